"""Which workers are free, and how a unit is divided over them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipeline import Schedule, WorkerGroup
from pipeline.plan.plan import PlacedGroup
from pipeline.plan.planner import plan
from pipeline.schedule.blockers import Weights
from pipeline.schedule.grants import Grants, GroupWorkers, divided
from pipeline.schedule.readiness import Reader, units_of
from tests.unit import toy
from tests.unit.toy import RESPONSE, Toy


@given(st.lists(st.integers(), unique=True, max_size=40).map(sorted), st.integers(0, 12))
def test_groups_are_divided_in_order_and_evenly(groups, count):
    made = divided(groups, count)
    assert [group for part in made for group in part] == groups
    assert len(made) == max(1, min(count, len(groups)))
    sizes = [len(part) for part in made]
    assert max(sizes) - min(sizes) <= 1


def group(replicas: int, model_parallel: int = 1) -> PlacedGroup:
    return PlacedGroup(
        name="g",
        backend="python",
        workers=replicas * model_parallel,
        gpus=0,
        cpus=1,
        threads=0,
        model_parallel=model_parallel,
        stages=(),
    )


class Occupied(RuleBasedStateMachine):
    """Model of one worker group: which workers are free, and where streams go."""

    @initialize(replicas=st.integers(1, 5))
    def begin(self, replicas):
        self.workers = GroupWorkers(group(replicas))
        self.free, self.load, self.streams = set(range(replicas)), [0] * replicas, []

    @precondition(lambda self: self.free)
    @rule()
    def take_one(self):
        replica = self.workers.take()
        assert replica == min(self.free), "the first that is free"
        self.free.discard(replica)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def take_this(self, data):
        replica = data.draw(st.sampled_from(sorted(self.free)))
        assert self.workers.take(replica) == replica
        self.free.discard(replica)

    @precondition(lambda self: len(self.free) == len(self.load))
    @rule()
    def take_all(self):
        self.workers.take_all()
        assert self.workers.free == 0 and not self.workers.idle
        self.workers.release(None)

    @precondition(lambda self: len(self.free) < len(self.load))
    @rule(data=st.data())
    def release(self, data):
        replica = data.draw(st.sampled_from([r for r in range(len(self.load)) if r not in self.free]))
        self.workers.release(replica)
        self.free.add(replica)

    @rule(groups=st.integers(0, 9))
    def stream(self, groups):
        replica = self.workers.stream_on(groups)
        assert self.load[replica] == min(self.load), "the one that streams the fewest"
        self.load[replica] += groups
        self.streams.append([replica, groups])

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def streamed(self, data):
        stream = data.draw(st.sampled_from(self.streams))
        ended = data.draw(st.integers(0, stream[1]))
        over = ended == stream[1]
        self.workers.streamed(stream[0], ended, over=over)
        self.load[stream[0]] -= ended
        stream[1] -= ended
        if over:
            self.streams.remove(stream)

    @invariant()
    def they_agree(self):
        if hasattr(self, "workers"):
            assert self.workers.free == len(self.free) and self.workers.idle == (len(self.free) == len(self.load))
            assert self.workers.streams == len(self.streams)
            assert all(self.workers.is_free(replica) == (replica in self.free) for replica in range(len(self.load)))


TestOccupied = Occupied.TestCase


@given(st.lists(st.integers(1, 8), min_size=1, max_size=40), st.integers(1, 6))
def test_streams_are_spread_evenly(sizes, replicas):
    workers, load = GroupWorkers(group(replicas, model_parallel=2)), [0] * replicas
    for size in sizes:
        load[workers.stream_on(size)] += size
    assert max(load) - min(load) <= max(sizes), "one could not have been put better"


def test_what_was_streamed_long_ago_is_forgotten():
    workers = GroupWorkers(group(3))
    held = [workers.stream_on(1000) for _ in range(2)]
    for _ in range(5_000):
        replica = workers.stream_on(2)
        workers.streamed(replica, 1, over=False)
        workers.streamed(replica, 1, over=True)
    assert len(workers._load) < 100
    assert workers.stream_on(1) not in held


def grants(refit: str = "drain", can_wait: bool = True) -> tuple[Grants, dict]:
    """Return grants for the asynchronous toy graph with two samplers and two learners, and one reader per stage."""
    judge = Toy("judge", reads=(RESPONSE,), per="group", on=WorkerGroup("sampler", backend="torch", workers=2))
    changes = toy.streaming(sampler=2, learner=2)
    schedule = Schedule(steps=2, max_staleness=1, refit=refit)
    made = toy.graph(batch=4, schedule=schedule, **changes)
    planned = plan(type(made)(name="t", source=made.source, stages=(*made.stages, judge), schedule=schedule))[0]
    readers = {}
    for stage in planned.stages:
        holds = stage.name not in ("refit", "evaluate")
        readers[stage.name] = Reader(stage, 0, set(), units_of(stage, holds=holds, batch=4), 4 if holds else 1)
    return Grants(planned, version=lambda: 0, can_wait=lambda reader: can_wait), readers


def offer(made, reader, *groups):
    """Mark these groups as ready for a stage and return the tasks that start."""
    if groups:
        reader.units.admit(groups)
        reader.units.ready(groups)
    made.offer(reader)
    return [(task.stage, task.groups, task.replica) for task in made.granted()]


def end(made, number):
    running = made.running(number)
    made.acknowledge(running, running.task.groups)
    return [(task.stage, task.groups, task.replica) for task in made.granted()]


def test_a_blocked_or_empty_offer_is_none():
    made, readers = grants()
    assert offer(made, readers["reward"]) == [] and made.idle
    readers["reward"].blockers.add(Weights("x"))
    assert offer(made, readers["reward"], 1) == []
    readers["reward"].blockers.clear()
    assert offer(made, readers["reward"]) == [("reward", (1,), 0)] and not made.idle


def test_numbers_rise_and_tell_who_runs():
    made, readers = grants()
    offer(made, readers["reward"], 1)
    assert made.running(1).task.groups == (1,) and made.running(None) is made.running(2) is None
    assert offer(made, readers["prompts"], 5) == [], "the host has one worker"
    assert end(made, 1) == [("prompts", (5,), 0)]
    assert made.running(1) is None and made.running(2).task.stage == "prompts"


def test_a_transfer_holds_streams_back_until_it_is_over():
    made, readers = grants("drain")
    assert offer(made, readers["rollout"], 0, 1) == [("rollout", (0,), 0), ("rollout", (1,), 1)]
    assert offer(made, readers["refit"]) == []
    assert offer(made, readers["rollout"], 2) == [], "held back"
    assert end(made, 1) == []
    assert end(made, 2) == [("refit", (), None)]
    assert offer(made, readers["rollout"]) == [], "the weights are being swapped"
    assert end(made, 3) == [("rollout", (2,), 0)]


def test_a_transfer_in_flight_waits_for_tasks_and_not_for_streams():
    made, readers = grants("in_flight", can_wait=False)
    offer(made, readers["rollout"], 0, 1)
    assert [running.task.stage for running in made.streams()] == ["rollout", "rollout"]
    assert offer(made, readers["judge"], 9) == [("judge", (9,), 0)]
    assert offer(made, readers["refit"]) == []
    assert end(made, 3) == [("refit", (), None)]
    assert offer(made, readers["rollout"], 2) == []
    assert end(made, 4) == [("rollout", (2,), 0)]


def test_what_can_wait_starts_when_the_last_stream_ends():
    made, readers = grants(can_wait=True)
    offer(made, readers["rollout"], 0, 1)
    assert offer(made, readers["judge"], 9) == []
    assert end(made, 1) == []
    assert end(made, 2) == [("judge", (9,), 0)]


def test_a_lost_task_gives_back_its_worker_and_its_load():
    made, readers = grants()
    offer(made, readers["rollout"], 0, 1)
    made.acknowledge(made.running(1), ())
    assert made.lose(made.running(1)) == (0,)
    assert made.running(1) is None and len(list(made.streams())) == 1
    readers["rollout"].give_back((0,), 0)
    assert offer(made, readers["rollout"]) == [("rollout", (0,), 0)], "the replica that streams nothing"
    offer(made, readers["train"], 0, 1, 2, 3)
    assert made.running(4).task.replica is None
    assert made.lose(made.running(4)) == (0, 1, 2, 3)
    readers["train"].give_back((0, 1, 2, 3), 0)
    assert offer(made, readers["train"]) == [("train", (0, 1, 2, 3), None)]
    assert made.running(5).task.attempt == 1
