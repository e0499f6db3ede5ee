"""A field written by an outside process: complete groups are taken, everything else is left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline import KVBatchMeta
from pipeline.cli.load import load
from pipeline.data_plane.memory import MemoryPlane
from pipeline.engine.handles import HandleTable
from pipeline.engine.outside import Outside
from pipeline.executors.worker import register
from pipeline.plan.planner import plan
from pipeline.schedule.scheduler import Scheduler

SMALL = Path(__file__).parents[1] / "integration" / "small_graph.py"


@dataclass
class Held:
    """The part of an executor that `Outside` reads."""

    plane: MemoryPlane


def scores(handle: KVBatchMeta | None, plane: MemoryPlane) -> list[float]:
    assert handle is not None
    return plane.get(handle, ["score"], reader="listen")["score"].tolist()


def test_only_what_is_there_is_taken() -> None:
    described = load(SMALL).build({"steps": 1, "batch": 3, "external": True})
    planned = plan(described)[0]
    plane, handles, scheduler = MemoryPlane(), HandleTable(2), Scheduler(planned)
    register(plane, planned.partition, described.all_stages())
    scheduler.begin()
    outside = Outside(planned, handles, Held(plane))

    def asked() -> list[tuple[tuple[int, ...], int, int, tuple[int, ...]]]:
        outside._asked_s = float("-inf")  # make a check due now
        found = outside.came(scheduler)
        for notice in found:
            scheduler.handle(notice.event)
        return [
            (notice.event.groups, notice.written.samples, notice.written.size_bytes, notice.event.group_bytes)
            for notice in found
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
