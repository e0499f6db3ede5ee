// Prompts and responses: the groups of a step, and the prompts that never get a reward.

import { Card, Empty, html, number, percent, plural, useEffect, useLoaded } from "./ui.js";
import { get, partOf } from "./api.js";
import { go, link, stepOf } from "./address.js";
import { Difference } from "./difference.js";

const ORDERS = {
  admitted: ["as admitted", () => 0],
  worst: ["worst reward first", (a, b) => a.mean - b.mean],
  best: ["best reward first", (a, b) => b.mean - a.mean],
  spread: ["largest spread first", (a, b) => b.spread - a.spread],
};

function grouped(rows) {
  const groups = new Map();
  for (const row of rows) groups.set(row.group, [...(groups.get(row.group) || []), row]);
  return [...groups].map(([name, members]) => {
    const rewards = members.map((row) => row.reward).filter((value) => typeof value === "number");
    const mean = rewards.reduce((sum, value) => sum + value, 0) / Math.max(1, rewards.length);
    return { name, members, mean, spread: rewards.length ? Math.max(...rewards) - Math.min(...rewards) : 0 };
  });
}

// The kind of an episode's end, "failed" for "failed:2:OSError", and how many samples have each.
const kindOf = (row) => String(row.end).split(":")[0];

function endsOf(rows) {
  const counts = new Map();
  for (const row of rows) if (row.end !== undefined) counts.set(kindOf(row), (counts.get(kindOf(row)) || 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}

// The rewards that a sample may have to be shown, by the name of the choice.
const REWARDS = {
  any: ["any reward", () => true],
  none: ["reward 0 or less", (row) => row.reward <= 0],
  some: ["reward above 0", (row) => row.reward > 0],
  low: ["below the mean of its group", (row, group) => row.reward < group.mean],
  high: ["above the mean of its group", (row, group) => row.reward > group.mean],
};

// The stages that wrote something of these samples, and what the one of the address wrote: null without one.
function stagesOf(run, rows, query) {
  const written = new Set(rows.flatMap(Object.keys));
  const stages = run.about.plan.stages.filter((stage) => stage.writes.some((name) => written.has(name)));
  const one = stages.find((stage) => stage.name === query.stage);
  return [stages.map((stage) => stage.name), one ? one.writes : null];
}

// What all choices of the address leave of the samples of a step, in groups.
function chosenOf(rows, query, fields) {
  const [, wanted] = REWARDS[query.reward] || REWARDS.any;
  const text = (query.find || "").toLowerCase();
  const ends = endsOf(rows).map(([name]) => name);
  return grouped(rows)
    .map((group) => ({ ...group, members: group.members.filter((row) => wanted(row, group) && (!fields || fields.some((name) => name in row)) && (!ends.includes(query.end) || kindOf(row) === query.end)) }))
    .filter((group) => group.members.some((row) => JSON.stringify(row).toLowerCase().includes(text)))
    .sort((ORDERS[query.order] || ORDERS.admitted)[1]);
}

function Choice({ name, label, value, texts, change }) {
  return html`<label class="sr" for=${name}>${label}</label>
    <select id=${name} class="button" value=${value} onChange=${(event) => change(event.target.value)}>${texts.map(([key, text]) => html`<option key=${key} value=${key}>${text}</option>`)}</select>`;
}

const LISTED = 200; // steps; of more, one is typed

// A choice of one of the steps that have samples: as a menu, or as a number, of which the nearest step is taken.
function StepChoice({ name, label, value, steps, first, change }) {
  if (steps.length <= LISTED) {
    return html`<${Choice} name=${name} label=${label} value=${value ?? ""} texts=${[...(first ? [["", `${first} …`]] : []), ...steps.map((one) => [one, `${first ? "with " : ""}step ${one + 1}`])]} change=${(one) => change(one === "" ? null : +one)} />`;
  }
  const nearest = (typed) => steps.reduce((best, one) => (Math.abs(one + 1 - typed) < Math.abs(best + 1 - typed) ? one : best));
  return html`<label class="small" for=${name}>${first || label}</label>
    <input id=${name} class="button" type="number" min="1" max=${steps.at(-1) + 1} placeholder="step" value=${value === null ? "" : value + 1} onChange=${(event) => change(event.target.value === "" ? null : nearest(+event.target.value))} />`;
}

export function Samples({ run, query }) {
  const shaded = !!query.shade;
  const named = stepOf(query.step);
  const step = named === null ? null : named - 1;
  const when = step === null ? run.now.step : "chosen";
  const { value, error } = useLoaded(() => get(partOf(run.name, `samples${step === null ? "" : `?step=${step}`}`)), [run.name, step, when]);
  useEffect(() => { document.querySelector(".response.chosen")?.scrollIntoView({ block: "center", inline: "center" }); }, [query.sample, value]);
  if (error) return html`<div class="alert" role="alert">${error}</div>`;
  if (!value) return html`<${Empty}>Reading samples …<//>`;
  if (!value.steps.length) return html`<${Empty}>No samples were kept yet. A step keeps some groups of its batch: Schedule(keep_groups=...).<//>`;
  const setStep = (one) => go({ step: one + 1, sample: "" });
  const against = stepOf(query.against);
  const ends = endsOf(value.rows);
  const [stages, fields] = stagesOf(run, value.rows, query);
  const groups = chosenOf(value.rows, query, fields);
  const at = value.steps.indexOf(value.step);
  return html`${query.step && named === null && html`<div class="alert soft" role="alert">There is no step “${query.step}”: these are the samples of step ${value.step + 1}, the last one that has any.</div>`}
    <div class="toolbar">
      <button class="button icon" disabled=${at <= 0} onClick=${() => setStep(value.steps[at - 1])} aria-label="Previous step">‹</button>
      <${StepChoice} name="step" label="Step" value=${value.step} steps=${value.steps} change=${(one) => one !== null && setStep(one)} />
      <button class="button icon" disabled=${at >= value.steps.length - 1} onClick=${() => setStep(value.steps[at + 1])} aria-label="Next step">›</button>
      <${Choice} name="order" label="Order" value=${query.order || "admitted"} texts=${Object.entries(ORDERS).map(([name, [text]]) => [name, text])} change=${(order) => go({ order })} />
      <${Choice} name="reward" label="Reward" value=${query.reward || "any"} texts=${Object.entries(REWARDS).map(([name, [text]]) => [name, text])} change=${(reward) => go({ reward })} />
      <${Choice} name="stage" label="Stage" value=${fields ? query.stage : ""} texts=${[["", "all stages"], ...stages.map((name) => [name, `what ${name} wrote`])]} change=${(stage) => go({ stage })} />
      <label class="sr" for="find">Find</label><input id="find" class="button" type="search" placeholder="find in texts" value=${query.find || ""} onInput=${(event) => go({ find: event.target.value }, { keep: true })} />
      ${ends.length > 0 && html`<${Choice} name="end" label="End" value=${query.end || ""} texts=${[["", "any end"], ...ends.map(([name, count]) => [name, `${name} (${count})`])]} change=${(end) => go({ end })} />`}
      <${StepChoice} name="against" label="Compare with a step" value=${against === null ? null : against - 1} steps=${value.steps.filter((one) => one !== value.step)} first="compare with" change=${(one) => go({ against: one === null ? "" : one + 1 })} />
      ${value.rows.some((row) => row.tokens) && html`<button class="button" aria-pressed=${shaded} onClick=${() => go({ shade: shaded ? "" : 1 }, { keep: true })}>Shade unlikely tokens</button>`}
    </div>
    ${against !== null && html`<${Difference} run=${run} step=${value.step} rows=${value.rows} against=${against - 1} />`}
    ${shaded && html`<p class="small dim legendline">The stronger a token is marked, the less likely it was when it was sampled: fully at <span class="token" style=${{ "--shade": "100%" }}>1 %</span> or less.</p>`}
    ${groups.length ? groups.map((group) => html`<${Group} key=${group.name} run=${run} group=${group} shaded=${shaded} chosen=${query.sample} fields=${fields} />`) : html`<${Empty}>No sample of this step is like that.<//>`}
    <${Prompts} run=${run} open=${!!query.prompts} />`;
}

const PLAIN = new Set(["step", "key", "group", "version", "prompt", "answer", "response", "reward", "advantage", "truncated", "tokens", "turn_ends", "turn_rewards", "conversation", "end"]);

// How strongly a token is marked, in percent: 0 if it was certain, 100 at a probability of 1 % or less.
const shade = (nats) => Math.round(100 * Math.min(1, -nats / Math.log(100)));

function Token({ token: [text, nats, drawn], shaded }) {
  if (drawn === false) return html`<span class="inserted" title="not drawn by the policy">${text}</span>`;
  return shaded ? html`<span class="token" style=${{ "--shade": `${shade(nats)}%` }} title=${`${percent(Math.exp(nats))} (${nats} nats)`}>${text}</span>` : text;
}

// The turns of an episode: what was said to the policy, in grey, and its reply. All but the last are folded.
function Turns({ row, shaded }) {
  return row.turn_ends.map((end, n) => {
    const last = n === row.turn_ends.length - 1;
    const tokens = row.tokens.slice(n ? row.turn_ends[n - 1] : 0, last ? row.tokens.length : end);
    const reply = tokens.filter((one) => one[2] !== false).map(([text]) => text).join("");
    return html`<details key=${n} class="turn" open=${last}><summary><strong>Turn ${n + 1}</strong> <span class="dim">${plural(tokens.length, "token")}${row.turn_rewards && row.turn_rewards[n] ? `, reward ${number(row.turn_rewards[n])}` : ""}</span> <code>${reply.length > 40 ? `${reply.slice(0, 40)}…` : reply}</code></summary>
      <p class="text" tabindex="0">${tokens.map((token, place) => token[0] && html`<${Token} key=${place} token=${token} shaded=${shaded} />`)}</p></details>`;
  });
}

function Response({ row, shaded }) {
  if (row.tokens && row.turn_ends) return html`<${Turns} row=${row} shaded=${shaded} />`;
  if (shaded && row.tokens) {
    return html`<p class="text" tabindex="0">${row.tokens.map((token, n) => token[0] && html`<${Token} key=${n} token=${token} shaded=${true} />`)}</p>`;
  }
  return html`<p class="text" tabindex="0">${row.response === undefined ? "" : String(row.response) || "(empty)"}</p>`;
}

// With `fields`, of a stage, only these are shown of a response.
function Group({ run, group, shaded, chosen, fields }) {
  const [first] = group.members;
  const has = (row, name) => row[name] !== undefined && (!fields || fields.includes(name));
  const others = (row) => Object.keys(row).filter((name) => !PLAIN.has(name) && has(row, name));
  return html`<section class="card" aria-label=${`Group ${+group.name}`}>
    <div class="toolbar"><h2>Group ${+group.name}</h2><span class="dim">mean reward ${number(group.mean)}, ${plural(group.members.length, "sample")}</span></div>
    ${first.prompt !== undefined && html`<p class="text">${String(first.prompt)}</p>`}
    ${first.answer !== undefined && html`<p class="small dim wrap">Answer: <code>${String(first.answer)}</code></p>`}
    <div class="responses" tabindex="0" role="group" aria-label="Responses">${group.members.map((row) => html`<article key=${row.key} class=${`response ${row.advantage > 0 ? "up" : row.advantage < 0 ? "down" : ""} ${row.key === chosen ? "chosen" : ""}`}>
      ${(!fields || has(row, "response")) && html`<${Response} row=${row} shaded=${shaded} />`}
      <footer>${(!fields || has(row, "reward")) && html`<span>reward <b>${number(row.reward)}</b></span>`}${has(row, "advantage") && html`<span>advantage <b>${row.advantage > 0 ? "+" : ""}${number(row.advantage)}</b></span>`}${has(row, "end") && html`<span class="wrap">end <strong>${row.end}</strong></span>`}</footer>
      <p class="small dim">version ${row.version}${row.truncated ? ", truncated" : ""}${row.turn_ends ? `, ${plural(row.turn_ends.length, "turn")}` : ""}${others(row).map((name) => html`<br key=${name} /><span class="wrap">${name}: ${String(row[name])}</span>`)}</p>
      <p class="goto small"><a href=${link(run.name, "samples", { step: row.step + 1, sample: row.key })}>Link</a><a href=${link(run.name, "timeline", { step: row.step + 1, find: row.key })}>Timeline</a></p>
    </article>`)}</div></section>`;
}

function Prompts({ run, open }) {
  const { value, error } = useLoaded(async () => (open ? get(partOf(run.name, "prompts")) : null), [run.name, open, open && run.now.step]);
  const never = (value || []).filter((one) => one.best <= 0);
  return html`<${Card} title="Which prompts never get reward?">
    <button class="button" aria-expanded=${open} onClick=${() => go({ prompts: open ? "" : 1 }, { keep: true })}>${open ? "Hide" : "Look through all kept samples"}</button>
    ${open && error && html`<p class="dim">${error}</p>`}
    ${open && value && html`<p class="lead" style=${{ margin: "12px 0" }}>${never.length ? `${plural(never.length, "prompt")} of ${number(value.length)} listed never got any.` : `None: each of the ${plural(value.length, "kept prompt")} got some.`}</p>
      <div class="scroll"><table><thead><tr><th>Prompt</th><th class="num">Best</th><th class="num">Mean</th><th class="num">Samples</th><th class="num">Steps</th></tr></thead>
      <tbody>${value.slice(0, 50).map((one) => html`<tr key=${one.prompt}><td class="wrap mono">${one.prompt}</td><td class="num">${number(one.best)}</td><td class="num">${number(one.mean)}</td><td class="num">${one.samples}</td><td class="num">${one.first + 1}–${one.last + 1}</td></tr>`)}</tbody></table></div>`}<//>`;
}
