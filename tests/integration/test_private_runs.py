"""What a run writes can be read by its owner only. That it holds no secret: test_ray_runs.py."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.backends.model.folder import model_folder
from tests.errors.harness import command, live_text
from tests.unit.test_folder import POLICY

OTHERS = 0o077


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def reachable(folder: Path) -> list[str]:
    """Return what others can read or enter in a run directory, if they can enter the directory itself."""
    found, folders = [], [folder]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            if path.stat().st_mode & OTHERS:
                found.append(str(path.relative_to(folder)))
                folders += [path] if path.is_dir() else []
    return found


TOP = {"run.json", "graph.py", "plan.json", "events.jsonl", "metrics.jsonl", "lock", "samples", "checkpoints", "logs"}


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.journal_expected("I8")  # of the record whose checkpoints the test removes
def test_others_can_read_nothing_of_a_run(tmp_path: Path, existing: bool) -> None:
    (tmp_path / "graph.py").write_text(live_text())
    run = tmp_path / "a folder" / "run"
    if existing:
        run.mkdir(0o755, parents=True)
    argv = ("graph.py", "--executor", "local", "--run-dir", str(run))
    assert command(tmp_path, *argv)[0] == 0
    shutil.rmtree(run / "checkpoints")  # so that a resume moves the record aside
    assert command(tmp_path, *argv, "--resume")[0] == 0
    assert {path.name for path in run.iterdir()} >= TOP | {"before-1"}
    assert not reachable(run)
    assert stat.S_IMODE(run.stat().st_mode) == (0o755 if existing else 0o700), "a folder of the user's keeps its mode"


def test_a_folder_of_a_model_is_private(tmp_path: Path) -> None:
    folder = model_folder(POLICY, tmp_path)
    assert not reachable(tmp_path) and not folder.stat().st_mode & OTHERS
