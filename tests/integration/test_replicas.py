"""Several samplers: each samples with a version as soon as it has it, while others are still receiving it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from pipeline.engine.driver import Driver
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.rundir import RunDir
from tests.integration import apart_graph
from tests.integration.test_async import events


def run(folder: Path, **flags: Any) -> RunDir:
    from pipeline.executors.ray import RayExecutor

    graph = apart_graph.graph(**flags)
    run_dir = RunDir(folder).create()
    Driver(graph, plan(graph)[0], RayExecutor(), run_dir=run_dir).execute()
    return run_dir


def test_a_sampler_begins_with_a_version_before_all_of_them_have_it(tmp_path, ray_session):
    run_dir = run(tmp_path / "run", max_staleness=1, refit="in_flight")
    published = {event.version: event.at_s for event in events(run_dir, trace.Published)}
    served = {(event.version, event.replica): event.at_s for event in events(run_dir, trace.Served)}
    assert {version for version, replica in served if replica == 0} == set(published) == {0, 1, 2, 3}
    begun: dict[tuple[int, int], float] = {}
    for task in events(run_dir, trace.Submitted):
        if task.stage == "sample":
            begun.setdefault((task.version, task.replica), task.at_s)
    first = [version for version, replica in begun if replica == 0 and begun[version, 0] < published[version]]
    assert first == [0, 1], "the first sampler waits for no other"
    assert all(begun[version, 1] >= published[version] for version, replica in begun if replica == 1)
    tokens = [event for event in events(run_dir, trace.Put) if event.stage == "sample"]
    assert sum(len(event.groups) for event in tokens) == 12


def test_a_sampler_that_dies_when_it_has_a_version_is_sent_it_again(tmp_path, ray_session):
    """While the other sampler is still waiting for it; the replacement starts with the previous version."""
    run_dir = RunDir(tmp_path / "run")

    def kill() -> None:
        while not over.is_set():
            tasks = events(run_dir, trace.Submitted) if run_dir.events.exists() else []
            if any((task.stage, task.version, task.replica) == ("sample", 1, 0) for task in tasks):
                placed = [e.pid for e in events(run_dir, trace.Placed) if (e.group, e.worker) == ("sampler", 0)]
                return os.kill(placed[-1], signal.SIGKILL)
            time.sleep(0.02)

    over = threading.Event()
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        run(run_dir.path, late_s=4.0, token_s=0.6)
    finally:
        over.set()
        killer.join()
    reasons = [event.reason for event in events(run_dir, trace.Retried)]
    assert reasons == ["worker sampler.0 died", "worker sampler.0 was replaced after it had received the weights"]
    puts = [event for event in events(run_dir, trace.Put) if event.stage == "sample"]
    assert {event.step for event in puts} == {0, 1, 2}
    assert all(low == high == event.step for event in puts for low, high in event.versions), "of its own version"
