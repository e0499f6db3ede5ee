"""The data behind each page, from a run directory: plain values, ready for JSON."""

from __future__ import annotations

import re
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from pipeline.analysis.comparison import compare
from pipeline.analysis.findings import Findings, find
from pipeline.analysis.perfetto import Starts
from pipeline.analysis.report import summary
from pipeline.errors import GraphError
from pipeline.precedence import typed
from pipeline.record import trace
from pipeline.record.lock import holder_lives
from pipeline.record.runs import (
    UNFINISHED,
    UNREADABLE,
    RunSummary,
    consistent,
    list_runs,
    of_a_run,
    open_plan,
    open_run,
    read_metrics,
    run_json,
)  # fmt: skip
from pipeline.rundir import RunDir
from pipeline.simulation.hints import hints
from pipeline.simulation.recording import recording_of
from pipeline.web import texts
from pipeline.web.guard import is_run_name, outward, whole
from pipeline.web.words import SECTIONS, in_order, words

Query = Mapping[str, str]
PATHS = 200  # number of steps, the last ones, whose critical path is shown
FRESH_S = 10.0  # findings of a live run are reused for this long,
IDLE = 20  # or for this multiple of the time they took to compute
RECENT_BYTES = 16 << 20  # the end of the record that findings use: about 50,000 events
HIDDEN = "(hidden)"
SECRET = ("token", "key", "secret", "password")
RUNS = 500
READ = ("run.json", "plan.json", "events.jsonl", "metrics.jsonl", "data_plane.json", "samples")  # of a run, by the view


def runs(folder: Path) -> list[dict[str, Any]]:
    """Return the available runs, newest first. The state of one without an end is "running" or "killed" if its process
    can be asked, else "unfinished"; of a folder that this user may not read, "unreadable"."""
    return [
        {
            "name": run.path.name,
            "graph": run.graph,
            "started": run.started,
            "state": _state(run),
            "step": run.step,
            "steps": run.steps,
        }
        for run in list_runs(folder)[:RUNS]
        if is_run_name(run.path.name) and not run.path.is_symlink()
        if run.state == UNREADABLE or outward(run.path, READ) is None
    ]


def _state(run: RunSummary) -> str:
    lives = holder_lives(RunDir(run.path)) if run.state == UNFINISHED else None
    return run.state if lives is None else "running" if lives else "killed"


def about(path: Path, query: Query) -> dict[str, Any]:
    """Return static facts: the plan, the run's command, the meaning of its metrics."""
    plan = open_plan(path)
    described = run_json(path)
    return {
        "name": path.name,
        "plan": plan,
        "described": _hidden(described),
        "resume": _resume(path, described),
        "sections": SECTIONS,
        "words": {name: words(name) for name in _metric_names(path)},
        "wall": _wall(path),
    }


def _resume(path: Path, described: Mapping[str, Any]) -> str:
    """Return the command that resumes a run."""
    file, executor = (str(described.get(name, other)) for name, other in (("file", "GRAPH"), ("executor", "ray")))
    return shlex.join([*typed("pipeline.run"), file, "--executor", executor, "--run-dir", _typed(path), "--resume"])


def _typed(path: Path) -> str:
    return f"./{path}" if str(path).startswith("-") else str(path)


def _wall(path: Path) -> float:
    """Return the wall-clock time of the run's first start; 0 if it is not recorded."""
    events = RunDir(path).events
    with of_a_run(events):
        first = next((event for _, event in islice(trace.read(events), 1)), None)
    return first.wall_s if isinstance(first, trace.Started) else 0.0


def _metric_names(path: Path) -> list[str]:
    file = RunDir(path).metrics
    with of_a_run(file):
        lines = [*islice(read_metrics(file), 200)]
    return in_order(name for line in lines for name in line if name not in ("step", "version"))


def _hidden(value: Any, name: str = "") -> Any:
    """Hide values whose name marks them as secret, also in a command line."""
    if isinstance(value, dict):
        return {key: _hidden(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [*_words([_hidden(item, name) for item in value])]
    return HIDDEN if _is_secret(name) and isinstance(value, str) and value else value


def _is_secret(name: str) -> bool:
    return any(part in re.split("[-_.]", name.lower()) for part in SECRET)


def _words(words: list[Any]) -> Iterator[Any]:
    """Yield the words of a command line without secrets: `--api-key=...`, and what follows `--api-key`."""
    before = ""
    for word in words:
        name, equals, value = word.partition("=") if isinstance(word, str) else ("", "", "")
        if equals and value and _is_secret(name):
            yield f"{name}={HIDDEN}"
        else:
            yield HIDDEN if before.startswith("--") and _is_secret(before) and not name.startswith("--") else word
        before = "" if equals else name


def findings(path: Path, query: Query) -> dict[str, Any]:
    """Return critical path, idle time and bottleneck, in seconds of the run."""
    return _KEPT.get(path, _findings)


def _findings(path: Path) -> dict[str, Any]:
    run = open_run(path, recent_bytes=RECENT_BYTES)
    found = find(run)
    seconds = Starts.of(path).seconds
    return {
        "state": run.state,
        "report": summary(found.report),
        "groups": found.groups,
        "workers": found.workers,
        "episodes": found.episodes,
        "slack": found.slack.stages(),
        "window": [seconds(found.window[0]), seconds(found.window[1]), found.window[2]],
        "paths": _paths(found, seconds),
    }


def _paths(found: Findings, seconds: Callable[[float], float]) -> list[dict[str, Any]]:
    return [
        {
            "step": path.step,
            "spans": [
                [span.stage, span.cause, span.group, span.worker, seconds(span.start_s), seconds(span.end_s)]
                for span in path.spans
            ],
        }
        for path in found.paths[-PATHS:]
    ]


def advice(path: Path, query: Query) -> dict[str, Any]:
    """Return changes that would make a step faster, each with the command that reproduces it."""
    return _KEPT.get(path, _advice)


def _advice(path: Path) -> dict[str, Any]:
    run = open_run(path, recent_bytes=RECENT_BYTES)
    try:
        made = hints(recording_of(run), Path(_typed(path)))
    except GraphError as error:
        return {"hints": [], "notes": [problem.what for problem in error.problems]}
    return msgspec.to_builtins(made)


def samples(path: Path, query: Query) -> dict[str, Any]:
    """Return the samples of the requested step, or of the last step that has any."""
    there = RunDir(path).sampled_steps()
    step = whole(query.get("step", ""))
    if step is None:
        step = there[-1] if there else -1
    return {"steps": there, "step": step, "rows": texts.samples(path, step) if step in there else []}


def metrics(path: Path, query: Query) -> dict[str, Any]:
    """Return the metrics of every step, counted from 1, in columns: {"steps": [...], "values": {name: [...]}}."""
    file = RunDir(path).metrics
    with of_a_run(file):
        lines = {line["step"]: line for line in read_metrics(file)}  # of a step that was repeated, the last one
    steps = sorted(lines)
    names = {name for line in lines.values() for name in line} - {"step", "version"}
    return {"steps": steps, "values": {name: [lines[step].get(name) for step in steps] for name in sorted(names)}}


def prompts(path: Path, query: Query) -> list[dict[str, Any]]:
    """Return the kept prompts, those without reward first."""
    return texts.prompts(path)


def comparison(path: Path, query: Query) -> dict[str, Any]:
    """Compare this run with another one."""
    if "other" not in query:
        return {}
    opened = [open_run(each) for each in (path, path.parent / query["other"])]
    shown = [msgspec.structs.replace(run, described=_hidden(run.described)) for run in opened]
    return msgspec.to_builtins(compare(*shown), str_keys=True)


class _Kept:
    """Caches slow results while the record is unchanged, or for a limited time. Computes one of each kind at a time."""

    def __init__(self, most: int = 8) -> None:
        self._most = most
        self._made: dict[tuple[Path, str], tuple[int, float, Any]] = {}  # (record size, valid until, result)
        self._making: dict[str, threading.Lock] = {}

    def get(self, path: Path, make: Callable[[Path], Any]) -> Any:
        """Return the result of `make` for a run."""
        key = (path, make.__name__)
        with self._making.setdefault(make.__name__, threading.Lock()):
            with of_a_run(RunDir(path).events):
                size = RunDir(path).events.stat().st_size
            if key in self._made:
                before, until_s, made = self._made[key]
                if before == size or time.monotonic() < until_s:
                    return made
            begun_s = time.monotonic()
            made = make(path)
            ended_s = time.monotonic()
            self._made[key] = (size, ended_s + max(FRESH_S, IDLE * (ended_s - begun_s)), made)
            while len(self._made) > self._most:
                self._made.pop(next(iter(self._made)), None)
            return made


_KEPT = _Kept()


def _page(make: Callable[[Path, Query], Any]) -> Callable[[Path, Query], Any]:
    def page(path: Path, query: Query) -> Any:
        with consistent(path):
            return make(path, query)

    return page


PAGES = {make.__name__: _page(make) for make in (about, findings, advice, samples, metrics, prompts, comparison)}
