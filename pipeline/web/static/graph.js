// The graph with the current state of every stage, and below it what bounds a step and what would help.

import { bytes, Card, colourOf, Copy, html, number, percent, plural, seconds, Swatch, useClosing, useLayoutEffect, useLoaded, useMemo, useRef, useState } from "./ui.js";
import { get, partOf } from "./api.js";
import { go, link } from "./address.js";
import { SAYS } from "./episodes.js";
import { drawn } from "./layout.js";
import { keyOf } from "./lanes.js";

const ICONS = { running: "▶", waiting: "◷", ready: "◔", idle: "○", done: "✓", failed: "✕", stopped: "■" };
const LAST = 5; // number of tasks that a stage lists

export function Graph({ run, query }) {
  const named = run.about.plan.stages.some((stage) => stage.name === query.stage) ? query.stage : null;
  const select = (stage) => go({ stage });
  return html`<section class="card graph" aria-label="Graph"><${Drawing} run=${run} selected=${named} select=${select} /></section>
    ${named && html`<${Panel} run=${run} name=${named} close=${() => select("")} />`}
    <div class="columns">
      <div><${Verdict} run=${run} /></div>
      <div>${!run.now.loading && html`<${Hints} run=${run} />`}</div>
      <div><${Idle} run=${run} /><${Episodes} run=${run} /></div>
    </div>`;
}

// The critical path: seconds by stage, and the pairs of stages that follow each other on it in at least half of the steps.
function pathOf(run) {
  const found = run.findings && run.findings.report ? run.findings : null;
  if (!found) return { stages: {}, total: 0, pairs: new Set() };
  const counts = new Map();
  let before = "";
  for (const [stage] of found.paths.flatMap((path) => path.spans)) {
    if (stage === "no stage" || stage === before) continue;
    counts.set(`${before}>${stage}`, (counts.get(`${before}>${stage}`) || 0) + 1);
    before = stage;
  }
  const stages = found.report.critical_path.by_stage;
  const pairs = [...counts].filter(([, count]) => count >= found.paths.length / 2).map(([pair]) => pair);
  return { stages, total: Object.values(stages).reduce((sum, one) => sum + one, 0), pairs: new Set(pairs) };
}

// A line with rounded corners.
function rounded(points) {
  let path = `M${points[0]}`;
  for (let n = 1; n < points.length - 1; n += 1) {
    const [before, at, next] = points.slice(n - 1, n + 2);
    const near = (to) => {
      const far = Math.abs(to[0] - at[0]) + Math.abs(to[1] - at[1]);
      const share = far ? Math.min(6, far / 2) / far : 0;
      return [at[0] + (to[0] - at[0]) * share, at[1] + (to[1] - at[1]) * share];
    };
    path += ` L${near(before)} Q${at} ${near(next)}`;
  }
  return `${path} L${points.at(-1)}`;
}

const place = ({ x, y, w, h }) => ({ left: `${x}px`, top: `${y}px`, width: `${w}px`, height: `${h}px` });

// The next node in a direction, as the arrow keys go.
function neighbour(nodes, from, key) {
  const at = nodes.find((node) => node.stage === from);
  const [across, sign] = { ArrowRight: [true, 1], ArrowLeft: [true, -1], ArrowDown: [false, 1], ArrowUp: [false, -1] }[key];
  const far = (node) => {
    const [dx, dy] = [node.x - at.x, node.y - at.y];
    const [along, aside] = across ? [sign * dx, Math.abs(dy)] : [sign * dy, Math.abs(dx)];
    return along > 1 ? along + 2 * aside : Infinity;
  };
  const best = nodes.reduce((found, node) => (far(node) < far(found) ? node : found), at);
  return best.stage;
}

function Drawing({ run, selected, select }) {
  const { plan } = run.about;
  const holder = useRef(null);
  const [room, setRoom] = useState(0);
  useLayoutEffect(() => {
    const measure = () => setRoom(holder.current.clientWidth);
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(holder.current);
    return () => observer.disconnect();
  }, []);
  const made = useMemo(() => (room ? drawn(plan, room) : null), [plan, room]);
  const path = pathOf(run);
  const touches = (line) => selected && (line.writer === selected || line.reader === selected);
  const on = (line) => path.pairs.has(`${line.writer}>${line.reader}`);
  const press = (event, stage) => {
    if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
    holder.current.querySelector(`[data-stage="${CSS.escape(neighbour(made.nodes, stage, event.key))}"]`).focus();
  };
  return html`<div class="drawing" ref=${holder}>${made && html`<div class=${`plane ${made.wide < 130 ? "narrow" : ""}`} style=${{ width: `${made.width}px`, height: `${made.height}px` }}>
    ${[...made.groups, ...made.servers].map((group) => html`<div key=${group.name} class=${`group ${group.serves ? "server" : ""}`} style=${place(group)}>
      <span class="title" title=${group.title}>${group.title}</span>${group.serves && html`<span class="dim">serves ${group.serves.join(", ")}</span>`}</div>`)}
    <svg width=${made.width} height=${made.height} aria-hidden="true">
      <defs>${["", "on", "lit"].map((kind) => html`<marker id=${`arrow${kind}`} viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" markerUnits="userSpaceOnUse" orient="auto"><path class=${`arrow ${kind}`} d="M0 0 8 4 0 8z" /></marker>`)}</defs>
      ${[...made.lines].sort((a, b) => on(a) - on(b)).map((line) => html`<g key=${`${line.writer}>${line.reader}`} data-line=${`${line.writer}>${line.reader}`} class=${`edge ${line.back ? "back" : ""} ${line.serves ? "serves" : ""} ${on(line) ? "on" : ""} ${touches(line) ? "lit" : ""}`}>
        ${line.fields.length > 0 && html`<title>${line.fields.join(", ")}</title>`}
        <path d=${rounded(line.points)} marker-end=${line.serves ? undefined : `url(#arrow${touches(line) ? "lit" : on(line) ? "on" : ""})`} /></g>`)}
    </svg>
    ${made.lines.map((line) => html`<${Depth} key=${`${line.writer}>${line.reader}`} line=${line} depth=${run.now.depth[`${line.writer}>${line.reader}`] || 0} />`)}
    ${made.nodes.map((node) => html`<${Node} key=${node.stage} node=${node} run=${run} path=${path} selected=${selected === node.stage} select=${select} press=${press} />`)}
  </div>`}</div>`;
}

// The groups that lie on a line: its writer has finished them and its reader has not started.
function Depth({ line, depth }) {
  const [x, y] = line.points.at(-1);
  return depth > 0 && html`<span class="depth" style=${{ left: `${x - 9}px`, top: `${y}px` }} title=${`${plural(depth, "group")} from ${line.writer} not yet taken by ${line.reader}`}>${depth}</span>`;
}

function Node({ node, run, path, selected, select, press }) {
  const stage = run.about.plan.stages.find((one) => one.name === node.stage);
  const now = run.now.stages[node.stage];
  const share = path.total ? (path.stages[node.stage] || 0) / path.total : 0;
  return html`<button class=${`node ${now.state} ${selected ? "selected" : ""} ${share >= 0.005 ? "on" : ""}`} style=${{ ...place(node), "--of": colourOf(run.about.plan, node.stage) }} data-stage=${node.stage}
      aria-pressed=${selected} aria-label=${`${node.stage}: ${now.why}`} onClick=${() => select(selected ? "" : node.stage)} onKeyDown=${(event) => press(event, node.stage)}>
    <span class="name" title=${node.stage}>${node.stage}</span>
    <span class=${`why ${now.state}`}>${ICONS[now.state]} ${now.why}</span>
    <span class="spent" title="Seconds of its tasks in the last step; its share of the critical path"><span>${now.seconds ? seconds(now.seconds) : ""}</span>${share >= 0.005 && html`<b>${percent(share)}</b>`}</span>
    ${stage.writes.length > 0 && html`<span class="writes" title=${`writes ${stage.writes.join(", ")}`}><span>→ ${stage.writes[0]}</span>${stage.writes.length > 1 && html`<span>+${stage.writes.length - 1}</span>`}</span>`}
  </button>`;
}

export function Verdict({ run }) {
  const found = run.findings;
  const path = found && found.report && found.report.critical_path;
  if (!path || !found.window[2]) return html`<${Card} title="Why is a step as slow as it is?"><p class="dim">This appears once a few steps have ended.</p><//>`;
  const stages = Object.entries(path.by_stage);
  const total = stages.reduce((sum, [, value]) => sum + value, 0);
  return html`<${Card} title="Why is a step as slow as it is?">
    <p class="verdict">${path.sentence}</p>
    <div class="stack" aria-hidden="true">${stages.map(([name, value]) => html`<span key=${name} style=${{ flexGrow: value / total, background: colourOf(run.about.plan, name) }}></span>`)}</div>
    <ul class="legend">${stages.filter(([, value]) => value / total >= 0.005).map(([name, value]) => html`<li key=${name}><${Swatch} colour=${colourOf(run.about.plan, name)} />
      <span class="grow">${name === "no stage" ? "no stage (the driver, or nothing admitted)" : name}</span><span class="num">${seconds(value)}</span><span class="num dim">${percent(value / total)}</span></li>
      ${Object.entries((path.by_part || {})[name] || {}).filter(([part, spent]) => part && spent / total >= 0.005).map(([part, spent]) => html`<li key=${`${name} ${part}`} class="part"><${Swatch} colour=${`var(--e-${part}, var(--line-strong))`} />
        <span class="grow">${part}</span><span class="num">${seconds(spent)}</span><span class="num dim">${percent(spent / total)}</span></li>`)}`)}</ul>
    <p class="small dim">Seconds on the critical path, mean of ${plural(found.window[2], "step")}.</p><//>`;
}

function Hints({ run }) {
  const ended = run.live ? Math.floor(run.now.step / 20) : "end";
  const { value, error } = useLoaded(() => get(partOf(run.name, "advice")), [run.name, ended]);
  return html`<${Card} title="What would make it faster?">
    ${error ? html`<p class="dim">${error}</p>` : !value ? html`<p class="dim">Simulating …</p>`
      : !value.hints.length ? html`<p class="dim">${value.notes[0] || "No single change helps by 1 % or more."}</p>`
        : html`<ul class="hints">${value.hints.map((hint) => html`<li key=${hint.text}><details><summary><b>${hint.times.toFixed(2)} ×</b><span>${hint.text}</span></summary><${Copy} text=${hint.command} /></details></li>`)}</ul>
          <p class="small dim">Each simulates this run with one change; open one for its command. A step of the unchanged run takes ${seconds(value.simulated_s)} in the simulation; measured: ${seconds(value.measured_s)}.</p>`}<//>`;
}

function waits(part) {
  if (part.cause === "field" || part.cause === "weights") return `${part.field || "weights"}${part.stage ? `, from ${part.stage}` : ""}`;
  if (part.cause === "fence") return `${part.stage}, which must not run at the same time`;
  if (part.cause === "worker") return `the worker, busy with ${part.stage || "something else"}`;
  if (part.cause === "environment") return `environments, for which all episodes of ${part.stage} wait`;
  if (part.cause === "driver") return "the driver: reports and tasks in transit";
  if (part.cause === "room") return "groups that are not admitted yet";
  return part.stage ? `${part.cause}: ${part.stage}` : part.cause;
}

export function Idle({ run }) {
  const groups = (run.findings && run.findings.groups) || [];
  if (!groups.length) return null;
  return html`<${Card} title="What do workers wait for?">
    ${groups.map((group) => html`<div key=${group.group}><h3>${group.group}: idle ${percent(group.wall_s ? group.idle_s / group.wall_s : 0)} of the time</h3>
      <ul class="legend">${group.parts.filter((part) => part.seconds / group.wall_s >= 0.005).slice(0, 5).map((part) => html`<li key=${waits(part)}><${Swatch} colour=${colourOf(run.about.plan, part.stage)} /><span class="grow">${waits(part)}</span><span class="num dim">${percent(part.seconds / group.wall_s)}</span></li>`)}</ul></div>`)}<//>`;
}

export function Episodes({ run }) {
  const found = (run.findings && run.findings.episodes) || [];
  return found.map((one) => html`<${Card} key=${one.stage} title="How do episodes spend their time?">
    <p class="lead">${one.stage}: an episode takes ${seconds(one.seconds)}${one.waiting === null ? "" : `; for ${percent(one.waiting)} of the time, all wait for environments`}.</p>
    <ul class="legend">${Object.entries(one.parts).map(([part, spent]) => html`<li key=${part}><${Swatch} colour=${`var(--e-${part}, var(--line-strong))`} /><span class="grow">${part}${SAYS[part] ? html`<span class="dim">: ${SAYS[part]}</span>` : ""}</span><span class="num">${seconds(spent)}</span><span class="num dim">${percent(one.seconds ? spent / one.seconds : 0)}</span></li>`)}</ul>
    <p class="small dim">Mean of ${plural(one.episodes, "episode")}.</p><//>`);
}

// Bytes per step that an edge carries; columns with one entry per token are estimated from the mean response length.
function volume(run, edge) {
  const { batch, group_size } = run.about.plan;
  const last = run.steps.length ? run.steps[run.steps.length - 1][2] : {};
  const length = edge.ragged ? last["rollout/length_mean"] : 1;
  if (!edge.bytes_per_sample || !length) return "";
  return `, ${edge.ragged ? "about " : ""}${bytes(Math.round(batch * group_size * edge.bytes_per_sample * length))} per step`;
}

// The processes of a stage: the actors of its worker groups, which share them between their stages.
const actorsOf = (run, stage) => (run.now.actors || []).filter((actor) => stage.groups.includes(actor.group));

function clearedAfter(run, field) {
  const partition = (run.about.plan.partitions || []).find((one) => one.fields.includes(field));
  if (!partition) return "";
  return `in ${partition.name}, cleared after ${partition.holders.length ? partition.last_readers.join(" and ") : "every stage"}`;
}

// What is known of a stage, beside its node. Esc and a click elsewhere close it; the focus goes back to the node.
function Panel({ run, name, close }) {
  const panel = useClosing(true, close, ".node, header, .status");
  useLayoutEffect(() => {
    panel.current.focus();
    return () => document.querySelector(`[data-stage="${CSS.escape(name)}"]`)?.focus();
  }, [name]);
  const { stages } = run.about.plan;
  const late = stages.find((one) => one.name === name).layer > Math.max(...stages.map((one) => one.layer)) / 2;
  return html`<div class=${`panel ${late ? "left" : ""}`} ref=${panel} tabindex="-1"><${Stage} run=${run} name=${name} close=${close} /></div>`;
}

const To = ({ run, stage }) => html`<a href=${link(run.name, "graph", { stage })}>${stage}</a>`;

function Stage({ run, name, close }) {
  const { plan } = run.about;
  const stage = plan.stages.find((one) => one.name === name);
  const now = run.now.stages[name];
  const reads = plan.edges.filter((edge) => edge.reader === name);
  const readersOf = (field) => plan.edges.filter((edge) => edge.field === field).map((edge) => edge.reader);
  const path = run.findings && run.findings.report ? run.findings.report.critical_path.by_stage[name] : undefined;
  const spare = run.findings && run.findings.slack ? run.findings.slack[name] : undefined;
  const served = stage.shape === "transfer" && run.published.length ? run.published[run.published.length - 1] : null;
  const tasks = run.spans.filter((span) => span[0] === name).slice(-LAST).reverse();
  const metrics = run.steps.length ? Object.keys(run.steps[run.steps.length - 1][2]).some((metric) => metric.startsWith(`${name}/`)) : false;
  return html`<section class="card" aria-label=${`Stage ${name}`}><div class="toolbar"><${Swatch} colour=${colourOf(plan, name)} /><h2>${name}</h2><span class="grow"></span><button class="button quiet small" onClick=${close}>Close</button></div>
    <p class="goto"><a href=${link(run.name, "timeline", { find: name })}>Timeline</a>${now.step >= 0 && html`<a href=${link(run.name, "samples", { step: now.step + 1, stage: name })}>Samples of step ${now.step + 1}</a>`}${metrics && html`<a href=${link(run.name, "metrics", { show: `${name}/` })}>Metrics</a>`}</p>
    <dl class="facts">
      <dt>Now</dt><dd>${now.why}${Object.entries(now.open || {}).map(([part, count]) => html`<div key=${part} class="dim">${count} ${part}${SAYS[part] ? `: ${SAYS[part]}` : ""}</div>`)}</dd>
      <dt>Last step</dt><dd>${now.step < -1 ? "none yet" : now.step < 0 ? "before the first" : now.step + 1}${now.seconds ? `, ${seconds(now.seconds)}` : ""}</dd>
      ${path !== undefined && html`<dt>On the critical path</dt><dd>${seconds(path)} per step</dd>`}
      ${spare !== undefined && spare !== null && html`<dt>Slack</dt><dd>at least ${seconds(spare)} in every step</dd>`}
      ${served && html`<dt>Served</dt><dd>version ${served[1]}, ${seconds(Math.max(0, run.clock - served[3]))} ago <br /><code>${served[2].slice(0, 16)}</code></dd>`}
      <dt>Stage</dt><dd>${stage.kind}, ${stage.shape}, per ${stage.per}</dd>
      <dt>Runs on</dt><dd>${stage.groups.join(" → ") || "outside"}${actorsOf(run, stage).map((actor) => html`<div key=${actor.group + actor.worker} class="dim">${actor.group}.${actor.worker}: process ${actor.pid}, ${actor.node}</div>`)}</dd>
      <dt>Reads</dt><dd>${reads.length ? reads.map((edge) => html`<div key=${edge.field}><code>${edge.field}</code> <span class="dim">from </span><${To} run=${run} stage=${edge.writer} /><span class="dim">${volume(run, edge)}</span></div>`) : "nothing"}</dd>
      <dt>Writes</dt><dd>${stage.writes.length ? stage.writes.map((field) => html`<div key=${field}><code>${field}</code> ${readersOf(field).length > 0 && html`<span class="dim">for </span>${readersOf(field).map((reader, n) => html`${n ? ", " : ""}<${To} key=${reader} run=${run} stage=${reader} />`)}`} <div class="dim">${clearedAfter(run, field)}</div></div>`) : "nothing"}</dd>
      <dt>Tasks</dt><dd>${tasks.length ? tasks.map((span) => html`<div key=${keyOf(span)}><a href=${link(run.name, "timeline", { find: name, span: keyOf(span) })}>step ${span[3] + 1}</a> <span class="dim">${span[1]}.${span[2]}, ${seconds(span[6] - span[5])}</span></div>`) : "none yet"}</dd>
    </dl>
    <h3>Declared</h3><${Copy} text=${stage.where} /></section>`;
}
