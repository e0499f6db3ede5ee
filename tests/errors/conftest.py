"""Fixture: a finished run of two steps, made once per session."""

import pytest

from tests.errors.harness import command, live_text


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """The run directory of the live graph, run in process."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "graph.py").write_text(live_text())
    code, _, stderr = command(folder, "graph.py", "--executor", "local", "--run-dir", "run")
    assert code == 0, stderr
    return folder / "run"
