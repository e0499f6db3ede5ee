"""Real runs of the engine, checked: the schedule's guarantees hold for what happened."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pipeline import Schedule
from pipeline.cli.resume import cut_metrics
from pipeline.data_plane.memory import MemoryPlane
from pipeline.declare.task import Task
from pipeline.engine.driver import Driver
from pipeline.engine.loop import Loop
from pipeline.errors import SluiceError
from pipeline.executors.local import LocalExecutor
from pipeline.plan.planner import plan
from pipeline.record.checkpoint import read as read_checkpoint
from pipeline.rundir import RunDir
from pipeline.schedule.events import Clear
from tests.journal.checker import audit
from tests.journal.live import graph

SCHEDULES = {
    "sync": Schedule(steps=4),
    "wait": Schedule(steps=6, max_staleness=2),
    "wait, in flight": Schedule(steps=6, max_staleness=2, refit="in_flight"),
    "depth": Schedule(steps=6, max_staleness=2, pipeline_depth=1, refit="in_flight"),
    "drop": Schedule(steps=10, max_staleness=1, on_stale="drop", refit="in_flight"),
    "drop, drained": Schedule(steps=6, max_staleness=1, on_stale="drop"),
}


def execute(folder: Path, described, start: int = 0) -> RunDir:
    run_dir = RunDir(folder).create()
    planned = plan(described)[0]
    run_dir.plan.write_bytes(msgspec.json.encode(planned))
    Driver(described, planned, LocalExecutor(), run_dir=run_dir, start=start).execute()
    return run_dir


def dropped(run_dir: RunDir) -> set[str]:
    events = map(json.loads, run_dir.events.read_text().splitlines())
    return {event["reason"] for event in events if event["type"] == "dropped"}


@pytest.mark.parametrize(
    ("name", "sieve"),
    [
        *((name, True) for name in SCHEDULES),
        *((name, False) for name in ("sync", "drop")),
        *(pytest.param(name, False, marks=pytest.mark.search) for name in sorted(SCHEDULES.keys() - {"sync", "drop"})),
    ],
)
def test_a_run_keeps_the_invariants(name, sieve, tmp_path):
    run_dir = execute(tmp_path, graph(SCHEDULES[name], slow=3, sieve=sieve))
    report = audit(run_dir.path, stall_s=60.0)
    assert report.violations == [] and report.clean
    assert sum(report.staleness.values()) == SCHEDULES[name].steps * 4
    assert ("low score" in dropped(run_dir)) == sieve


def test_groups_that_get_too_old_are_given_up(tmp_path):
    run_dir = execute(tmp_path, graph(SCHEDULES["drop"], late=1))
    assert audit(run_dir.path).violations == []
    events = [msgspec.json.decode(line) for line in run_dir.events.read_text().splitlines()]
    reasons = {group: event["reason"] for event in events if event["type"] == "dropped" for group in event["groups"]}
    assert reasons[1] == "cancelled"
    assert set(reasons.values()) <= {"cancelled", "stale"}  # on a slow machine, other groups become stale besides


@pytest.mark.parametrize(
    ("name", "sieve"),
    [
        ("wait", True),
        ("drop", False),
        pytest.param("wait", False, marks=pytest.mark.search),
        pytest.param("drop", True, marks=pytest.mark.search),
    ],
)
def test_a_resumed_run_keeps_them_too(name, sieve, tmp_path):
    schedule = replace(SCHEDULES[name], checkpoint_every=2)
    with pytest.raises(SluiceError):
        execute(tmp_path, graph(schedule, slow=3, sieve=sieve, fails_at=3))
    assert audit(tmp_path).violations == []
    start = read_checkpoint(RunDir(tmp_path))[1].steps
    cut_metrics(RunDir(tmp_path), start)
    execute(tmp_path, graph(schedule, slow=3, sieve=sieve), start=start)
    report = audit(tmp_path)
    assert report.violations == [] and report.clean and report.counts["started"] == 2


def _no_bound(**_: int) -> bool:
    return False


_submit = Loop._submit


def _clears_at_once(self: Loop, task: Task) -> None:
    _submit(self, task)
    if rows := self.rows.handles.rows(task.groups):
        self.rows._remove(rows, Clear(task.step, task.groups, (), last=True))


def _much(**_: int) -> int:
    return 1000


@pytest.mark.journal_expected
@pytest.mark.parametrize(
    "name, what, broken, invariant",
    [
        ("drop", "pipeline.schedule.scheduler.too_old", _no_bound, "I1"),
        ("wait", "pipeline.schedule.scheduler.askable", _much, "I1"),
        ("wait", "pipeline.schedule.board.admissible", _much, "I3"),
        ("wait", "pipeline.schedule.scheduler.Scheduler._is_ahead", lambda *_: False, "I7"),
        ("sync", "pipeline.engine.loop.Loop._submit", _clears_at_once, "I7"),
        ("sync", "pipeline.engine.run_rows.RunRows._remove", lambda *_: None, "I2"),
    ],
)
def test_an_engine_that_breaks_its_rules_is_found_out(name, what, broken, invariant, tmp_path, monkeypatch):
    monkeypatch.setattr(what, broken)
    late, slow = (1, 0) if name == "drop" else (-1, 100)  # one group of the first batch
    with suppress(Exception):
        execute(tmp_path, graph(SCHEDULES[name], late=late, slow=slow))
    assert invariant in {violation.invariant for violation in audit(tmp_path).violations}


@pytest.mark.journal_expected
def test_a_sampler_that_is_not_served_is_found_out(tmp_path):
    """The refit reports a version as published, but the worker keeps the old weights."""
    execute(tmp_path, graph(SCHEDULES["sync"], serves=False))
    assert {violation.invariant for violation in audit(tmp_path).violations} == {"I1", "I4"}


@pytest.mark.parametrize("batches", [1, 2])
def test_the_bytes_stay_within_their_limit_even_if_removals_are_slow(batches, tmp_path, monkeypatch):
    clear = MemoryPlane.clear
    monkeypatch.setattr(MemoryPlane, "clear", lambda *given: (time.sleep(0.05), clear(*given)))
    described = graph(Schedule(steps=6, max_staleness=2), slow=3)
    prompts_bytes = 2 * len("10")
    group_bytes = sum(partition.most_bytes for partition in plan(described)[0].partitions) + prompts_bytes
    limit = batches * described.source.batch * group_bytes
    run_dir = execute(tmp_path, replace(described, schedule=replace(described.schedule, capacity_bytes=limit)))
    peaks = [json.loads(line)["stored/peak_bytes"] for line in run_dir.metrics.read_text().splitlines()]
    assert len(peaks) == 7 and 0 < max(peaks) <= limit
