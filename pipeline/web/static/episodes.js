// How the time of episodes was spent: reads the texts of the record, and counts the open episodes over time.

export const KINDS = ["generate", "queue", "environment", "process", "worker"]; // from bottom to top
export const SAYS = {
  generate: "is sampled", queue: "waits to be sampled", environment: "its environment works", process: "waits for a process of its environment",
  worker: "its worker tokenizes or is busy",
};
const UNIT_S = 1e-4;
const LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";

// The parts of one episode as [name, start, end]; see pipeline/record/spent.py.
export function partsOf(text, names, start) {
  let at = parseInt(text, 10);
  const parts = [];
  for (const [, letter, length] of text.matchAll(/([a-zA-Z])(\d+)/g)) {
    parts.push([names[LETTERS.indexOf(letter)], start + at * UNIT_S, start + (at + +length) * UNIT_S]);
    at += +length;
  }
  return parts;
}

const known = new WeakMap(); // rows that were read before

// [time, kind, by how many episodes] of a row of the record.
function changesOf(row) {
  if (known.has(row)) return known.get(row);
  const [, , , , start, names, texts] = row;
  const changes = [];
  for (const text of texts) {
    for (const [name, from, to] of partsOf(text, names, start)) {
      const kind = KINDS.indexOf(name);
      if (kind >= 0) changes.push([from, kind, 1], [to, kind, -1]);
    }
  }
  known.set(row, changes);
  return changes;
}

// Times at which a count changes, and the open episodes of each kind from then on.
export function counted(rows) {
  const changes = rows.flatMap(changesOf);
  changes.sort((a, b) => a[0] - b[0]);
  const times = [], counts = [];
  const now = KINDS.map(() => 0);
  let most = 0;
  for (const [at, kind, by] of changes) {
    now[kind] += by;
    if (times[times.length - 1] !== at) { times.push(at); counts.push(null); }
    counts[counts.length - 1] = now.slice();
  }
  for (const one of counts) most = Math.max(most, one.reduce((sum, count) => sum + count, 0));
  return { times, counts, most };
}

// The counts at a time; null before the first change.
export function countsAt(made, at) {
  let [low, high] = [0, made.times.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (made.times[middle] <= at) low = middle + 1; else high = middle;
  }
  return low ? made.counts[low - 1] : null;
}

export function inWords(counts, at) {
  const open = counts.reduce((sum, count) => sum + count, 0);
  return `${at.toFixed(3)} s: ${open} open episodes\n${KINDS.map((kind, n) => [counts[n], kind]).filter(([count]) => count).map(([count, kind]) => `${count} ${kind}`).join("\n")}`;
}
