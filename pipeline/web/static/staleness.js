// The age of trained samples, and the groups that were dropped.

import { Card, html, number, percent, plural } from "./ui.js";

export function ages(run) {
  const counts = new Map();
  for (const [, , one] of run.trained) for (const [age, count] of Object.entries(one)) counts.set(+age, (counts.get(+age) || 0) + count);
  return [...counts].sort((a, b) => a[0] - b[0]);
}

function sentence(found, bound) {
  const total = found.reduce((sum, [, count]) => sum + count, 0);
  if (!total) return "Nothing has been trained yet.";
  const mean = found.reduce((sum, [age, count]) => sum + age * count, 0) / total;
  const oldest = found[found.length - 1][0];
  if (!bound && !oldest) return `Every one of ${plural(total, "sample")} was trained by the version that sampled it: the run is synchronous.`;
  const kept = oldest <= bound ? `none above the bound of ${bound}` : `above the bound of ${bound}: this is a bug`;
  return `Samples were ${mean.toFixed(2)} versions old on average and ${oldest} at most, ${kept}.`;
}

export function Staleness({ run }) {
  const found = ages(run);
  const bound = run.about.plan.max_staleness;
  const total = found.reduce((sum, [, count]) => sum + count, 0);
  const rows = Array.from({ length: Math.max(bound, ...found.map(([age]) => age), 0) + 1 }, (_, age) => [age, (found.find(([one]) => one === age) || [0, 0])[1]]);
  return html`<${Card} title="How stale were the samples?"><p class="verdict">${sentence(found, bound)}</p><//>
    <div class="split">
      <div>
        <${Card} title="Samples by age, whole run"><ul class="bars">${rows.map(([age, count]) => html`<li key=${age} class=${age > bound ? "over" : ""}>
          <span>${plural(age, "version")} old</span><span class="track"><span class="fill" style=${{ display: "block", width: `${total ? (100 * count) / total : 0}%` }}></span></span>
          <span class="num">${number(count)} <span class="dim">${percent(total ? count / total : 0)}</span></span></li>`)}
          <li class="bound small" style=${{ display: "block" }}>max_staleness ${bound}: no sample may be below this line</li></ul><//>
        <${Card} title="Step by step"><${Steps} run=${run} rows=${rows} /><//>
      </div>
      <${Drops} run=${run} />
    </div>`;
}

// One column per step, for the last steps, with one part per kind. With `whole`, all columns have the same height;
// otherwise the height shows the total.
function Columns({ steps, kinds, named, colour, whole, label }) {
  const width = Math.max(4, Math.min(24, 960 / steps.length));
  const totals = steps.map(([, counts]) => kinds.reduce((sum, kind) => sum + (counts[kind] || 0), 0));
  const most = Math.max(...totals);
  return html`<svg viewBox=${`0 0 ${steps.length * width} 120`} width="100%" height="120" preserveAspectRatio="none" role="img" aria-label=${label}>
      ${steps.map(([step, counts], n) => {
        let y = 120;
        return kinds.map((kind, at) => {
          const height = (120 * (counts[kind] || 0)) / (whole ? totals[n] : most);
          y -= height;
          return height > 0 && html`<rect key=${`${step} ${kind}`} x=${n * width} y=${y} width=${width - 1} height=${height} style=${{ fill: colour(at) }}><title>${`step ${step + 1}: ${counts[kind]} ${named(kind)}`}</title></rect>`;
        });
      })}</svg>
    <ul class="keys">${kinds.map((kind, at) => html`<li key=${kind}><span class="swatch" style=${{ background: colour(at) }}></span>${named(kind)}</li>`)}</ul>
    <p class="small dim">Steps ${steps[0][0] + 1} to ${steps[steps.length - 1][0] + 1}.</p>`;
}

const LAST = 120; // number of steps that are drawn
const kindColour = (at) => `var(--c${at % 10})`;
const ageColour = (count) => (at) => `color-mix(in srgb, var(--c0) ${Math.round(100 * (at + 1) / count)}%, var(--sunk))`; // older is stronger

function Steps({ run, rows }) {
  const steps = run.trained.slice(-LAST).map(([step, , counts]) => [step, counts]);
  if (!steps.length) return html`<p class="dim">No step has been trained yet.</p>`;
  return html`<${Columns} steps=${steps} kinds=${rows.map(([age]) => age)} named=${(age) => `${plural(age, "version")} old`} colour=${ageColour(rows.length)} whole=${true} label=${`Share of each age in the last ${steps.length} steps`} />`;
}

function Drops({ run }) {
  const report = run.findings && run.findings.report;
  const reasons = new Map();
  const lost = new Map();
  for (const [stage, step, reason, groups] of run.dropped) {
    const name = stage ? `${stage}: ${reason}` : reason;
    reasons.set(name, (reasons.get(name) || 0) + groups);
    if (!lost.has(step)) lost.set(step, {});
    lost.get(step)[name] = (lost.get(step)[name] || 0) + groups;
  }
  const total = [...reasons.values()].reduce((sum, count) => sum + count, 0);
  const lengths = (report && report.dropped.by_length) || [];
  const unknown = report ? report.dropped.groups - lengths.reduce((sum, one) => sum + one.dropped, 0) : 0;
  const last = Math.max(run.now.step, ...lost.keys());
  const steps = Array.from({ length: Math.min(LAST, last + 1) }, (_, n, step = Math.max(0, last + 1 - LAST) + n) => [step, lost.get(step) || {}]);
  return html`<aside><${Card} title="What was dropped?">
    <p class="lead">${total ? `${plural(total, "group")} were sampled and never trained.` : "Nothing: every admitted group was trained or is still in flight."}</p>
    ${total > 0 && html`<table><thead><tr><th>Reason</th><th class="num">Groups</th></tr></thead><tbody>${[...reasons].map(([name, count]) => html`<tr key=${name}><td>${name}</td><td class="num">${number(count)}</td></tr>`)}</tbody></table>`}<//>
    ${total > 0 && html`<${Card} title="Dropped, step by step"><${Columns} steps=${steps} kinds=${[...reasons.keys()]} named=${(name) => name} colour=${kindColour} label=${`Groups dropped for each reason in the last ${steps.length} steps`} /><//>`}
    ${lengths.length > 0 && html`<${Card} title="By length of the longest response"><table><thead><tr><th>Tokens</th><th class="num">Admitted</th><th class="num">Dropped</th></tr></thead>
      <tbody>${lengths.map((one) => html`<tr key=${one.low}><td>${one.low} to ${one.high}</td><td class="num">${number(one.admitted)}</td><td class="num">${number(one.dropped)} <span class="dim">${percent(one.dropped / one.admitted)}</span></td></tr>`)}</tbody></table>
      ${unknown > 0 && html`<p class="small dim">The length of ${plural(unknown, "dropped group")} was not recorded.</p>`}<//>`}
  </aside>`;
}
