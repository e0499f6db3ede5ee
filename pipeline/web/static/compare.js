// Compares this run with another one.

import { Card, Empty, html, number, seconds, Swatch, useLoaded } from "./ui.js";
import { get, partOf } from "./api.js";
import { go } from "./address.js";
import { Chart } from "./chart.js";

const FIRST = ["reward/mean", "rollout/length_mean", "train/entropy", "train/kl", "train/grad_norm", "train/mismatch_kl", "train/clip_fraction", "time/step_s"];

export function Compare({ run, query }) {
  const runs = useLoaded(() => get("runs"), [run.name]).value || [];
  const others = runs.filter((one) => one.name !== run.name);
  const other = query.other || "";
  const { value, error } = useLoaded(async () => (other ? get(partOf(run.name, `comparison?other=${encodeURIComponent(other)}`)) : null), [run.name, other]);
  return html`<div class="toolbar"><label for="other">Compare with</label>
      <select id="other" class="button" value=${other} onChange=${(event) => go({ other: event.target.value })}><option value="">choose a run</option>${others.map((one) => html`<option key=${one.name} value=${one.name}>${one.name}</option>`)}</select></div>
    ${error ? html`<div class="alert" role="alert">${error}</div>` : !others.length ? html`<${Empty}>There is no other run in this folder.<//>` : !value ? html`<${Empty}>${other ? "Reading both records …" : "Choose a run to compare with this one."}<//>` : html`<${Both} value=${value} words=${run.about.words} />`}`;
}

const change = (pair) => (pair.first && pair.second !== null ? `${pair.second >= pair.first ? "+" : "−"}${Math.abs((100 * (pair.second - pair.first)) / pair.first).toFixed(0)} %` : "–");

function Both({ value, words }) {
  const stages = Object.entries(value.stages);
  const names = Object.keys(value.metrics).filter((name) => name !== "version");
  const ordered = [...FIRST.filter((name) => names.includes(name)), ...names.filter((name) => name.startsWith("eval/"))];
  return html`<${Card} title="What is different?">
      <ul class="keys"><li><${Swatch} colour="var(--c0)" />${value.first}: ${value.sentences[0]}</li><li><${Swatch} colour="var(--c1)" />${value.second}: ${value.sentences[1]}</li></ul>
      ${value.changes.length ? html`<div class="scroll"><table><thead><tr><th>What</th><th>Name</th><th>${value.first}</th><th>${value.second}</th></tr></thead>
        <tbody>${value.changes.map((one, n) => html`<tr key=${n}><td>${one.kind}</td><td class="wrap">${one.name}${one.what ? ` · ${one.what}` : ""}</td><td class="wrap mono">${shown(one.before)}</td><td class="wrap mono">${shown(one.after)}</td></tr>`)}</tbody></table></div>` : html`<p class="lead">The graphs and their flags are the same.</p>`}<//>
    <${Card} title="Seconds per step"><div class="scroll"><table><thead><tr><th>Stage</th><th class="num">${value.first}</th><th class="num">${value.second}</th><th class="num">Change</th></tr></thead>
      <tbody>${[["step, mean", value.step_s], ["step, median", value.step_median_s], ...stages].map(([name, pair]) => html`<tr key=${name}><td>${name}</td><td class="num">${seconds(pair.first)}</td><td class="num">${seconds(pair.second)}</td><td class="num">${change(pair)}</td></tr>`)}</tbody></table></div><//>
    <h2 class="section">Metrics</h2><div class="grid">${ordered.map((name) => {
      const steps = Object.keys(value.metrics[name]).map(Number).sort((a, b) => a - b);
      const line = (side) => steps.map((step) => value.metrics[name][step][side]);
      const title = (words[name] || { title: name }).title;
      return html`<article class="card metric" key=${name}><header><h3>${title}</h3><code>${name}</code></header>
        <${Chart} steps=${steps} series=${[[value.first, "--c0", line("first")], [value.second, "--c1", line("second")]]} unit=${(words[name] || { unit: "" }).unit} label=${`${title} of both runs`} /></article>`;
    })}</div>`;
}

const shown = (value) => (value === null || value === undefined ? "–" : typeof value === "number" ? number(value) : typeof value === "string" ? value : JSON.stringify(value));
