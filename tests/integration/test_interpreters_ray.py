"""A worker group with its own interpreter, in a whole run on Ray; and what a start refuses."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec
import pytest

import pipeline
from pipeline.cli.load import load
from pipeline.engine.driver import Driver
from pipeline.errors import GraphError
from pipeline.plan.plan import Plan
from pipeline.plan.planner import plan
from pipeline.rundir import RunDir
from tests.other_python import other_python

HERE = Path(__file__).parent


def driver_of(run_dir: Path, python: str) -> Driver:
    from pipeline.executors.ray import RayExecutor
    from pipeline.executors.sent import user_modules

    file = load(HERE / "interpreter_graph.py")
    graph = file.build({"python": python})
    executor = RayExecutor(modules=user_modules(file.module))
    return Driver(graph, plan(graph)[0], executor, run_dir=RunDir(run_dir).create(), deadline_s=240.0)


def test_a_stage_runs_with_the_interpreter_of_its_group(tmp_path, ray_session, monkeypatch):
    """It has a module that the driver lacks, and Sluice is not installed there; a child process finds Sluice too."""
    python = other_python(tmp_path / "venv", {"only_there": "VALUE = 7\n"})
    monkeypatch.chdir(tmp_path)
    driver = driver_of(tmp_path / "run", "venv/bin/python")
    driver.execute()
    assert importlib.util.find_spec("only_there") is None
    said = f"7 {python} {pipeline.__file__} {python} {pipeline.__file__}"
    for step in range(2):
        lines = driver.run_dir.samples(step).read_bytes().splitlines()
        assert [msgspec.json.decode(line)["run_by"] for line in lines] == [f"{2 * step + i} {said}" for i in range(2)]
    recorded = msgspec.json.decode(driver.run_dir.plan.read_bytes(), type=Plan)
    assert {group.name: group.python for group in recorded.groups} == {"apart": str(python), "host": None}


def test_no_worker_starts_if_an_interpreter_has_no_ray(tmp_path, ray_session):
    python = other_python(tmp_path / "venv", {}, sees_ours=False)
    driver = driver_of(tmp_path / "run", str(python))
    with pytest.raises(GraphError, match=r"which has no ray, no TransferQueue, .*, and the driver has ray 2\."):
        driver.execute()
    assert not driver.executor._groups.actors
