// Fetches the data of a page: from the server, or, in an exported file, from the file itself.

const EMBEDDED = globalThis.embedded || null;
export const offline = EMBEDDED !== null;
export const only = offline ? EMBEDDED.run : "";

// The path of a part of a run. A run may have any name that a folder can have.
export const partOf = (run, what) => `runs/${encodeURIComponent(run)}/${what}`;

export async function get(path) {
  if (offline) {
    if (path in EMBEDDED.answers) return EMBEDDED.answers[path];
    throw new Error("this is not in the exported file; open the run with python -m pipeline.view");
  }
  const answer = await fetch(`api/${path}`);
  if (!answer.ok) throw new Error((await answer.text()) || `${answer.status}`);
  return answer.json();
}

// Calls take(name, data) for every event of a run from its first byte, lost(true or false) when the stream breaks or
// recovers, and refused(text) when the server refuses it. Returns a function that ends it.
export function follow(run, take, lost, refused) {
  if (offline) {
    for (const [name, data] of EMBEDDED.events) take(name, data);
    return () => {};
  }
  const path = `api/${partOf(run, "events")}`;
  let [source, again, ended] = [null, 0, false];
  const open = () => {
    source = new EventSource(path);
    for (const name of ["rows", "now", "again"]) {
      source.addEventListener(name, (event) => { lost(false); take(name, JSON.parse(event.data)); });
    }
    source.addEventListener("error", () => {
      lost(true);
      if (source.readyState === EventSource.CLOSED) ask(); // the browser does not say why, and does not try again
    });
  };
  const ask = async () => {
    const asked = new AbortController();
    try {
      const answer = await fetch(path, { signal: asked.signal });
      const text = answer.ok ? "" : (await answer.text()) || `${answer.status}`;
      asked.abort(); // of a stream, only its state is of interest
      if (ended) return;
      if (text) { refused(text); return; }
      take("again", {});
      open();
    } catch {
      if (!ended) again = setTimeout(ask, 2000);
    }
  };
  open();
  return () => { ended = true; clearTimeout(again); source.close(); };
}
