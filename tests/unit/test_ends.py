"""A process of Sluice's ends, whatever user code leaves running; a text that is no text does not hide an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import Problem

LEFT = {
    "a thread": "threading.Thread(target=time.sleep, args=(60,), name='theirs').start()",
    "a process": "multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,), name='theirs').start()",
    "an exit handler": "import atexit; atexit.register(time.sleep, 60)",
}


@pytest.mark.parametrize("left", LEFT)
def test_what_user_code_leaves_running_is_not_waited_for(left: str) -> None:
    lines = [
        "import multiprocessing, threading, time", "from pipeline.cli import command", "command.LEFT_S = 0.3",
        LEFT[left], "command.end(3)",
    ]  # fmt: skip
    done = subprocess.Popen([sys.executable, "-c", "\n".join(lines)], stderr=subprocess.PIPE, text=True)
    assert done.wait(30) == 3
    assert done.stderr is not None
    said = done.stderr.readline()
    assert said.startswith("still running after 0.3 s, and not waited for: ")
    assert ("theirs" in said) or left == "an exit handler"


def test_an_end_without_anything_left_says_nothing() -> None:
    lines = "from pipeline.cli import command; command.end(3)"
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (3, "")


def test_a_problem_is_always_a_text() -> None:
    problem = Problem(where="a\udcff", what="b\ud800\x1b[2J", why="ü", fix="d\0")
    assert str(problem) == r"a\udcff: b\ud800\x1b[2J; ü. Fix: d\x00"


def test_a_command_in_a_folder_that_is_gone_says_so(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    gone = f"cd {tmp_path}/gone && rmdir ../gone && exec {sys.executable} -m pipeline.run graph.py --check"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(["sh", "-c", gone], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("working directory: it does not exist any more; ") and done.stderr.count("\n") == 1


def test_a_signal_while_a_process_ends_does_not_change_how_it_ended() -> None:
    lines = [
        "import atexit, os, signal, time", "from pipeline.cli import command",
        "atexit.register(lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(60)))", "command.end(3)",
    ]  # fmt: skip
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], timeout=30, check=False).returncode == 3
