"""Signals, to the driver or to its process group: a step in training is finished and saved, and a resumed run has lost
nothing; a run that was killed leaves no process behind."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import queue
import random
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.load import load
from pipeline.cli.resume import cut_metrics
from pipeline.engine import termination
from pipeline.engine.driver import Driver
from pipeline.engine.termination import Termination
from pipeline.errors import GraphError
from pipeline.executors.keeper import members
from pipeline.executors.local import LocalExecutor
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.record.lock import held
from pipeline.rundir import RunDir
from tests.forked import FORKS, Command
from tests.integration.test_async import NUMBERS, QUICKSTART, SLOW_TAIL, events, execute, lines, weights
from tests.integration.test_lost_workers import FLAGS
from tests.journal.checker import check
from tests.sessions import session_of, wait_until_empty
from tests.sockets import called, listening, status

ROOT = Path(__file__).parents[2]
SCHEDULES: list[dict[str, Any]] = [{}, {"max_staleness": 2}]
SCHEDULES += [SCHEDULES[1] | {"on_stale": "drop", "refit": "in_flight"}]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
WAIT_S = 60.0
COMMAND = ("-m", "pipeline.run", str(NUMBERS))


def stopped(file: Path, flags: dict[str, Any], folder: Path, *, at: int, after_s: float = 0.0) -> tuple[RunDir, int]:
    """Run in this process, send SIGTERM `after_s` after step `at`; return the run and its checkpoint's step count."""
    graph, run_dir = load(file).build(flags), RunDir(folder).create()

    def done(step: int, metrics: dict[str, float]) -> None:
        if step == at:
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGTERM)).start()

    before = signal.getsignal(signal.SIGTERM)
    with Termination() as asked:
        driver = Driver(graph, plan(graph)[0], LocalExecutor(), run_dir=run_dir, on_step=done, termination=asked)
        driver.execute()
    assert driver.stopped and asked.asked and signal.getsignal(signal.SIGTERM) == before
    assert [event.error for event in events(run_dir, trace.Failed)] == ["interrupted"]
    return run_dir, run_dir.checkpoint_steps()[-1]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_that_was_asked_to_stop_goes_on_where_it_was(tmp_path, schedule, seed):
    rng = random.Random(f"{seed} {schedule}")
    flags = {"steps": 10_000, **SLOW_TAIL, **schedule}
    at = rng.randint(0, 4)
    run_dir, behind = stopped(NUMBERS, flags, tmp_path / "run", at=at, after_s=rng.uniform(0, 0.05))
    assert behind >= at + 1 and [line["step"] for line in lines(run_dir)] == list(range(1, behind + 1))
    last = [event.step for event in events(run_dir, trace.Trained)][-1]
    assert last == behind - 1  # everything trained is saved
    cut_metrics(run_dir, behind)
    run_dir = execute(NUMBERS, flags | {"steps": behind + 3}, tmp_path / "run", start=behind)
    assert [line["step"] for line in lines(run_dir)] == list(range(1, behind + 4))
    assert not check(run_dir.path)


def test_what_is_being_given_up_as_a_run_stops_is_accounted_for(tmp_path):
    """The worker has not yet acknowledged that it dropped these groups, and no checkpoint has them."""
    run_dir = RunDir(tmp_path / "run").create()
    graph = load(NUMBERS).build({"steps": 10_000, **SLOW_TAIL, **SCHEDULES[2]})
    given_up: set[int] = set()

    def done(step: int, metrics: dict[str, float]) -> None:
        if driver.loop.drops.cancelled and not given_up:
            given_up.update(driver.loop.drops.cancelled)
            os.kill(os.getpid(), signal.SIGTERM)

    with Termination() as termination:
        driver = Driver(graph, plan(graph)[0], LocalExecutor(), run_dir=run_dir, on_step=done, termination=termination)
        driver.execute()
    dropped = {group: event.reason for event in events(run_dir, trace.Dropped) for group in event.groups}
    assert given_up and {dropped[group] for group in given_up} == {"cancelled"}
    manifest = run_dir.checkpoints / f"step_{run_dir.checkpoint_steps()[-1]:06d}" / "manifest.json"
    assert given_up.isdisjoint(json.loads(manifest.read_text())["pending"])
    assert not check(run_dir.path)


def test_weights_are_those_of_a_run_that_was_not_stopped(tmp_path, undisturbed):
    run_dir, behind = stopped(QUICKSTART, FLAGS, tmp_path / "run", at=2, after_s=0.1)
    cut_metrics(run_dir, behind)
    assert weights(execute(QUICKSTART, FLAGS, tmp_path / "run", start=behind), 8) == undisturbed


def launched(*words: str, **options: Any) -> subprocess.Popen[str]:
    """Start a command."""
    return Command(*words, cwd=ROOT, env=ENVIRONMENT | FORKS, text=True, **options)


def started(
    folder: Path, *flags: str, steps: int = 3, run: tuple[str, ...] = COMMAND
) -> tuple[subprocess.Popen[str], RunDir]:
    """Return the command as a process of its own, once its first steps are done."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    process = launched(*run, "--run-dir", str(folder), *flags, **options)
    run_dir, deadline_s = RunDir(folder), time.monotonic() + 120
    while not run_dir.metrics.is_file() or run_dir.metrics.read_bytes().count(b"\n") < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return process, run_dir


@pytest.mark.parametrize(
    ("executor", "number"),
    [
        ("local", signal.SIGHUP),
        ("local", signal.SIGINT),
        pytest.param("ray", signal.SIGINT, marks=pytest.mark.search),
        ("ray", signal.SIGTERM),
    ],
)
@pytest.mark.usefixtures("signals_are_not_ignored")
def test_a_command_that_gets_a_signal_saves_and_can_be_resumed(tmp_path, executor, number):
    flags = ("--executor", executor, "--batch", "4", "--token-s", "0.005", "--learn-s", "0.05", "--max-staleness", "1")
    process, run_dir = started(tmp_path / "run", *flags, "--steps", "10000")
    session = session_of(process.pid)
    os.killpg(process.pid, number)  # as `timeout`, SLURM and a closed terminal do
    _, told = process.communicate(timeout=240)
    assert process.returncode == 128 + number, told
    if executor == "ray":
        wait_until_empty(session)
    behind = run_dir.checkpoint_steps()[-1]
    assert told.splitlines()[-1].endswith(f"--resume   (from step {behind})") and f"second {number.name}" in told
    resume = ["--executor", "local", "--run-dir", str(run_dir.path), "--resume", "--steps", str(behind + 2)]
    again = launched(*COMMAND, *resume, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, told = again.communicate(timeout=120)
    assert again.returncode == 0, told
    steps = [json.loads(line)["step"] for line in run_dir.metrics.read_text().splitlines()]
    assert steps == list(range(behind + 3))
    assert not check(run_dir.path)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen, RunDir]]:
    """A run on Ray that trains on two ranks and gives Ray two seconds to end. The second test of it ends it."""
    folder = tmp_path_factory.mktemp("two_ranks") / "run"
    quick = (
        "import sys, pipeline.executors.ray as ray; ray.CLOSE_S = 2.0; from pipeline.run import main; sys.exit(main())"
    )
    process, run_dir = started(folder, run=("-c", quick, str(ROOT / "tests/integration/two_ranks_graph.py")))
    yield process, run_dir
    with suppress(ProcessLookupError):
        process.kill()
    process.wait(60)


def rays_folder(driver):
    """Return the folder that the keeper of a driver was given for Ray."""
    commands = (Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in members(session_of(driver)))
    return next(Path(words[3].decode()) for words in commands if words[2:3] and words[2].endswith(b"keeper.py"))


def test_every_socket_of_a_run_is_closed_to_a_stranger(two_ranks):
    """A socket on all addresses refuses calls without the token. Other machines do not reach the other sockets."""
    process, _ = two_ranks
    found = list(listening([process.pid, *members(session_of(process.pid))]))
    open_to_all = [one for one in found if not one.is_loopback]
    assert len(open_to_all) >= 8, found  # driver, workers, TransferQueue's two, raylet's two, control store, agent
    for one in open_to_all:
        answers = called(one)
        assert set(answers.values()) == {"UNIMPLEMENTED", "UNAUTHENTICATED"}, (one, answers)
    near = [one for one in found if one.is_loopback]
    agents = [one for one in near if one.command.endswith("Agent")]
    assert agents and {status(one) for one in agents} == {401}, agents
    others = {one.command.partition(" ")[0].partition(".")[0] for one in near if one not in agents}
    assert {"ray::Actor", "ray::TransferQueueController", "ray::SimpleStorageUnit"} <= others  # gloo's, TransferQueue's
    assert process.poll() is None, "the strangers' calls have ended the run"


def test_no_other_user_enters_the_folder_of_rays_sockets(two_ranks):
    folder = rays_folder(two_ranks[0].pid)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert any(path.is_socket() for path in folder.rglob("sockets/*"))


def test_a_run_ends_even_if_rays_control_store_has_stopped(two_ranks):
    """Stopped, not dead: Ray's calls that end the workers never return."""
    process, run_dir = two_ranks
    session = session_of(process.pid)
    (store,) = (pid for pid in members(session) if b"gcs_server" in Path(f"/proc/{pid}/cmdline").read_bytes())
    folder = rays_folder(process.pid)
    os.kill(store, signal.SIGSTOP)
    process.terminate()
    _, told = process.communicate(timeout=120)
    assert not folder.exists(), "Ray's files go with the run"
    assert process.returncode == 143 and "Ray has not ended the workers within 2 s" in told
    wait_until_empty(session)
    assert told.splitlines()[-1].endswith(f"(from step {run_dir.checkpoint_steps()[-1]})")


def test_a_run_whose_control_store_has_died_says_so_and_leaves_no_process(tmp_path):
    """Ray alone would abort the driver after a minute, with exit code 1 and without a word of ours."""
    process, _ = started(tmp_path / "run", "--steps", "10000")
    session = session_of(process.pid)
    (store,) = (pid for pid in members(session) if b"gcs_server" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(store, signal.SIGKILL)
    _, told = process.communicate(timeout=50)
    assert process.returncode == 3 and "its process has died" in told and "Traceback" not in told
    assert told.splitlines()[-1].startswith("resume: ")
    wait_until_empty(session)


@pytest.mark.parametrize("where", [">/dev/full", "<&- >&- 2>&-"])
def test_a_run_whose_output_cannot_be_written_trains_to_its_end(tmp_path, where):
    flags = ("--executor", "local", "--run-dir", str(tmp_path / "run"), "--steps", "4", "--plain")
    command = [sys.executable, *COMMAND, *flags]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {where}', "sh", *command], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    if "full" in where:
        assert "the output cannot be written (No space left on device); the run goes on" in done.stderr
    assert len(RunDir(tmp_path / "run").metrics.read_text().splitlines()) >= 4


@pytest.mark.parametrize("both", [False, True])
def test_a_run_outlives_the_reader_of_its_output(tmp_path, both):
    command = [*COMMAND, "--executor", "local", "--run-dir", str(tmp_path / "run"), "--steps", "8", "--plain"]
    stderr = subprocess.STDOUT if both else subprocess.PIPE
    process = launched(*command, stdout=subprocess.PIPE, stderr=stderr)
    assert process.stdout.readline().startswith("numbers: 8 steps")
    process.stdout.close()
    told = "" if both else process.stderr.read()
    assert process.wait(timeout=120) == 0, told
    assert [line["step"] for line in lines(RunDir(tmp_path / "run"))] == list(range(1, 9))
    assert both or told.count("nobody reads the output any more; the run goes on") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.journal_expected("I5", "I8", "record")
def test_a_run_that_ends_while_its_workers_start_leaves_no_process(tmp_path, number):
    process = launched(*COMMAND, "--run-dir", str(tmp_path / "run"), start_new_session=True, stderr=subprocess.PIPE)
    deadline_s = time.monotonic() + 60
    while not (session := session_of(process.pid)) or len(list(members(session))) < 4:  # Ray's own processes
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.02)
    with pytest.raises(GraphError, match=f"process {process.pid} on "), held(RunDir(tmp_path / "run"), where="run"):
        pass
    os.killpg(process.pid, number)
    process.wait(60)
    with held(RunDir(tmp_path / "run"), where="run") as warning:  # at once: no process of Ray's holds it
        assert warning is None
    _, told = process.communicate(timeout=60)
    wait_until_empty(session)
    if number == signal.SIGTERM:
        assert process.returncode == 143, told
        assert told.startswith("SIGTERM: the run ends; its workers are still starting\n")
        assert told.splitlines()[-1].endswith("--resume   (from the start: no checkpoint was written yet)")


@pytest.mark.journal_expected("I8")  # of the record whose checkpoints the test removes
def test_a_run_without_a_checkpoint_is_resumed_from_the_start_and_one_without_an_end_is_finished(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    command = [*COMMAND, "--executor", "local", "--run-dir", str(run_dir.path), "--steps", "2", "--plain"]

    def said(*more: str) -> str:
        process = launched(*command, *more, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        told = process.communicate(timeout=120)[1]
        assert process.returncode == 0, told
        return told

    def resumed() -> str:
        told = said("--resume")
        assert [line["step"] for line in lines(run_dir)] == [1, 2] and not check(run_dir.path)
        assert isinstance(events(run_dir, object)[-1], trace.Ended)
        return told

    said()
    lines_ = run_dir.events.read_text().splitlines(keepends=True)
    assert '"ended"' in lines_.pop()
    run_dir.events.write_text("".join([*lines_, '{"type":"pu']))  # as if it was killed after its last checkpoint
    metrics = run_dir.metrics.read_bytes()
    resumed()
    assert len(events(run_dir, object)) == len(lines_) + 1 and run_dir.metrics.read_bytes() == metrics
    assert not list(run_dir.path.glob("before-*")), "nothing is trained again"
    shutil.rmtree(run_dir.checkpoints)
    assert "its record so far is in" in resumed()
    assert (run_dir.path / "before-1" / "events.jsonl").is_file()


def test_the_end_of_a_run_is_recorded_before_its_workers_end(tmp_path):
    """That may take seconds, in which the run can be killed."""
    seen: list[trace.Ended] = []

    class Ends(LocalExecutor):
        def close(self) -> None:
            seen.extend(events(RunDir(tmp_path / "run"), trace.Ended))
            super().close()

    execute(NUMBERS, {"steps": 1}, tmp_path / "run", Ends())
    assert len(seen) == 1


def test_a_handler_that_is_removed_in_c_is_put_back_at_once_and_at_the_end() -> None:
    """Ray's end removes that of SIGTERM, a second or more before it returns."""
    from pipeline.executors.connection import _handler_put_back

    libc, taken = ctypes.CDLL(None), []
    before = signal.signal(signal.SIGUSR1, lambda *_: taken.append(len(taken)))
    try:
        with _handler_put_back(signal.SIGUSR1):
            libc.signal(signal.SIGUSR1, ctypes.c_void_p(1))  # SIG_IGN
            deadline_s = time.monotonic() + 20
            while not taken:
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.02)
                assert time.monotonic() < deadline_s
            libc.signal(signal.SIGUSR1, ctypes.c_void_p(1))
        taken.clear()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert taken == [0]
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.journal_expected("I5", "I8", "record")
def test_a_second_signal_ends_a_run_now(tmp_path):
    learn_s = 8.0
    flags = ("--learn-s", str(learn_s), "--steps", "10000", "--tail", "1")
    process, run_dir = started(tmp_path / "run", "--executor", "local", *flags, steps=1)
    deadline_s = time.monotonic() + 120
    while [event.stage for event in events(run_dir, trace.Submitted)].count("learn") < 1:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert "second SIGTERM" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    began_s = time.monotonic()
    _, told = process.communicate(timeout=120)
    assert process.returncode == 143, told
    assert time.monotonic() - began_s < learn_s / 2
    assert "resume: " in told
    assert events(run_dir, trace.Failed)


def test_a_run_that_is_asked_to_stop_before_it_begins_trains_nothing(tmp_path):
    """As if SIGTERM arrives after a trainer was lost, before the run continues from its checkpoint."""
    asked = Termination()
    with asked:
        os.kill(os.getpid(), signal.SIGTERM)
        graph, run_dir = load(NUMBERS).build({"steps": 3}), RunDir(tmp_path / "run").create()
        driver = Driver(graph, plan(graph)[0], LocalExecutor(), run_dir=run_dir, termination=asked)
        driver.execute()
    assert driver.stopped and not events(run_dir, trace.Trained)


def test_a_signal_that_comes_late_lets_a_run_say_its_last_words_but_ends_it(monkeypatch, capfd):
    monkeypatch.setattr(termination, "LAST_S", 0.2)
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    with Termination(left.put) as asked:
        asked.over()
        os.kill(os.getpid(), signal.SIGTERM)
        assert not asked.asked and left.empty()
        assert left.get(timeout=WAIT_S) == 143
    assert "not ended 0.2 s after a signal" in capfd.readouterr().err


def test_a_second_signal_does_not_wait_for_what_holds_the_run_up(monkeypatch):
    monkeypatch.setattr(termination, "AT_ONCE_S", 0.2)
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    with Termination(left.put):
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
        assert left.get(timeout=WAIT_S) == 128 + signal.SIGHUP


@pytest.mark.journal_expected("I5", "I8", "record")
def test_a_run_whose_output_is_not_read_goes_on_and_stops_when_asked(tmp_path):
    """Its reader is there and does not read, as `less` does after its first page."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    run_dir = RunDir(tmp_path / "run")
    flags = ("--executor", "local", "--run-dir", str(run_dir.path), "--steps", "10000", "--plain")
    with open("/dev/null", "rb") as nothing, open(writer, "wb") as to:
        first = ("from pipeline.cli import output", "output.FULL_S = 1.0", "from pipeline import run")
        program = "\n".join((*first, f"run.main({[str(NUMBERS), *flags]})"))
        process = launched("-c", program, stdin=nothing, stdout=to, stderr=subprocess.PIPE)
        deadline_s = time.monotonic() + WAIT_S
        while not run_dir.metrics.exists():  # a step has ended, and the run has taken the signals
            assert process.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.05)
        while select.select([], [writer], [], 0.0)[1]:
            os.write(writer, b"x" * select.PIPE_BUF)
        said = b""
        while b"nobody has read the output for 1 s; the run goes on" not in said:
            said += (part := os.read(process.stderr.fileno(), 1 << 12))
            assert part, said
        process.send_signal(signal.SIGTERM)
        told = said.decode() + process.communicate(timeout=60)[1]
    os.close(reader)
    assert "a second SIGTERM ends the run at once" in told and "resume: " in told, (process.returncode, told)
    assert [event.error for event in events(run_dir, trace.Failed)] == ["interrupted"]
