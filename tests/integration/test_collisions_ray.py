"""A run on Ray in a folder whose files have the names of Sluice's, Python's and installed modules, and with secrets in
its environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.errors.harness import REPOSITORY, live_text
from tests.integration.test_private_runs import reachable
from tests.journal.plugin import assert_sound
from tests.unit.test_collisions import RAISES, sluice, written

INSTALLED = ("torch", "numpy", "tensordict", "transfer_queue", "ray", "msgspec", "cloudpickle", "random")
OURS = ("pipeline__init__", "pipeline__executors", "stages__init__", "ops")
CANARIES = {
    "SLUICE_CANARY_TOKEN": "canary-of-a-token-5501",
    "OPENAI_API_KEY": "sk-canary-of-a-key-5502",
    "HF_TOKEN": "hf_canary_of_a_hub_5503",
    "CANARY_CLIENT_SECRET": "canary-of-a-secret-5504",
    "CANARY_DB_PASSWORD": "canary-of-a-password-5505",
}
SCORE = """def score(prompt: str, answer: str) -> float:
    import beside
    import here

    return beside.B + here.H


"""
COMMAND = ("run", "project/graph.py", "--run-dir", "run", "--steps", "1", "--plain")


def files(folder: Path, *hidden: str) -> Path:
    """Write a graph whose reward imports the user's modules, and files that must not be imported; `both` is the
    graph's, not the working directory's."""
    graph = "import both, here\n\n" + live_text(SCORE)
    right = {"project__graph": graph, "project__both": "", "project__beside": "B = 0.25\n", "here": "H = 0.5\n"}
    written(folder, **right, **dict.fromkeys((*hidden, "both"), RAISES))
    return folder


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str, str]:
    """The folder of a run, its exit code, stdout and stderr."""
    folder = files(tmp_path_factory.mktemp("collisions"), *INSTALLED, *OURS)
    return folder, *sluice(folder, *COMMAND, **CANARIES)


def test_no_process_of_a_run_imports_a_users_file_in_the_place_of_an_installed_package(ran):
    """Neither a worker nor an actor of the data plane does."""
    folder, code, _, stderr = ran
    assert (code, stderr) == (0, "")
    assert (folder / "run/metrics.jsonl").read_text().count("\n") == 1
    assert_sound(folder / "run")


def test_workers_import_what_the_driver_does_and_no_secret_is_recorded(ran):
    folder, _, stdout, stderr = ran
    assert "reward of the last step  0.750" in stdout
    recorded = {str(path): path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
    assert any("/logs/" in name for name in recorded) and any("/checkpoints/" in name for name in recorded)
    for name, content in (recorded | {"stdout": stdout.encode(), "stderr": stderr.encode()}).items():
        assert not [word for pair in CANARIES.items() for word in pair if word.encode() in content], name
    assert not reachable(folder / "run")


@pytest.mark.search
def test_so_do_workers_of_a_command_that_searches_the_working_directory_first(tmp_path):
    folder = files(tmp_path, "stages__init__", "ops__init__", "random")
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.run", *COMMAND[1:]], capture_output=True, text=True, timeout=150, cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "reward of the last step  0.750" in done.stdout
