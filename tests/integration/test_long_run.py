"""A thousand steps leave nothing behind, in the data plane, in the driver, or in memory."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.engine import Engine
from pipeline.executors.local import LocalExecutor
from pipeline.load import load
from pipeline.plan import plan

STEPS = 1000


def resident_mib() -> float:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_rows_handles_and_memory_are_flat_over_a_thousand_steps():
    graph = load(Path(__file__).parent / "small_graph.py").build({"steps": STEPS, "batch": 8})
    rows, sizes, resident = [], [], []

    def look(step: int, metrics: dict[str, float]) -> None:
        rows.append(engine.executor.plane.row_count("small"))
        sizes.append((len(engine.handles._handles), len(engine.handles._counts), len(engine.scheduler._steps)))
        resident.append(resident_mib())

    engine = Engine(graph, plan(graph)[0], LocalExecutor(), on_step=look)
    engine.execute()
    assert len(rows) == STEPS
    assert max(rows) <= 8 * (2 + 2), "the capacity, which is two batches, and two that are being cleared"
    assert max(sizes) <= (2, 0, 2)
    assert resident[-1] - resident[STEPS // 5] < 8
