"""The wall clock may jump: durations and deadlines come from a monotonic clock, and a run's record stays in order."""

from __future__ import annotations

import ast
import itertools
import time
from pathlib import Path

import pytest

from pipeline.record import trace
from tests.integration.test_async import FAST, QUICKSTART, events, execute, weights
from tests.journal.checker import check

ROOT = Path(__file__).resolve().parents[2]
READS_IT = {  # and what for
    "pipeline/engine/journal.py": "the time of day in the record",
    "pipeline/forwarders/step_times.py": "the time of a step without a record",
    "pipeline/forwarders/tensorboard.py": "the beginning of event files",
    "pipeline/rundir.py": "the name of a run",
}
NAMES = {"time", "time_ns", "now", "utcnow", "today"}


def reads_wall_clock(path: Path) -> bool:
    """Return whether a module calls time.time() or the like."""
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    found = {ast.unparse(call) for call in calls if isinstance(call, ast.Attribute) and call.attr in NAMES}
    return any(name.split(".")[0] in ("time", "datetime") for name in found)


def test_nothing_but_the_record_reads_the_wall_clock() -> None:
    files = [path for folder in ("pipeline", "stages", "ops", "graphs") for path in (ROOT / folder).rglob("*.py")]
    assert {str(path.relative_to(ROOT)) for path in files if reads_wall_clock(path)} == READS_IT.keys()


def test_a_run_whose_clock_jumps_by_hours_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"steps": 3, **FAST}
    still = execute(QUICKSTART, flags, tmp_path / "still")
    real, jumps = time.time, itertools.cycle((0.0, 3600.0, -3600.0, 86400.0))
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    jumped = execute(QUICKSTART, flags, tmp_path / "jumped")
    assert weights(jumped, 3) == weights(still, 3)
    times = [event.start_s for event in events(jumped, trace.Ran)]
    assert all(0.0 <= event.end_s - event.start_s < 60.0 for event in events(jumped, trace.Ran))
    assert max(times) - min(times) < 60.0
    assert not check(jumped.path)
