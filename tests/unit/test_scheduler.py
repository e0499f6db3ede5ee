"""The scheduler as a pure machine: exactly once, nothing before its last field, nothing lost, in any order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Schedule
from pipeline.plan import plan
from pipeline.scheduler import Admit, Clear, Finished, Landed, Run, Save, Saved, Scheduler, StepDone
from pipeline.staleness import admissible, askable
from tests.unit import toy


class World:
    """Runs tasks in whatever order it is told, and checks every decision against what it has seen itself."""

    def __init__(self, planned, start=0):
        self.plan = planned
        self.scheduler = Scheduler(planned, start=start)
        self.running = []
        self.landed = set()  # (field, step, group) and (weights field, step)
        self.handed, self.finished = [], []
        self.admitted, self.cleared, self.steps_done, self.saved = [], [], [], []
        self.versions = []
        self.start = start
        self.saving = []
        self.take(self.scheduler.begin())

    def take(self, decisions):
        for decision in decisions:
            match decision:
                case Admit(step=step, groups=groups):
                    self.check_admitted(step, groups)
                    self.admitted += groups
                    assert len(self.admitted) - len(self.cleared) <= self.plan.capacity
                case Run(task=task):
                    self.check_may_start(task)
                    self.handed += [(task.stage, task.step, group) for group in task.groups or (None,)]
                    self.running.append(task)
                case Clear(groups=groups):
                    self.cleared += groups
                case Save(step=step, next_group=next_group):
                    assert next_group == (step + 1) * self.plan.batch
                    self.saving.append(step)
                case StepDone(step=step):
                    self.steps_done.append(step)

    def check_admitted(self, step, groups):
        assert groups == tuple(range(step * self.plan.batch, (step + 1) * self.plan.batch))

    def check_may_start(self, task):
        stage = self.plan.stage(task.stage)
        opening = task.step < self.start
        for field in stage.reads:
            if field in self.plan.weights_fields:
                assert (field, task.step) in self.landed or (opening and stage.shape == "transfer"), (task, field)
            else:
                assert all((field, task.step, group) in self.landed for group in task.groups), (task, field)
        for field in stage.reads_back:
            assert (field, max(self.start, task.step - self.plan.max_staleness) - 1) in self.landed, (task, field)
        for fence in self.plan.fences:
            if fence.after == task.stage:
                at = task.step - fence.lag
                for stage_name, step, *_ in [(t.stage, t.step) for t in self.running]:
                    assert (stage_name, step) != (fence.before, at), f"{task.stage} started inside {fence}"
                if fence.lag == 0 and self.plan.stage(fence.before).runs_at(at, self.plan.steps):
                    assert any(t.stage == fence.before and t.step == at for t in self.finished), fence

    def finish(self, index):
        task = self.running.pop(index % len(self.running))
        stage = self.plan.stage(task.stage)
        weights = tuple(f for f in stage.writes if f in self.plan.weights_fields)
        fields = tuple(f for f in stage.writes if f not in self.plan.weights_fields)
        self.finished.append(task)
        if weights:
            self.landed |= {(field, task.step) for field in weights}
            if stage.shape == "transfer":
                self.versions.append(task.step + 1)
            self.take(self.scheduler.handle(Landed(task.step, (), weights)))
        if fields:
            self.landed |= {(field, task.step, group) for field in fields for group in task.groups}
            self.take(self.scheduler.handle(Landed(task.step, task.groups, fields)))
        self.take(self.scheduler.handle(Finished(task)))

    def run(self, choose):
        for _ in range(10_000):
            if self.saving and (not self.running or choose(2)):
                step = self.saving.pop(0)
                self.saved.append(step + 1)
                self.take(self.scheduler.handle(Saved(step)))
            elif self.running:
                self.finish(choose(len(self.running)))
            else:
                break
        return self

    def check_end(self):
        total = range(self.start * self.plan.batch, self.plan.steps * self.plan.batch)
        assert self.scheduler.done, self.scheduler.waiting()
        assert sorted(self.admitted) == sorted(self.cleared) == list(total)
        assert len(self.handed) == len(set(self.handed)), "handed out twice"
        assert [step for step in sorted(self.steps_done) if step >= 0] == list(range(self.start, self.plan.steps))
        assert self.versions == list(range(self.start, self.plan.steps + 1)), "published versions rise by one"
        for stage in self.plan.stages:
            steps = {step for name, step, _ in self.handed if name == stage.name and step >= self.start}
            expected = {s for s in range(self.start, self.plan.steps) if stage.runs_at(s, self.plan.steps)}
            assert steps == expected, stage.name


def build(**options):
    changes = options.pop("changes", {})
    schedule = Schedule(**({"steps": 3} | options.pop("schedule", {})))
    return plan(toy.graph(schedule=schedule, **options, **changes))[0]


@given(
    st.randoms(use_true_random=False),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(0, 2),
)
@settings(max_examples=200, deadline=None)
def test_any_order_of_completion_trains_every_group_exactly_once(random, batch, steps, every, staleness, start):
    planned = build(
        batch=batch,
        schedule={"steps": steps + start, "checkpoint_every": every, "max_staleness": staleness},
        changes={"train": {"corrects_off_policy": True}},
    )
    world = World(planned, start=start).run(lambda count: random.randrange(count))
    world.check_end()
    expected = [s for s in range(start + 1, steps + start + 1) if s == steps + start or (every and s % every == 0)]
    assert world.saved == expected


def test_a_reader_starts_once_after_its_last_field():
    scheduler = Scheduler(build(batch=2))
    begun = [(d.task.stage, d.task.step) for d in scheduler.begin() if isinstance(d, Run)]
    assert begun == [("refit", -1), ("prompts", 0), ("prompts", 1)], "prompts are made ahead of the sampler"
    published = scheduler.handle(Landed(-1, (), ("served_weights",)))
    assert [(d.task.stage, d.task.step) for d in published] == [("evaluate", -1)]
    assert [d.task.stage for d in scheduler.handle(Landed(0, (0, 1), ("response",)))] == ["logprobs"]
    started = scheduler.handle(Landed(0, (1,), ("prompt",)))
    assert {d.task.stage: d.task.groups for d in started} == {"rollout": (1,), "reward": (1,)}
    assert scheduler.handle(Landed(0, (1,), ("prompt",))) == [], "a field that lands again starts nothing"
    started = scheduler.handle(Landed(0, (0,), ("prompt",)))
    assert {d.task.stage: d.task.groups for d in started} == {"rollout": (0,), "reward": (0,)}


def test_a_batch_stage_waits_for_the_whole_batch():
    scheduler = Scheduler(build(batch=2))
    scheduler.begin()
    scheduler.handle(Landed(-1, (), ("served_weights",)))
    first = scheduler.handle(Landed(0, (1,), ("response",)))
    assert "logprobs" not in {d.task.stage for d in first}
    then = scheduler.handle(Landed(0, (0,), ("response",)))
    assert [d.task.groups for d in then if d.task.stage == "logprobs"] == [(0, 1)], "canonical order, not arrival"


def test_train_waits_for_the_checkpoint_of_the_step_before():
    world = World(build(batch=1, schedule={"steps": 2, "checkpoint_every": 1}))
    while not world.saving:
        world.finish(0)
    for _ in range(20):
        if world.running:
            world.finish(0)
    assert ("train", 1, 1) not in world.handed
    assert any("checkpoint 1" in what for _, stage, what in world.scheduler.waiting() if stage == "train")
    world.take(world.scheduler.handle(Saved(0)))
    assert ("train", 1, 1) in world.handed


def test_waiting_names_what_is_missing():
    scheduler = Scheduler(build(batch=1))
    scheduler.begin()
    scheduler.handle(Landed(-1, (), ("served_weights",)))
    waits = {stage: what for step, stage, what in scheduler.waiting() if step == 0}
    ahead = {stage: what for step, stage, what in scheduler.waiting() if step == 1}
    assert ahead["rollout"] == ("version 1", "prompt")
    assert waits["reward"] == ("prompt", "response")
    assert waits["refit"] == ("evaluate -1", "trained_weights")


def test_a_graph_without_weights_runs_step_after_step():
    planned = build(
        changes={
            "rollout": {"reads_back": (), "models": ()},
            "logprobs": None,
            "train": None,
            "refit": None,
            "evaluate": None,
        }
    )
    world = World(planned).run(lambda count: 0)
    assert world.scheduler.done and sorted(world.cleared) == list(range(12))


@given(st.integers(0, 50), st.integers(0, 4), st.integers(1, 64), st.integers(0, 9999), st.integers(0, 512))
def test_asking_never_passes_the_bound_of_staleness(version, k, batch, trained, asked):
    more = askable(version=version, max_staleness=k, batch=batch, trained=trained, asked=asked)
    assert more >= 0
    if more:
        assert trained + asked + more == (k + version + 1) * batch


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_admission_never_passes_the_capacity(capacity, held):
    more = admissible(capacity=capacity, held=held)
    assert more >= 0
    assert held + more <= max(capacity, held)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_rollout_runs_ahead_by_the_bound_and_no_further(staleness):
    planned = build(
        batch=1,
        schedule={"steps": 8, "max_staleness": staleness},
        changes={"train": {"corrects_off_policy": True}, "evaluate": None},
    )
    world = World(planned)
    for _ in range(200):  # everything but training goes on as far as it can
        free = [i for i, task in enumerate(world.running) if task.stage != "train"]
        if not free:
            break
        world.finish(free[0])
    asked = {step for stage, step, _ in world.handed if stage == "rollout"}
    assert asked == set(range(staleness + 1))
    assert len(world.admitted) == staleness + 2, "one batch of prompts is ready"
