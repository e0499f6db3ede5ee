// The address of what a page shows: #/RUN/PAGE?stage=...&step=... Reload and the back button restore it.

import { only } from "./api.js";

export const PAGE_NAMES = ["graph", "timeline", "staleness", "metrics", "samples", "compare"];

// {run, page, query}; with {problem} if the address names no run or page that can be.
export function address() {
  const [path, given] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, page] = path.split("/");
  const query = Object.fromEntries(new URLSearchParams(given || ""));
  const problem = (name || only) && page && !PAGE_NAMES.includes(page) ? `There is no page “${page}”: this is the graph.` : undefined;
  try {
    return { run: decodeURIComponent(name) || only, page: PAGE_NAMES.includes(page) ? page : "graph", query, problem };
  } catch {
    return { run: only, page: "graph", query: {}, problem: `There is no page at ${location.hash}: a % in an address must precede two digits.` };
  }
}

export function link(run, page, query = {}) {
  const given = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== undefined && value !== null)).toString();
  return `#/${encodeURIComponent(run)}/${page}${given ? `?${given}` : ""}`;
}

// The number of the step that an address names, counted from 1; null if it is not one.
export const stepOf = (text) => (/^[1-9]\d{0,14}$/.test(text ?? "") ? +text : null);

// Changes the query of this page. `keep` adds no step to the history, as for a text that is being typed.
export function go(changes, { keep = false } = {}) {
  const { run, page, query } = address();
  const next = link(run, page, { ...query, ...changes });
  if (next === location.hash) return;
  if (keep) {
    history.replaceState(null, "", next);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = next;
}
