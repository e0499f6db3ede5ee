// Every metric of every step, each with an explanation.

import { Empty, html, inUnit, Swatch, useClosing, useEffect, useLoaded, useMemo, useRef, useState } from "./ui.js";
import { get, offline, partOf } from "./api.js";
import { go } from "./address.js";
import { Chart, joined } from "./chart.js";

const OTHERS = 5; // runs that may be drawn over this one
const REACH = "400px"; // charts that are this near to the screen are drawn

// Returns [names, steps, values by name] of all step rows.
export function table(rows) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row[2])))].sort();
  const last = new Map(rows.map((row) => [row[0], row]));
  const ordered = [...last.values()].sort((a, b) => a[0] - b[0]);
  const values = Object.fromEntries(names.map((name) => [name, ordered.map((row) => row[2][name] ?? null)]));
  return [names, ordered.map((row) => row[0] + 1), values];
}

function sentence(steps, values) {
  const reward = (values["reward/mean"] || []).filter((value) => value !== null);
  if (reward.length < 4) return "It takes a few steps to tell.";
  const span = Math.max(1, Math.floor(reward.length / 10));
  const mean = (part) => part.reduce((sum, value) => sum + value, 0) / part.length;
  const [first, last] = [mean(reward.slice(0, span)), mean(reward.slice(-span))];
  const noise = Math.sqrt(mean(reward.slice(-span * 3).map((value) => (value - last) ** 2))) / Math.sqrt(span) || 0;
  const held = Object.keys(values).find((name) => name.startsWith("eval/") && !/^eval\/(count|length_mean|truncated|end_.*)$/.test(name));
  const known = held ? values[held].filter((value) => value !== null) : [];
  const lost = known.length > 1 && known.at(-1) < known[0];
  const rises = lost ? "Reward rises, but not on held-out prompts" : "It learns";
  const word = last - first > 2 * noise ? rises : first - last > 2 * noise ? "Reward falls" : "Reward does not change";
  const learned = known.length > 1 ? ` Held out, ${held.slice(5).replaceAll("_", " ")} went from ${known[0].toFixed(3)} to ${known[known.length - 1].toFixed(3)}.` : "";
  return `${word}: mean reward ${first.toFixed(3)} at first, ${last.toFixed(3)} now, over ${reward.length} steps.${learned}`;
}

// Runs to draw over this one, each with its own color.
function Others({ run, chosen }) {
  const [open, setOpen] = useState(false);
  const { value } = useLoaded(async () => (open ? get("runs") : []), [open]);
  const turn = (name) => go({ with: (chosen.includes(name) ? chosen.filter((one) => one !== name) : [...chosen, name]).join("/") });
  const menu = useClosing(open, () => setOpen(false));
  return html`<div class="menu" ref=${menu}><button class="button" aria-expanded=${open} onClick=${() => setOpen(!open)}>Other runs${chosen.length ? ` (${chosen.length})` : ""}</button>
    ${open && html`<ul>${(value || []).filter((one) => one.name !== run.name).map((one) => html`<li key=${one.name}><label><input type="checkbox" checked=${chosen.includes(one.name)} disabled=${!chosen.includes(one.name) && chosen.length >= OTHERS} onChange=${() => turn(one.name)} />${one.name}</label></li>`)}</ul>`}</div>`;
}

export function Metrics({ run, query }) {
  const filter = query.show || "";
  const smooth = Math.min(0.99, Math.max(0, +query.smooth || 0));
  const others = offline ? [] : (query.with || "").split("/").filter((name) => name && name !== run.name).slice(0, OTHERS);
  const loaded = useLoaded(() => Promise.all(others.map((name) => get(partOf(name, "metrics")))), [others.join("/")]);
  const [names, steps, values] = useMemo(() => table(run.steps), [run, run.steps.length]);
  const known = run.about.words;
  const of = (name) => known[name] || { title: name, section: "Other", unit: "", read: "" };
  const places = new Map(Object.keys(known).map((name, place) => [name, place]));
  names.sort((a, b) => (places.get(a) ?? Infinity) - (places.get(b) ?? Infinity) || (a < b ? -1 : 1));
  const wanted = names.filter((name) => `${name} ${of(name).title}`.toLowerCase().includes(filter.toLowerCase()));
  if (!names.length) return html`<${Empty}>No step has ended yet.<//>`;
  const drawn = [{ name: run.name, steps, values }, ...(loaded.value || []).map((one, n) => ({ name: others[n], ...one }))].filter((one) => one.name);
  return html`<section class="card" aria-label="Is it learning?"><h2>Is it learning?</h2><p class="verdict">${sentence(steps, values)}</p></section>
    <div class="toolbar choices"><label class="sr" for="filter">Show</label><input id="filter" class="button" type="search" placeholder="all metrics" value=${filter} onInput=${(event) => go({ show: event.target.value }, { keep: true })} />
      <label class="small" for="smooth">Smoothing</label><input id="smooth" type="range" min="0" max="0.99" step="0.01" value=${smooth} onInput=${(event) => go({ smooth: +event.target.value || "" }, { keep: true })} /><output class="small num" for="smooth">${smooth}</output>
      ${!offline && html`<${Others} run=${run} chosen=${others} />`}
      ${drawn.length > 1 && html`<ul class="keys" aria-label="Runs">${drawn.map((one, n) => html`<li key=${one.name}><${Swatch} colour=${`var(--c${n})`} />${one.name}</li>`)}</ul>`}
      ${loaded.error && html`<span class="small down" role="alert">${loaded.error}</span>`}</div>
    ${run.about.sections.map((section) => {
      const inside = wanted.filter((name) => of(name).section === section);
      return inside.length > 0 && html`<section key=${section} aria-label=${section}><h2 class="section">${section}</h2><div class="grid">
        ${inside.map((name) => html`<${Metric} key=${name} name=${name} words=${of(name)} runs=${drawn} smooth=${smooth} />`)}</div></section>`;
    })}`;
}

function Metric({ name, words, runs, smooth }) {
  const here = useRef(null);
  const [near, setNear] = useState(false);
  useEffect(() => {
    const observer = new IntersectionObserver(([one]) => one.isIntersecting && setNear(true), { rootMargin: REACH });
    observer.observe(here.current);
    return () => observer.disconnect();
  }, []);
  const with_ = runs.filter((run, n) => !n || name in run.values);
  const [steps, lines] = useMemo(() => joined(with_.map((run) => ({ steps: run.steps, values: run.values[name] }))), [with_.length, ...with_.map((run) => run.values[name])]);
  const last = runs[0].values[name].findLast((value) => value !== null);
  const series = with_.map((run, n) => [run.name, `--c${runs.indexOf(run)}`, lines[n]]);
  return html`<article class="card metric" ref=${here}><header><h3>${words.title}</h3><span class="big">${inUnit(last, words.unit)}</span></header>
    ${near ? html`<${Chart} steps=${steps} series=${series} unit=${words.unit} smooth=${smooth} label=${`${words.title} over ${steps.length} steps, now ${inUnit(last, words.unit)}`} />` : html`<div class="chart"></div>`}
    <p>${words.read} <code>${name}</code></p></article>`;
}
