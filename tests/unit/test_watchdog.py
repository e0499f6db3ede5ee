"""A driver that is in a call which does not return is interrupted at the deadline, or ends with its process."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from pipeline.cli import load
from pipeline.engine import loop, watchdog
from pipeline.engine.driver import Driver
from pipeline.engine.watchdog import Watchdog
from pipeline.errors import Problem, StageError
from pipeline.executors.local import LocalExecutor
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.run import main
from pipeline.rundir import RunDir
from tests.integration.slow_graph import graph


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LATE_S", 0.0)
    monkeypatch.setattr(watchdog, "GRACE_S", 0.3)


def test_a_stage_that_hangs_in_the_drivers_process_ends_the_run_with_its_line(tmp_path: Path) -> None:
    slow, start_s = graph(busy_s=60.0, hung=__file__), time.monotonic()
    run = Driver(slow, plan(slow)[0], LocalExecutor(), run_dir=RunDir(tmp_path).create(), deadline_s=0.5)
    with pytest.raises(StageError) as raised:
        run.execute()
    (problem,) = raised.value.problems
    assert time.monotonic() - start_s < 20.0
    assert problem.where.startswith(str(Path(__file__).parents[1] / "integration" / "slow_graph.py:"))
    assert problem.what.startswith("no task finished in 0.5 s; running: publish at step 0, numbers at step 1 (")
    (failed,) = [event for _, event in trace.read(RunDir(tmp_path).events) if isinstance(event, trace.Failed)]
    assert problem.what in failed.problems[0]


def late(line: str) -> StageError:
    return StageError(Problem(where=line or "run", what="late", why="every wait has a deadline", fix="wait"))


def test_what_cannot_be_interrupted_ends_with_the_process_and_its_last_words(capsys: pytest.CaptureFixture) -> None:
    told: list[object] = []
    dog = Watchdog(0.1, lambda: told.append("resume"), told.append)
    signal.pthread_sigmask(signal.SIG_BLOCK, {watchdog.SIGNAL})  # as code does that never returns to Python
    try:
        with suppress(StageError), dog.within(late):
            time.sleep(1.0)
        assert told == ["resume", StageError.exit_code]
        said = capsys.readouterr().err
        assert said.startswith(f"{__file__}:") and "the call was interrupted and does not return" in said
    finally:
        dog.close()
        if signal.sigpending():
            signal.sigwait({watchdog.SIGNAL})
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {watchdog.SIGNAL})


LOCKED = """
import itertools
from pipeline.engine import watchdog
from tests.unit.test_watchdog import late
watchdog.LATE_S, watchdog.GRACE_S, watchdog.LOCKED_S = 0.0, 0.3, 0.3
with watchdog.Watchdog(0.1, print).within(late):
    all(itertools.repeat(True))  # for ever, in C, and it keeps Python's lock
"""


def test_a_call_that_lets_no_thread_run_ends_with_the_process_and_its_line() -> None:
    done = subprocess.run([sys.executable, "-c", LOCKED], stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    assert done.returncode == 1 and "Timeout" in done.stderr, done.stderr
    assert 'File "<string>", line 7 in <module>' in done.stderr


def test_progress_begins_the_time_anew_and_the_end_stops_it() -> None:
    before = signal.getsignal(watchdog.SIGNAL)
    dog = Watchdog(0.3, lambda: None)
    with dog.within(late):
        for _ in range(8):
            time.sleep(0.1)
            dog.progressed()
    time.sleep(0.5)
    dog.close()
    dog.close()
    assert signal.getsignal(watchdog.SIGNAL) == before


def test_a_task_that_takes_the_signal_does_not_end_the_run() -> None:
    """Code that cleans up after its own timeouts sets the default, which ends the process."""
    dog = Watchdog(0.4, lambda: None)
    with dog.within(late):
        signal.signal(watchdog.SIGNAL, signal.SIG_DFL)
        dog.progressed()
        time.sleep(0.2)
        dog.progressed()
        time.sleep(0.3)
    with pytest.raises(StageError), dog.within(late):
        signal.signal(watchdog.SIGNAL, signal.SIG_IGN)
        dog.progressed()
        time.sleep(5.0)
    dog.close()


def test_a_stage_does_not_catch_it() -> None:
    dog = Watchdog(0.1, lambda: None)
    with pytest.raises(StageError), dog.within(late):
        try:
            time.sleep(5.0)
        except Exception:  # noqa: BLE001 - as a stage may
            time.sleep(5.0)
    dog.close()


def test_another_thread_is_left_alone() -> None:
    def watched() -> None:
        with dog.within(late):
            time.sleep(0.3)
        dog.close()

    dog = Watchdog(0.1, lambda: None)
    thread = threading.Thread(target=watched)
    thread.start()
    thread.join(5.0)
    assert not thread.is_alive()


def test_a_regular_expression_that_lets_no_other_thread_run_is_interrupted() -> None:
    dog, start_s = Watchdog(0.2, lambda: None), time.monotonic()
    with pytest.raises(StageError), dog.within(late):
        re.match("(a+)+$", 60 * "a" + "b")
    dog.close()
    assert time.monotonic() - start_s < 20.0


@pytest.mark.parametrize("phase", ["start", "settle"])
def test_a_start_and_an_end_that_hang_are_bounded_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    monkeypatch.setattr(loop, "START_S", 0.3)
    slow = graph(busy_s=0.0, hung=__file__)
    run = Driver(slow, plan(slow)[0], LocalExecutor(), run_dir=RunDir(tmp_path).create(), deadline_s=0.2)
    whom, name = (run.executor, "start") if phase == "start" else (run.loop.checkpoints, "settle")
    monkeypatch.setattr(whom, name, lambda *given, **named: named.get("wait", phase == "start") and time.sleep(60.0))
    text = "its workers start" if phase == "start" else "its last checkpoint is written"
    with pytest.raises(StageError, match=f"{text}: not done within 0.3 s"):
        run.execute()


def test_a_failed_run_does_not_wait_for_ever_for_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "START_S", 0.5)
    quick, start_s = graph(busy_s=0.0, hung=__file__), time.monotonic()
    run = Driver(quick, plan(quick)[0], LocalExecutor(), run_dir=RunDir(tmp_path).create(), deadline_s=0.3)
    monkeypatch.setattr(run.executor, "submit", lambda *given: time.sleep(60.0))
    monkeypatch.setattr(run.loop.checkpoints, "end", lambda *, wait: wait and time.sleep(60.0))
    with pytest.raises(StageError, match=r"no task finished in 0\.3 s"):
        run.execute()
    assert time.monotonic() - start_s < 20.0
    assert any(isinstance(event, trace.Failed) for _, event in trace.read(RunDir(tmp_path).events))


def test_a_checkpoint_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = graph(busy_s=0.0, hung=__file__)
    run = Driver(quick, plan(quick)[0], LocalExecutor(), run_dir=RunDir(tmp_path).create(), deadline_s=0.3)
    monkeypatch.setattr(run.executor, "hold", lambda folder: time.sleep(60.0))
    with pytest.raises(StageError, match=r"no task finished in 0\.3 s; the state after step 1 is being saved"):
        run.execute()


@pytest.mark.parametrize("at", ["the file", "graph()"])
def test_a_graph_file_that_hangs_ends_its_check_with_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, at: str
) -> None:
    monkeypatch.setattr(load, "LOAD_S", 0.5)
    monkeypatch.setattr(load, "NOTICE_S", 0.2)
    path = tmp_path / "slow.py"
    sleep = "import time\ntime.sleep(60)\n" if at == "the file" else "import time\n"
    path.write_text(f"{sleep}def graph(steps: int = 1):\n    time.sleep(60)\n")
    assert main([str(path), "--check"]) == 2
    line = 2 if at == "the file" else 3
    notice, said = capsys.readouterr().err.splitlines()
    assert notice == f"still declaring the graph: {path}:{line}; it may take 0.5 s"
    assert said.startswith(f"{path}:{line}: the graph is not declared and checked within 0.5 s; "), said
