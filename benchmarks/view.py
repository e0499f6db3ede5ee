"""The cost of the web view next to a run: CPU seconds per minute with 0, 1 and 20 pages, and memory of a long replay;
and how soon a long run opens in a browser, and how its pages scroll.

python -m benchmarks.view [--seconds 60] [--events-per-s 200] [--spans 300000] [--steps 10000] [--out FILE]

The view follows a simulated record that is written line by line at a steady pace. A page makes the requests of a
browser: the stream of rows, and the findings as steps end, at least ten seconds apart. Then the view follows a record
of many spans from its first byte to its end; the server's memory is read after each tenth. At last a finished run of
many steps, with 100 samples and about 40 metrics each, is opened in Chromium, page by page: the first page is the first
that this server shows.
"""

from __future__ import annotations

import argparse
import http.client
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.report import report
from pipeline.record import trace
from pipeline.rundir import RunDir
from tests.unit.records import simulated
from tests.web.folders import written
from tests.web.serving import Served, serving

PAGES = (0, 1, 20)
SAMPLES, METRICS = 100, 36  # of each step of the long run
CONTENT = {  # of each page, that shows that it is there
    "graph": ".node",
    "timeline": "canvas",
    "staleness": ".bars",
    "metrics": ".metric canvas",
    "samples": ".response",
}
WAIT_MS = 120_000
THERE = "what => document.querySelector(what)"
FRAMES = """() => {
  window.frames_ms = [];
  let before = 0;
  const next = (at) => { if (before) window.frames_ms.push(at - before); before = at; requestAnimationFrame(next); };
  requestAnimationFrame(next);
}"""
FINDINGS_S = 10.0
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def memory_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Page(threading.Thread):
    """The requests of one open page."""

    def __init__(self, served: Served, run: str) -> None:
        super().__init__(daemon=True)
        self._served, self._run = served, run
        self.received_bytes, self.stop = 0, False

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._served.port, timeout=30)
        connection.request("GET", f"/api/runs/{self._run}/events", headers={"Cookie": self._served.cookie})
        answer = connection.getresponse()
        found_s = 0.0
        while not self.stop and (line := answer.readline()):
            self.received_bytes += len(line)
            if line.startswith(b"event: rows") and time.monotonic() - found_s > FINDINGS_S:
                found_s = time.monotonic()
                self.received_bytes += len(self._served.ask(f"/api/runs/{self._run}/findings")[2])
        connection.close()


def live(pages: int, seconds: float, events_per_s: float) -> dict[str, Any]:
    """The cost while a run writes `events_per_s` events per second and `pages` pages are open."""
    plan, events = simulated(steps=int(seconds * events_per_s / 30) + 50, max_staleness=1)
    tick_s = 0.1
    batch = max(1, round(events_per_s * tick_s))
    with tempfile.TemporaryDirectory() as folder:
        run_dir = written(Path(folder) / "run", plan, events[:200])
        with serving(Path(folder)) as served:
            readers = [Page(served, "run") for _ in range(pages)]
            for reader in readers:
                reader.start()
            time.sleep(2.0)
            begun_s, before_s = time.monotonic(), cpu_s(served.process.pid)
            writer, at = trace.TraceWriter(run_dir.events), 200
            while time.monotonic() - begun_s < seconds and at < len(events):
                for event in events[at : at + batch]:
                    writer.write(event)
                writer.flush()
                at += batch
                time.sleep(tick_s)
            took_s = time.monotonic() - begun_s
            used_s = cpu_s(served.process.pid) - before_s
            memory = memory_bytes(served.process.pid)
            for reader in readers:
                reader.stop = True
            writer.close()
    return {
        "pages": pages,
        "events_per_s": round((at - 200) / took_s),
        "cpu_s_per_minute": round(60 * used_s / took_s, 2),
        "memory_mib": round(memory / 2**20, 1),
        "mib_per_page": round(sum(r.received_bytes for r in readers) / max(1, pages) / 2**20, 2),
    }


def replay(spans: int) -> dict[str, Any]:
    """Memory of the server while a record grows to `spans` spans, with one page open."""
    plan, events = simulated(steps=300, max_staleness=1)
    tail = events[len(events) // 2 : -1]
    per_round = sum(isinstance(event, trace.Ran) for event in tail)
    with tempfile.TemporaryDirectory() as folder:
        run_dir: RunDir = written(Path(folder) / "run", plan, events[:-1])
        with serving(Path(folder)) as served:
            reader = Page(served, "run")
            reader.start()
            writer, memory = trace.TraceWriter(run_dir.events), []
            rounds = spans // per_round
            for number in range(rounds):
                for event in tail:
                    writer.write(event)
                writer.flush()
                if number % max(1, rounds // 10) == 0:
                    seen = -1
                    while seen != reader.received_bytes:  # until the page has received everything
                        seen = reader.received_bytes
                        time.sleep(1.0)
                    memory.append(memory_bytes(served.process.pid))
            reader.stop = True
            writer.close()
    half = len(memory) // 2
    return {
        "spans": rounds * per_round,
        "memory_mib": [round(size / 2**20, 1) for size in memory],
        "second_half_growth": round(memory[-1] / memory[half] - 1, 3),
    }


def long_run(path: Path, steps: int) -> RunDir:
    """Write a finished run with `SAMPLES` samples per step."""
    plan, events = simulated(steps=steps, batch=12, max_staleness=1)
    metrics = {f"train/part_{n}": n + 0.123456789 for n in range(METRICS)}
    run_dir = written(path, plan, [_with(event, metrics) for event in events])
    for step in range(steps):
        (row,) = map(msgspec.json.decode, run_dir.samples(step).read_bytes().splitlines())
        rows = [row | {"key": f"{step:08d}_g{n:03d}"} for n in range(SAMPLES)]
        run_dir.samples(step).write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in rows))
    return run_dir


def _with(event: trace.TraceEvent, metrics: dict[str, float]) -> trace.TraceEvent:
    if not isinstance(event, trace.StepEnded):
        return event
    return msgspec.structs.replace(event, metrics=event.metrics | metrics)


def idle(pid: int) -> None:
    """Wait until a process has nothing to do, such as findings of the page before."""
    before_s = -1.0
    while before_s != (before_s := cpu_s(pid)):
        time.sleep(0.5)


def opened(steps: int) -> list[dict[str, Any]]:
    """Open each page of a long run: seconds until it shows its content, and until all rows are there; and milliseconds
    between two frames while it is scrolled."""
    from playwright.sync_api import sync_playwright

    found = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        long_run(Path(folder) / "long", steps)
        with serving(Path(folder)) as served:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            tab = browser.new_page(viewport={"width": 1280, "height": 800})
            tab.goto(served.address.partition("#")[0])
            for page, content in CONTENT.items():
                tab.goto("about:blank")
                idle(served.process.pid)
                begun_s, before_s = time.monotonic(), cpu_s(served.process.pid)
                tab.goto(f"{served.address.partition('?')[0]}#/long/{page}")
                tab.wait_for_function(THERE, arg=f"main[aria-busy=false] {content}", polling="raf", timeout=WAIT_MS)
                shown_s = time.monotonic() - begun_s
                tab.wait_for_function(THERE, arg="main[data-complete=true]", polling="raf", timeout=WAIT_MS)
                row = {"page": page, "shown_s": round(shown_s, 2), "complete_s": round(time.monotonic() - begun_s, 2)}
                row["server_cpu_s"] = round(cpu_s(served.process.pid) - before_s, 2)
                tab.wait_for_timeout(1000)
                tab.evaluate(FRAMES)
                for _ in range(40):
                    tab.mouse.wheel(0, 120)
                    tab.wait_for_timeout(40)
                frames = sorted(tab.evaluate("window.frames_ms"))
                row |= {"frame_ms": round(frames[len(frames) // 2], 1), "slow_frame_ms": round(frames[-2], 1)}
                found.append(row)
            browser.close()
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--events-per-s", type=float, default=200.0)
    parser.add_argument("--spans", type=int, default=300_000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [live(pages, options.seconds, options.events_per_s) for pages in PAGES]
    found = replay(options.spans)
    pages = opened(options.steps)
    notes = (
        f"A simulated run that writes {options.events_per_s:g} events per second for {options.seconds:g} s; "
        f"mib_per_page is what a page received. Replay with one page: {found['spans']} spans, server memory in "
        f"MiB after each tenth {found['memory_mib']}, growth over the second half "
        f"{100 * found['second_half_growth']:.1f} %. A run of {options.steps} steps with {SAMPLES} samples each, "
        f"page by page in Chromium: {pages}."
    )
    report("view", rows, list(rows[0]), notes, options.out)


if __name__ == "__main__":
    main()
