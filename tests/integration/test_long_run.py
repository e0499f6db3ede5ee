"""In-process runs: a thousand steps leave nothing behind, and outside columns are split like the graph's own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from pipeline import Field, Graph, Schedule, Stage
from pipeline.cli.load import load
from pipeline.data_plane.memory import MemoryPlane
from pipeline.declare.columns import Ragged
from pipeline.declare.stage import External
from pipeline.engine.driver import Driver
from pipeline.engine.handles import HandleTable
from pipeline.engine.outside import Outside
from pipeline.engine.stored import Stored
from pipeline.executors.local import LocalExecutor
from pipeline.executors.worker import register
from pipeline.plan.planner import plan, sample_fields
from pipeline.schedule.scheduler import Scheduler

STEPS = 1000


def resident_mib() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_rows_handles_and_memory_are_flat_over_a_thousand_steps():
    graph = load(Path(__file__).parent / "small_graph.py").build({"steps": STEPS, "batch": 8})
    rows, sizes, resident = [], [], []

    def look(step: int, metrics: dict[str, float]) -> None:
        rows.append(driver.executor.plane.row_count("small"))
        sizes.append((len(driver.rows.handles), driver.scheduler.in_flight, len(driver.scheduler.steps_in_flight())))
        resident.append(resident_mib())

    driver = Driver(graph, plan(graph)[0], LocalExecutor(), on_step=look)
    driver.execute()
    assert len(rows) == STEPS
    parts = len(driver.plan.partitions)  # a group has a row in each
    assert max(rows) <= parts * 8 * (2 + 2), "the capacity, which is two batches, and two that are being cleared"
    assert driver.rows.stored.now_bytes == 0
    for size, bound in zip(map(max, zip(*sizes)), (4, 16, 2)):
        assert size <= bound, sizes[-1]
    assert resident[-1] - resident[STEPS // 5] < 8


def test_ragged_columns_from_outside_are_cut_by_the_lengths_of_the_graph():
    """The graph writes tokens; an outside process writes a number per token, as one row per group."""
    module = load(Path(__file__).parent / "small_graph.py").module
    tokens = Field("tokens", dtype="int64", dims="N T")
    marks = Field("marks", dtype="float32", dims="N T")
    seen = {}

    @dataclass(frozen=True)
    class Tokens(Stage):
        name: str = "tokens"
        reads: Sequence[Field] = (module.PROMPT,)
        writes: Sequence[Field] = (tokens,)

        def setup(self, context):
            return lambda columns, task: {
                "tokens": Ragged.of([torch.arange(i % 3 + 1) for i in range(len(columns["prompt"]))])
            }

    @dataclass(frozen=True)
    class Look(Stage):
        name: str = "look"
        reads: Sequence[Field] = (tokens, marks)
        per: str = "batch"

        def setup(self, context):
            return lambda columns, task: seen.update(columns)

    graph = Graph(
        name="small",
        source=module.Numbers(batch=2),
        stages=(Tokens(), External((marks,), timeout_s=20.0), Look()),
        schedule=Schedule(steps=1),
    )
    driver = Driver(graph, plan(graph)[0], LocalExecutor())
    thread = threading.Thread(target=driver.execute)
    thread.start()
    time.sleep(0.3)
    for group, count in ((0, 3), (1, 4)):  # two samples of 1 + 2 tokens, then two of 3 + 1
        driver.executor.plane.write_outside("small", f"{group:08d}.0", {"marks": torch.arange(float(count)) + group})
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert seen["tokens"].lengths == seen["marks"].lengths == (1, 2, 3, 1)
    assert [row.tolist() for row in seen["marks"].rows()] == [[0.0], [1.0, 2.0], [1.0, 2.0, 3.0], [4.0]]


def test_a_field_from_outside_that_nobody_reads_is_neither_adopted_nor_waited_for():
    module = load(Path(__file__).parent / "small_graph.py").module
    graph = Graph(
        name="small",
        source=module.Numbers(batch=2),
        stages=(module.Shout(), External((module.SCORE,), timeout_s=0.0)),
        schedule=Schedule(steps=1),
    )
    planned, warnings = plan(graph)
    assert [warning.what for warning in warnings] == ["field 'score' of 'external' is not read by any stage"]
    plane, scheduler = MemoryPlane(), Scheduler(planned)
    register(plane, planned.partition, graph.all_stages())
    plane.write_outside("small", "00000000.0", {"score": torch.ones(2)})
    scheduler.begin()
    assert scheduler.steps_in_flight() == [0]
    fields, stored = sample_fields(graph.all_stages()), Stored({part.name: part.fields for part in planned.partitions})
    outside = Outside(planned, fields, HandleTable(planned.group_size), stored, SimpleNamespace(plane=plane))
    outside.admitted(0, (0, 1))
    outside.due = lambda: True
    assert outside.came(scheduler) == []
