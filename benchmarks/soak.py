"""Whether a long run stays as small as it began: memory, threads and open files of its processes, rows, record, view.

python -m benchmarks.soak [--steps 10000] [--executor ray] [--parts 10] [--run-dir DIR] [--out FILE]

The smallest Qwen3 samples and trains on Ray and TransferQueue; a checkpoint every 500th step (three stay), samples kept
of every step. /proc of all its processes is read every other second. A row is a part of the run with the largest values
seen in it; memory counts shared pages in parts; `stored bytes` is the most that the data plane held in a step. The note
compares the last part with the third: before it allocators and caches fill. Aims: nothing grows by more than 5 %, and
the view's first answer comes within 2 s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import report
from pipeline.record.runs import tail_metrics
from pipeline.rundir import RunDir

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ["steps", "memory MB", "driver MB", "processes", "threads", "files", "stored bytes", "s/step"]
GROW = ("memory MB", "driver MB", "processes", "threads", "files", "stored bytes")
AIM, AIM_VIEW_S, EVERY_S = 1.05, 2.0, 2.0
GRAPH = """
from ops.rewards import exact_match
from pipeline import Graph, Model, Schedule, WorkerGroup
from stages import Advantage, ClippedLoss, Generated, PrevLogprobs, Prompts, Refit, Reward, Rollout, Train

SMALL = {
    "model_type": "qwen3", "vocab_size": 128, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def graph(steps: int = 10000, seed: int = 0) -> Graph:
    task = Generated("reverse", digits=2, held_out=20)
    policy = Model("small", config=SMALL, alphabet=task.alphabet)
    sampler = WorkerGroup("sampler", backend="torch", threads=1)
    learner = WorkerGroup("learner", backend="torch", threads=1)
    stages = (
        Rollout(policy, on=sampler, samples_per_prompt=2, max_tokens=3), Reward(exact_match),
        PrevLogprobs(policy, on=learner), Advantage("group_relative"),
        Train(policy, on=learner, loss=ClippedLoss(), lr=1e-4), Refit(policy, source=learner, target=sampler),
    )
    schedule = Schedule(steps=steps, seed=seed, checkpoint_every=500, keep_checkpoints=3)
    return Graph(name="soak", source=Prompts(task, batch=4), stages=stages, schedule=schedule)
"""


class Seen(NamedTuple):
    """What /proc says of a run's processes at one moment."""

    step: int
    at_s: float
    memory_bytes: int
    driver_bytes: int
    processes: int
    threads: int
    files: int


def processes_of(driver: int, mark: str) -> Iterator[Path]:
    """Yield the /proc folders of the driver and of every process that has `mark` in its environment."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if int(folder.name) == driver or mark.encode() in (folder / "environ").read_bytes():
                    yield folder


def look(driver: int, mark: str, step: int) -> Seen:
    """Add up memory (shared pages in parts), threads and files."""
    memory = own = processes = threads = files = 0
    for folder in processes_of(driver, mark):
        with suppress(OSError, StopIteration, ValueError):
            size = _bytes(folder)
            threads += len(os.listdir(folder / "task"))
            files += len(os.listdir(folder / "fd"))
            memory, processes = memory + size, processes + 1
            own = size if int(folder.name) == driver else own
    return Seen(step, time.monotonic(), memory, own, processes, threads, files)


def _bytes(folder: Path) -> int:
    try:
        lines = (folder / "smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    except OSError:  # a kernel without it
        lines = (folder / "status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


class Counted:
    """The lines of metrics.jsonl so far: steps, and the most bytes that the data plane held in each."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.stored: dict[int, float] = {}

    def step(self) -> int:
        """Read what is new. Returns the newest step."""
        for offset, values in tail_metrics(self._path, self._offset):
            self._offset = offset
            self.stored[int(values["step"])] = float(values.get("stored/peak_bytes", 0.0))
        return max(self.stored, default=0)


def view_s(run: RunDir) -> float:
    """Return the seconds until the view of a run has given its page, what the run is, and its first events."""
    command = [sys.executable, "-m", "pipeline.view", str(run.path), "--no-open"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().partition("#")[0].strip()
            browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            start_s, base = time.perf_counter(), address.partition("/?")[0]
            browser.open(address, timeout=60).read()
            browser.open(f"{base}/api/runs/{run.path.name}/about", timeout=60).read()
            browser.open(f"{base}/api/runs/{run.path.name}/events", timeout=60).readline()
            return time.perf_counter() - start_s
        finally:
            process.terminate()


def watched(run: RunDir, steps: int, executor: str) -> tuple[list[Seen], Counted, int]:
    """Run to the end. Returns what was seen, the metrics, and the exit code."""
    graph, mark = run.path.with_name("soak.py"), f"SLUICE_SOAK={os.getpid()}-{time.time_ns()}"
    graph.write_text(GRAPH)
    words = ["--executor", executor, "--run-dir", str(run.path), "--steps", str(steps), "--plain"]
    name, _, value = mark.partition("=")
    seen, counted = [], Counted(run.metrics)
    with subprocess.Popen(
        [sys.executable, "-m", "pipeline.run", str(graph), *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", name: value},
        stdout=subprocess.DEVNULL,
    ) as process:
        while process.poll() is None:
            if counted.step():
                seen.append(look(process.pid, mark, counted.step()))
                print(f"step {seen[-1].step}: {seen[-1].memory_bytes / 1e9:.3f} GB", flush=True)
            time.sleep(EVERY_S)
    counted.step()
    return seen, counted, process.returncode


def rows_of(seen: list[Seen], counted: Counted, steps: int, parts: int) -> list[dict[str, Any]]:
    """Return a row per part of the run with the largest values seen."""
    rows = []
    for part in range(parts):
        first, last = part * steps // parts, (part + 1) * steps // parts
        here = [one for one in seen if first < one.step <= min(last, steps - 1)]  # after the last step processes end
        if not here:
            continue
        rows.append(
            {
                "steps": f"{first + 1} to {last}",
                "memory MB": max(one.memory_bytes for one in here) / 1e6,
                "driver MB": max(one.driver_bytes for one in here) / 1e6,
                "processes": max(one.processes for one in here),
                "threads": max(one.threads for one in here),
                "files": max(one.files for one in here),
                "stored bytes": max(counted.stored.get(step, 0) for step in range(first + 1, last + 1)),
                "s/step": (here[-1].at_s - here[0].at_s) / max(1, here[-1].step - here[0].step),
            }
        )
    return rows


def main() -> int:
    """Run and report. Returns 1 if the run fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10000, help="of the run")
    parser.add_argument("--executor", choices=("ray", "local"), default="ray")
    parser.add_argument("--parts", type=int, default=10, help="rows of the table")
    parser.add_argument("--run-dir", help="where the run is recorded; default: a temporary folder")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak") as place:
        run = RunDir(Path(options.run_dir or Path(place, "run")).resolve())
        seen, counted, code = watched(run, options.steps, options.executor)
        rows = rows_of(seen, counted, options.steps, options.parts)
        if code or not rows:
            print(f"the run ended with exit code {code}, seen {len(seen)} times", file=sys.stderr)
            return 1
        ended = json.loads(run.events.read_bytes().splitlines()[-1])
        events = run.events.stat().st_size
        opened_s = view_s(run)
    third, last = rows[min(2, len(rows) - 1)], rows[-1]
    grows = {name: last[name] / third[name] for name in GROW if third[name]}
    notes = (
        f"{options.steps} steps on {options.executor}; {ended.get('rows_left', 'unknown')} rows left "
        f"at the end; events.jsonl {events / options.steps:,.0f} bytes per step, {events / 1e6:.1f} MB; the view's "
        f"first answer after {opened_s:.2f} s (aim {AIM_VIEW_S:g} s). Last part over the third: "
        + ", ".join(f"{name} {ratio:.3f}" for name, ratio in grows.items())
        + f" (aim: at most {AIM:g})."
    )
    report("soak", rows, COLUMNS, notes, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
