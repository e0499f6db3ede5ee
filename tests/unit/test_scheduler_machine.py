"""Invariants of the scheduler under any order of events from workers, the data plane and outside processes.

`World` plays them and checks each decision on its own: what is handed out, where, when and how often (exactly once per
attempt, nothing before its last field, no step before its fences), what is claimed, dropped, cleared and saved. The
rules add disorder: partial streams, duplicate or late reports, lost attempts, slow checkpoints, a killed run. Each run
then continues without faults and must end cleanly.
"""

from __future__ import annotations

import functools
import random
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipeline import Field, Graph, Schedule
from pipeline.declare.stage import External
from pipeline.plan.plan import Plan
from pipeline.plan.planner import plan
from pipeline.schedule.events import AttemptLost, Finished, GroupsDropped, Landed, Saved
from pipeline.schedule.scheduler import Scheduler
from tests.examples import few
from tests.unit import toy
from tests.unit.toy import LOGPROBS, PROMPT, REF, RESPONSE, REWARD, VERSIONS, Toy
from tests.unit.world import World

OUTSIDE = Field("outside", dtype="float32")
KEPT = Field("kept", dtype="bool")
ADVANTAGE = Field("advantage", dtype="float32")
JUDGED = Field("judged", dtype="float32")


class Case(NamedTuple):
    """One schedule of one graph. If `served`, weights are published; `extras` are additional stages."""

    batch: int = 2
    steps: int = 3
    staleness: int = 0
    depth: int | None = None
    on_stale: str = "wait"
    refit: str = "drain"
    capacity: int | None = None
    checkpoint_every: int = 0
    sampler: int = 1
    learner: int = 1
    run_groups: int | None = None
    stream: bool = True
    served: bool = True
    extras: frozenset[str] = frozenset()


@functools.lru_cache(maxsize=4096)
def planned(case: Case) -> Plan:
    """Return the plan of a case."""
    schedule = Schedule(
        steps=case.steps,
        max_staleness=case.staleness,
        pipeline_depth=case.depth,
        on_stale=case.on_stale,
        refit=case.refit,
        capacity=case.capacity,
        checkpoint_every=case.checkpoint_every,
    )
    reads = [REWARD, LOGPROBS, REF, VERSIONS, *([ADVANTAGE] if "advantage" in case.extras else [])]
    changes = toy.streaming(
        sampler=case.sampler, learner=case.learner, run_groups=case.run_groups, train={"reads": tuple(reads)}
    )
    if not case.stream:
        changes["rollout"]["shape"] = "map"
    if not case.served:
        changes["rollout"] |= {"reads_back": (), "models": ()}
        changes |= {"refit": None, "evaluate": None}
    sampler = changes["rollout"]["on"]
    more = []
    if "advantage" in case.extras:
        more.append(Toy("advantage", reads=(REWARD,), writes=(ADVANTAGE,), per="group"))
    if "judge" in case.extras:  # no weights depend on it, and it shares the sampler's workers
        more.append(Toy("judge", reads=(RESPONSE,), writes=(JUDGED,), on=sampler))
    if "report" in case.extras:
        more.append(Toy("report", reads=(PROMPT, REWARD), per="batch", on=sampler, every=2))
    if "gate" in case.extras:
        more.append(Toy("gate", reads=(REWARD,), writes=(KEPT,), gate=KEPT, per="group"))
    if "outside" in case.extras:
        more += [External((OUTSIDE,)), Toy("late", reads=(RESPONSE, OUTSIDE), per="group")]
    made = toy.graph(batch=case.batch, schedule=schedule, **changes)
    return plan(Graph(name="toy", source=made.source, stages=(*made.stages, *more), schedule=schedule))[0]


@st.composite
def cases(draw, **fixed: st.SearchStrategy) -> Case:
    """Draw any case that passes the checks; `fixed` replaces the strategies of single parameters."""

    def pick(name, strategy):
        return draw(fixed.get(name, strategy))

    batch = pick("batch", st.sampled_from([2, 1, 3, 4]))
    replicas = st.sampled_from([count for count in (1, 2, 3, 4) if batch % count == 0])
    staleness = pick("staleness", st.sampled_from([1, 0, 2, 3, 4]))
    served = pick("served", st.sampled_from([True, True, True, False]))
    return Case(
        batch=batch,
        steps=pick("steps", st.sampled_from([5, 4, 3, 6, 2, 1])),
        staleness=staleness,
        depth=pick("depth", st.none() | st.integers(0, staleness)),
        on_stale=pick("on_stale", st.sampled_from(["wait", "drop"])) if served else "wait",
        refit=pick("refit", st.sampled_from(["drain", "in_flight"])),
        capacity=pick("capacity", st.none() | st.integers((staleness + 1) * batch, (staleness + 3) * batch)),
        checkpoint_every=pick("checkpoint_every", st.integers(0, 2)),
        sampler=pick("sampler", replicas),
        learner=pick("learner", replicas),
        run_groups=pick("run_groups", st.none() | st.integers(1, batch)),
        stream=pick("stream", st.sampled_from([True, True, True, False])),
        served=served,
        extras=pick("extras", st.frozensets(st.sampled_from(["advantage", "judge", "report", "gate", "outside"]))),
    )


dropped_groups = st.frozensets(st.integers(0, 20), max_size=8)  # too few to reach the limit of any gate


AGEING = dict(
    staleness=st.integers(1, 2),
    served=st.just(True),
    on_stale=st.just("drop"),
    refit=st.sampled_from(["in_flight", "in_flight", "drain"]),
    steps=st.integers(5, 8),
    stream=st.just(True),
)


class Disorder(RuleBasedStateMachine):
    """A run with every kind of fault. `slow` groups are yielded only if a rule does so, and at the end."""

    any_case = cases()
    any_slow = st.frozensets(st.integers(0, 12), max_size=4)

    @initialize(data=st.data(), drops=dropped_groups)
    def begin(self, data, drops):
        case, self.slow = data.draw(self.any_case, label="case"), data.draw(self.any_slow, label="slow")
        self.plan, self.drops = planned(case), drops
        self.checkpoints = [(0, None, ())]
        self.trained = {}  # step -> its batch, up to the last checkpoint that was resumed from
        self.world = World(self.plan, drops=drops.__contains__)
        self.restarts = 0

    def job(self, data, wanted=lambda job: True):
        jobs = [job for job in self.world.jobs.values() if wanted(job)]
        return data.draw(st.sampled_from(jobs), label="job") if jobs else None

    def some(self, data, groups):
        return data.draw(st.lists(st.sampled_from(groups), unique=True, min_size=1), label="groups") if groups else []

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data())
    def a_task_does_all_that_is_left(self, data):
        self.world.finish(self.job(data))

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data())
    def the_first_token(self, data):
        """A group's first token comes late, or from weights that the scheduler does not know of yet."""
        job = self.job(data, lambda job: job.stage.stamps)
        if job:
            has = self.world.version_on(job.task)
            coming = [other.task.step + 1 for other in self.world.jobs.values() if other.stage.shape == "transfer"]
            swapped = self.plan.refit == "in_flight" and coming and data.draw(st.booleans(), label="swapped")
            version = max([has, *coming]) if swapped else has
            for group in self.some(data, job.left):
                job.first.setdefault(group, version)

    @precondition(lambda self: self.transfer)
    @rule(data=st.data())
    def a_replica_has_a_version_first(self, data):
        job = self.transfer
        self.world.serve(job, data.draw(st.integers(0, self.world.replicas[job.stage.groups[-1]] - 1), label="replica"))

    @property
    def transfer(self):
        """Return a running transfer to several replicas, or None."""
        return next(
            (
                job
                for job in self.world.jobs.values()
                if job.stage.shape == "transfer" and self.world.replicas[job.stage.groups[-1]] > 1
            ),
            None,
        )

    @rule(reports=st.integers(5, 60), seed=st.integers(0, 2**16))
    def it_goes_well_for_a_while(self, reports, seed):
        """Report without faults for a while; otherwise most runs would never reach a checkpoint."""
        rng = random.Random(seed)
        for _ in range(reports):
            self.world.step(rng.randrange, self.slow)
        self.note_checkpoints()

    @rule(data=st.data())
    def a_stream_yields(self, data):
        job = self.job(data, lambda job: job.stage.shape == "stream" and job.left)
        if job:
            groups = self.some(data, job.left)
            self.world.land(job, groups)
            self.world.acknowledge(job, groups)

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data())
    def a_task_writes_and_does_not_acknowledge(self, data):
        job = self.job(data)
        self.world.land_weights(job)
        if groups := self.some(data, job.left):
            self.world.land(job, groups)

    @rule(data=st.data())
    def it_acknowledges_later(self, data):
        job = self.job(data, lambda job: job.landed.intersection(job.left))
        if job:
            self.world.land_weights(job)
            self.world.acknowledge(job, self.some(data, [group for group in job.left if group in job.landed]))

    @rule(data=st.data())
    def it_gives_up_what_was_cancelled(self, data):
        job = self.job(data, lambda job: job.cancelled.intersection(job.left))
        if job:
            self.world.acknowledge(job, self.some(data, [group for group in job.left if group in job.cancelled]))

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data())
    def a_worker_is_lost(self, data):
        self.world.fail(self.job(data))

    @precondition(lambda self: self.world.over)
    @rule(data=st.data())
    def a_zombie_reports(self, data):
        """I10. No report of an ended task causes a decision."""
        task = data.draw(st.sampled_from(self.world.over), label="zombie")
        stage = self.plan.stage(task.stage)
        reports = [
            Landed(task.step, task.groups, stage.writes, oldest=(0,) * len(task.groups), task=task.number),
            GroupsDropped(task.step, dict.fromkeys(task.groups, "equal"), task=task.number),
            Finished(task, task.groups),
            AttemptLost(task),
        ]
        for report in data.draw(st.lists(st.sampled_from(reports), min_size=1), label="reports"):
            assert self.world.tell(report) == []

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data())
    def a_report_comes_twice(self, data):
        job = self.job(data)
        task, stage = job.task, job.stage
        behind = tuple(group for group in task.groups if group not in job.left)
        if behind:
            assert self.world.tell(Finished(task, behind)) == []
        written = tuple(field for field in stage.writes if field not in self.world.weights)
        for group in job.landed:
            if (written[:1] and (written[0], group) in self.world.landed) and not self.world.is_gate(stage):
                assert self.world.tell(Landed(task.step, (group,), written, task=task.number)) == []
            elif self.world.is_gate(stage) and group in self.world.dropped:
                assert self.world.tell(GroupsDropped(task.step, {group: "again"}, task=task.number)) == []

    @precondition(lambda self: self.world.saving)
    @rule(twice=st.booleans())
    def a_checkpoint_is_written(self, twice):
        step = self.world.saving[0]
        self.world.save()
        if twice:
            assert self.world.tell(Saved(step)) == []
        self.note_checkpoints()

    def note_checkpoints(self):
        saves = [self.world.saves[step] for step in self.world.saved]
        self.checkpoints += [(save.step + 1, save.next_group, save.pending) for save in saves]

    @precondition(lambda self: self.world.absent())
    @rule(data=st.data())
    def the_outside_writes(self, data):
        self.world.from_outside(data.draw(st.integers(0, len(self.world.absent()) - 1)))

    @precondition(lambda self: self.restarts < min(3, 1 + len(self.world.saved) + self.world.start))
    @rule()
    def the_run_is_killed(self):
        """I8. The run restarts from the last checkpoint."""
        self.restarts += 1
        start, next_group, pending = self.checkpoints[-1]
        known = self.trained | self.world.batches
        self.trained = {step: groups for step, groups in known.items() if step < start}
        self.world = World(
            self.plan, start=start, next_group=next_group, pending=pending, drops=self.drops.__contains__
        )

    @invariant()
    def no_group_is_in_two_batches(self):
        """I2, across restarts."""
        if hasattr(self, "world"):
            batches = {**self.trained, **self.world.batches}
            groups = [group for of in batches.values() for group in of]
            assert len(groups) == len(set(groups))
            assert not self.drops.intersection(groups) or self.plan.gate is None

    def teardown(self):
        """I5. Once faults stop, the run ends within a bounded number of events."""
        if hasattr(self, "world"):
            most = len(self.plan.stages) * (2 * self.plan.batch + 1) * (self.plan.steps + self.plan.max_staleness + 12)
            turn = iter(range(10**6))
            self.world.run(lambda count: (next(turn) * 7919) % count, limit=most)
            self.world.check_end()
            self.no_group_is_in_two_batches()


class DisorderWithDrops(Disorder):
    """The same with samples that become too old."""

    any_case = cases(**AGEING)
    any_slow = st.frozensets(st.integers(0, 8), min_size=1, max_size=4)


TestDisorder = Disorder.TestCase
TestDisorder.settings = settings(max_examples=few(60), stateful_step_count=50, deadline=None)
TestDisorderWithDrops = DisorderWithDrops.TestCase
TestDisorderWithDrops.settings = settings(max_examples=few(60), stateful_step_count=50, deadline=None)


def disorderly(case: Case, drops: frozenset[int], rng: random.Random, *, slow: float, faults: float) -> World:
    """Run to the end with some slow groups and some lost attempts."""
    world = World(planned(case), drops=drops.__contains__)
    waits = [group for group in range(60) if rng.random() < slow]
    for _ in range(5_000):
        if world.jobs and rng.random() < faults:
            world.fail(rng.choice(list(world.jobs.values())))
        elif not world.step(rng.randrange, waits):
            if not waits:
                return world
            waits.pop(0)
        elif waits and not rng.randrange(40):
            waits.pop(0)
    raise AssertionError("it does not end")


@given(cases(), dropped_groups, st.randoms(use_true_random=False))
@settings(max_examples=few(100), deadline=None)
def test_any_case_in_any_order_comes_to_its_end(case, drops, rng):
    disorderly(case, drops, rng, slow=rng.choice([0, 0.2]), faults=rng.choice([0, 0.05])).check_end()


def stopped(world: World, rng: random.Random, after: int) -> World:
    """Ask a run to stop after `after` reports, and let running tasks end."""
    for _ in range(after):
        world.step(rng.randrange)
    if world.gave_up is not None or world.scheduler.done:
        return world
    admitted, last = set(world.admitted), world.stop()
    while not world.scheduler.stopped:
        assert world.step(rng.randrange), world.scheduler.waiting()
    world.check_stopped(last)
    while world.step(rng.randrange):  # later reports change nothing
        assert world.scheduler.stopped
    assert set(world.admitted) == admitted
    return world


@given(st.one_of(cases(), cases(**AGEING)), dropped_groups, st.randoms(use_true_random=False), st.integers(0, 120))
@settings(max_examples=few(100), deadline=None)
def test_a_run_that_is_asked_to_stop_saves_what_it_has_trained_and_goes_on_from_there(case, drops, rng, after):
    case = case._replace(extras=case.extras - {"outside"})
    if not any(stage.updates for stage in planned(case).stages):
        return
    world = stopped(World(planned(case), drops=drops.__contains__), rng, after)
    if not world.saved or world.gave_up is not None or (len(world.saved) and world.saved[-1] + 1 == case.steps):
        return
    save = world.saves[world.saved[-1]]
    again = World(
        planned(case), start=save.step + 1, next_group=save.next_group, pending=save.pending, drops=drops.__contains__
    ).run(rng.randrange)
    if again.gave_up is None:
        again.check_end()
        first = {group for step, groups in world.batches.items() if step <= save.step for group in groups}
        assert first.isdisjoint(group for groups in again.batches.values() for group in groups)


@given(cases(**AGEING), st.frozensets(st.integers(0, 20), max_size=2), st.integers(0, 2**32))
@settings(max_examples=few(80), deadline=None)
def test_samples_that_become_too_old_are_replaced(case, drops, seed):
    disorderly(case, drops, random.Random(seed), slow=0.2, faults=0.02).check_end()


@given(cases(staleness=st.just(0)), dropped_groups, st.randoms(use_true_random=False))
@settings(max_examples=few(40), deadline=None)
def test_without_staleness_every_schedule_decides_the_same(case, drops, rng):
    """k = 0 is sync: neither `on_stale` nor `refit` changes any decision."""
    world = World(planned(case), drops=drops.__contains__).run(rng.randrange)
    for on_stale in ("wait", "drop"):
        for refit in ("drain", "in_flight"):
            other = Scheduler(planned(case._replace(on_stale=on_stale, refit=refit)))
            other.begin()
            for event, decisions in world.log:
                assert other.handle(event) == decisions


def units(world: World) -> set[tuple]:
    """Return the tasks of streaming stages and of stages with whole batches, each with its groups."""
    stages = world.stages
    return {
        (task.stage, task.step, task.groups)
        for task in world.ran
        if stages[task.stage].shape == "stream" or stages[task.stage].per == "batch"
    }


@given(cases(on_stale=st.just("wait")), dropped_groups, st.randoms(use_true_random=False))
@settings(max_examples=few(60), deadline=None)
def test_what_is_computed_together_follows_from_admission(case, drops, rng):
    if case.staleness and case.depth != 0:  # then a gate's drops are replaced at once, not per round
        case = case._replace(extras=case.extras - {"gate"})
    orders = [rng.randrange, lambda count: 0, lambda count: count - 1]
    found = [units(World(planned(case), drops=drops.__contains__).run(order)) for order in orders]
    assert found[0] == found[1] == found[2]
