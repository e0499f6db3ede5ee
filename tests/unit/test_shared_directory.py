"""A worker that does not see the driver's run directory ends the run at the start: what it saves would be lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.load import load
from pipeline.engine.driver import Driver
from pipeline.errors import StageError
from pipeline.executors import worker
from pipeline.executors.local import LocalExecutor
from pipeline.plan.planner import plan
from pipeline.rundir import RunDir

SMALL = Path(__file__).parents[1] / "integration" / "small_graph.py"


@pytest.mark.parametrize("theirs", ["nothing", "an empty folder", "the mark of an earlier start", "the same"])
def test_all_workers_see_the_directory_of_the_driver(theirs: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(worker, "SHARED_S", 0.2)
    there = RunDir(tmp_path / "there")
    if theirs != "nothing":
        there.create()
    if theirs == "the mark of an earlier start":
        there.mark.write_text("0123456789abcdef")
    executor = LocalExecutor()
    start = executor.start
    elsewhere = tmp_path / "here" if theirs == "the same" else there.path
    executor.start = lambda graph, planned, settings, restore: start(  # type: ignore[method-assign]
        graph, planned, replace(settings, run_dir=elsewhere), restore
    )
    described = load(SMALL).build({"steps": 1, "batch": 2})
    run_dir = RunDir(tmp_path / "here").create()
    driver = Driver(described, plan(described)[0], executor, run_dir=run_dir)
    if theirs == "the same":
        return driver.execute()
    with pytest.raises(StageError, match=r"worker 0 of '[a-z]+' on .* does not see it; all workers"):
        driver.execute()
