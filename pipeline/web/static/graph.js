// The graph with the current state of every stage, and next to it what bounds a step and what would help.

import { bytes, Card, colourOf, Copy, html, number, percent, plural, seconds, Swatch, useLoaded, useState } from "./ui.js";
import { get } from "./api.js";
import { SAYS } from "./episodes.js";

const ICONS = { running: "▶", waiting: "◷", ready: "◔", idle: "○", done: "✓", failed: "✕" };

export function Graph({ run }) {
  const [selected, select] = useState(null);
  return html`<div class="split">
    <section class="card graph" aria-label="Graph"><${Drawing} run=${run} selected=${selected} select=${select} /></section>
    <aside>
      ${selected && html`<${Stage} run=${run} name=${selected} close=${() => select(null)} />`}
      <${Verdict} run=${run} />
      <${Hints} run=${run} />
      <${Idle} run=${run} />
      <${Episodes} run=${run} />
    </aside>
  </div>`;
}

// A path from box to box in curves that leave and arrive vertically.
function curve(points, back) {
  if (back) {
    const [a, b, c, d] = points;
    return `M${a} L${b[0] - 10} ${b[1]} Q${b} ${b[0]} ${b[1] - 10} L${c[0]} ${c[1] + 10} Q${c} ${c[0] - 10} ${c[1]} L${d}`;
  }
  let path = `M${points[0]}`;
  for (let n = 1; n < points.length; n += 1) {
    const [[x0, y0], [x1, y1]] = [points[n - 1], points[n]];
    const middle = (y0 + y1) / 2;
    path += x0 === x1 ? ` V${y1}` : ` C${x0} ${middle} ${x1} ${middle} ${x1} ${y1}`;
  }
  return path;
}

// A text in one or two lines of so many letters, divided between words.
function twoLines(text, letters) {
  if (text.length <= letters) return [text];
  const at = text.lastIndexOf(" ", letters);
  return at > 0 ? [text.slice(0, at), fit(text.slice(at + 1), letters)] : [fit(text, letters)];
}

const fit = (text, letters) => (text.length > letters ? `${text.slice(0, letters - 1)}…` : text);

function Drawing({ run, selected, select }) {
  const { layout, plan } = run.about;
  const touches = (line) => selected && (line.writer === selected || line.reader === selected);
  return html`<svg viewBox=${`0 0 ${layout.width} ${layout.height}`} width=${layout.width} height=${layout.height} role="group" aria-label="Stages and the fields between them">
    <defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse"><path class="arrow" d="M0 0 8 4 0 8z" /></marker></defs>
    ${layout.lines.map((line) => html`<g key=${`${line.writer}>${line.reader}`} class=${`edge ${line.back ? "back" : ""} ${touches(line) ? "lit" : ""}`}>
      <path d=${curve(line.points, line.back)} marker-end="url(#arrow)" /></g>`)}
    ${layout.lines.map((line) => html`<${Label} key=${`label ${line.writer}>${line.reader}`} line=${line} lit=${touches(line)} depth=${run.now.depth[`${line.writer}>${line.reader}`] || 0} />`)}
    ${layout.boxes.map((box) => {
      const now = run.now.stages[box.stage];
      const why = twoLines(`${ICONS[now.state]} ${now.why}`, 27);
      const lift = 8 * (why.length - 1);
      const press = (event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), select(box.stage));
      return html`<g key=${box.stage} class=${`node ${now.state} ${selected === box.stage ? "selected" : ""}`} tabindex="0" role="button"
          aria-pressed=${selected === box.stage} aria-label=${`${box.stage}: ${now.why}`} onClick=${() => select(selected === box.stage ? null : box.stage)} onKeyDown=${press}>
        <rect class="body" x=${box.x} y=${box.y} width=${box.w} height=${box.h} rx="8" />
        <rect x=${box.x + 8} y=${box.y + 12} width="4" height=${box.h - 24} rx="2" style=${{ fill: colourOf(plan, box.stage) }} />
        <text class="name" x=${box.x + 20} y=${box.y + 26 - lift}>${fit(box.stage, 17)}</text>
        <text class="seconds" x=${box.x + box.w - 12} y=${box.y + 26 - lift}>${now.seconds ? seconds(now.seconds) : ""}</text>
        ${why.map((line, n) => html`<text key=${n} class=${`why ${now.state}`} x=${box.x + 20} y=${box.y + 47 - lift + 16 * n}>${line}</text>`)}
      </g>`;
    })}
  </svg>`;
}

function Label({ line, lit, depth }) {
  const y = line.label_y;
  const right = line.label_x + line.label_w / 2;
  return html`<g class=${`edge ${lit ? "lit" : ""}`}><title>${line.fields.join(", ")}</title>
    <rect x=${line.label_x - line.label_w / 2} y=${y - 10} width=${line.label_w} height="20" rx="10" />
    <text x=${line.label_x} y=${y + 4}>${line.label}</text>
    ${depth > 0 && html`<g class="depth"><rect x=${right - 4} y=${y - 17} width=${12 + 7 * String(depth).length} height="16" rx="8" />
      <text x=${right + 2 + 3.5 * String(depth).length} y=${y - 5}>${depth}</text></g>`}
  </g>`;
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
  const { value, error } = useLoaded(() => get(`runs/${run.name}/advice`), [run.name, ended]);
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
  if (part.cause === "environment") return `environments, for which all episodes wait`;
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

function Stage({ run, name, close }) {
  const stage = run.about.plan.stages.find((one) => one.name === name);
  const now = run.now.stages[name];
  const reads = run.about.plan.edges.filter((edge) => edge.reader === name);
  const path = run.findings && run.findings.report ? run.findings.report.critical_path.by_stage[name] : undefined;
  const spare = run.findings && run.findings.slack ? run.findings.slack[name] : undefined;
  const served = stage.shape === "transfer" && run.published.length ? run.published[run.published.length - 1] : null;
  return html`<section class="card" aria-label=${`Stage ${name}`}><div class="toolbar"><h2>${name}</h2><span class="grow"></span><button class="button quiet small" onClick=${close}>Close</button></div>
    <dl class="facts">
      <dt>Now</dt><dd>${now.why}${Object.entries(now.open || {}).map(([part, count]) => html`<div key=${part} class="dim">${count} ${part}${SAYS[part] ? `: ${SAYS[part]}` : ""}</div>`)}</dd>
      <dt>Last step</dt><dd>${now.step < -1 ? "none yet" : now.step < 0 ? "before the first" : now.step + 1}${now.seconds ? `, ${seconds(now.seconds)}` : ""}</dd>
      ${path !== undefined && html`<dt>On the critical path</dt><dd>${seconds(path)} per step</dd>`}
      ${spare !== undefined && spare !== null && html`<dt>Slack</dt><dd>at least ${seconds(spare)} in every step</dd>`}
      ${served && html`<dt>Served</dt><dd>version ${served[1]}, ${seconds(Math.max(0, run.clock - served[3]))} ago <br /><code>${served[2].slice(0, 16)}</code></dd>`}
      <dt>Stage</dt><dd>${stage.kind}, ${stage.shape}, per ${stage.per}</dd>
      <dt>Runs on</dt><dd>${stage.groups.join(" → ") || "outside"}${actorsOf(run, stage).map((actor) => html`<div key=${actor.group + actor.worker} class="dim">${actor.group}.${actor.worker}: process ${actor.pid}, ${actor.node}</div>`)}</dd>
      <dt>Reads</dt><dd>${reads.length ? reads.map((edge) => html`<div key=${edge.field}><code>${edge.field}</code> <span class="dim">from ${edge.writer}${volume(run, edge)}</span></div>`) : "nothing"}</dd>
      <dt>Writes</dt><dd>${stage.writes.length ? stage.writes.map((field) => html`<div key=${field}><code>${field}</code> <span class="dim">${clearedAfter(run, field)}</span></div>`) : "nothing"}</dd>
      <dt>Declared</dt><dd class="mono">${stage.where}</dd>
    </dl></section>`;
}
