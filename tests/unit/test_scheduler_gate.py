"""The scheduler with a gate: dropped groups are replaced, nobody behind sees them, and the order changes nothing."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Field, Graph, GraphError, Schedule
from pipeline.plan import plan
from pipeline.scheduler import Admit, Clear, Dropped, Finished, GiveUp, Landed, Run, Save, Saved, Scheduler, StepDone
from pipeline.stage import External
from tests.unit import toy
from tests.unit.toy import LOGPROBS, PROMPT, RESPONSE, REWARD, Toy

KEPT = Field("kept", dtype="bool")
OUTSIDE = Field("outside", dtype="float32")


def gate(*reads, **options):
    return Toy("gate", reads=reads or (REWARD,), writes=(KEPT,), gate=KEPT, **({"per": "group"} | options))


def graph(*extra, **options):
    """The toys with a gate behind the reward, and stages beside them."""
    schedule = Schedule(**({"steps": 3} | options.pop("schedule", {})))
    made = toy.graph(schedule=schedule, **options)
    return Graph(name="toy", source=made.source, stages=(*made.stages, *(extra or (gate(),))), schedule=schedule)


def ancestors(stages, name):
    """The stages that lead to what `name` reads, by walking back through the fields."""
    writer = {made.name: stage for stage in stages for made in stage.writes}
    found, todo = set(), [name]
    by_name = {stage.name: stage for stage in stages}
    while todo:
        for made in by_name[todo.pop()].reads:
            before = writer[made.name].name
            if before not in found:
                found.add(before)
                todo.append(before)
    return found


def batches(drop, batch, steps, first, limit):
    """What each step trains, told without a scheduler: (admitted, kept) a step; it ends where the limit is passed."""
    made = []
    for _ in range(steps):
        admitted, at = [], first
        while sum(not drop[group] for group in admitted) < batch:
            admitted.append(at)
            at += 1
        made.append((admitted, [group for group in admitted if not drop[group]]))
        if len(admitted) > limit:
            break
        first = at
    return made


@dataclass
class World:
    """Runs a plan with a gate in a random order and checks every decision against what it has seen itself."""

    graph: Graph
    drop: list
    rng: random.Random
    start: int = 0
    first: int = 0
    limit: int = 20_000
    running: list = field(default_factory=list)
    landed: set = field(default_factory=set)
    handed: dict = field(default_factory=dict)
    acknowledged: dict = field(default_factory=dict)
    admitted: dict = field(default_factory=dict)
    dropped: set = field(default_factory=set)
    cleared: list = field(default_factory=list)
    saving: list = field(default_factory=list)
    cursors: dict = field(default_factory=dict)
    done: list = field(default_factory=list)
    gave_up: GiveUp | None = None

    def __post_init__(self):
        self.plan = plan(self.graph)[0]
        stages = self.graph.all_stages()
        before = ancestors(stages, "gate")
        self.external = {stage.name for stage in stages if isinstance(stage, External)}
        self.before = {name for name in before if name not in self.external} | {"gate"}
        weights = self.plan.weights_fields
        holders = {s.name for s in self.plan.stages if any(name not in weights for name in s.reads + s.writes)}
        self.holders = holders - self.external
        self.read = {made.name for stage in stages for made in stage.reads}
        self.scheduler = Scheduler(self.plan, start=self.start, next_group=self.first)
        self.take(self.scheduler.begin())

    def take(self, decisions):
        for decision in decisions:
            match decision:
                case Admit(step=step, groups=groups):
                    known = [group for numbers in self.admitted.values() for group in numbers]
                    assert groups[0] == max(known, default=self.first - 1) + 1, "numbers count up without a gap"
                    assert groups == tuple(range(groups[0], groups[-1] + 1))
                    assert max(self.admitted, default=step) in (step, step - 1), "the step before is complete"
                    self.admitted.setdefault(step, []).extend(groups)
                case Run(task=task):
                    self.check_may_start(task)
                    self.running.append(task)
                case Clear(groups=groups):
                    for group in groups:
                        wanted = self.before if group in self.dropped else self.holders
                        skipped = {n for n in wanted if not self.plan.stage(n).runs_at(decision.step, self.plan.steps)}
                        assert {name for name, at in self.acknowledged if at == group} == wanted - skipped
                    self.cleared += groups
                case Save(step=step, next_group=next_group):
                    self.saving.append(step)
                    self.cursors[step] = next_group
                case StepDone(step=step):
                    self.done.append(step)
                case GiveUp():
                    self.gave_up = decision
        live = {group for numbers in self.admitted.values() for group in numbers} - self.dropped - set(self.cleared)
        assert len(live) <= self.plan.capacity
        uncleared = len(self.dropped - set(self.cleared))
        if self.gave_up is None:
            assert self.scheduler.in_flight == len(live) + uncleared

    def check_may_start(self, task):
        stage = self.plan.stage(task.stage)
        fields = [name for name in stage.reads if name not in self.plan.weights_fields]
        if stage.name in self.holders - self.before:
            fields.append("kept")
        if stage.name == "gate":
            fields += [name for at in self.external for name in self.plan.stage(at).writes if name in self.read]
        for group in task.groups:
            assert (task.stage, group) not in self.handed, "handed out twice"
            self.handed[task.stage, group] = task.step
            assert all((name, group) in self.landed for name in fields), (task, fields)
            assert stage.name in self.before or group not in self.dropped, "a dropped group is seen behind the gate"
        if stage.per == "batch" and stage.name in self.holders:
            assert list(task.groups) == sorted(task.groups)
            assert len(task.groups) == self.plan.batch

    def land(self, step, groups, fields):
        """Fields land group by group, in parts, in any order."""
        groups = list(groups)
        self.rng.shuffle(groups)
        while groups and self.gave_up is None:
            part = tuple(groups[: self.rng.randint(1, len(groups))])
            del groups[: len(part)]
            self.landed |= {(name, group) for name in fields for group in part}
            self.take(self.scheduler.handle(Landed(step, part, fields)))
            assert self.scheduler.handle(Landed(step, part, fields)) == [], "what lands again starts nothing"

    def decide(self, task):
        """What the gate says, in parts and in any order."""
        kept = [group for group in task.groups if not self.drop[group]]
        lost = [group for group in task.groups if self.drop[group]]
        parts = [lambda: self.land(task.step, kept, ("kept",))]
        while lost:
            part = [lost.pop() for _ in range(self.rng.randint(1, len(lost)))]
            parts.append(lambda part=part: self.lose(task.step, part))
        self.rng.shuffle(parts)
        for act in parts:
            if self.gave_up is None:
                act()

    def lose(self, step, groups):
        self.dropped |= set(groups)
        event = Dropped(step, dict.fromkeys(groups, "equal"))
        self.take(self.scheduler.handle(event))
        if self.gave_up is None:
            assert self.scheduler.handle(event) == [], "dropped once"

    def finish(self):
        task = self.running.pop(self.rng.randrange(len(self.running)))
        stage = self.plan.stage(task.stage)
        weights = tuple(name for name in stage.writes if name in self.plan.weights_fields)
        if weights:
            self.take(self.scheduler.handle(Landed(task.step, (), weights)))
        if task.stage == "gate":
            self.decide(task)
        else:
            self.land(task.step, task.groups, tuple(name for name in stage.writes if name not in weights))
        if self.gave_up is None:
            self.acknowledged |= dict.fromkeys((task.stage, group) for group in task.groups)
            self.take(self.scheduler.handle(Finished(task)))

    def from_outside(self):
        """Something that a process outside has written, if the graph waits for anything."""
        written = [name for at in sorted(self.external) for name in self.plan.stage(at).writes]
        for name in sorted(self.read.intersection(written)):
            for step in self.scheduler.steps_in_flight():
                if groups := self.scheduler.absent(step, name):
                    assert not self.dropped & set(groups)
                    self.land(step, [self.rng.choice(groups)], (name,))
                    return True
        return False

    def run(self):
        for _ in range(self.limit):
            if self.gave_up is not None:
                return self
            choice = self.rng.random()
            if self.saving and (choice < 0.3 or not self.running):
                self.take(self.scheduler.handle(Saved(self.saving.pop(0))))
            elif self.external and (choice < 0.5 or not self.running) and self.from_outside():
                continue
            elif self.running:
                self.finish()
            else:
                return self
        raise AssertionError("it does not end")

    def check_end(self):
        """Every step has trained what it had to, and nothing is left."""
        limit = self.plan.gate.max_groups
        steps = self.plan.steps - self.start
        expected = batches(self.drop, self.plan.batch, steps, self.first, limit)
        if len(expected[-1][0]) > limit:
            assert self.gave_up is not None
            assert self.gave_up.step == self.start + len(expected) - 1
            assert sum(map(len, self.admitted.values())) <= sum(len(a) for a, _ in expected[:-1]) + limit
            return
        assert self.gave_up is None
        assert self.scheduler.done, self.scheduler.waiting()
        assert self.scheduler.in_flight == 0
        assert sorted(self.cleared) == [group for admitted, _ in expected for group in admitted]
        assert [step for step in sorted(self.done) if step >= 0] == list(range(self.start, self.plan.steps))
        for step, (admitted, kept) in enumerate(expected, start=self.start):
            assert self.admitted[step] == admitted
            assert self.cursors.get(step, admitted[-1] + 1) == admitted[-1] + 1
            for name in self.holders:
                if self.plan.stage(name).runs_at(step, self.plan.steps):
                    had = sorted(group for (stage, group), at in self.handed.items() if (stage, at) == (name, step))
                    assert had == (admitted if name in self.before else kept), name


@st.composite
def graphs(draw, staleness=0):
    """Stages in any relation to each other and to the gate, which any of their fields may lead to."""
    rng = draw(st.randoms(use_true_random=False))
    fields, extra = [RESPONSE, REWARD], []
    if rng.random() < 0.3:
        extra.append(External((OUTSIDE,)))
        fields.append(OUTSIDE)

    def some(known):
        return tuple(rng.sample(known, rng.randint(1, min(3, len(known)))))

    for i in range(rng.randint(0, 3)):
        made = Field(f"early_{i}", dtype="float32")
        per = rng.choice(["group", "sample"])
        extra.append(Toy(f"early_{i}", reads=some([PROMPT, *fields]), writes=(made,), per=per))
        fields.append(made)
    decide = gate(*some(fields), max_rounds=rng.choice([2, 3, 10]))
    fields += [LOGPROBS]
    for i in range(rng.randint(0, 3)):
        made = Field(f"late_{i}", dtype="float32")
        reads = some([PROMPT, *fields]) + ((KEPT,) if rng.random() < 0.2 else ())
        every = rng.choice([1, 1, 2])
        writes = (made,) if every == 1 else ()
        extra.append(Toy(f"late_{i}", reads=reads, writes=writes, per=rng.choice(["group", "batch"]), every=every))
        fields += writes
    batch = rng.randint(1, 4)
    schedule = {
        "steps": rng.randint(1, 4),
        "max_staleness": staleness,
        "checkpoint_every": rng.randint(0, 2),
        "capacity": rng.choice([None, (staleness + 1) * batch]),
    }
    changes = {"train": {"corrects_off_policy": True}}
    if rng.random() < 0.3 and not staleness:  # no weights at all
        changes = {"rollout": {"reads_back": (), "models": ()}, "logprobs": {"models": ()}}
        changes |= {"train": None, "refit": None, "evaluate": None}
    extra.insert(rng.randint(0, len(extra)), decide)
    return graph(*extra, batch=batch, schedule=schedule, **changes)


@given(st.data(), st.integers(0, 2), st.randoms(use_true_random=False), st.sampled_from([0.0, 0.2, 0.6, 0.9]))
@settings(max_examples=120, deadline=None)
def test_any_graph_in_any_order_trains_the_first_groups_that_are_kept(data, staleness, rng, rate):
    described = data.draw(graphs(staleness))
    drop = [rng.random() < rate for _ in range(400)] + [False] * 200
    World(described, drop, random.Random(rng.random())).run().check_end()


@given(st.integers(1, 5), st.lists(st.booleans(), min_size=0, max_size=40), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_batch_does_not_depend_on_the_order(batch, pattern, rng):
    drop = pattern + [False] * 100
    described = graph(gate(max_rounds=100), batch=batch, schedule={"steps": 2})
    worlds = [World(described, drop, random.Random(seed)).run() for seed in (rng.random(), rng.random())]
    for world in worlds:
        world.check_end()
    trained = [{(group, step) for (name, group), step in world.handed.items() if name == "train"} for world in worlds]
    assert trained[0] == trained[1]


@given(st.lists(st.booleans(), min_size=20, max_size=20), st.randoms(use_true_random=False), st.integers(0, 1))
@settings(max_examples=50, deadline=None)
def test_a_resumed_run_goes_on_with_the_next_number(pattern, rng, staleness):
    drop = pattern + [False] * 100
    changes = {"train": {"corrects_off_policy": True}}
    schedule = {"steps": 4, "checkpoint_every": 2, "max_staleness": staleness}
    described = graph(gate(max_rounds=100), batch=2, schedule=schedule, **changes)
    whole = World(described, drop, random.Random(rng.random())).run()
    whole.check_end()
    resumed = World(described, drop, random.Random(rng.random()), start=2, first=whole.cursors[1]).run()
    resumed.check_end()
    assert resumed.admitted == {step: groups for step, groups in whole.admitted.items() if step >= 2}
    assert resumed.cursors[3] == whole.cursors[3]


def test_a_gate_that_drops_everything_ends_the_run_and_says_so():
    world = World(graph(gate(max_rounds=3), batch=2), [True] * 50, random.Random(0)).run()
    assert world.gave_up is not None
    told = r"stage 'gate' dropped (5|6) of 6 groups at step 1 and the batch of 2 is not full: \1 \(equal\)"
    assert re.fullmatch(told, world.gave_up.problem.what)
    assert world.gave_up.problem.why.startswith("max_rounds=3 allows 6 groups a step")
    assert len(world.admitted[0]) == 6


def test_the_last_group_that_max_rounds_allows_is_sampled():
    drop = [True, True, True, True, False, False]
    World(graph(gate(max_rounds=3), batch=2, schedule={"steps": 1}), drop, random.Random(0)).run().check_end()


def test_a_dropped_group_is_replaced_in_the_same_transaction():
    scheduler = Scheduler(plan(graph(batch=2))[0])
    begun = scheduler.begin()
    assert [d.groups for d in begun if isinstance(d, Admit)] == [(0, 1)], "the next batch has no numbers yet"
    scheduler.handle(Landed(-1, (), ("served_weights",)))
    after = scheduler.handle(Dropped(0, {1: "equal"}))
    assert after[0] == Admit(0, (2,))
    assert [(d.task.stage, d.task.groups) for d in after[1:]] == [("prompts", (2,))]
    assert scheduler.in_flight == 3, "the dropped group still lies in the data plane"


def test_the_next_step_is_admitted_when_the_batch_is_kept():
    scheduler = Scheduler(plan(graph(batch=2, schedule={"capacity": 8}))[0])
    scheduler.begin()
    assert scheduler.handle(Landed(0, (0,), ("kept",))) == []
    scheduler.handle(Dropped(0, {1: "equal"}))
    after = scheduler.handle(Landed(0, (2,), ("kept",)))
    assert [d for d in after if isinstance(d, Admit)] == [Admit(1, (3, 4))]


def test_waiting_names_the_gate():
    scheduler = Scheduler(plan(graph(batch=1))[0])
    scheduler.begin()
    scheduler.handle(Landed(-1, (), ("served_weights",)))
    for name in ("prompt", "response", "reward"):
        scheduler.handle(Landed(0, (0,), (name,)))
    waits = {stage: what for step, stage, what in scheduler.waiting() if step == 0}
    assert waits["logprobs"] == ("kept",)
    assert waits["samples"] == ("kept",)
    scheduler.handle(Dropped(0, {0: "equal"}))
    waits = {stage: what for step, stage, what in scheduler.waiting() if step == 0}
    assert waits["logprobs"] == ("response", "kept")
    for name in ("prompt", "response", "reward", "kept"):
        scheduler.handle(Landed(0, (1,), (name,)))
    waits = {stage: what for step, stage, what in scheduler.waiting() if step == 0}
    assert waits["train"] == ("logprobs 0", "refit -1", "logprobs"), "it no longer waits for what was dropped"


def test_the_plan_says_who_waits_for_the_gate():
    described = graph(gate(), External((OUTSIDE,)), Toy("late", reads=(OUTSIDE, KEPT)))
    planned, warnings = plan(described)
    assert warnings == plan(graph())[1] == []
    awaits = {stage.name: stage.awaits for stage in planned.stages if stage.awaits}
    assert awaits == {"logprobs": ("kept",), "train": ("kept",), "samples": ("kept",), "gate": ("outside",)}
    layer = {stage.name: stage.layer for stage in planned.stages}
    assert layer["logprobs"] > layer["gate"] > layer["reward"]
    free = {edge.reader for edge in planned.edges if edge.field == "kept" and not edge.bytes_per_sample}
    assert free == {"logprobs", "train", "samples"}
    assert "kept" not in planned.stage("samples").reads


def problems(*extra, **options):
    with pytest.raises(GraphError) as error:
        plan(graph(*extra, **options))
    return [problem.what for problem in error.value.problems]


def test_gates_that_cannot_work_are_refused():
    other = Toy("other", reads=(REWARD,), writes=(OUTSIDE,), gate=OUTSIDE, per="group")
    assert problems(gate(), other) == ["2 stages drop groups ('gate', 'other')"]
    assert problems(gate(), reward={"per": "batch"}) == [
        "stage 'reward' starts on whole batches and is before 'gate', which reads what it leads to"
    ]
    nothing = {"rollout": {"reads_back": (), "models": ()}}
    nothing |= dict.fromkeys(("logprobs", "train", "refit", "evaluate"))
    assert problems(gate(), **nothing) == ["no stage is behind 'gate'"]
    for rounds in (1, 2.5, True, None):
        assert problems(gate(max_rounds=rounds)) == [f"stage 'gate' has max_rounds={rounds!r}"]
    assert problems(gate(per="batch")) == ["stage 'gate' has a gate; it is a map stage per batch and writes 'kept'"]
    unwritten = Toy("gate", reads=(REWARD,), writes=(OUTSIDE,), gate=KEPT, per="group")
    assert problems(unwritten, Toy("late", reads=(OUTSIDE,))) == [
        "stage 'gate' has a gate; it is a map stage per group and writes 'outside'"
    ]
