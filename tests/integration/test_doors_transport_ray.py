"""A user's own transport reaches the workers on Ray with nothing but the graph file."""

from pathlib import Path
from typing import Any

from pipeline.cli.load import load
from tests.integration.test_async import execute, lines
from tests.unit.test_doors_transport import REPOSITORY, files, published


def test_files_between_workers_on_ray_bring_the_weights_that_are_pulled(tmp_path: Path, ray_session: Any) -> None:
    from pipeline.executors.ray import RayExecutor
    from pipeline.executors.sent import user_modules

    flags = {"steps": 2, "warm_start_steps": 10}
    graph = files(tmp_path)[0]
    executor = RayExecutor(modules=user_modules(load(graph).module))
    run_dir = execute(graph, {**flags, "folder": str(tmp_path / "weights")}, tmp_path / "run", executor)
    pulled = execute(REPOSITORY / "graphs" / "quickstart.py", flags, tmp_path / "pulled")
    assert published(run_dir) == published(pulled) and len(published(pulled)) == 3
    assert all(line["refit/path_files"] == 1.0 for line in lines(run_dir))
