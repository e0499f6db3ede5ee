"""Partitions of a plan by the lifetime of their fields, their holders, and the bytes that groups may take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pipeline import Field, Schedule
from pipeline.cli.load import load
from pipeline.data_plane.memory import MemoryPlane
from pipeline.declare.columns import Column, Ragged, group_bytes, size_bytes
from pipeline.declare.handle import groups_of, keys_of
from pipeline.declare.stage import External
from pipeline.declare.task import Task
from pipeline.engine.run_rows import RunRows
from pipeline.engine.stored import Stored
from pipeline.executors.outputs import TaskResult
from pipeline.executors.worker import register
from pipeline.plan.plan import Plan
from pipeline.plan.planner import plan
from pipeline.schedule.events import Admit, Clear, Decision, Finished, Landed, Run, Save, Saved
from pipeline.schedule.scheduler import Scheduler
from tests.unit import toy
from tests.unit.toy import RESPONSE, Toy

MARK = Field("mark", dtype="float32")
NOTE = Field("note", dtype="str")


def planned(*more: Toy | External, **schedule: object) -> Plan:
    """Return the plan of the toy graph with additional stages."""
    changes = toy.streaming(train={"corrects_off_policy": True}) if schedule else {}
    described = toy.graph(schedule=Schedule(steps=3, **schedule), **changes)  # type: ignore[arg-type]
    return plan(dataclasses.replace(described, stages=(*described.stages, *more)))[0]


def fields(made: Plan) -> dict[str, set[str]]:
    return {partition.name: set(partition.fields) for partition in made.partitions}


def test_fields_with_the_same_last_readers_share_a_partition() -> None:
    made = planned()
    assert fields(made) == {
        "toy.samples": {"prompt"},
        "toy.logprobs+samples": {"response"},
        "toy.train+samples": {"reward"},
        "toy.train": {"logprobs"},
    }
    holders = {partition.name: partition.holders for partition in made.partitions}
    assert holders["toy.logprobs+samples"] == ("rollout", "reward", "logprobs", "samples")
    every = [field for partition in made.partitions for field in partition.fields]
    assert sorted(every) == sorted(set(every))


def test_a_field_that_nobody_reads_lives_until_its_writer_has_finished() -> None:
    made = planned(Toy("remarks", reads=(RESPONSE,), writes=(Field("remark", dtype="float32", dims="N T"),)))
    (partition,) = [partition for partition in made.partitions if "remark" in partition.fields]
    assert (partition.name, partition.last_readers) == ("toy.remarks", ("remarks",))


def test_what_an_outside_process_reads_stays_until_what_it_writes_has_been_read() -> None:
    outside = External((MARK,), reads=(RESPONSE,))
    made = planned(outside, Toy("look", reads=(MARK,), writes=(NOTE,)))
    response = next(partition for partition in made.partitions if "response" in partition.fields)
    assert "look" in response.holders and "external" not in response.holders
    mark = next(partition for partition in made.partitions if "mark" in partition.fields)
    assert mark.holders == (), "it goes with the group's last rows, so that nothing written late stays"


def test_the_most_bytes_of_a_group_come_from_dims_and_limits() -> None:
    described = load(Path(__file__).parents[2] / "graphs/quickstart.py").build({})
    made = plan(described)[0]
    limit = next(stage.max_tokens for stage in described.stages if stage.name == "rollout")
    sizes = {f: most for p in made.partitions for f, most in zip(p.fields, p.group_bytes)}
    assert sizes["response_ids"] == made.group_size * limit * 8
    assert sizes["rollout_logprobs"] == made.group_size * limit * 4
    assert sizes["reward"] == made.group_size * 4
    assert sizes["prompt_ids"] is None and sizes["response"] is None, "no limit is known"


def drive(scheduler: Scheduler, sizes: dict[str, int]) -> Iterator[Decision]:
    """Finish every task in order, with these bytes per group. Yields each decision."""
    todo = scheduler.begin()
    stages = {stage.name: stage for stage in scheduler.plan.stages}
    while todo:
        decision = todo.pop(0)
        yield decision
        if isinstance(decision, Save):
            todo += scheduler.handle(Saved(decision.step))
        if isinstance(decision, Run):
            task, stage = decision.task, stages[decision.task.stage]
            written = tuple(stage.writes)
            per_sample = [f for f in written if f not in scheduler.plan.weights_fields]
            groups = task.groups if per_sample else ()
            landed = Landed(
                task.step, groups, written, (), task.number, tuple(sizes.get(field, 0) for field in written)
            )
            todo += scheduler.handle(*([landed] if written else []), Finished(task, task.groups))


def test_each_partition_of_a_group_is_cleared_once_and_all_of_them_in_the_end() -> None:
    made = planned()
    scheduler = Scheduler(made)
    cleared: dict[int, list[str]] = {}
    last = []
    for decision in drive(scheduler, {}):
        if isinstance(decision, Clear):
            last += decision.groups if decision.last else ()
            for group in decision.groups:
                cleared.setdefault(group, []).extend(decision.partitions)
    assert sorted(last) == list(range(made.steps * made.batch)) == sorted(cleared)
    assert all(sorted(names) == sorted(fields(made)) for names in cleared.values())


@given(
    texts=st.integers(0, 4096), staleness=st.integers(0, 2), batches=st.integers(1, 4), wait=st.booleans(),
)  # fmt: skip
def test_groups_are_admitted_only_where_the_most_that_they_may_take_fits(
    texts: int, staleness: int, batches: int, wait: bool
) -> None:
    made = planned(max_staleness=staleness, on_stale="wait" if wait else "drop")
    known = sum(partition.most_bytes for partition in made.partitions)
    per_group = known + texts
    made = replace(made, capacity_bytes=per_group * made.batch * batches)
    scheduler = Scheduler(made)
    live: dict[int, set[str]] = {}
    for decision in drive(scheduler, {"prompt": texts, "reward": 4}):
        if isinstance(decision, Clear):
            for group in decision.groups:
                live[group] -= set(decision.partitions)
        elif isinstance(decision, Admit):
            held = sum(bool(left) for left in live.values())
            live |= {group: set(fields(made)) for group in decision.groups}
            bound = {p.name: p.most_bytes + (texts if "prompt" in p.fields else 0) for p in made.partitions}
            total = sum(bound[name] for left in live.values() for name in left)
            assert total <= made.capacity_bytes or not held
    assert scheduler.done


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
@pytest.mark.parametrize("limit, texts", [(1, 0), (24, 0), (40, 100), (80, 100_000)])  # 32 bytes are a batch's least
def test_without_room_one_batch_is_in_flight_at_a_time(on_stale: str, limit: int, texts: int) -> None:
    """Also if the batch fills one by one, and if its texts turn out larger than the limit."""
    made = replace(planned(max_staleness=2, on_stale=on_stale), capacity_bytes=limit)
    scheduler = Scheduler(made)
    most = 0
    for _ in drive(scheduler, {"prompt": texts}):
        most = max(most, scheduler.in_flight)
    assert most == made.batch and scheduler.done


class TestStored:
    """The count of bytes in the data plane."""

    def test_a_puts_bytes_go_with_its_groups_and_none_are_left(self) -> None:
        stored = Stored({"run.x": ("a",), "run.y": ("b",)})
        stored.add((1, 2, 3), {"a": [30, 50, 20], "b": [1, 2, 7]})
        assert (stored.largest("a", (1, 3)), stored.largest("b", (1, 2, 3)), stored.largest("c", ())) == (30, 7, 0)
        stored.clear((1,), ("run.x",))
        assert stored.now_bytes == 110 - 30
        stored.clear((2, 3), ("run.x",))
        assert stored.now_bytes == 10
        assert stored.peaks() == {"stored/peak_bytes": 110, "stored/peak_bytes_x": 100, "stored/peak_bytes_y": 10}
        stored.clear((1, 2, 3), ("run.x", "run.y"))
        assert stored.now_bytes == 0 and stored.peaks()["stored/peak_bytes"] == 10
        assert stored.peaks()["stored/peak_bytes"] == 0

    @pytest.mark.parametrize("size", [1, 7, 1000])
    def test_what_was_put_twice_is_counted_twice(self, size: int) -> None:
        stored = Stored({"run.x": ("a",)})
        for _ in range(2):
            stored.add((5, 6), {"a": [size, 2]})
        assert stored.largest("a", (5, 6)) == max(2 * size, 4)
        stored.clear((5,), ("run.x",))
        stored.clear((6,), ("run.x",))
        assert stored.now_bytes == 0


def test_the_largest_group_of_a_put_is_what_counts_once_it_is_complete() -> None:
    """Texts of unknown size: the mean of a put's groups would let in more than fits."""
    described = load(Path(__file__).parents[1] / "integration" / "small_graph.py").build({"steps": 1, "batch": 2})
    made, plane = plan(described)[0], MemoryPlane()
    register(plane, made.partition, described.all_stages(), {part.name: part.fields for part in made.partitions})
    rows = RunRows(made, SimpleNamespace(plane=plane), SimpleNamespace(), None)

    def landed(keys: tuple[str, ...], texts: list[str]) -> Landed:
        handle = plane.put(keys, {"prompt": texts}, partition=made.partition, stage="numbers")
        sizes = {"prompt": group_bytes(texts, tuple(groups_of(keys).values()))}
        (event,) = rows.landed(
            TaskResult(task=Task(stage="numbers", step=0, groups=(0,)), handles=[handle], sizes=[sizes])
        )
        return event

    whole = landed((*keys_of((0, 1), 2),), ["a", "b", "long", "longer"])
    assert (whole.groups, whole.group_bytes) == ((0, 1), (10,))
    assert landed(("00000002_g000",), ["ab"]).groups == ()
    assert landed(("00000002_g001",), ["c"]).group_bytes == (3,)
    rows.close()


@pytest.mark.parametrize(
    "column, sizes",
    [
        (torch.zeros((3, 5), dtype=torch.int16), [20, 10]),
        (Ragged(torch.zeros((6, 2)), (1, 2, 3)), [24, 24]),
        (["a", "é", "abc"], [3, 3]),
        (torch.zeros(3, dtype=torch.bool), [2, 1]),
    ],
)  # fmt: skip
def test_bytes_by_group_add_up_to_those_of_the_column(column: Column, sizes: list[int]) -> None:
    assert group_bytes(column, (2, 1)) == sizes and sum(sizes) == size_bytes(column)
