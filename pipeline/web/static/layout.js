// Lays out the graph of a plan with dagre, in layers from left to right: a node per stage, a box per worker group around
// the stages that run on it, and orthogonal lines. Pure. Lengths are pixels; x grows to the right, y down.

import { graphlib, layout as dagre } from "./vendor/dagre.js";

export const NODE_H = 104;
const SIZES = [[60, 172], [52, 160], [44, 148], [36, 136], [30, 124], [26, 112], [24, 100], [22, 88]]; // gap between layers, width of nodes
const KEEPS = "KeepSamples"; // the stage of every plan that only keeps samples for display: it is not drawn
const SCROLLED = [26, 112]; // where none fits
const APART = 10; // at least between two ends of lines on a node
const SERVER = "server ", BOX = "group ";

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

// The title of a group: its processes, and the GPUs or CPUs that they have.
export function titleOf(group) {
  const cpus = Math.round(group.cpus * group.workers * 10) / 10;
  const has = group.gpus ? plural(group.gpus, "GPU") : plural(cpus, "CPU");
  const shared = group.gpus && group.colocated ? ` of ${group.colocated}` : "";
  return `${group.name} · ${group.workers > 1 ? `${group.workers} workers, ` : ""}${has}${shared}`;
}

export const stagesOf = (plan) => plan.stages.filter((stage) => stage.kind !== KEEPS);

// The fields between each pair of stages, as [{writer, reader, back, fields}].
export function linesOf(plan) {
  const drawn = new Set(stagesOf(plan).map((stage) => stage.name));
  const lines = new Map();
  for (const { writer, reader, back, field } of plan.edges) {
    const key = `${writer}>${reader}>${back}`;
    if (!drawn.has(writer) || !drawn.has(reader)) continue;
    if (!lines.has(key)) lines.set(key, { writer, reader, back, fields: [] });
    lines.get(key).fields.push(field);
  }
  return [...lines.values()];
}

// Everything to draw in so many pixels: {width, height, wide, nodes, groups, servers, lines}, in the largest size that
// fits. It is wider than the room if nodes would get too narrow to read.
export function drawn(plan, room) {
  for (const size of SIZES) {
    const made = inSize(plan, ...size);
    if (made.width <= room) return made;
  }
  return inSize(plan, ...SCROLLED);
}

function inSize(plan, gap, wide) {
  const stages = stagesOf(plan);
  const graph = new graphlib.Graph({ compound: true });
  graph.setGraph({ rankdir: "LR", nodesep: 14, edgesep: 12, ranksep: gap, marginx: 2, marginy: 12 });
  const servers = plan.servers || [];
  for (const group of plan.groups) graph.setNode(BOX + group.name, {});
  for (const stage of stages) {
    graph.setNode(stage.name, { width: wide, height: NODE_H });
    if (stage.groups.length === 1) graph.setParent(stage.name, BOX + stage.groups[0]);
  }
  const lines = linesOf(plan);
  for (const { writer, reader, back } of lines) graph.setEdge(...(back ? [reader, writer] : [writer, reader]), {});
  for (const server of servers) {
    graph.setNode(SERVER + server.name, { width: wide, height: NODE_H / 2 });
    for (const stage of server.serves) if (graph.hasNode(stage)) graph.setEdge(stage, SERVER + server.name, {});
  }
  dagre(graph);
  const place = (name) => { const { x, y, width, height } = graph.node(name); return { x: x - width / 2, y: y - height / 2, w: width, h: height }; };
  const serving = servers.flatMap((server) => server.serves.filter((stage) => graph.hasNode(stage)).map((stage) => ({ writer: stage, reader: SERVER + server.name, serves: true, fields: [] })));
  const { width, height } = graph.graph();
  return {
    width, height, wide,
    nodes: stages.map((stage) => ({ stage: stage.name, ...place(stage.name) })),
    groups: plan.groups.filter((group) => graph.children(BOX + group.name).length).map((group) => ({ name: group.name, title: titleOf(group), ...place(BOX + group.name) })),
    servers: servers.map((server) => ({ name: server.name, title: titleOf(server), serves: server.serves, ...place(SERVER + server.name) })),
    lines: routed(graph, [...lines, ...serving]),
  };
}

// Lines from the right side of a node to the left side of the next one. They run straight past the nodes of a layer, at
// the heights that dagre reserved, and turn only between layers, each in a track of its own.
function routed(graph, lines) {
  const columns = [...new Set(graph.nodes().filter((name) => !graph.children(name).length).map((name) => Math.round(graph.node(name).x)))].sort((a, b) => a - b);
  const half = Math.max(...graph.nodes().filter((name) => !graph.children(name).length).map((name) => graph.node(name).width)) / 2;
  const made = lines.map((line) => {
    const [from, to] = line.back ? [line.reader, line.writer] : [line.writer, line.reader];
    const past = graph.edge(from, to).points.slice(1, -1).filter((point) => columns.includes(Math.round(point.x)));
    const [a, b] = [graph.node(from), graph.node(to)];
    const inside = past.filter((point) => point.x > a.x + half && point.x < b.x - half);
    return { line, from, to, stops: [{ x: a.x, y: a.y }, ...inside, { x: b.x, y: b.y }] };
  });
  ports(graph, made, "from", (one) => one.stops[0], (one) => one.stops[1]);
  ports(graph, made, "to", (one) => one.stops.at(-1), (one) => one.stops.at(-2));
  straighten(graph, made, "from", (one) => one.stops[0], (one) => one.stops[1]);
  straighten(graph, made, "to", (one) => one.stops.at(-1), (one) => one.stops.at(-2));
  const turns = new Map(); // column on the left -> steps from one height to another
  for (const one of made) {
    one.turns = one.stops.slice(1).map((stop, n) => {
      const before = one.stops[n];
      const turn = { left: before.x + half, right: stop.x - half, y0: before.y, y1: stop.y };
      const column = Math.round(before.x);
      if (Math.abs(turn.y0 - turn.y1) > 0.5) turns.set(column, [...(turns.get(column) || []), turn]);
      return turn;
    });
  }
  for (const all of turns.values()) tracks(all);
  return made.map(({ line, turns: parts }) => {
    const points = parts.flatMap(({ left, right, y0, y1, x }) => (x === undefined ? [[left, y0], [right, y1]] : [[left, y0], [x, y0], [x, y1], [right, y1]]));
    return { ...line, points: line.back ? points.reverse() : points };
  });
}

// Spreads the ends of lines over the side of their node, in the order of the heights that they lead to.
function ports(graph, made, side, end, next) {
  const byNode = new Map();
  for (const one of made) byNode.set(one[side], [...(byNode.get(one[side]) || []), one]);
  for (const [name, all] of byNode) {
    const { y, height } = graph.node(name);
    all.sort((p, q) => next(p).y - next(q).y);
    all.forEach((one, n) => { end(one).y = y - height / 2 + (height * (n + 1)) / (all.length + 1); });
  }
}

// Moves an end to the height of the next stop if that is near, on the node, and keeps the order and distance of the ends.
function straighten(graph, made, side, end, next) {
  for (const one of made) {
    const { y, height } = graph.node(one[side]);
    const wanted = next(one).y;
    const others = made.filter((other) => other !== one && other[side] === one[side]).map((other) => end(other).y);
    const apart = others.every((at) => Math.abs(at - wanted) >= APART && at < wanted === at < end(one).y);
    if (apart && Math.abs(wanted - y) <= height / 2 - APART) end(one).y = wanted;
  }
}

// Gives each turn between two layers a track: those that lead down turn in the order from right to left, those that
// lead up from left to right, so that neighbors do not cross.
function tracks(all) {
  const down = all.filter((turn) => turn.y1 > turn.y0).sort((p, q) => q.y0 - p.y0);
  const up = all.filter((turn) => turn.y1 <= turn.y0).sort((p, q) => p.y0 - q.y0);
  const order = [...up, ...down];
  order.forEach((turn, n) => { turn.x = turn.left + 4 + ((turn.right - turn.left - 14) * (n + 1)) / (order.length + 1); });
}
