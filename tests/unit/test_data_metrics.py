"""Metrics of a step about the data plane: bytes by edge, requests, and cache hits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from pipeline.cli.load import load
from pipeline.declare.handle import KVBatchMeta
from pipeline.declare.task import Task
from pipeline.engine.driver import Driver
from pipeline.engine.tally import Tally
from pipeline.executors import merged
from pipeline.executors.local import LocalExecutor
from pipeline.executors.outputs import TaskResult
from pipeline.plan.planner import plan
from pipeline.rundir import RunDir
from tests.unit import toy

SMALL = Path(__file__).parents[1] / "integration" / "small_graph.py"


def test_bytes_are_counted_by_edge_and_partition(tmp_path: Path) -> None:
    described = load(SMALL).build({"steps": 2, "batch": 3})
    run_dir = RunDir(tmp_path / "run").create()
    Driver(described, plan(described)[0], LocalExecutor(), run_dir=run_dir).execute()
    first, second = (msgspec.json.decode(line) for line in run_dir.metrics.read_bytes().splitlines())
    texts = 3 * 2 * len("0")  # one character per prompt
    assert first["data/bytes_numbers_to_shout"] == second["data/bytes_numbers_to_shout"] == texts
    assert first["data/bytes_shout_to_samples"] == 2 * texts
    assert first["stored/peak_bytes"] >= 3 * texts, "prompts and their doubles"
    assert "data/cache_hits" not in first, "memory needs no cache"


def test_counts_are_summed_over_tasks_and_hits_are_a_share() -> None:
    tally = Tally(plan(toy.graph())[0])
    tally.count(0, {"requests": 5, "hits": 3})
    tally.count(0, {"requests": 2, "misses": 1, "bytes_a_to_b": 7})
    tally.count(1, {"requests": 1})
    assert tally.close(0, 0.0) == {"data/bytes_a_to_b": 7, "data/cache_hits": 0.75, "data/requests": 7}
    assert tally.close(1, 0.0) == {"data/requests": 1}


def test_ranks_of_a_task_are_counted_together() -> None:
    task = Task(stage="train", step=0, groups=(1,))
    one = TaskResult(task=task, counts={"requests": 2}, handles=[KVBatchMeta(keys=(), partition_id="p", fields=())])
    other = TaskResult(task=task, counts={"requests": 3, "hits": 1}, sizes=[{"a": [4]}])
    whole = merged(task, [one, other])
    assert Counter(whole.counts) == {"requests": 5, "hits": 1} and whole.sizes == [{"a": [4]}]
