// Every metric of every step, each with an explanation.

import { Empty, html, inUnit, useMemo, useState } from "./ui.js";
import { Chart } from "./chart.js";

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

export function Metrics({ run }) {
  const [filter, setFilter] = useState("");
  const [names, steps, values] = useMemo(() => table(run.steps), [run, run.steps.length]);
  const known = run.about.words;
  const of = (name) => known[name] || { title: name, section: "Other", unit: "", read: "" };
  const places = new Map(Object.keys(known).map((name, place) => [name, place]));
  names.sort((a, b) => (places.get(a) ?? Infinity) - (places.get(b) ?? Infinity) || (a < b ? -1 : 1));
  const wanted = names.filter((name) => `${name} ${of(name).title}`.toLowerCase().includes(filter.toLowerCase()));
  if (!names.length) return html`<${Empty}>No step has ended yet.<//>`;
  return html`<section class="card" aria-label="Is it learning?"><h2>Is it learning?</h2><p class="verdict">${sentence(steps, values)}</p></section>
    <div class="toolbar" style=${{ margin: "16px 0" }}><label class="small" for="filter">Show</label><input id="filter" class="button" type="search" placeholder="all metrics" value=${filter} onInput=${(event) => setFilter(event.target.value)} /></div>
    ${run.about.sections.map((section) => {
      const inside = wanted.filter((name) => of(name).section === section);
      return inside.length > 0 && html`<section key=${section} aria-label=${section}><h2 class="section">${section}</h2><div class="grid">
        ${inside.map((name) => html`<${Metric} key=${name} name=${name} words=${of(name)} steps=${steps} values=${values[name]} />`)}</div></section>`;
    })}`;
}

function Metric({ name, words, steps, values }) {
  const last = values.findLast((value) => value !== null);
  return html`<article class="card metric"><header><h3>${words.title}</h3><span class="big">${inUnit(last, words.unit)}</span></header>
    <${Chart} steps=${steps} series=${[[name, "--c0", values]]} label=${`${words.title} over ${steps.length} steps, now ${inUnit(last, words.unit)}`} />
    <p>${words.read} <code>${name}</code></p></article>`;
}
