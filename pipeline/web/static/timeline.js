// The tasks of every worker over time, and the critical path. Drag or arrow keys move; Ctrl and wheel, + and - zoom.

import { Card, colourOf, html, number, plural, seconds, Swatch, useClosing, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./ui.js";
import { go, link } from "./address.js";
import { arrange, bounded, draw, episodesAt, finder, GUTTER, keyOf, spanAt } from "./lanes.js";
import { inWords, KINDS, SAYS } from "./episodes.js";
import { Episodes, Idle, Verdict } from "./graph.js";

const LOUD = new Set(["failed", "retried", "diverged"]); // events whose kind is shown
const PAGE = 100000; // tasks that a page gets at least, if the run has as many
const REST_MS = 300; // without a move, after which a view is written to the address
const LATEST = 5; // number of steps shown initially

function looks(plan) {
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(name).trim();
  const colours = new Map(plan.stages.map((stage, place) => [stage.name, value(`--c${place % 10}`)]));
  return {
    sunk: value("--sunk"), line: value("--line"), strong: value("--line-strong"), text: value("--text"), dim: value("--dim"),
    path: value("--path"), onColour: value("--on-c"), font: getComputedStyle(document.body).fontFamily,
    stage: (name) => colours.get(name) || value("--line-strong"), episode: (kind) => value(`--e-${kind}`),
  };
}

function latest(run) {
  const ends = run.steps.map((row) => row[1]);
  const end = run.clock || 1;
  return [ends.length > LATEST ? ends[ends.length - 1 - LATEST] : 0, end];
}

// The view of the address, or null.
function named(run, query) {
  const [from, to] = [query.from, query.to].map((text) => (text ? +text : NaN));
  return Number.isFinite(from) && Number.isFinite(to) && from < to ? bounded([from, to], run.clock) : null;
}

// Where the timeline starts: at the view, the span, the step, or what is searched for (in that step) of the address, or at
// the last steps.
function first(run, query, made) {
  const wanted = finder(query.find || "", run.about.plan);
  const inStep = wanted && query.step && !query.span ? made.order.filter((one) => one[3] === query.step - 1 && wanted(one)) : [];
  if (named(run, query)) return named(run, query);
  if (inStep.length) {
    const [start, end] = [inStep[0][5], inStep.reduce((last, one) => Math.max(last, one[6]), 0)];
    return bounded([start - 0.1 * (end - start), end + 0.1 * (end - start)], run.clock);
  }
  const at = run.steps.findIndex((row) => row[0] === query.step - 1);
  const span = query.span ? made.order.find((one) => keyOf(one) === query.span) : at < 0 && wanted && made.order.findLast(wanted);
  if (!span && at < 0) return latest(run);
  const [start, end] = span ? [span[5], span[6]] : [at ? run.steps[at - 1][1] : 0, run.steps[at][1]];
  const [from, to] = latest(run);
  const half = Math.max(span ? (to - from) / 2 : 0, 0.6 * (end - start));
  return [(start + end) / 2 - half, (start + end) / 2 + half];
}

export function Timeline({ run, query }) {
  const canvas = useRef(null);
  const made = useMemo(() => arrange(run.about.plan, run.spans, run.spent), [run, run.changes]);
  const asked = query.find || query.step || query.span || named(run, query);
  const [view, setView] = useState(() => first(run, query, made));
  const [follow, setFollow] = useState(run.live && !asked);
  const chosen = useMemo(() => (query.span ? made.order.find((span) => keyOf(span) === query.span) : null), [made, query.span]);
  const choose = (span) => go({ span: span ? keyOf(span) : "" }, { keep: true });
  const card = useClosing(!!query.span, () => choose(null), "header, .status");
  const wanted = useMemo(() => finder(query.find || "", run.about.plan), [run, query.find]);
  const matches = useMemo(() => (wanted ? made.order.filter(wanted) : []), [made, wanted]);
  const [tip, setTip] = useState(null);
  const paths = (run.findings && run.findings.paths) || [];
  const shown = follow && run.live ? [run.clock - (view[1] - view[0]), run.clock] : view;
  const scene = {
    view: shown, wanted, steps: run.steps.filter((row) => row[0] >= 0), tasks: run.now.tasks, clock: run.clock, paths, chosen,
  };
  const again = useRef(null);
  again.current = () => canvas.current && draw(canvas.current, made, scene, looks(run.about.plan));
  useLayoutEffect(() => again.current());
  useEffect(() => {
    const redraw = () => again.current();
    const observer = new ResizeObserver(redraw);
    observer.observe(canvas.current);
    const theme = new MutationObserver(redraw);
    theme.observe(document.documentElement, { attributes: true });
    return () => { observer.disconnect(); theme.disconnect(); };
  }, []);

  const later = useRef({}); // the view is written to the address once it rests; `wrote` is the last one that was
  const write = (from, to) => {
    clearTimeout(later.current.timer);
    later.current.timer = setTimeout(() => { later.current.wrote = `${from} ${to}`; go({ from, to }, { keep: true }); }, REST_MS);
  };
  useEffect(() => () => clearTimeout(later.current.timer), []);
  useEffect(() => {
    const there = named(run, query);
    if (there && later.current.wrote !== `${query.from} ${query.to}`) { setFollow(false); setView(there); }
    later.current.wrote = `${query.from} ${query.to}`;
  }, [query.from, query.to]);
  const move = (start, end) => {
    const next = bounded([start, end], run.clock);
    setFollow(false);
    setView(next);
    write(...next.map((at) => at.toFixed(6)));
  };
  const newest = () => {
    if (!run.live) { move(...latest(run)); return; }
    setView(latest(run));
    setFollow(true);
    write("", ""); // the view moves on
  };
  const zoom = (factor, at = (shown[0] + shown[1]) / 2) => move(at - (at - shown[0]) * factor, at + (shown[1] - at) * factor);
  const pan = (share) => move(shown[0] + share * (shown[1] - shown[0]), shown[1] + share * (shown[1] - shown[0]));
  const all = () => move(0, Math.max(run.clock, 1));
  const show = (span) => {
    choose(span);
    if (span && (span[6] < shown[0] || span[5] > shown[1])) {
      const half = (shown[1] - shown[0]) / 2;
      move(span[5] - half, span[5] + half);
    }
  };
  const order = wanted ? matches : made.order;
  const step = (by) => {
    const place = chosen && order.includes(chosen) ? order.indexOf(chosen) + by : order.findIndex((span) => span[5] >= shown[0]);
    if (order.length) show(order[(place + order.length) % order.length]);
  };
  const keys = {
    ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1.4),
    Home: all, End: newest, "[": () => step(-1), "]": () => step(1),
  };
  const press = (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  };
  const place = (event) => {
    const box = canvas.current.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top, box.width];
  };
  const atX = (x, width) => shown[0] + ((x - GUTTER) / (width - GUTTER)) * (shown[1] - shown[0]);
  const wheel = (event) => {
    if (!event.ctrlKey && Math.abs(event.deltaX) > Math.abs(event.deltaY)) { event.preventDefault(); pan(event.deltaX / 1000); return; }
    if (!event.ctrlKey && !event.shiftKey) return; // the page scrolls
    event.preventDefault();
    const [x, , width] = place(event);
    zoom(event.deltaY > 0 || event.deltaX > 0 ? 1.2 : 1 / 1.2, atX(Math.max(x, GUTTER), width));
  };
  const drag = useRef(null);
  const down = (event) => { const [x, , width] = place(event); drag.current = { x, width, view: shown, moved: false }; canvas.current.setPointerCapture(event.pointerId); };
  const over = (event) => {
    const [x, y, width] = place(event);
    const from = drag.current;
    if (from) {
      const by = ((x - from.x) / (from.width - GUTTER)) * (from.view[1] - from.view[0]);
      if (Math.abs(x - from.x) > 3) from.moved = true;
      if (from.moved) move(from.view[0] - by, from.view[1] - by);
      setTip(null);
      return;
    }
    const span = spanAt(made, shown, width, x, y);
    const open = span ? null : episodesAt(made, shown, width, x, y);
    const text = span ? textOf(span) : open && inWords(open.counts, open.at);
    setTip(text ? { text, x: Math.min(x + 12, width - 240), y: y + 12 } : null);
  };
  const up = (event) => {
    const [x, y, width] = place(event);
    if (drag.current && !drag.current.moved) choose(spanAt(made, shown, width, x, y));
    drag.current = null;
  };
  useEffect(() => {
    const target = canvas.current;
    target.addEventListener("wheel", wheel, { passive: false });
    return () => target.removeEventListener("wheel", wheel);
  });

  return html`
    <section class="card" aria-label="Timeline" ref=${card}>
      <div class="toolbar"><h2>Timeline</h2>
        <label class="sr" for="seek">Find a stage or a sample</label>
        <input id="seek" class="button" type="search" placeholder="stage or sample" value=${query.find || ""} onInput=${(event) => go({ find: event.target.value, span: "" }, { keep: true })}
          onKeyDown=${(event) => event.key === "Enter" && step(event.shiftKey ? -1 : 1)} />
        ${wanted && html`<span class="small dim" role="status">${plural(matches.length, "task")}${matches.length ? "; Enter goes to the next" : ""}</span>`}<span class="grow"></span>
        ${run.live && html`<button class="button" aria-pressed=${follow} onClick=${() => (follow ? setFollow(false) : newest())}>Follow</button>`}
        <button class="button" onClick=${newest}>Last steps</button>
        <button class="button" onClick=${all}>Whole run</button>
        <button class="button icon" onClick=${() => zoom(0.6)} aria-label="Zoom in">+</button>
        <button class="button icon" onClick=${() => zoom(1.6)} aria-label="Zoom out">−</button></div>
      <div class="lanes">
        <canvas ref=${canvas} tabindex="0" role="img" onKeyDown=${press} onPointerDown=${down} onPointerMove=${over} onPointerUp=${up} onPointerLeave=${() => setTip(null)}
          aria-label=${`${number(run.spans.length)} tasks on ${made.lanes.length} workers, ${seconds(shown[0])} to ${seconds(shown[1])}. Arrows move, plus and minus zoom, brackets go from task to task.`}></canvas>
        ${tip && html`<div class="tip" style=${{ left: `${tip.x}px`, top: `${tip.y}px` }}>${tip.text}</div>`}
      </div>
      <ul class="keys">${run.about.plan.stages.map((stage) => html`<li key=${stage.name}><${Swatch} colour=${colourOf(run.about.plan, stage.name)} />${stage.name}</li>`)}
        <li><span class="swatch" style=${{ background: "var(--path)", height: "3px", width: "20px" }}></span>critical path</li></ul>
      ${run.spent.length > 0 && html`<ul class="keys" aria-label="Episodes">${KINDS.map((kind) => html`<li key=${kind} title=${SAYS[kind]}><${Swatch} colour=${`var(--e-${kind})`} />${kind}</li>`)}</ul>`}
      ${run.spans.length >= PAGE && html`<p class="small dim">Tasks are drawn from ${seconds(made.order[0][5])} on: a page gets the last ${number(PAGE)} or more. Export has all.</p>`}
      <p class="small dim" aria-live="polite">${chosen ? html`${textOf(chosen).replaceAll("\n", ", ")} · <a href=${link(run.name, "graph", { stage: chosen[0] })}>Stage ${chosen[0]}</a>${chosen[3] >= 0 && html` · <a href=${link(run.name, "samples", { step: chosen[3] + 1 })}>Samples of step ${chosen[3] + 1}</a>`}` : "Drag to move, Ctrl and wheel to zoom; keys: ← → + − Home End [ ]."}</p>
    </section>
    <div class="split"><${Verdict} run=${run} /><div><${Idle} run=${run} /><${Episodes} run=${run} /></div></div>
    <${Story} run=${run} />
    <${Tasks} run=${run} made=${made} />`;
}

const textOf = (span) => `${span[0]}, step ${span[3] + 1}${span[4] ? `, attempt ${span[4] + 1}` : ""}\n${span[1]} ${span[2]}, ${span[7]} groups\n${seconds(span[6] - span[5])}, from ${span[5].toFixed(3)} s\ngroups ${span[8].length > 24 ? `${span[8].slice(0, 24)}…` : span[8]}`;

// Events other than tasks: starts, retried attempts, checkpoints, the end.
function Story({ run }) {
  const last = run.notes.slice(-50).reverse();
  return html`<${Card} title="What happened?"><div class="scroll"><table><thead><tr><th>When</th><th>What</th></tr></thead>
    <tbody>${last.map(([kind, at, text], n) => html`<tr key=${`${at} ${n}`}><td class="dim">${at.toFixed(1)} s</td><td class=${`wrap ${LOUD.has(kind) ? "down" : ""}`}>${LOUD.has(kind) ? html`<b>${kind}</b> ` : ""}${text}</td></tr>`)}</tbody></table></div><//>`;
}

// The tasks of the last finished step as a table.
function Tasks({ run, made }) {
  const [open, setOpen] = useState(false);
  const last = run.steps.length ? run.steps[run.steps.length - 1][0] : -1;
  const rows = open ? made.order.filter((span) => span[3] === last).slice(0, 200) : [];
  return html`<${Card} label="Tasks of the last step"><button class="button" aria-expanded=${open} onClick=${() => setOpen(!open)}>Tasks of step ${last + 1} as a table</button>
    ${open && html`<div class="scroll"><table><thead><tr><th>Stage</th><th>Worker</th><th class="num">Groups</th><th class="num">From</th><th class="num">Took</th></tr></thead>
      <tbody>${rows.map((span, n) => html`<tr key=${n}><td>${span[0]}</td><td>${span[1]} ${span[2]}</td><td class="num">${span[7]}</td><td class="num">${span[5].toFixed(3)} s</td><td class="num">${seconds(span[6] - span[5])}</td></tr>`)}</tbody></table></div>`}<//>`;
}
