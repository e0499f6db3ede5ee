// Fetches the data of a page: from the server, or, in an exported file, from the file itself.

const EMBEDDED = globalThis.embedded || null;
export const offline = EMBEDDED !== null;
export const only = offline ? EMBEDDED.run : "";

export async function get(path) {
  if (offline) {
    if (path in EMBEDDED.answers) return EMBEDDED.answers[path];
    throw new Error("this is not in the exported file; open the run with python -m pipeline.view");
  }
  const answer = await fetch(`api/${path}`);
  if (!answer.ok) throw new Error((await answer.text()) || `${answer.status}`);
  return answer.json();
}

// Calls take(name, data) for every event of a run from its first byte, and lost(true or false) when the stream breaks
// or recovers. Returns a function that ends it.
export function follow(run, take, lost) {
  if (offline) {
    for (const [name, data] of EMBEDDED.events) take(name, data);
    return () => {};
  }
  const source = new EventSource(`api/runs/${run}/events`);
  for (const name of ["rows", "now", "again"]) {
    source.addEventListener(name, (event) => { lost(false); take(name, JSON.parse(event.data)); });
  }
  source.addEventListener("error", () => lost(true));
  return () => source.close();
}
