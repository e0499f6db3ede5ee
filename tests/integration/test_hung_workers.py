"""Hung workers are killed and the run continues as after a death; slow workers are left alone.

A stopped process stands in for any hang. Writes of a worker that was wrongly taken for lost change nothing.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.load import load
from pipeline.data_plane.memory import MemoryPlane
from pipeline.declare.columns import Columns, Ragged
from pipeline.declare.handle import KVBatchMeta
from pipeline.declare.task import Task
from pipeline.errors import WorkerLost
from pipeline.executors.local import LocalExecutor
from pipeline.executors.outputs import TaskResult
from pipeline.record import trace
from pipeline.rundir import RunDir
from tests.integration.test_async import QUICKSTART, events, execute, lines, weights
from tests.integration.test_lost_workers import COMMAND, FLAGS, in_command, pids

SLOW = Path(__file__).parent / "slow_graph.py"
SILENT_S = 4.0


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.executors import heartbeat

    monkeypatch.setattr(heartbeat, "DEADLINE_S", SILENT_S)
    monkeypatch.setattr(heartbeat, "LOOKS", int(SILENT_S))  # the driver checks at most once per second


def is_gone(pid: int, within_s: float = 20.0) -> bool:
    """Return whether a process ends in time. A stopped process still counts as running."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        with suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.1)
                continue
        return True
    return False


def stopped(run_dir: Path, group: str, at: int, *, woken: int | None = None) -> Callable[[int, dict[str, float]], None]:
    """Stop the worker of a group after step `at`, and resume the process, if it still exists, after step `woken`."""
    hung: list[int] = []

    def on_step(step: int, metrics: dict[str, float]) -> None:
        if step == at and not hung:
            hung.append(pids(run_dir, group)[-1])
            os.kill(hung[0], signal.SIGSTOP)
        if step == woken:
            with suppress(ProcessLookupError):
                os.kill(hung[0], signal.SIGCONT)

    return on_step


def test_a_sampler_that_is_stopped_is_replaced_and_nothing_changes(tmp_path, ray_session, undisturbed, impatient):
    from pipeline.executors.ray import RayExecutor

    folder = tmp_path / "run"
    on_step = stopped(folder, "sampler", 2, woken=3)
    run_dir = execute(QUICKSTART, FLAGS, folder, RayExecutor(), on_step=on_step)
    first, second = pids(folder, "sampler")
    assert first != second and is_gone(first)
    retried = events(run_dir, trace.Retried)
    assert {event.reason for event in retried} == {"worker sampler.0 has not answered for 4 s"}
    assert weights(run_dir, 8) == undisturbed
    assert [line["step"] for line in lines(run_dir)] == list(range(1, 9))


def test_a_trainer_that_is_stopped_takes_the_run_back_to_a_checkpoint(
    tmp_path, ray_session, undisturbed, impatient, monkeypatch, capsys
):
    (tmp_path / "small.py").write_text(COMMAND)
    folder = tmp_path / "run"
    assert in_command(tmp_path / "small.py", folder, monkeypatch, stopped(folder, "learner", 3)) == 0
    told = capsys.readouterr().err
    assert "a worker has not answered for 4 s and did not finish" in told and "restart from step 3" in told
    run_dir = RunDir(folder)
    assert [event.start for event in events(run_dir, trace.Started)] == [0, 3]
    assert is_gone(pids(folder, "learner")[0])
    assert weights(run_dir, 8) == undisturbed


def test_only_who_hangs_is_replaced(tmp_path, ray_session, impatient):
    """Not a worker that sleeps, blocks its event loop or waits for another one for longer than the deadline."""
    from pipeline.executors.ray import RayExecutor
    from pipeline.executors.sent import user_modules

    executor = RayExecutor(modules=user_modules(load(SLOW).module))
    flags = {"busy_s": 1.5 * SILENT_S, "hung": str(tmp_path / "hung")}
    run_dir = execute(SLOW, flags, tmp_path / "run", executor)
    took_s = {event.stage: event.end_s - event.start_s for event in events(run_dir, trace.Ran)}
    assert min(took_s["sample"], took_s["spin"]) > SILENT_S
    assert {event.reason for event in events(run_dir, trace.Retried)} == {"worker learner.0 has not answered for 4 s"}
    assert [len(pids(run_dir.path, group)) for group in ("learner", "sampler", "host")] == [2, 1, 1]


def test_who_does_not_answer_a_call_of_the_driver_is_lost_too(ray_session):
    from pipeline.executors import answers

    def call() -> None:
        time.sleep(2.0)

    with pytest.raises(WorkerLost, match=r"the workers did not save step_000003 in 0\.2 s"):
        answers.get_all([ray_session.remote(call).options(num_cpus=0).remote()], "save step_000003", 0.2)


class LateWrites(MemoryPlane):
    """After a second attempt's put, the first attempt puts different values too, and again on each call of `again`."""

    def put(self, keys: Sequence[str], columns: Columns, *, attempt: int = 0, **how: Any) -> KVBatchMeta:
        handle = super().put(keys, columns, attempt=attempt, **how)
        if attempt == 1:
            other = {
                name: column[::-1] if isinstance(column, list) else flipped(column) for name, column in columns.items()
            }
            self.again = partial(super().put, keys, other, attempt=0, **how)
            self.again()
        return handle


def flipped(column: Any) -> Any:
    return Ragged(column.values.flip(0), column.lengths) if isinstance(column, Ragged) else column.flip(0)


class LosesStream(LocalExecutor):
    """Treats the worker of the third step's stream as lost."""

    def __init__(self) -> None:
        super().__init__()
        self.plane = LateWrites()
        self._lost: list[TaskResult] = []

    def submit(self, task: Task, meta: KVBatchMeta | None) -> None:
        if self._planned[task.stage].shape == "stream" and task.step == 2 and not task.attempt:
            self._lost.append(TaskResult(task=task, lost="it has not answered"))
        else:
            super().submit(task, meta)

    def wait(self, timeout_s: float) -> list[TaskResult]:
        lost, self._lost = self._lost, []
        return lost or super().wait(timeout_s)


def test_what_a_worker_that_was_taken_for_lost_writes_is_never_seen_and_is_swept(tmp_path, undisturbed):
    executor = LosesStream()

    def on_step(step: int, metrics: dict[str, float]) -> None:
        if step == 5:
            executor.plane.again()
            assert executor.plane.row_count("quickstart"), "rows of groups that are long gone"

    run_dir = execute(QUICKSTART, FLAGS, tmp_path / "run", executor, on_step=on_step)
    assert [event.stage for event in events(run_dir, trace.Retried)] == ["rollout"]
    assert weights(run_dir, 8) == undisturbed
    assert events(run_dir, trace.Ended)[0].rows_left == 0
