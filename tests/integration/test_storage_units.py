"""TransferQueue with two and three storage units on the cluster of the session, and the CPUs that it reserves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.load import load
from pipeline.engine.driver import Driver
from pipeline.errors import GraphError
from pipeline.executors.local import LocalExecutor
from pipeline.executors.placement import PlacementGroups
from pipeline.plan.planner import plan
from pipeline.rundir import RunDir

HERE = Path(__file__).parent


def puts_and_rows(ray: Any, units: int) -> list[tuple[int, int]]:
    """Return how many puts each storage unit received, and how many rows it holds."""
    actors = [ray.get_actor(f"TransferQueueStorageUnit#{i}") for i in range(units)]
    counted = [
        actor.__ray_call__.remote(
            lambda self: (self._arrivals_by_op.get("PUT_DATA", 0), self.storage_data.active_key_count)
        )
        for actor in actors
    ]
    return ray.get(counted, timeout=60)


def run(ray: Any, folder: Path, units: int) -> tuple[list[bytes], list[tuple[int, int]]]:
    """Run the small graph; return its samples, and what its units had received and held when its rows were cleared."""
    from pipeline.executors.ray import RayExecutor
    from pipeline.executors.sent import user_modules

    file = load(HERE / "small_graph.py")
    graph = file.build({"steps": 2, "batch": 6})
    executor = RayExecutor(modules=user_modules(file.module), storage_units=units)
    driver = Driver(graph, plan(graph)[0], executor, run_dir=RunDir(folder).create(), deadline_s=240.0)
    counts: list[tuple[int, int]] = []
    close = executor.close

    def count_and_close() -> None:
        executor.plane.drain()
        counts.extend(puts_and_rows(ray, len(executor.plane.settings.storage)))
        close()

    executor.close = count_and_close
    driver.execute()
    return [driver.run_dir.samples(step).read_bytes() for step in range(2)], counts


def in_process(folder: Path) -> list[bytes]:
    """Return the samples of the same run in this process."""
    graph = load(HERE / "small_graph.py").build({"steps": 2, "batch": 6})
    driver = Driver(graph, plan(graph)[0], LocalExecutor(), run_dir=RunDir(folder).create(), deadline_s=240.0)
    driver.execute()
    return [driver.run_dir.samples(step).read_bytes() for step in range(2)]


@pytest.mark.search  # the other tests have two
def test_a_run_is_the_same_with_two_and_three_storage_units(tmp_path: Path, ray_session: Any, session_store: Any):
    """Each unit gets rows, and holds none at the end. The session's TransferQueue has two; the run starts its own one
    with three."""
    expected = in_process(tmp_path / "local")
    said, counts = run(ray_session, tmp_path / "2", units=1)  # of the session's, whatever it asks for
    assert said == expected and len(counts) == 2
    assert all(puts and not rows for puts, rows in counts), counts
    session_store.close()
    try:
        said, counts = run(ray_session, tmp_path / "3", units=3)
    finally:
        session_store.open()
    assert said == expected and len(counts) == 3
    assert all(puts and not rows for puts, rows in counts), counts


def test_cpus_are_reserved_until_they_are_released(ray_session: Any, monkeypatch: pytest.MonkeyPatch):
    """Eight CPUs of the cluster are free: while five are reserved, four more are not to be had."""
    first, second = PlacementGroups(), PlacementGroups()
    try:
        first.reserve([{"CPU": 1.0}] * 5)
        with monkeypatch.context() as at_once:
            at_once.setattr("pipeline.executors.placement.START_DEADLINE_S", 0.0)
            with pytest.raises(GraphError, match=r"TransferQueue: its 4 CPUs could not be reserved .* are free\."):
                second.reserve([{"CPU": 1.0}] * 4)
        second.close()
        first.release()
        second.reserve([{"CPU": 1.0}] * 4)
    finally:
        first.close()
        second.close()
