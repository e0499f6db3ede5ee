// The list of runs.

import { Card, Empty, html, number, useEffect, useLoaded, useState } from "./ui.js";
import { get } from "./api.js";

const WORDS = { finished: "Finished", failed: "Failed", interrupted: "Interrupted", running: "Live", killed: "Killed", unfinished: "Live or killed", unreadable: "Cannot be read" };
const LOOKS = { finished: "finished", failed: "failed", interrupted: "silent", running: "running", killed: "failed" };

export function Runs() {
  const [count, setCount] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => setCount((before) => before + 1), 5000);
    return () => clearInterval(timer);
  }, []);
  const { value, error } = useLoaded(() => get("runs"), [count]);
  if (error) return html`<div class="alert" role="alert">${error}</div>`;
  if (!value) return html`<${Empty}>Reading the runs …<//>`;
  if (!value.length) return html`<${Empty}>There are no runs yet. Start one: <code>python -m pipeline.run quickstart</code><//>`;
  return html`<${Card} title="Runs"><div class="scroll"><table>
    <thead><tr><th>Run</th><th>State</th><th>Graph</th><th class="num">Steps</th><th>Started</th></tr></thead>
    <tbody>${value.map((run) => html`<tr key=${run.name}>
      <td><a href=${`#/${encodeURIComponent(run.name)}/graph`}>${run.name}</a></td>
      <td><span class=${`pill ${LOOKS[run.state] || ""}`}><i></i>${WORDS[run.state] || run.state}</span></td>
      <td>${run.graph}</td>
      <td class="num">${number(run.step)}${run.steps === null ? "" : html`<span class="dim"> of ${number(run.steps)}</span>`}</td>
      <td class="dim">${run.started.replace("T", " ")}</td></tr>`)}</tbody></table></div><//>`;
}
