// What the same prompts were answered at two steps: their rewards, and the words that one response has and the other lacks.

import { Card, html, number, plural, useLoaded } from "./ui.js";
import { get, partOf } from "./api.js";

const PROMPTS = 50; // that are listed
const WORDS = 400; // of a response that are compared

// The longest common words of two texts, as [kind, text] with kind "both", "first" or "second".
export function compared(first, second) {
  const [a, b] = [first, second].map((text) => text.match(/\s+|[^\s\w]|\w+/g)?.slice(0, WORDS) || []);
  const best = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i -= 1) for (let j = b.length - 1; j >= 0; j -= 1) best[i][j] = a[i] === b[j] ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
  const parts = [];
  const add = (kind, text) => { if (parts.length && parts.at(-1)[0] === kind) parts.at(-1)[1] += text; else parts.push([kind, text]); };
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { add("both", a[i]); i += 1; j += 1; }
    else if (j >= b.length || (i < a.length && best[i + 1][j] >= best[i][j + 1])) { add("first", a[i]); i += 1; }
    else { add("second", b[j]); j += 1; }
  }
  return parts;
}

// The prompts that both steps have, each with its mean reward and its best response.
export function pairs(before, after) {
  const byPrompt = (rows) => {
    const found = new Map();
    for (const row of rows) if (typeof row.prompt === "string") found.set(row.prompt, [...(found.get(row.prompt) || []), row]);
    return found;
  };
  const [one, other] = [byPrompt(before), byPrompt(after)];
  const summed = (rows) => ({
    mean: rows.reduce((sum, row) => sum + (row.reward || 0), 0) / rows.length,
    text: String(rows.reduce((best, row) => ((row.reward || 0) > (best.reward || 0) ? row : best)).response ?? ""),
  });
  return [...one.keys()].filter((prompt) => other.has(prompt)).map((prompt) => ({ prompt, before: summed(one.get(prompt)), after: summed(other.get(prompt)) }));
}

export function Difference({ run, step, rows, against }) {
  const { value, error } = useLoaded(() => get(partOf(run.name, `samples?step=${against}`)), [run.name, against]);
  if (error) return html`<div class="alert" role="alert">${error}</div>`;
  if (!value) return null;
  const earlier = against < step;
  const both = earlier ? pairs(value.rows, rows) : pairs(rows, value.rows);
  const [from, to] = earlier ? [against, step] : [step, against];
  const better = both.filter((one) => one.after.mean > one.before.mean).length;
  const worse = both.filter((one) => one.after.mean < one.before.mean).length;
  return html`<${Card} title=${`From step ${from + 1} to step ${to + 1}`}>
    <p class="lead">${both.length ? `${plural(both.length, "prompt")} in both: mean reward is higher for ${better}, lower for ${worse}.` : "No prompt was kept in both steps."}</p>
    ${both.length > 0 && html`<ul class="differences">${both.slice(0, PROMPTS).map((one) => html`<li key=${one.prompt}><details><summary><span class="wrap mono">${one.prompt}</span><span class="num">${number(one.before.mean)} → <b class=${one.after.mean > one.before.mean ? "up" : one.after.mean < one.before.mean ? "down" : ""}>${number(one.after.mean)}</b></span></summary>
      <p class="text" tabindex="0">${compared(one.before.text, one.after.text).map(([kind, text], n) => (kind === "first" ? html`<del key=${n}>${text}</del>` : kind === "second" ? html`<ins key=${n}>${text}</ins>` : text))}</p></details></li>`)}</ul>
    <p class="small dim">Open a prompt for the words of its best response: removed since step ${from + 1}, added by step ${to + 1}.</p>`}<//>`;
}
