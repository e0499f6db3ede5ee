"""What a run writes can be read by its owner only, and holds no secret of its environment."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.backends.model.folder import model_folder
from tests.errors.harness import command, live_text
from tests.integration.test_async import NUMBERS
from tests.unit.test_folder import POLICY

ROOT = Path(__file__).parents[2]
OTHERS = 0o077
CANARIES = {
    "SLUICE_CANARY_TOKEN": "canary-of-a-token-5501",
    "OPENAI_API_KEY": "sk-canary-of-a-key-5502",
    "HF_TOKEN": "hf_canary_of_a_hub_5503",
    "CANARY_CLIENT_SECRET": "canary-of-a-secret-5504",
    "CANARY_DB_PASSWORD": "canary-of-a-password-5505",
}


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


def test_no_secret_of_the_environment_is_in_a_run_on_ray(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipeline.run", str(NUMBERS), "--steps", "2", "--batch", "4", "--tail", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | CANARIES
    done = subprocess.run(
        [*command, "--run-dir", "run"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    files = {str(path): path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    files |= {"stdout": done.stdout.encode(), "stderr": done.stderr.encode()}
    assert any("/logs/" in name for name in files) and any("/checkpoints/" in name for name in files)
    for name, content in files.items():
        assert not [word for pair in CANARIES.items() for word in pair if word.encode() in content], name
    assert not reachable(tmp_path / "run")
