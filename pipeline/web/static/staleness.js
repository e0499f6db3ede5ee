// How old what was trained was, and what was lost on the way.

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
  const kept = oldest <= bound ? `none above the bound of ${bound}` : `above the bound of ${bound}: this must not be`;
  return `Samples were ${mean.toFixed(2)} versions old in the mean and ${oldest} at most, ${kept}.`;
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
          <li class="bound small" style=${{ display: "block" }}>max_staleness ${bound}: nothing may lie below this line</li></ul><//>
        <${Card} title="Step by step"><${Steps} run=${run} rows=${rows} /><//>
      </div>
      <${Drops} run=${run} />
    </div>`;
}

// The last steps, a column each: the share of every age, from fresh to old.
function Steps({ run, rows }) {
  const last = run.trained.slice(-120);
  if (!last.length) return html`<p class="dim">No step has been trained yet.</p>`;
  const width = Math.max(4, Math.min(24, 960 / last.length));
  return html`<svg viewBox=${`0 0 ${last.length * width} 120`} width="100%" height="120" preserveAspectRatio="none" role="img" aria-label=${`Share of each age in the last ${last.length} steps`}>
      ${last.map(([step, , counts], n) => {
        const total = Object.values(counts).reduce((sum, count) => sum + count, 0);
        let y = 120;
        return rows.map(([age]) => {
          const height = (120 * (counts[age] || 0)) / total;
          y -= height;
          return height > 0 && html`<rect key=${`${step} ${age}`} x=${n * width} y=${y} width=${width - 1} height=${height} style=${{ fill: `var(--c${age % 10})` }}><title>${`step ${step + 1}: ${counts[age]} samples ${age} versions old`}</title></rect>`;
        });
      })}</svg>
    <ul class="keys">${rows.map(([age]) => html`<li key=${age}><span class="swatch" style=${{ background: `var(--c${age % 10})` }}></span>${plural(age, "version")} old</li>`)}</ul>
    <p class="small dim">Steps ${last[0][0] + 1} to ${last[last.length - 1][0] + 1}.</p>`;
}

function Drops({ run }) {
  const report = run.findings && run.findings.report;
  const reasons = new Map();
  for (const [stage, , reason, groups] of run.dropped) {
    const name = stage ? `${stage}: ${reason}` : reason;
    reasons.set(name, (reasons.get(name) || 0) + groups);
  }
  const total = [...reasons.values()].reduce((sum, count) => sum + count, 0);
  const lengths = (report && report.dropped.by_length) || [];
  return html`<aside><${Card} title="What was lost?">
    <p class="lead">${total ? `${plural(total, "group")} were sampled and never trained.` : "Nothing: every group that was admitted was trained, or still will be."}</p>
    ${total > 0 && html`<table><thead><tr><th>Reason</th><th class="num">Groups</th></tr></thead><tbody>${[...reasons].map(([name, count]) => html`<tr key=${name}><td>${name}</td><td class="num">${number(count)}</td></tr>`)}</tbody></table>`}<//>
    ${lengths.length > 0 && html`<${Card} title="By length of the longest response"><table><thead><tr><th>Tokens</th><th class="num">Admitted</th><th class="num">Dropped</th></tr></thead>
      <tbody>${lengths.map((one) => html`<tr key=${one.low}><td>${one.low} to ${one.high}</td><td class="num">${number(one.admitted)}</td><td class="num">${number(one.dropped)} <span class="dim">${percent(one.dropped / one.admitted)}</span></td></tr>`)}</tbody></table><//>`}
  </aside>`;
}
