"""Runs ahead of the weights: every trained token respects the staleness bound, nothing is lost, nothing accumulates."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.load import load
from pipeline.cli.resume import cut_metrics
from pipeline.engine.driver import Driver
from pipeline.errors import StageError
from pipeline.executors.local import LocalExecutor
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.rundir import RunDir
from tests.journal.checker import check

NUMBERS = Path(__file__).parent / "async_graph.py"
QUICKSTART = Path(__file__).parents[2] / "graphs" / "quickstart.py"
FAST: dict[str, Any] = {"warm_start_steps": 20, "prompts_per_step": 8, "samples_per_prompt": 4, "threads": 1}
SLOW_TAIL: dict[str, Any] = {"batch": 8, "token_s": 0.002, "learn_s": 0.004, "tail": 40}


def execute(
    file: Path, flags: dict[str, Any], folder: Path, executor: Any = None, *, start: int = 0, on_step: Any = None
) -> RunDir:
    graph = load(file).build(flags)
    planned = plan(graph)[0]
    run_dir = RunDir(folder).create()
    driver = Driver(graph, planned, executor or LocalExecutor(), run_dir=run_dir, start=start, on_step=on_step)
    driver.execute()
    return run_dir


def events(run_dir: RunDir, kind: type) -> list[Any]:
    return [event for _, event in trace.read(run_dir.events) if isinstance(event, kind)]


def lines(run_dir: RunDir) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, run_dir.metrics.read_text().splitlines()) if line["step"] > 0]


def weights(run_dir: RunDir, steps: int) -> str:
    return hashlib.sha256((run_dir.checkpoint(steps) / "train" / "weights.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("staleness", "on_stale", "refit"),
    [
        (1, "wait", "drain"),
        (1, "drop", "in_flight"),
        (3, "wait", "in_flight"),
        (3, "drop", "drain"),
        pytest.param(1, "wait", "in_flight", marks=pytest.mark.search),
        pytest.param(1, "drop", "drain", marks=pytest.mark.search),
        pytest.param(3, "wait", "drain", marks=pytest.mark.search),
        pytest.param(3, "drop", "in_flight", marks=pytest.mark.search),
    ],
)
def test_no_trained_token_is_older_than_allowed(tmp_path, staleness, on_stale, refit):
    flags = {"steps": 25, "max_staleness": staleness, "on_stale": on_stale, "refit": refit, **SLOW_TAIL}
    run_dir = execute(NUMBERS, flags, tmp_path / "run")
    trained = events(run_dir, trace.Trained)
    ages = [one.version - oldest for one in trained for oldest in one.oldest]
    assert min(ages) >= 0 and max(ages) <= staleness
    assert max(ages) == max(line["learn/oldest"] for line in lines(run_dir)), "the stage itself has seen the same"
    assert any(age > 0 for age in ages), "the run was ahead of itself"
    assert not check(run_dir.path)
    if refit == "in_flight":
        assert any(a < b for one in trained for a, b in zip(one.oldest, one.newest)), "weights changed between tokens"
    else:
        assert all(one.oldest == one.newest for one in trained)


def test_what_is_dropped_is_counted_by_reason_and_length_and_replaced(tmp_path):
    flags = {"steps": 25, "max_staleness": 1, "on_stale": "drop", "refit": "in_flight", **SLOW_TAIL}
    run_dir = execute(NUMBERS, flags, tmp_path / "run")
    dropped = events(run_dir, trace.Dropped)
    assert {event.reason for event in dropped} <= {"stale", "cancelled"}
    lost = [group for event in dropped for group in event.groups]
    assert lost and len(lost) == len(set(lost))
    admitted = [group for event in events(run_dir, trace.Admitted) for group in event.groups]
    trained = [group for event in events(run_dir, trace.Trained) for group in event.groups]
    assert sorted(trained + lost) == sorted(admitted), "each group is trained, or dropped for a reason"
    assert len(trained) == 25 * 8
    by_step = {reason: sum(line[f"dropped/{reason}"] for line in lines(run_dir)) for reason in ("stale", "cancelled")}
    assert by_step == {
        reason: sum(len(event.groups) for event in dropped if event.reason == reason) for reason in by_step
    }
    assert all(len(event.tokens) == len(event.groups) for event in dropped)
    tokens = dict(zip(lost, (n for event in dropped for n in event.tokens)))
    assert max(tokens.values()) >= 40, "those with the long tail are the ones that are lost"


@pytest.mark.parametrize("on_stale", ["wait", pytest.param("drop", marks=pytest.mark.search)])
def test_rows_handles_and_memory_are_flat_over_a_thousand_asynchronous_steps(tmp_path, on_stale):
    rows, sizes, resident = [], [], []
    said: list[str] = []
    flags = {"steps": 1000, "max_staleness": 2, "on_stale": on_stale, "refit": "in_flight", "batch": 8}
    graph = load(NUMBERS).build(flags)

    def look(step: int, metrics: dict[str, float]) -> None:
        rows.append(driver.executor.plane.row_count("numbers"))
        sizes.append((len(driver.rows.handles), driver.scheduler.in_flight, len(driver.scheduler.running)))
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20)

    driver = Driver(graph, plan(graph)[0], LocalExecutor(on_start=said.append), on_step=look)
    driver.execute()
    assert said == [*(driver.plan.loading([group.name]) for group in driver.plan.groups), "the first step"]
    assert len(rows) == 1001
    parts = len(driver.plan.partitions)  # a group has a row in each
    assert max(rows) <= parts * 8 * (4 + 2), "the capacity, which is four batches, and two that are being cleared"
    assert driver.rows.stored.now_bytes == 0
    assert max(size[1] for size in sizes) <= 8 * 4
    early, late = sizes[100:200], sizes[-100:]
    assert max(late) <= tuple(n + 8 for n in max(early)), "handles do not pile up"
    assert resident[-1] - resident[200] < 8


def test_without_staleness_the_other_words_change_nothing(tmp_path):
    flags = {"steps": 4, "evaluate_every": 4, **FAST}
    sync = weights(execute(QUICKSTART, flags, tmp_path / "sync"), 4)
    for number, (on_stale, refit) in enumerate([("drop", "in_flight")]):
        words = {"on_stale": on_stale, "refit": refit}
        assert weights(execute(QUICKSTART, flags | words, tmp_path / str(number)), 4) == sync, words


def test_ray_and_this_process_train_the_same_where_batches_wait(tmp_path, ray_session):
    from pipeline.executors.ray import RayExecutor

    flags = {"steps": 6, "evaluate_every": 6, "max_staleness": 2, **FAST}
    here = execute(QUICKSTART, flags, tmp_path / "here")
    there = execute(QUICKSTART, flags, tmp_path / "there", RayExecutor())
    assert weights(here, 6) == weights(there, 6)
    assert [line["train/staleness_max"] for line in lines(there)] == [0, 1, 2, 2, 2, 2]
    assert any(line["train/is_changed"] > 0 or line["train/mismatch_ess"] < 1 for line in lines(there))
    assert not check(here.path) and not check(there.path)


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
def test_a_run_that_stopped_goes_on_from_its_checkpoint_with_what_was_in_flight(tmp_path, on_stale):
    flags = {"steps": 12, "max_staleness": 2, "on_stale": on_stale, "refit": "in_flight", "checkpoint_every": 4}
    flags |= SLOW_TAIL

    def stop(step: int, metrics: dict[str, float]) -> None:
        if step >= 6 and RunDir(tmp_path / "run").checkpoint(4).exists():  # it is written while training goes on
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(NUMBERS, flags, tmp_path / "run", on_step=stop)
    cut_metrics(RunDir(tmp_path / "run"), 4)
    run_dir = execute(NUMBERS, flags, tmp_path / "run", start=4)
    starts = [i for i, (_, event) in enumerate(trace.read(run_dir.events)) if isinstance(event, trace.Started)]
    assert len(starts) == 2
    assert not check(run_dir.path)


def test_a_stream_that_forgets_a_group_is_told_so(tmp_path):
    from dataclasses import replace

    graph = load(NUMBERS).build({"steps": 1})
    sample: Any = next(stage for stage in graph.stages if stage.name == "sample")

    class Forgetful(type(sample)):  # type: ignore[misc]
        def setup(self, context: Any) -> Any:
            run = super().setup(context)

            async def first(columns: Any, task: Any) -> Any:
                async for output in run(columns, task):
                    yield output
                    return

            return first

    forgetful = Forgetful(token_s=sample.token_s, tail=sample.tail)
    stages = tuple(forgetful if stage is sample else stage for stage in graph.stages)
    graph = replace(graph, stages=stages)
    with pytest.raises(StageError, match="ended without output for 3 groups"):
        Driver(graph, plan(graph)[0], LocalExecutor()).execute()
