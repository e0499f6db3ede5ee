"""A field written by an outside process: complete groups are taken, everything else is left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

from pipeline import KVBatchMeta
from pipeline.cli.load import load
from pipeline.data_plane.memory import MemoryPlane
from pipeline.data_plane.outside import READER
from pipeline.declare.columns import Ragged
from pipeline.declare.handle import group_of, keys_of
from pipeline.engine.handles import HandleTable
from pipeline.engine.outside import Outside
from pipeline.engine.stored import Stored
from pipeline.executors.worker import register
from pipeline.plan.planner import plan, sample_fields
from pipeline.schedule.scheduler import Scheduler

SMALL = Path(__file__).parents[1] / "integration" / "small_graph.py"


@dataclass
class Held:
    """The part of an executor that `Outside` reads."""

    plane: MemoryPlane


def begun() -> tuple[MemoryPlane, HandleTable, Scheduler, Outside]:
    """A run of three groups of two samples that has begun, with a process outside its graph."""
    described = load(SMALL).build({"steps": 1, "batch": 3, "external": True})
    planned = plan(described)[0]
    plane, handles, scheduler = MemoryPlane(), HandleTable(2), Scheduler(planned)
    register(plane, planned.partition, described.all_stages())
    scheduler.begin()
    stored = Stored({part.name: part.fields for part in planned.partitions})
    outside = Outside(planned, sample_fields(described.all_stages()), handles, stored, Held(plane))
    return plane, handles, scheduler, outside


def scores(handle: KVBatchMeta | None, plane: MemoryPlane) -> list[float]:
    assert handle is not None
    return plane.get(handle, ["score"], reader="listen")["score"].tolist()


def test_only_what_is_there_is_taken() -> None:
    plane, handles, scheduler, outside = begun()

    def asked() -> list[tuple[tuple[int, ...], int, int, tuple[int, ...]]]:
        outside._asked_s = float("-inf")  # make a check due now
        found = outside.came(scheduler)
        for notice in found:
            scheduler.handle(notice.event)
        return [
            (notice.event.groups, put.samples, put.size_bytes, notice.event.group_bytes)
            for notice in found
            for put in notice.written
        ]

    assert asked() == [] and not len(handles)
    plane.write_outside("small", "00000001.0", {"score": torch.tensor([3.0, 4.0])})
    plane.write_outside("small", "00000002.0", {"score": torch.tensor([5.0])})  # one of its two samples
    assert asked() == [((1,), 2, 2 * 4, (8,))] and asked() == []
    assert scores(handles.handle((1,), ["score"]), plane) == [3.0, 4.0]
    assert scheduler.absent(0, "score") == [0, 2]
    plane.write_outside("small", "00000002.0", {"score": torch.tensor([5.0, 6.0])})
    assert asked() == [((2,), 2, 2 * 4, (8,))]
    assert scores(handles.handle((1, 2), ["score"]), plane) == [3.0, 4.0, 5.0, 6.0]


def test_the_process_gets_handles_of_what_its_stage_reads_until_the_group_is_cleared() -> None:
    """Also if two workers put a group's samples, and a second attempt."""
    plane, handles, scheduler, outside = begun()

    def shared() -> dict[int, KVBatchMeta]:
        outside._asked_s = float("-inf")
        outside.came(scheduler)
        partition, keys = "small.external.handles", keys_of((0, 1, 2), 2)
        there = [key for key, is_there in zip(keys, plane.presence(partition, keys, ["handle"])["handle"]) if is_there]
        found = plane.get(plane.adopt(partition, there, ["handle"], {}), ["handle"], reader=READER)["handle"]
        assert found[1::2] == [""] * len(found[1::2])
        made = [msgspec.json.decode(text, type=KVBatchMeta) for text in found[::2]]
        return {group_of(handle.keys[0]): handle for handle in made}

    def put(key: str, text: str, marks: list[int], attempt: int = 0) -> None:
        columns = {"shout": [text], "marks": Ragged.of([torch.tensor(marks, dtype=torch.int64)])}
        for name, column in columns.items():
            stage = {"shout": "shout", "marks": "mark"}[name]
            handles.add(plane.put([key], {name: column}, partition="small", stage=stage, attempt=attempt))

    put("00000001_g000", "a", [1])
    assert shared() == {}
    put("00000001_g001", "b", [2, 3])
    for attempt in (0, 1):
        put("00000002_g000", "c", [], attempt)
        put("00000002_g001", "d", [4 + attempt], attempt)
    found = shared()
    assert found.keys() == {1, 2} and found[1].lengths["M"] == (1, 2)
    read = plane.get(found[1], ["shout", "marks"], reader="listen")
    assert (read["shout"], read["marks"].values.tolist()) == (["a", "b"], [1, 2, 3])
    assert plane.get(found[2], ["marks"], reader="listen")["marks"].values.tolist() == [5]
    handles.forget((1,))
    assert shared().keys() == {2}


def test_what_is_written_to_a_group_just_as_it_is_dropped_is_cleared() -> None:
    plane, handles, scheduler, outside = begun()

    def look() -> None:
        outside._asked_s = float("-inf")
        outside.came(scheduler)

    for group in (1, 2):
        columns = {"shout": ["a", "b"], "marks": Ragged.of([torch.tensor([1]), torch.tensor([2])])}
        for name, column in columns.items():
            stage = {"shout": "shout", "marks": "mark"}[name]
            handles.add(plane.put(keys_of((group,), 2), {name: column}, partition="small", stage=stage))
    look()
    handles.forget((1,))
    look()  # the handle is withdrawn; the process has read it before
    for key in ("00000001.0", "00000002.0"):
        plane.write_outside("small", key, {"score": torch.tensor([3.0, 4.0])})
    look()
    there = plane.presence("small", keys_of((1, 2), 2), ["score"])["score"]
    assert there == [False, False, True, True]


def test_a_process_that_reads_nothing_gets_handles_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes only to groups that have one, so nothing is left of what it writes too late."""
    plane, handles, scheduler, outside = begun()
    stage = msgspec.structs.replace(outside.stages[0], reads=(), writes=("score",))
    monkeypatch.setattr(outside, "stages", [stage])
    handles.add(plane.put(keys_of((1,), 2), {"prompt": ["1", "1"]}, partition="small", stage="numbers"))
    for there in (True, False):
        outside._asked_s = float("-inf")
        outside.came(scheduler)
        found = plane.presence("small.external.handles", keys_of((1,), 2), ["handle"])["handle"]
        assert found == [there, there]
        handles.forget((1,))
