"""One run at a time in a run directory; a killed run leaves no lock; readers need none."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import GraphError
from pipeline.record.lock import held
from pipeline.rundir import RunDir
from tests.errors.harness import command, live_text

LOCAL = ("graph.py", "--executor", "local", "--run-dir", "run")
HOLDS = """
import os, subprocess, sys, time
from pathlib import Path
from pipeline.record.lock import held
from pipeline.rundir import RunDir

with held(RunDir(Path(sys.argv[1])), where="run"):
    children = [subprocess.Popen(["sleep", "60"]).pid]
    if not (forked := os.fork()):
        os.write(1, b"forked\\n")  # one write, whatever the other process writes at that moment
        time.sleep(60)
    children.append(forked)
    os.write(1, f"{children[0]} {forked}\\n".encode())
    time.sleep(60)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A finished run of a graph without a model, in a folder with that graph."""
    (tmp_path / "graph.py").write_text(live_text())
    code, _, told = command(tmp_path, *LOCAL)
    assert code == 0, told
    return RunDir(tmp_path / "run")


def full() -> str:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.journal_expected("I8")  # of the record whose checkpoint the test breaks
def test_a_second_run_in_a_folder_is_refused_and_changes_nothing(run: RunDir) -> None:
    folder = run.path.parent
    (run.checkpoints / "step_000002" / "manifest.json").unlink()  # a resume would move the record aside
    with held(run, where="run"):
        before = contents(run.path)
        for flags in ((), ("--resume",), ("--resume", "--steps", "4")):
            code, said, told = command(folder, *LOCAL, *flags)
            assert code == 2 and not said
            assert told.count("\n") == 1 and told.startswith("--run-dir run: a run is writing it: ")
            assert f"process {os.getpid()} on {socket.gethostname()};" in told
        assert contents(run.path) == before


def test_a_full_disk_is_one_error(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", full)  # when the file is written
    before = contents(run.path)
    with (
        pytest.raises(GraphError, match=r"a file in it cannot be written: No space left on device: .*/lock"),
        held(run, where="run"),
    ):
        pass
    assert contents(run.path).keys() == before.keys() | {"lock"}


def test_what_reads_a_run_needs_no_lock(run: RunDir) -> None:
    with held(run, where="run"):
        for program, *argv in (
            ("analyse", "run"),
            ("export", "run", "--csv", "tables"),
            ("simulate", "run"),
            ("run", "graph.py", "--check"),
            ("run", "--list", "."),
        ):
            code, _, told = command(run.path.parent, *argv, program=program)
            assert code == 0, told


def test_a_killed_run_leaves_no_lock_though_its_children_live(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run").create()
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(run.path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    told = {process.stdout.readline(), process.stdout.readline()} - {"forked\n"}
    children = [int(pid) for pid in told.pop().split()]
    try:
        with pytest.raises(GraphError, match=f"process {process.pid} on "), held(run, where="run"):
            pass
        process.kill()
        process.wait()
        with held(run, where="run") as warning:
            assert warning is None
        for pid in children:
            os.kill(pid, 0)  # they live
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)


def test_a_file_system_without_locks_gets_a_warning_and_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    (tmp_path / "graph.py").write_text(live_text())
    monkeypatch.setattr(fcntl, "flock", none)
    code, _, told = command(tmp_path, *LOCAL)
    assert code == 0 and told.startswith("--run-dir run: warning: its file system has no locks: "), told


def test_runs_that_start_in_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    assert len({RunDir.new(tmp_path, "quickstart").path for _ in range(5)}) == 5
