"""Processes that user code starts: a copy of the driver does not go on with its run, and nothing outlives the run."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from pipeline.cli.orphans import POLL_S
from pipeline.forks import ENDED, Original, closed_in_copies
from pipeline.record import trace
from pipeline.rundir import RunDir
from tests.errors.harness import REPOSITORY, live_text
from tests.forked import Command

WAIT_S = 60.0
SCORE = """import os, subprocess, sys, time

def score(prompt: str, answer: str) -> float:
    {}
    return 1.0


"""
STARTS = {
    "a program without our environment": "subprocess.Popen(['sleep', {seconds!r}], env={{'PATH': os.environ['PATH']}})",
    "a program": "subprocess.Popen(['sleep', {seconds!r}])",
    "a program of a shell": "subprocess.Popen('sleep {seconds} & :', shell=True).wait()",
    "a copy, and a copy of it": "os.fork() or (os.fork(), os.execvp('sleep', ['sleep', {seconds!r}]))",
}


def started(folder: Path, line: str = "pass", first: str = "") -> subprocess.Popen[str]:
    """Run a graph with this line in its reward, and these at its import."""
    (folder / "graph.py").write_text(live_text(SCORE.format(line) + first))
    return launched(folder)


def launched(folder: Path) -> subprocess.Popen[str]:
    """Run a graph file."""
    return Command(
        "-m", "pipeline.run", "graph.py", "--executor", "local", "--run-dir", "run",
        cwd=folder, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def running(seconds: str) -> list[int]:
    """Return the processes `sleep seconds`."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if (entry / "cmdline").read_bytes().split(b"\0")[:2] == [b"sleep", seconds.encode()]:
                found.append(int(entry.name))
    return found


def wait_for(number: int, seconds: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while (len(running(seconds)) > 0) is not (number > 0):
        assert time.monotonic() < deadline_s, running(seconds)
        time.sleep(0.05)


def test_a_copy_that_comes_back_from_user_code_ends_and_the_run_goes_on(tmp_path):
    """It exits, raises, or returns, and then scores the rest of its step, with copies."""
    copies = ("sys.exit(3)", "raise ValueError('of a copy')", "return 1.0")
    process = started(tmp_path, "\n    ".join(f"if os.fork() == 0: {how}" for how in copies))
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    said = [line for line in err.splitlines() if "which 'reward' forked, came back from its code" in line]
    assert len(said) == 2 * len(copies) * (2**4 - 1)  # two steps of four samples
    assert said == err.splitlines()
    run = RunDir(tmp_path / "run")
    assert [event.step for _, event in trace.read(run.events) if isinstance(event, trace.StepEnded)] == [0, 1]
    assert out.count("step 2/2") == 1


def all_starts(first: int) -> tuple[str, list[str]]:
    """Return a line of code that starts all these processes, and the argument of each one's `sleep`."""
    seconds = [f"{first + os.getpid() / 1e7 + number / 1e3}" for number in range(len(STARTS))]
    return "; ".join(line.format(seconds=s) for line, s in zip(STARTS.values(), seconds, strict=True)), seconds


def test_what_user_code_has_started_ends_with_the_run_and_a_service_in_a_session_of_its_own_stays(tmp_path):
    line, seconds = all_starts(3000)
    service = f"{5000 + os.getpid() / 1e7}"
    quiet = "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
    line = f"subprocess.Popen(['sleep', '{service}'], {quiet}, start_new_session=True); {line}"
    process = started(tmp_path, line)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    for each in seconds:
        wait_for(0, each)
    time.sleep(4 * POLL_S)  # the watcher has seen the end
    left = running(service)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(left) == 8


def test_and_with_a_run_that_is_killed(tmp_path):
    line, seconds = all_starts(4000)
    process = started(tmp_path, f"{line}; time.sleep(600)")
    for each in seconds:
        wait_for(1, each)
    time.sleep(3 * POLL_S)  # the watcher knows the one without our environment only by having seen it
    process.kill()
    process.communicate(timeout=WAIT_S)
    for each in seconds:
        wait_for(0, each)
    assert not any(map(running, seconds))


def test_what_the_graph_file_starts_ends_with_the_run_and_a_copy_of_it_runs_nothing(tmp_path):
    seconds = f"{6000 + os.getpid() / 1e7}"
    process = started(tmp_path, first=f"subprocess.Popen(['sleep', {seconds!r}])\nos.fork()\n")
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    assert "which 'graph.py' forked, came back from its code: it ends" in err and out.count("2 steps of 4") == 1
    wait_for(0, seconds)


ENDED_BY_ITS_PARENT = (  # a process, and a pool
    "p = multiprocessing.get_context('fork').Process(target=spin); p.start(); time.sleep(0.1); p.terminate(); p.join()",
    "pool = multiprocessing.get_context('fork').Pool(1); pool.apply_async(spin); time.sleep(0.1); "
    "pool.terminate(); pool.join()",
)


def test_a_signal_to_a_copy_ends_it_and_is_not_one_to_the_run(tmp_path):
    first = "import multiprocessing\n\ndef spin():\n    while True:\n        pass\n\n\n"
    process = started(tmp_path, "; ".join(ENDED_BY_ITS_PARENT), first)
    _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (0, "")


def test_a_copy_of_what_saves_a_state_writes_nothing(tmp_path):
    saves = "def save(self, folder):"
    text = live_text(SCORE.format("pass")).replace(saves, f"{saves}\n        os.fork()")
    (tmp_path / "graph.py").write_text(text)
    process = launched(tmp_path)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    assert all("which 'count' forked, came back" in line for line in err.splitlines())
    kept = [event.step for _, event in trace.read(RunDir(tmp_path / "run").events) if isinstance(event, trace.Held)]
    assert kept == [0, 1]


def test_a_thread_that_prints_to_the_end_does_not_crash_it(tmp_path):
    first = """import threading

def talk():
    while True:
        print("x", flush=True)


threading.Thread(target=talk, daemon=True).start()


"""
    process = started(tmp_path, first=first)
    _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (0, "")


def test_only_the_original_leaves_the_code_of_a_stage():
    original = Original()
    with original.only("reward"):
        copy = os.fork()
    if copy == 0:
        os._exit(1)  # unreachable
    assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == ENDED


@pytest.mark.parametrize(
    ("code", "end"), [("_exit(3)", 3), ("abort()", -signal.SIGABRT), ("execvp('true', ['true'])", 0)]
)
def test_the_original_cannot_be_ended_or_replaced_by_user_code_and_a_copy_can(code, end):
    original = Original()
    with original.only("reward"), pytest.raises(RuntimeError, match="would end the process of the run"):
        eval(f"os.{code}")
    with original.only("reward"):
        copy = os.fork()
        if copy == 0:
            eval(f"os.{code}")
    assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == end


@pytest.mark.parametrize("line", [
    "import threading; one = threading.Thread(target=os._exit, args=(0,)); one.start(); one.join()",
    "import atexit; atexit.register(os._exit, 3)",
])  # fmt: skip
def test_no_thread_and_no_exit_handler_of_user_code_ends_a_run(tmp_path, line):
    process = started(tmp_path, line)
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, "would end the process of the run" in err) == (0, True), err
    assert "continue" in out


def test_a_stream_of_user_code_that_only_writes_is_enough(tmp_path):
    tee = "class Tee:\n    write, flush = sys.__stdout__.write, sys.__stdout__.flush\n\n\nsys.stdout = Tee()\n"
    process = started(tmp_path, first=tee)
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (0, "")
    assert "continue" in out


@pytest.mark.parametrize("where", ["line", "first"])
def test_output_that_user_code_closes_is_not_missed(tmp_path, where):
    process = started(tmp_path, **{where: "import sys; sys.__stdout__.close()\n"})
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    lost = "the output cannot be written (I/O operation on closed file.); the run goes on, and its record is in run\n"
    assert err == (lost if where == "line" else "")


def test_a_copy_does_not_hold_a_pipe_open():
    reader, writer = os.pipe()
    file = open(writer, "wb")  # noqa: SIM115 - closed below
    closed_in_copies(file)
    copy = os.fork()
    if copy == 0:
        time.sleep(WAIT_S)
        os._exit(0)
    file.close()
    try:
        assert os.read(reader, 1) == b""  # at once, while the copy lives
    finally:
        os.kill(copy, signal.SIGKILL)
        os.waitpid(copy, 0)
        os.close(reader)
