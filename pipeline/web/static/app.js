// Routing, and the header and status of all pages.

import { Boundary, Copy, Empty, html, number, plural, render, seconds, useClosing, useEffect, useState } from "./ui.js";
import { offline, partOf } from "./api.js";
import { address, link } from "./address.js";
import { Run } from "./store.js";
import { Runs } from "./runs.js";
import { Graph } from "./graph.js";
import { Timeline } from "./timeline.js";
import { Staleness } from "./staleness.js";
import { Metrics } from "./metrics.js";
import { Samples } from "./samples.js";
import { Compare } from "./compare.js";

const PAGES = { graph: Graph, timeline: Timeline, staleness: Staleness, metrics: Metrics, samples: Samples, compare: Compare };
const TITLES = {
  graph: "Graph", timeline: "Timeline", staleness: "Staleness", metrics: "Metrics", samples: "Samples", compare: "Compare",
};
const STATES = {
  loading: "Loading", running: "Live", finished: "Finished", failed: "Failed", interrupted: "Interrupted", killed: "Killed",
};
const LOOKS = { failed: "failed", killed: "failed", interrupted: "silent", running: "running", finished: "finished" };

// A browser may block local storage.
function remembered(name) {
  try { return localStorage.getItem(name); } catch { return null; }
}

function remember(name, value) {
  try { localStorage.setItem(name, value); } catch { /* the choice is not kept */ }
}

function useTheme() {
  const asked = window.matchMedia("(prefers-color-scheme: dark)");
  const [theme, setTheme] = useState(remembered("theme") || (asked.matches ? "dark" : "light"));
  useEffect(() => { document.documentElement.dataset.theme = theme; }, [theme]);
  const turn = () => {
    const next = theme === "dark" ? "light" : "dark";
    remember("theme", next);
    setTheme(next);
  };
  return [theme, turn];
}

function Export({ run }) {
  const [open, setOpen] = useState(false);
  const kinds = [
    ["html", "One HTML file that opens offline"],
    ["perfetto", "Perfetto / Chrome trace"],
    ["spans", "Spans, CSV"],
    ["metrics", "Metrics, CSV"],
  ];
  const menu = useClosing(open, () => setOpen(false));
  return html`<div class="menu" ref=${menu}>
    <button class="button" aria-expanded=${open} onClick=${() => setOpen(!open)}>Export</button>
    ${open && html`<ul>${kinds.map(([kind, text]) => html`<li key=${kind}>
      <a href=${`api/${partOf(run, `export/${kind}`)}`} download onClick=${() => setOpen(false)}>${text}</a></li>`)}</ul>`}
  </div>`;
}

function Status({ run }) {
  const now = run.now;
  const last = run.steps.length ? run.steps[run.steps.length - 1][2] : {};
  const report = run.findings && run.findings.report;
  return html`<div class="status" aria-label="State of the run" role="region" tabindex="0">
    <span class=${`pill ${LOOKS[run.state] || ""}`} role="status"><i></i>${STATES[run.state]}</span>
    ${now && html`
      <span class="stat"><progress value=${now.step + 1} max=${now.steps} aria-label="Steps done"></progress>
        <b>${number(now.step + 1)}</b><span class="dim">of ${plural(now.steps, "step")}</span></span>
      ${report && report.step_s > 0 && html`<span class="stat"><b>${seconds(report.step_s)}</b><span class="dim">per step</span></span>`}
      <span class="stat"><b>${now.version < 0 ? "–" : now.version}</b><span class="dim">policy version served</span></span>
      ${"reward/mean" in last && html`<span class="stat"><b>${number(last["reward/mean"])}</b><span class="dim">reward</span></span>`}
      <span class="stat"><b>${seconds(run.clock)}</b><span class="dim">since the start</span></span>`}
    ${run.lost && html`<span class="pill silent"><i></i>No connection; retrying</span>`}
  </div>`;
}

const SILENT_S = 60; // seconds without an event after which a live run counts as silent

function Resume({ run }) {
  const { checkpoint } = run.now;
  const from = checkpoint ? ` from step ${checkpoint}` : checkpoint === 0 ? " from the start: no checkpoint was written yet" : "";
  return html`<p class="small dim">Resume${from}</p><${Copy} text=${run.about.resume} />`;
}

function Trouble({ run }) {
  if (run.state === "failed" || run.state === "interrupted") {
    return html`<div class="alert" role="alert"><h2>${run.state === "failed" ? "The run failed" : "The run was interrupted"}</h2>
      <p>${run.now.failed}</p>${run.now.problems.map((problem) => html`<p class="mono small" key=${problem}>${problem}</p>`)}
      <${Resume} run=${run} /></div>`;
  }
  if (run.state === "killed") {
    return html`<div class="alert" role="alert"><h2>The processes of this run are gone</h2>
      <p>The record stops after ${seconds(run.now.last)} without an end event. It is complete up to there.</p>
      <${Resume} run=${run} /></div>`;
  }
  const silent = run.clock - run.now.last;
  if (run.live && silent > SILENT_S) {
    return html`<div class="alert soft" role="status">No event for ${seconds(silent)}. A long task reports only at its end; a task that hangs ends the run at its deadline.</div>`;
  }
  return null;
}

function Diverged({ run }) {
  return run.now.diverged.length ? html`<div class="alert soft" role="status"><h2>Training diverges</h2>
    ${run.now.diverged.map((problem) => html`<p class="mono small" key=${problem}>${problem}</p>`)}</div>` : null;
}

function Tabs({ run, page }) {
  return html`<nav class="tabs" aria-label="Pages">${Object.keys(PAGES).map((name) => (offline && name === "compare" ? null
    : html`<a key=${name} href=${link(run, name)} aria-current=${name === page ? "page" : undefined}>${TITLES[name]}</a>`))}</nav>`;
}

function App() {
  const [at, setAt] = useState(address());
  const [run, setRun] = useState(null);
  const [error, setError] = useState("");
  const [, setDrawn] = useState(0);
  const [theme, turn] = useTheme();
  useEffect(() => {
    const go = () => setAt(address());
    addEventListener("hashchange", go);
    go(); // the hash may have changed before the listener was added
    return () => removeEventListener("hashchange", go);
  }, []);
  useEffect(() => {
    setError("");
    if (!at.run) { setRun(null); return undefined; }
    const opened = new Run(at.run);
    const drawn = () => setDrawn((count) => count + 1);
    opened.listeners.add(drawn);
    let again = 0;
    const open = () => opened.open().then(() => setError(""), (problem) => {
      setError(String(problem.message || problem));
      again = setTimeout(open, 2000); // a run that has just started has no record yet
    });
    open();
    setRun(opened);
    const tick = setInterval(() => opened.live && drawn(), 1000);
    return () => { clearInterval(tick); clearTimeout(again); opened.listeners.clear(); opened.close(); };
  }, [at.run]);
  useEffect(() => { document.title = at.run ? `${at.run} · ${TITLES[at.page]} · Sluice` : "Sluice"; }, [at.run, at.page]);
  const Page = PAGES[at.page];
  const refused = run && run.name === at.run ? run.refused : "";
  const ready = run && run.name === at.run && run.about && run.now && (!run.now.loading || at.page === "graph"); // the others need all rows
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>Skip to content</a>
    <header class="top">
      <div class="bar">
        <a class="brand" href="#/"><img src=${document.querySelector("link[rel=icon]").href} alt="" />Sluice</a>
        ${at.run ? html`<span class="slash" aria-hidden="true">/</span><h1>${at.run}</h1>` : html`<h1 class="sr">Runs</h1>`}
        <span class="grow"></span>
        ${at.run && !offline && html`<${Export} run=${at.run} />`}
        <button class="button quiet icon" onClick=${turn} aria-label=${`Use the ${theme === "dark" ? "light" : "dark"} theme`}>${theme === "dark" ? "☀" : "☾"}</button>
      </div>
      ${at.run && html`<${Tabs} run=${at.run} page=${at.page} />`}
    </header>
    ${ready && html`<${Status} run=${run} />`}
    <main id="main" tabindex="-1" aria-busy=${!!at.run && !error && !refused && !ready} data-complete=${!!ready && !run.now.loading}>
      ${at.problem && html`<div class="alert soft" role="alert">${at.problem}</div>`}
      ${error ? html`<div class="alert" role="alert">${error}</div>`
        : !at.run ? html`<${Runs} />`
          : html`${refused && html`<div class="alert" role="alert">${refused}</div>`}
            ${ready ? html`<${Trouble} run=${run} /><${Diverged} run=${run} /><${Boundary} at=${location.hash}><${Page} key=${run.name} run=${run} query=${at.query} /><//>`
              : !refused && html`<${Empty}>Reading the record …<//>`}`}
    </main>`;
}

render(html`<${App} />`, document.getElementById("app"));
