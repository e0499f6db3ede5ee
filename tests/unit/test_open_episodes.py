"""What open episodes do, while their task runs: counted on the worker, summed and recorded by the driver, and shown."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from pipeline import Output, StageError, Task
from pipeline.declare.times import SampleTimes
from pipeline.engine.driver import Driver
from pipeline.engine.journal import Journal, WallClock
from pipeline.engine.open_counts import EVERY_S, OpenCounts
from pipeline.executors.local import LocalExecutor
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.web.live import Live
from pipeline.web.tail import Record
from stages import End, Environment, Messages, Reply
from stages.episode.open_episodes import OpenEpisodes
from tests.unit.environments import Sleeping
from tests.unit.records import simulated
from tests.unit.test_episode import TEXTS, Worker, episode, execute, run_graph
from tests.waiting import until

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("forked_environments")


@dataclass(frozen=True)
class Held(Environment):
    """Does not open the episodes whose prompts begin with `of` before there is a file `gate`."""

    gate: str
    of: str = ""

    async def open(self, row: Mapping[str, Any], draw: Random) -> tuple[Any, str]:
        while row["prompt"].startswith(self.of) and not Path(self.gate).exists():
            await asyncio.sleep(0.01)
        return None, row["prompt"]

    def turn(self, state: Any, reply: Reply) -> Messages | End:
        return End()


@dataclass(frozen=True)
class HeldAlone(Held):
    """Opens one after the other."""

    def open(self, row: Mapping[str, Any], draw: Random) -> tuple[Any, str]:  # type: ignore[override]
        while not Path(self.gate).exists():
            time.sleep(0.01)
        return None, row["prompt"]


@dataclass(frozen=True)
class HeldOne(Held):
    """Does not answer the reply that comes first."""

    async def turn(self, state: Any, reply: Reply) -> Messages | End:  # type: ignore[override]
        with suppress(FileExistsError):
            Path(f"{self.gate}.first").touch(exist_ok=False)
            while not Path(self.gate).exists():
                await asyncio.sleep(0.01)
        return End()


def assert_counts(environment: Held, wanted: dict[str, int], **settings: Any) -> None:
    """The gate opens when the counts of a task are the wanted ones, and then all its episodes end."""
    stage = episode(environment, **settings)
    worker = Worker()
    run = stage.setup(worker.context)
    columns = {"prompt": [text for text in TEXTS for _ in range(worker.size)]}
    task = Task(number=1, stage=stage.name, step=0, groups=(5, 6, 7, 8), version=0)

    async def outputs() -> list[Output]:
        found = []
        async for output in run(columns, task):
            found.append(output)
            if output.open == wanted:
                Path(environment.gate).touch()
        return found

    try:
        found = asyncio.run(outputs())
    finally:
        worker.close()
    assert wanted in [output.open for output in found] and found[-1].open == {} and found[-1].columns
    assert set(found[-1].columns["end"]) == {"answered"}


def test_open_episodes_are_counted_by_part(tmp_path: Path) -> None:
    """Two are held, and the others wait for a wave of turns. One is held, and the others wait for its process. One is
    held, and the others are over."""
    assert_counts(Held(str(tmp_path / "1"), of="ab"), {"environment": 2, "queue": 6})
    assert_counts(HeldAlone(str(tmp_path / "2")), {"environment": 1, "process": 7}, environments=1)
    assert_counts(HeldOne(str(tmp_path / "3"), of="none"), {"environment": 1})


class OnePlay:
    """What is counted of an episode."""

    def __init__(self) -> None:
        self.times, self.is_over = SampleTimes(), False


def test_a_worker_counts_at_most_once_a_second_and_only_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    plays: Any = [OnePlay() for _ in range(3)]
    counts = OpenEpisodes()
    counts.add(plays)
    assert counts.changed() == {"worker": 3}
    plays[0].is_over = True
    assert counts.changed() is None
    monkeypatch.setattr("stages.episode.open_episodes.EVERY_S", 0.0)
    assert counts.changed() == {"worker": 2} and counts.changed() is None
    assert counts.remove(plays[:2]) == {"worker": 1} and counts.changed() is None


def test_the_record_grows_with_time_and_not_with_workers() -> None:
    """Here 1,000 workers report every 0.1 s."""
    counts, written = OpenCounts(), []
    for tick in range(100):
        for replica in range(1000):
            parts = {"environment": tick + 1, "generate": 20, "queue": 3}
            counts.take(Task(stage="episode", step=0, replica=replica), parts)
        written += [(tick, counts.due(tick * 0.1))]
    due = [(tick, found) for tick, found in written if found]
    assert [tick for tick, _ in due] == list(range(0, 100, round(10 * EVERY_S)))
    assert due[1][1] == [("episode", {"environment": 11_000, "generate": 20_000, "queue": 3_000})]
    event = trace.OpenSamples(stage="episode", parts=due[-1][1][0][1], at_s=123456.7)
    assert len(msgspec.json.encode(event)) < 110


def test_counts_that_are_the_same_are_due_once_and_again_for_another_task() -> None:
    counts = OpenCounts()
    first, second = (Task(stage="episode", step=0, replica=n) for n in range(2))
    counts.take(first, {"environment": 2})
    assert counts.due(0.0) == [("episode", {"environment": 2})]
    counts.take(first, {"environment": 2})
    assert counts.due(5.0) == []
    counts.take(second, {"environment": 1, "queue": 4})
    counts.take(first, {})
    assert counts.due(6.0) == [("episode", {"environment": 1, "queue": 4})]
    counts.take(second, {})
    assert counts.due(7.0) == []  # the tasks have ended, as the record says
    counts.take(first, {"environment": 1, "queue": 4})
    assert counts.due(8.0) == [("episode", {"environment": 1, "queue": 4})]


def test_the_counts_of_a_worker_that_is_lost_are_forgotten() -> None:
    planned, written = simulated(steps=1)[0], []
    pen: Any = SimpleNamespace(write=written.append, flush=lambda: None, close=lambda: None)
    journal = Journal(planned, WallClock(), pen)
    lost, other = (Task(stage="rollout", step=0, replica=n) for n in range(2))
    journal.opened(lost, {"environment": 2})
    journal.opened(other, {"generate": 1})
    journal.retried(lost, (), "it died")
    journal.flush()
    assert [event.parts for event in written if isinstance(event, trace.OpenSamples)] == [{"generate": 1}]


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (
            {"environment": 30, "process": 11, "generate": 20, "queue": 3},
            "41 of 64 episodes wait for their environment",
        ),
        ({"environment": 1, "queue": 7}, "7 of 8 episodes wait to be sampled"),
        ({"generate": 64}, "64 of 64 episodes are sampled"),
        ({"worker": 3, "mine": 5}, "5 of 8 episodes mine"),
        ({}, "step 1"),
    ],
)
def test_a_stage_says_what_most_of_its_episodes_do_until_its_tasks_end(parts: dict[str, int], says: str) -> None:
    planned, events = simulated(steps=2)
    live, said = Live(planned), set()
    for event in events:
        live.apply(event)
        if isinstance(event, trace.Submitted) and event.stage == "rollout" and event.step == 0:
            live.apply(trace.OpenSamples(stage="rollout", parts=parts, at_s=0.0))
            now = live.picture(float).stages["rollout"]
            assert (now.state, now.open) == ("running", parts) and now.why in (says, "2 tasks", "3 tasks", "4 tasks")
            said.add(now.why)
        elif isinstance(event, trace.Submitted) and event.stage == "rollout":
            assert live.picture(float).stages["rollout"].open == {}
    assert says in said and not any(stage.open for stage in live.picture(float).stages.values())


def test_a_run_says_what_its_episodes_wait_for(tmp_path: Path) -> None:
    """The record has it while the task runs, and little more than that."""
    gate, folder = tmp_path / "gate", tmp_path / "run"
    running = threading.Thread(target=execute, args=(folder, run_graph(Held(str(gate)))))
    running.start()
    try:
        until(lambda: why(folder) == "8 of 8 episodes wait for their environment", 60.0)
    finally:
        gate.touch()
        running.join()
    events = [event for _, event in trace.read(folder / "events.jsonl")]
    opened = [event for event in events if isinstance(event, trace.OpenSamples)]
    assert opened and {event.stage for event in opened} == {"episode"}
    assert all(two.at_s - one.at_s > 0.8 for one, two in pairwise(opened))
    assert why(folder) == "done"


def why(folder: Path) -> str:
    """What the graph says of the episodes of a run; empty as long as there is no run."""
    if not (folder / "plan.json").exists() or not (folder / "events.jsonl").exists():
        return ""
    stages = Record.read(folder).picture().stages
    return stages["episode"].why


def test_counts_are_no_progress(tmp_path: Path) -> None:
    """They change every second, and no task finishes."""
    graph = run_graph(Ticking(), turns=100)
    run = Driver(graph, plan(graph)[0], LocalExecutor(), deadline_s=2.5)
    with pytest.raises(StageError, match=r"no task finished in 2.5 s; running: episode"):
        run.execute()


class Ticking(Sleeping):
    """Answers each reply after 0.2 s, one episode at a time."""

    def turn(self, state: Any, reply: Reply) -> Messages | End:  # type: ignore[override]
        time.sleep(0.2)
        return Messages("1")
