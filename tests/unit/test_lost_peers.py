"""Executor reports when workers lose each other in a transfer or one of them fails for good; without Ray."""

import threading
import time
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError

from graphs.quickstart import graph
from pipeline import Task
from pipeline.data_plane import patience
from pipeline.declare.ranks import RankLayout, reach_store
from pipeline.errors import PeerLost, Problem, StageError, Unfit, WorkerLost
from pipeline.executors import answers, control_store
from pipeline.executors import ray as executors
from pipeline.executors.control_store import ControlStore
from pipeline.executors.heartbeat import Heartbeat
from pipeline.executors.losses import RESTARTS, Losses
from pipeline.executors.outputs import TaskResult
from pipeline.executors.ray import RayExecutor
from pipeline.executors.task_calls import Offer, TaskCalls
from pipeline.plan.planner import plan
from pipeline.record.trace import Placed

TASK = Task(stage="refit", step=1)
APART = PeerLost(Problem(where="refit", what="the transfer failed", why="w", fix="f"))
UNFIT = Unfit(Problem(where="vllm", what="its engine died", why="w", fix="f"))
LEARNER, FIRST, SECOND = "learner.0", "sampler.0", "sampler.1"


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An executor with one source and two targets, each of which is its own call and its own actor."""
    made: Any = RayExecutor()
    made._planned = {stage.name: stage for stage in plan(graph())[0].stages}
    made._groups.actors |= {"learner": [LEARNER], "sampler": [FIRST, SECOND]}
    made._groups.replaceable |= {"learner": False, "sampler": True}
    made._transfers.meetings._host = lambda: "127.0.0.1"
    made.meeting = made._transfers.meeting(made._planned["refit"], [0, 1])
    losses = Losses(made._groups, made._transfers, Heartbeat(), made.store, look=made._look, joined=print)
    calls = TaskCalls(TASK, {FIRST: FIRST, SECOND: SECOND}, {LEARNER: LEARNER})  # type: ignore[dict-item]
    made._follow(calls)

    def replace(name: str, rank: int) -> Placed:
        made._groups.replace(name, rank, f"{name}.{rank} again")
        return Placed(group=name, worker=rank, node="here", pid=1)

    losses.replace = replace  # type: ignore[method-assign]
    made._losses = losses
    return made


def told(executor: Any, monkeypatch: pytest.MonkeyPatch, **answers: Any) -> list[TaskResult]:
    """Return the executor's reports as answers arrive: results, with or without an error, or None if a worker died."""

    def get(call: str, timeout: float) -> TaskResult:
        answer = answers[call.replace(".", "_")]
        if answer is None:
            raise RayActorError()
        return answer

    monkeypatch.setattr(executors.ray, "get", get)
    reports = [executor._result(call.replace("_", ".")) for call in answers]
    return [report for report in reports if report]


def result(error: Any = None) -> TaskResult:
    return TaskResult(task=TASK, error=error)


def test_who_lost_a_worker_that_died_has_no_error(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (report,) = told(executor, monkeypatch, learner_0=result(APART), sampler_0=None, sampler_1=result(APART))
    assert (report.lost, report.error) == ("worker sampler.0 died", None)
    assert [event.worker for event in report.events] == [0]
    meeting, again = executor.meeting, executor._transfers.meeting(executor._planned["refit"], [0, 1])
    store = reach_store(meeting.host, meeting.port, 1, deadline_s=30.0)
    assert store.get(meeting.name) == b"worker sampler.0 died", "nobody waits there"
    assert again.name == meeting.name.replace("sampler.0#0", "sampler.0#1")


@pytest.mark.parametrize("apart", [("learner_0",), ("sampler_0", "learner_0"), ("sampler_1",)])
def test_where_nobody_died_it_is_the_error(executor: Any, monkeypatch: pytest.MonkeyPatch, apart: tuple[str]) -> None:
    answers = {name: result(APART if name in apart else None) for name in ("sampler_0", "learner_0", "sampler_1")}
    (report,) = told(executor, monkeypatch, **answers)
    assert report.error is APART and not executor._transfers.served


def test_the_first_failed_end_ends_the_meeting_and_is_the_error(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    later = PeerLost(Problem(where="refit", what="it waited in vain", why="w", fix="f"))
    next(iter(executor._pending.values())).meeting = executor.meeting  # all calls share it
    assert not told(executor, monkeypatch, learner_0=result(APART))
    store = reach_store(executor.meeting.host, executor.meeting.port, 1, deadline_s=30.0)
    assert b"the transfer failed" in store.get(executor.meeting.name)
    (report,) = told(executor, monkeypatch, sampler_0=result(later), sampler_1=result(later))
    assert report.error is APART and b"the transfer failed" in store.get(executor.meeting.name)


def test_one_that_gives_up_is_replaced(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (report,) = told(executor, monkeypatch, learner_0=result(), sampler_1=result(UNFIT), sampler_0=result(APART))
    assert (report.lost, report.error) == ("worker sampler.1 gave up: its engine died", None)
    assert executor._groups.actors["sampler"] == [FIRST, "sampler.1 again"]


@pytest.mark.parametrize("limit", [True, False])
def test_one_that_gives_up_and_cannot_be_replaced_is_the_error(
    executor: Any, monkeypatch: pytest.MonkeyPatch, limit: bool
) -> None:
    if limit:
        executor._losses._restarts["sampler"] = RESTARTS
    else:
        executor._groups.replaceable["sampler"] = False
    (report,) = told(executor, monkeypatch, sampler_1=result(UNFIT))
    assert report.error is UNFIT


def test_a_replacement_is_not_waited_for_once_the_control_store_has_died(
    executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It died after its worker, in the middle of the replacement: Ray's call does not return."""
    monkeypatch.setattr(patience, "LOOK_S", 0.01)
    never, refusals = threading.Event(), iter([False, True, True, True])
    executor._losses.replace = lambda name, rank: never.wait(60)
    executor._connection.store = ControlStore("127.0.0.1:6379", lambda address, port: next(refusals))
    monkeypatch.setattr(control_store, "POLL_S", 0.0)
    (report,) = told(executor, monkeypatch, sampler_0=None)
    never.set()
    assert report.lost is None and "its process has died" in str(report.error)


def test_workers_are_not_waited_for_once_the_control_store_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(refs: list[str], timeout: float) -> None:
        time.sleep(timeout)
        raise GetTimeoutError

    monkeypatch.setattr(answers.ray, "get", get)
    monkeypatch.setattr(answers, "LOOK_S", 0.01)
    monkeypatch.setattr(control_store, "POLL_S", 0.0)
    executor: Any = RayExecutor()
    with pytest.raises(WorkerLost, match=r"the workers did not save it in 0\.05 s"):
        executor._all([FIRST], "save it", 0.05)
    executor._connection.store = ControlStore("127.0.0.1:6379", lambda address, port: True)
    with pytest.raises(StageError, match="its process has died"):
        executor._all([FIRST], "save it", 60.0)


def test_a_replica_is_served_once_all_of_its_ranks_have_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas of two ranks each, and their source. A replica is served when its last rank has the version."""
    made: Any = RayExecutor()
    made._planned = {stage.name: stage for stage in plan(graph())[0].stages}
    ranks = [f"sampler.{rank}" for rank in range(4)]
    made._groups.actors |= {"learner": [LEARNER], "sampler": ranks}
    made._groups.layouts["sampler"] = RankLayout(tensor=2, data=2)
    made._losses = Losses(made._groups, made._transfers, Heartbeat(), made.store, look=made._look, joined=print)
    offer = Offer(made._planned["refit"], task=TASK, near=True, carried=False, payloads=())

    def served(**answers: Any) -> list[int | None]:
        calls = TaskCalls(TASK, dict(zip(ranks, ranks)), {LEARNER: LEARNER}, offer)  # type: ignore[arg-type]
        made._pending.clear()
        made._follow(calls)
        return [report.served for report in told(made, monkeypatch, **answers)]

    of = {rank: rank.replace(".", "_") for rank in (*ranks, LEARNER)}
    assert served(**{of[LEARNER]: result(), of["sampler.0"]: result(), of["sampler.2"]: result()}) == []
    assert served(**{of["sampler.2"]: result(), of["sampler.3"]: result()}) == [1]
    assert served(**{of["sampler.1"]: result(), of["sampler.2"]: result(), of["sampler.0"]: result()}) == [0]
    assert served(**{of["sampler.0"]: result(APART), of["sampler.1"]: result()}) == [], "one was not reached"
    assert served(**{of["sampler.0"]: result(), of["sampler.1"]: result(APART)}) == []
