// Arranges spans in rows and draws them: one lane per worker, with more rows if its tasks overlap. Keeps no page state.

import { counted, countsAt, KINDS } from "./episodes.js";

const HEAD = 26, ROWS = 8;
const LARGE = { bar: 18, gap: 2, space: 10, label: true };
const TALL = 2400; // pixels; if the lanes do not fit, they are drawn as thin lines with one name per group
const STRIP = 44; // pixels of the open episodes below the tasks of their worker
export const GUTTER = 128;
const LINE_GAP = 6; // pixels per step from which on each gets a line
const CROWDED = 1; // spans per pixel from which on only their shares are drawn

// Names a span in an address: stage, group, worker, and its start.
export const keyOf = (span) => [span[0], span[1], span[2], span[5].toFixed(6)].join("-");

// A view within the run, and not shorter than a millisecond.
const LEAST_S = 1e-3;

export function bounded([start, end], clock) {
  const whole = Math.max(clock, LEAST_S);
  const wide = Math.min(Math.max(end - start, LEAST_S), whole);
  const from = Math.min(Math.max((start + end - wide) / 2, 0), whole - wide);
  return [from, from + wide];
}

// Whether a text of ranges, such as "4-7 9", has a number.
function within(ranges, number) {
  return ranges.split(" ").some((range) => {
    const [low, high = low] = range.split("-");
    return number >= +low && number <= +high;
  });
}

// A test of spans: of a stage whose name has the text, or with the group of a sample, such as 00000012_g003 or 12.
export function finder(text, plan) {
  const wanted = text.trim().toLowerCase();
  if (!wanted) return null;
  if (/^\d+(_g\d+)?$/.test(wanted)) return (span) => within(span[8], parseInt(wanted, 10));
  const names = new Set(plan.stages.map((stage) => stage.name).filter((name) => name.toLowerCase().includes(wanted)));
  return (span) => names.has(span[0]);
}

// Lanes in the order of the plan, each with rows of spans sorted by start.
export function arrange(plan, spans, spent = []) {
  const lanes = [];
  const byWorker = new Map();
  for (const group of plan.groups) {
    for (let worker = 0; worker < group.workers; worker += 1) {
      const lane = { group: group.name, worker, workers: group.workers, name: group.workers > 1 ? `${group.name} ${worker}` : group.name, rows: [] };
      byWorker.set(`${group.name} ${worker}`, lane);
      lanes.push(lane);
    }
  }
  const order = spans.slice().sort((a, b) => a[5] - b[5]);
  for (const span of order) {
    const lane = byWorker.get(`${span[1]} ${span[2]}`);
    if (!lane) continue;
    let row = lane.rows.find((one) => one.end <= span[5] + 1e-9);
    if (!row) {
      if (lane.rows.length < ROWS) lane.rows.push((row = { end: 0, spans: [] }));
      else row = lane.rows[ROWS - 1];
    }
    row.spans.push(span);
    row.end = Math.max(row.end, span[6]);
  }
  for (const lane of lanes) {
    const rows = spent.filter((row) => row[1] === lane.group && row[2] === lane.worker);
    if (rows.length) lane.episodes = counted(rows);
  }
  const size = sized(lanes);
  let y = HEAD;
  lanes.forEach((lane, place) => {
    lane.y = y;
    lane.tasks = Math.max(1, lane.rows.length) * (size.bar + size.gap);
    lane.height = lane.tasks + (lane.episodes && size.label ? STRIP : 0);
    const next = lanes[place + 1];
    y += lane.height + (next && next.group === lane.group ? size.space : LARGE.space);
    if (!size.label && lane.workers > 1) lane.name = `${lane.group}, ${lane.workers}`;
  });
  return { lanes, height: y, order, size };
}

function sized(lanes) {
  const rows = lanes.reduce((sum, lane) => sum + Math.max(1, lane.rows.length), 0);
  if (rows * (LARGE.bar + LARGE.gap) + lanes.length * LARGE.space <= TALL) return LARGE;
  const bar = Math.max(2, Math.min(LARGE.bar, Math.floor(TALL / rows) - 2));
  return { bar, gap: 1, space: 1, label: bar > 11 };
}

// The index of the first span of a row that ends at or after a time.
function first(spans, at) {
  let [low, high] = [0, spans.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle][6] < at) low = middle + 1; else high = middle;
  }
  return low;
}

export function spanAt(made, view, width, x, y) {
  const lane = made.lanes.find((one) => y >= one.y && y < one.y + one.height);
  if (!lane || x < GUTTER) return null;
  const row = lane.rows[Math.floor((y - lane.y) / (made.size.bar + made.size.gap))];
  const at = view[0] + ((x - GUTTER) / (width - GUTTER)) * (view[1] - view[0]);
  const near = (3 / (width - GUTTER)) * (view[1] - view[0]);
  if (!row) return null;
  for (let n = first(row.spans, at - near); n < row.spans.length && row.spans[n][5] <= at + near; n += 1) {
    if (row.spans[n][6] >= at - near) return row.spans[n];
  }
  return null;
}

// The lane and the time of a place on a strip of episodes.
export function episodesAt(made, view, width, x, y) {
  const lane = made.lanes.find((one) => y >= one.y + one.tasks && y < one.y + one.height);
  if (!lane || x < GUTTER) return null;
  const at = view[0] + ((x - GUTTER) / (width - GUTTER)) * (view[1] - view[0]);
  const counts = countsAt(lane.episodes, at);
  return counts && counts.some((count) => count) ? { counts, at } : null;
}

const CLOCK = [30, 60, 120, 300, 600, 1800, 3600, 7200, 18000, 36000, 86400, 172800, 432000, 864000]; // seconds between ticks

export function ticks(view, width) {
  const wanted = ((view[1] - view[0]) / Math.max(1, width - GUTTER)) * 110;
  const base = 10 ** Math.floor(Math.log10(wanted));
  const step = wanted > 20 ? CLOCK.find((n) => n >= wanted) || wanted : [1, 2, 5, 10].map((n) => n * base).find((n) => n >= wanted);
  const found = [];
  for (let at = Math.ceil(view[0] / step) * step; at <= view[1]; at += step) found.push([at, step]);
  return found;
}

const measured = new Map(); // name -> pixels; there are many bars but few names

function fitted(context, name, room) {
  if (!measured.has(name)) measured.set(name, context.measureText(name).width);
  const wide = measured.get(name);
  return wide <= room ? name : `${name.slice(0, Math.max(1, Math.floor((room * name.length) / wide) - 1))}…`;
}

const short = (name) => (name.length > 18 ? `${name.slice(0, 17)}…` : name);
const clock = (at, step) => (step >= 30 ? `${Math.floor(at / 3600)}:${String(Math.floor((at % 3600) / 60)).padStart(2, "0")}${step < 60 ? `:${String(Math.floor(at % 60)).padStart(2, "0")}` : ""} h` : step >= 1 ? `${Math.round(at)} s` : `${at.toFixed(Math.min(6, Math.ceil(-Math.log10(step))))} s`);

// Draws everything; `look` has the colors of the theme.
export function draw(canvas, made, scene, look) {
  const { view, steps, tasks, clock: now, paths, chosen, wanted } = scene;
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(made.height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(made.height * ratio);
    canvas.style.height = `${made.height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, made.height);
  context.font = `12px ${look.font}`;
  context.textBaseline = "middle";
  const scale = (width - GUTTER) / (view[1] - view[0]);
  const x = (at) => GUTTER + (at - view[0]) * scale;

  for (const lane of made.lanes) {
    context.fillStyle = look.sunk;
    context.fillRect(GUTTER, lane.y, width - GUTTER, lane.height);
    context.fillStyle = look.text;
    if (made.size.label || !lane.worker) context.fillText(short(lane.name), 8, lane.y + Math.min(lane.tasks, LARGE.bar + LARGE.gap) / 2);
    if (lane.height > lane.tasks) {
      context.fillStyle = look.dim;
      context.fillText("episodes", 8, lane.y + lane.tasks + STRIP / 2);
    }
  }
  context.save();
  context.beginPath();
  context.rect(GUTTER, 0, width - GUTTER, made.height);
  context.clip();
  context.fillStyle = look.dim;
  let free = -Infinity;
  for (const [at, step] of ticks(view, width)) {
    const text = clock(at, step);
    context.fillText(text, Math.min(x(at) + 2, width - context.measureText(text).width - 2), 8);
    context.fillStyle = look.line;
    context.fillRect(x(at), 0, 1, 14);
    context.fillStyle = look.dim;
  }
  const inside = steps.filter(([, at]) => at >= view[0] && at <= view[1]);
  const sparse = inside.length * LINE_GAP < width - GUTTER;
  for (const [number, at] of inside) {
    const text = `step ${number + 1}`;
    if (sparse) {
      context.fillStyle = look.strong;
      context.fillRect(Math.round(x(at)), 16, 1, made.height);
    }
    if (x(at) - free < 44) continue;
    const wide = context.measureText(text).width;
    if (x(at) - wide - 12 > free && x(at) - wide - 4 >= GUTTER) {
      if (!sparse) {
        context.fillStyle = look.strong;
        context.fillRect(Math.round(x(at)), 16, 1, 10);
      }
      context.fillStyle = look.dim;
      context.fillText(text, x(at) - wide - 4, 20);
      free = x(at);
    }
  }
  for (const lane of made.lanes) {
    lane.rows.forEach((row, place) => bars(context, row.spans, lane.y + place * (made.size.bar + made.size.gap) + 1, { view, x, look, chosen, wanted, width, bar: made.size.bar }));
  }
  for (const lane of made.lanes) if (lane.height > lane.tasks) strip(context, lane, { view, x, look, width });
  for (const task of tasks) running(context, made, task, Math.max(now, task.start), { x, look });
  route(context, made, paths, { view, x, look });
  context.restore();
}

// The open episodes of a worker, stacked by what they wait for, pixel by pixel.
function strip(context, lane, { view, x, look, width }) {
  const { times, most } = lane.episodes;
  const [left, right] = [Math.max(GUTTER, x(times[0])), Math.min(width, x(times[times.length - 1]))];
  for (let pixel = Math.floor(left); pixel < right; pixel += 1) {
    const counts = countsAt(lane.episodes, view[0] + ((pixel + 0.5 - GUTTER) / (width - GUTTER)) * (view[1] - view[0]));
    let y = lane.y + lane.height;
    for (let kind = 0; counts && kind < KINDS.length; kind += 1) {
      const height = (counts[kind] / most) * (STRIP - 4);
      y -= height;
      context.fillStyle = look.episode(KINDS[kind]);
      if (height) context.fillRect(pixel, y, 1, height);
    }
  }
}

function bars(context, spans, y, scene) {
  const { view, x, look, chosen, wanted, bar } = scene;
  if (first(spans, view[1]) - first(spans, view[0]) > CROWDED * (scene.width - GUTTER)) { shares(context, spans, y, scene); return; }
  let last = -1, lastColour = "";
  for (let n = first(spans, view[0]); n < spans.length && spans[n][5] <= view[1]; n += 1) {
    const span = spans[n];
    const left = x(span[5]);
    const wide = Math.max(1, x(span[6]) - left);
    const colour = !wanted || wanted(span) ? look.stage(span[0]) : look.line;
    if (wide <= 1.5 && Math.floor(left) === last && colour === lastColour) continue; // the same pixel
    last = Math.floor(left);
    lastColour = colour;
    context.fillStyle = colour;
    context.fillRect(left, y, Math.max(1, wide - (wide > 4 ? 1 : 0)), bar);
    const from = Math.max(left, GUTTER);
    const room = Math.min(left + wide, x(view[1])) - from - 8;
    if (room > 24 && bar >= 12) {
      context.fillStyle = colour === look.line ? look.dim : look.onColour;
      context.fillText(fitted(context, span[0], room), from + 4, y + bar / 2 + 0.5);
    }
    if (span === chosen) {
      context.strokeStyle = look.text;
      context.lineWidth = 2;
      context.strokeRect(left, y, wide, bar);
    }
  }
}

// Of more spans than pixels: what share of each pixel every stage took, from bottom to top.
function shares(context, spans, y, { view, x, look, wanted, width, bar }) {
  const pixels = new Map(); // pixel -> {color: seconds}
  const each = (view[1] - view[0]) / (width - GUTTER);
  for (let n = first(spans, view[0]); n < spans.length && spans[n][5] <= view[1]; n += 1) {
    const span = spans[n];
    const colour = !wanted || wanted(span) ? look.stage(span[0]) : look.line;
    for (let pixel = Math.max(GUTTER, Math.floor(x(span[5]))); pixel <= Math.min(width, x(span[6])); pixel += 1) {
      const from = view[0] + (pixel - GUTTER) * each;
      const spent = Math.min(span[6], from + each) - Math.max(span[5], from);
      if (!pixels.has(pixel)) pixels.set(pixel, {});
      pixels.get(pixel)[colour] = (pixels.get(pixel)[colour] || 0) + spent;
    }
  }
  for (const [pixel, all] of pixels) {
    let bottom = y + bar;
    for (const colour of Object.keys(all).sort()) {
      const height = bar * Math.min(1, all[colour] / each);
      context.fillStyle = colour;
      context.fillRect(pixel, Math.max(y, bottom - height), 1, Math.min(height, bottom - y));
      bottom -= height;
    }
  }
}

// An unfinished task: its bar extends to the current time.
function running(context, made, task, now, { x, look }) {
  for (const lane of made.lanes) {
    if (lane.group !== task.group || (task.replica !== null && lane.worker !== task.replica)) continue;
    const y = lane.y + lane.tasks - made.size.bar - made.size.gap / 2;
    context.globalAlpha = 0.55;
    context.fillStyle = look.stage(task.stage);
    context.fillRect(x(task.start), y, Math.max(2, x(now) - x(task.start)), made.size.bar);
    context.globalAlpha = 1;
  }
}

// The critical path: a line along the bars that it passes through.
function route(context, made, paths, { view, x, look }) {
  context.strokeStyle = look.path;
  context.lineWidth = 2;
  for (const path of paths) {
    let before = null;
    context.beginPath();
    for (const [, , group, worker, start, end] of path.spans) {
      if (end < view[0] || start > view[1]) { before = null; continue; }
      const lane = made.lanes.find((one) => one.group === group && one.worker === worker);
      const y = lane ? lane.y + lane.height + 3 : before;
      if (y === null) continue;
      if (before === null) context.moveTo(x(start), y); else context.lineTo(x(start), y);
      context.lineTo(x(end), y);
      before = y;
    }
    context.stroke();
  }
}
