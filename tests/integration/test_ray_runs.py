"""Whole runs on Ray and TransferQueue: outside presence, fan-out, and failures that leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from pipeline.cli.load import load
from pipeline.declare.handle import sample_key
from pipeline.engine.driver import Driver
from pipeline.errors import StageError
from pipeline.executors.turns import Turns
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.rundir import RunDir
from tests.forked import FORKS

HERE = Path(__file__).parent


def driver_of(run_dir: Path, on_start=lambda doing: None, **flags):
    from pipeline.executors.ray import RayExecutor
    from pipeline.executors.sent import user_modules

    file = load(HERE / "small_graph.py")
    graph = file.build(flags)
    executor = RayExecutor(modules=user_modules(file.module), on_start=on_start)
    return Driver(graph, plan(graph)[0], executor, run_dir=RunDir(run_dir).create(), deadline_s=240.0)


def events_of(driver: Driver, kind: type) -> list:
    return [event for _, event in trace.read(driver.run_dir.events) if isinstance(event, kind)]


def listened(driver: Driver) -> dict[int, float]:
    """Return when the reader of the outside field began, by group."""
    return {group: ran.start_s for ran in events_of(driver, trace.Ran) if ran.stage == "listen" for group in ran.groups}


def test_a_process_outside_the_graph_writes_the_last_field_and_its_reader_starts(tmp_path, ray_session):
    """Nothing in the graph writes `score` and `grades`: a process writes them to TransferQueue, group by group. It
    reads ragged marks, and grades of other lengths than theirs are refused."""
    driver = driver_of(tmp_path, steps=1, batch=2, external=True)
    thread = threading.Thread(target=driver.execute)
    thread.start()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])}
    waiting_s = time.monotonic() + 240
    while time.monotonic() < waiting_s and not any(
        put.stage == "shout" for put in (events_of(driver, trace.Put) if driver.run_dir.events.exists() else [])
    ):
        time.sleep(0.1)
    assert not driver.run_dir.data_plane.stat().st_mode & 0o077
    read: list[int] = []
    for group in (1, 0):
        command = [sys.executable, str(HERE / "outside.py"), str(driver.run_dir.path), str(group)]
        done = subprocess.run(
            [*command, str(group), "0.5"], capture_output=True, text=True, timeout=240, env=environment
        )
        assert done.returncode == 0, done.stderr[-2000:]
        texts, marks, before_s, _, refused = done.stdout.split("|")
        assert (texts, marks) == (
            f"{group}{group},{group}{group}",
            f"[{10 * group}, {10 * group + 1}, {10 * group + 1}]",
        )
        assert "'grades' has samples of lengths 2, 1" in refused and "the group have M = 1, 2" in refused
        while time.monotonic() < waiting_s and len(started_s := listened(driver)) == len(read):
            time.sleep(0.1)
        assert started_s.keys() - set(read) == {group}, "the reader starts when the field is there, and not before"
        assert started_s[group] > float(before_s)
        read.append(group)
    thread.join(timeout=240)
    assert not thread.is_alive()
    metrics = msgspec.json.decode(driver.run_dir.metrics.read_bytes())
    assert metrics["listen/sum"] == pytest.approx((0 + 1 + 2 * 0.5) / 2)
    assert (metrics["listen/first"], metrics["listen/second"]) == (5.0, 11.0 + 1.0)
    assert events_of(driver, trace.Ended)[0].rows_left == 0


def test_a_task_is_spread_over_the_workers_of_its_group(tmp_path, ray_session):
    said: list[str] = []
    driver = driver_of(tmp_path, said.append, steps=2, batch=4, workers=2)
    driver.execute()
    told = list(dict.fromkeys(said))  # of a start
    assert told[:2] == ["Ray", "the processes of the workers"] and told[-1] == "the first step"
    assert told[2].startswith("the data plane; ") and " (python)" in told[2]
    spans = [ran for ran in events_of(driver, trace.Ran) if ran.stage == "shout"]
    assert sorted((ran.step, ran.worker, ran.groups) for ran in spans) == [
        (0, 0, (0, 1)),
        (0, 1, (2, 3)),
        (1, 0, (4, 5)),
        (1, 1, (6, 7)),
    ]
    samples = [msgspec.json.decode(line) for line in driver.run_dir.samples(1).read_bytes().splitlines()]
    assert [(row["prompt"], row["shout"]) for row in samples] == [
        (str(g), str(g) * 2) for g in (4, 4, 5, 5, 6, 6, 7, 7)
    ]
    assert events_of(driver, trace.Ended)[0].rows_left == 0


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_worker_that_raises_leaves_an_empty_partition_and_the_original_error(interrupted, tmp_path, ray_session):
    driver = driver_of(tmp_path, steps=3, batch=4, bad=5, interrupted=interrupted)
    left = []
    close = driver.executor.close

    def close_and_count():
        plane = driver.executor.plane
        plane_close, plane.close = plane.close, lambda: None
        close()
        left.append(plane.row_count("small"))
        plane_close()

    driver.executor.close = close_and_count
    with pytest.raises(StageError) as error:
        driver.execute()
    (problem,) = error.value.problems
    said = "KeyboardInterrupt" if interrupted else "ArithmeticError: group 5 is bad"
    assert f"stage 'shout' failed at step 2: {said}" in problem.what
    assert problem.where.startswith(str(HERE / "small_graph.py"))
    assert left == [0]
    assert (driver.run_dir.failure(1, "shout") / "columns.json").is_file()
    assert events_of(driver, trace.Failed)[0].problems == (str(problem),)


def test_a_worker_of_plain_functions_that_dies_is_replaced(tmp_path, ray_session):
    driver = driver_of(tmp_path, steps=12, batch=4)
    done = []
    driver.loop.steps._listeners = [lambda step, metrics: (
        done.append(metrics), step == 3 and ray_session.kill(driver.executor._groups.actors["shouters"][0])
    )]  # fmt: skip
    driver.execute()
    assert len(done) == 12
    assert {event.stage for event in events_of(driver, trace.Retried)} == {"shout"}
    assert events_of(driver, trace.Ended)[0].rows_left == 0


def test_a_task_goes_out_to_all_workers_before_any_answers():
    """One round trip for any number of shards: 32 calls are in flight when submit returns."""
    from pipeline.declare.handle import KVBatchMeta
    from pipeline.declare.ranks import RankLayout
    from pipeline.declare.task import Task
    from pipeline.executors.ray import RayExecutor

    calls = []

    class Remote:
        def __init__(self, rank):
            self.rank = rank
            self.run = self

        def remote(self, task, meta, cleared):
            calls.append((self.rank, task.groups, KVBatchMeta.decode(meta).keys))
            return object()

    executor = RayExecutor()
    executor._groups.actors["scorers"] = [Remote(rank) for rank in range(32)]
    executor._groups.layouts["scorers"] = RankLayout(data=32)
    planned = plan(load(HERE.parents[1] / "graphs/quickstart.py").build({}))[0]
    scorers = msgspec.structs.replace(planned.groups[0], name="scorers")
    executor._turns = Turns(msgspec.structs.replace(planned, groups=(scorers,)), lambda name, awake: [])
    scoring = planned.stage("prev_logprobs")
    executor._planned["prev_logprobs"] = msgspec.structs.replace(scoring, groups=("scorers",))
    groups = tuple(range(64))
    keys = tuple(sample_key(group, i) for group in groups for i in range(3))
    lengths = {"P": (1,) * len(keys), "T": (1,) * len(keys)}
    handle = KVBatchMeta(keys=keys, partition_id="p", fields=(), lengths=lengths)
    executor.submit(Task(stage="prev_logprobs", step=0, groups=groups), handle)
    assert [rank for rank, _, _ in calls] == list(range(32))
    assert all(of == groups for _, of, _ in calls)
    assert sorted(key for _, _, part in calls for key in part) == sorted(keys)


def test_a_run_joins_a_cluster_of_two_nodes_and_brings_the_graphs_code_along(tmp_path):
    """In its own process with its own Ray; the graph's folder is deleted before any worker starts."""
    done = subprocess.run(
        [sys.executable, str(HERE / "two_nodes.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=150,
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])} | FORKS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert seen["nodes"] == {"host": "127.0.0.2", "shouters": "127.0.0.3"}
    assert seen["units"] == ["127.0.0.2", "127.0.0.3"], "one storage unit per node"
    assert seen["samples"] == [text * 2 for text in "44556677"]
    assert (seen["steps"], seen["rows_left"]) == (2, 0)
