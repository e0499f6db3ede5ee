"""What a user's file brings along reaches the workers on Ray."""

from __future__ import annotations

from pipeline.cli.load import load
from tests.doors import page_code, write
from tests.integration.test_async import execute, lines


def test_a_loss_of_the_users_file_travels_to_the_workers(tmp_path, ray_session):
    from pipeline.executors.ray import RayExecutor, user_modules

    file = write(tmp_path, page_code("your-own-loss.md"))
    executor = RayExecutor(modules=user_modules(load(file).module))
    run_dir = execute(file, {"steps": 2}, tmp_path / "run", executor)
    assert all(line["train/clip_fraction"] == 0 < line["train/grad_norm"] for line in lines(run_dir))
