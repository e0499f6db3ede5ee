// The run as this page knows it: rows are appended as they arrive, and listeners are called at most once per frame.

import { follow, get, partOf } from "./api.js";

const SPANS = 200000; // maximum number of spans that a page keeps; older ones are dropped
const EPISODES = 8000; // and of episodes

export class Run {
  constructor(name) {
    this.name = name;
    this.listeners = new Set();
    this.about = null;
    this.findings = null;
    this.lost = false;
    this.refused = ""; // why the server sends no more rows
    this.clear();
  }

  clear() {
    this.now = null;
    this.spans = [];
    this.spent = [];
    this.turns = [];
    this.steps = [];
    this.published = [];
    this.trained = [];
    this.dropped = [];
    this.notes = [];
    this.changes = 0;
  }

  async open() {
    this.about = await get(partOf(this.name, "about"));
    this.close = follow(this.name, (name, data) => this.take(name, data), (lost) => this.mark(lost), (text) => { this.refused = text; this.mark(false); this.changed(); });
    this.changed();
  }

  close() {}

  mark(lost) {
    if (lost !== this.lost) { this.lost = lost; this.changed(); }
  }

  take(name, data) {
    if (name === "again") this.clear();
    if (name === "now") {
      this.now = data;
      if (!data.loading && !this.found) this.find(); // not while the server sends the rows
    }
    if (name === "rows") {
      const before = this.steps.length;
      for (const kind of ["spans", "spent", "turns", "steps", "published", "trained", "dropped", "notes"]) {
        for (const row of data[kind] || []) this[kind].push(row);
      }
      let episodes = 0, kept = this.spent.length;
      while (kept && (episodes += this.spent[kept - 1][6].length) <= EPISODES) kept -= 1;
      this.spent.splice(0, kept);
      if (this.spans.length > SPANS) this.spans.splice(0, this.spans.length - SPANS);
      this.changes += 1;
      if (this.steps.length > before && this.found) this.find();
    }
    this.changed();
  }

  // Findings are slow to compute: requests them at most every ten seconds, and once more at the end.
  async find() {
    clearTimeout(this.later);
    const due = (this.found || -Infinity) + 10000 - performance.now();
    if (due > 0) { this.later = setTimeout(() => this.find(), due); return; }
    this.found = performance.now();
    try {
      this.findings = await get(partOf(this.name, "findings"));
    } catch (error) {
      this.findings = this.findings || { error: String(error.message || error) };
    }
    this.changed();
  }

  changed() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      for (const listener of this.listeners) listener();
    });
  }

  get state() {
    if (!this.now) return "loading";
    if (this.now.failed) return this.now.problems.length ? "failed" : "interrupted";
    if (this.now.ended) return "finished";
    if (this.now.gone) return "killed";
    return "running";
  }

  get live() { return this.state === "running"; }

  // Current time in seconds of the run: the end of the record, or for a live run this machine's clock.
  get clock() {
    if (!this.now) return 0;
    if (!this.live || !this.about.wall) return this.now.last;
    return Math.max(this.now.last, Date.now() / 1000 - this.about.wall);
  }
}
