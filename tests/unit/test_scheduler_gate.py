"""The scheduler with a gate: dropped groups are replaced, later stages never get them, and order changes nothing."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Field, Graph, GraphError, Schedule, WorkerGroup
from pipeline.declare.stage import External, Gate
from pipeline.plan.planner import plan
from pipeline.schedule.events import Admit, GroupsDropped
from tests.examples import few
from tests.unit import toy
from tests.unit.toy import LOGPROBS, PROMPT, RESPONSE, REWARD, VERSIONS, Toy
from tests.unit.world import World

KEPT = Field("kept", dtype="bool")
OUTSIDE = Field("outside", dtype="float32")


def gate(*reads, **options):
    return Toy("gate", reads=reads or (REWARD,), writes=(KEPT,), **({"per": "group", "gate": KEPT} | options))


def graph(*extra, **options):
    """Return the toy graph with a gate after the reward, or with the stages `extra` instead."""
    schedule = Schedule(**({"steps": 3} | options.pop("schedule", {})))
    made = toy.graph(schedule=schedule, **options)
    return Graph(name="toy", source=made.source, stages=(*made.stages, *(extra or (gate(),))), schedule=schedule)


def batches(drop, batch, steps, first, limit):
    """Return (admitted, kept) groups per step, computed without a scheduler; stops at a step that exceeds the limit."""
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


def world_of(described, drop, **options):
    return World(plan(described)[0], drops=drop.__getitem__, **options)


def check_end(world, drop, first=0):
    """Check that steps train the first kept groups and sample no others, or that the gate gave up at its limit."""
    limit, batch, pool = world.plan.gate.max_groups, world.plan.batch, world.plan.pool
    expected = batches(drop, batch, world.plan.steps - world.start, first, limit)
    admitted = {step: [g for g, at in world.admitted.items() if at == step] for step in world.admitted.values()}
    if len(expected[-1][0]) > limit:
        assert world.gave_up is not None
        assert world.gave_up.step == world.start + len(expected) - 1
        if not pool:
            assert len(world.admitted) <= sum(len(groups) for groups, _ in expected[:-1]) + limit
        return
    assert world.gave_up is None
    world.check_end()
    for step, (sampled, kept) in enumerate(expected, start=world.start):
        assert list(world.batches[step]) == kept and (pool or admitted[step] == sampled)
        if step in world.saves and not pool:
            assert world.saves[step].next_group == sampled[-1] + 1 and not world.saves[step].pending
        for name in world.holding:
            if world.runs_at(name, step):
                had = sorted(group for stage, group in world.acked if stage == name and group in sampled)
                assert had == (sampled if name in world.before_gate else kept), name
    assert set(world.admitted) == {group for sampled, _ in expected for group in sampled}, "and no more"


@st.composite
def graphs(draw, staleness=0):
    """Draw graphs with random stages before and after a gate that reads random fields."""
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
@settings(max_examples=few(60), deadline=None)
def test_any_graph_in_any_order_trains_the_first_groups_that_are_kept(data, staleness, rng, rate):
    described = data.draw(graphs(staleness))
    drop = [rng.random() < rate for _ in range(400)] + [False] * 200
    check_end(world_of(described, drop).run(rng.randrange, limit=20_000), drop)


@given(st.integers(1, 5), st.lists(st.booleans(), min_size=0, max_size=40), st.randoms(use_true_random=False))
@settings(max_examples=few(30), deadline=None)
def test_the_batch_does_not_depend_on_the_order(batch, pattern, rng):
    drop = pattern + [False] * 100
    described = graph(gate(max_rounds=100), batch=batch, schedule={"steps": 2})
    worlds = [world_of(described, drop).run(rng.randrange) for _ in range(2)]
    for world in worlds:
        check_end(world, drop)
    assert worlds[0].batches == worlds[1].batches


@given(st.lists(st.booleans(), min_size=20, max_size=20), st.randoms(use_true_random=False), st.integers(0, 1))
@settings(max_examples=few(25), deadline=None)
def test_a_resumed_run_goes_on_with_the_next_number(pattern, rng, staleness):
    drop = pattern + [False] * 100
    changes = {"train": {"corrects_off_policy": True}}
    schedule = {"steps": 4, "checkpoint_every": 2, "max_staleness": staleness}
    described = graph(gate(max_rounds=100), batch=2, schedule=schedule, **changes)
    whole = world_of(described, drop).run(rng.randrange)
    check_end(whole, drop)
    left = {"next_group": whole.saves[1].next_group, "pending": whole.saves[1].pending}
    resumed = world_of(described, drop, start=2, **left).run(rng.randrange)
    assert resumed.batches == {step: groups for step, groups in whole.batches.items() if step >= 2}
    assert resumed.saves[3] == whole.saves[3]


def test_a_gate_that_drops_everything_ends_the_run_and_says_so():
    world = world_of(graph(gate(max_rounds=3), batch=2), [True] * 50).run(lambda count: 0)
    assert world.gave_up is not None
    told = r"stage 'gate' dropped (5|6) of 6 groups at step 1 and the batch of 2 is not full: \1 \(equal\)"
    assert re.fullmatch(told, world.gave_up.problem.what)
    assert world.gave_up.problem.why.startswith("max_rounds=3 allows 6 groups per step")
    assert len([group for group, step in world.admitted.items() if step == 0]) == 6


@pytest.mark.parametrize(("fault", "most", "ends"), [("equ", 0.4, True), ("equ", 0.6, False), ("lost", 0.0, False)])
def test_too_many_failures_end_the_run(fault, most, ends):
    """Of each batch of two, the first two groups are dropped and the next two are kept: half of those sampled."""
    described = graph(gate(gate=Gate(KEPT, 100, fault, most)), batch=2)
    world = world_of(described, [True, True, False, False] * 20).run(lambda count: 0)
    assert (world.gave_up is not None) == ends
    if ends:
        told = "dropped 2 of the 4 groups sampled for step 1 since something failed: 2 (equal); the last one is group 1"
        assert told in world.gave_up.problem.what and "at most 40%" in world.gave_up.problem.why


def test_one_group_may_be_lost_in_any_step():
    described = graph(gate(gate=Gate(KEPT, 100, "equ", 0.1)), batch=2)
    world = world_of(described, [True, False, False] * 20).run(lambda count: 0)
    assert world.gave_up is None, "a third of a step, and one"


def test_a_step_that_lost_most_of_its_groups_says_what_to_correct():
    described = graph(gate(gate=Gate(KEPT, 4, "equ", 1.0)), batch=2)
    world = world_of(described, [True] * 20).run(lambda count: 0)
    assert world.gave_up is not None and world.gave_up.problem.fix.startswith("correct what failed")


def dropping(drop):
    """Return a world that claims batches of one group, in which the gate may drop two groups per claim."""
    schedule = {"steps": 4, "max_staleness": 1, "on_stale": "drop"}
    return world_of(graph(gate(max_rounds=3), batch=1, schedule=schedule, **toy.streaming()), drop)


def test_max_rounds_counts_what_was_refused_since_the_last_claim():
    world = dropping([True, False] * 4 + [False] * 40).run(lambda count: 0)
    assert list(world.dropped.values()) == ["equal"] * 4
    world.check_end()
    world = dropping([False] + [True] * 40).run(lambda count: 0)
    assert world.gave_up is not None and world.gave_up.step == 1
    assert "dropped 3 of " in world.gave_up.problem.what


@pytest.mark.parametrize(
    ("on_stale", "drop", "order", "says"),
    [
        ("wait", {1, 2, 4, 5}, [1, 2, 4, 5, 3, 0], None),
        ("wait", {1, 2, 3}, [1, 2, 3, 4, 5, 0], "dropped 3 of 4 groups at step 2 "),
        ("drop", {1, 2, 3}, [1, 2, 3, 4, 5, 0], "dropped 3 of 3 groups at step 1 "),
        ("drop", {1, 2, 3}, [1, 2, 0, 3, 4, 5], None),
    ],
)
def test_max_rounds_counts_the_groups_of_one_batch_however_early_they_are_decided(on_stale, drop, order, says):
    """Of a run that is five steps ahead, in batches of one group, of which two may be dropped. In their order, what
    comes after the next batch counts later; where the first that are ready are trained, all since the last claim do.
    And nothing is sampled beyond the last step."""
    schedule = {"steps": 8, "max_staleness": 5, "on_stale": on_stale}
    described = graph(gate(max_rounds=3), batch=1, schedule=schedule, **toy.streaming())
    world = world_of(described, [group in drop for group in range(40)])
    while others := [job for job in world.jobs.values() if job.task.stage != "gate"]:
        world.finish(others[0])
    (job,) = world.jobs.values()
    assert job.task.groups == (0, 1, 2, 3, 4, 5)
    for group in order:
        if world.gave_up is None:
            world.finish(job, [group])
    if says:
        assert world.gave_up is not None and says in world.gave_up.problem.what
        return
    world.run(lambda count: 0).check_end()
    assert len(world.admitted) == 8 + len(drop)


def test_the_last_group_that_max_rounds_allows_is_sampled():
    drop = [True, True, True, True, False, False]
    world = world_of(graph(gate(max_rounds=3), batch=2, schedule={"steps": 1}), drop)
    check_end(world.run(lambda count: 0), drop)


def scored(world, step=0):
    """Run until the gate can decide on all groups up to a step and return the gate's job."""
    for stage in ("refit", "evaluate", "prompts", "rollout", "reward"):
        while any(job.task.stage == stage and job.task.step <= step for job in world.jobs.values()):
            world.finish(world.job(stage))
    return world.job("gate")


def admits(world):
    return [decision for _, told in world.log for decision in told if isinstance(decision, Admit)]


def test_what_is_dropped_is_replaced_when_the_round_is_decided():
    """Without staleness: the replacements are decoded together, whatever the order of decisions."""
    world = world_of(graph(batch=3), [True, False, True] + [False] * 20)
    job = scored(world)
    world.land(job, [0])
    world.land(job, [2])
    assert admits(world) == [], "group 1 may be dropped too"
    world.land(job, [1])
    assert admits(world) == [Admit(0, (3, 4))]
    assert world.scheduler.in_flight == 5, "the dropped groups still lie in the data plane"


def test_what_is_dropped_is_replaced_at_once_where_rollout_may_run_ahead():
    schedule = {"max_staleness": 1}
    world = world_of(graph(batch=3, schedule=schedule, train={"corrects_off_policy": True}), [True] + [False] * 20)
    world.land(scored(world), [0])
    assert admits(world) == [Admit(0, (3, 4, 5)), Admit(0, (6,))]


def test_the_next_batch_is_sampled_while_this_one_is_being_decided():
    """With what a gate drops: the first groups that are kept are the batch, whichever is kept first."""
    schedule = {"max_staleness": 1}
    world = world_of(graph(batch=2, schedule=schedule, train={"corrects_off_policy": True}), [True] + [False] * 20)
    for stage in ("refit", "evaluate", "prompts", "rollout", "reward"):
        while any(job.task.stage == stage for job in world.jobs.values()):
            world.finish(world.job(stage))
    job = world.job("gate")
    world.land(job, [2, 3])
    world.acknowledge(job, [2, 3])
    assert not world.batches, "groups 0 and 1 come first"
    world.finish(job)
    assert world.batches == {0: (1, 2)} and admits(world)[-1] == Admit(0, (4,))
    world.run(lambda count: 0).check_end()


def test_the_next_step_is_admitted_when_the_batch_is_kept():
    world = world_of(graph(batch=2, schedule={"capacity": 8}), [False, True] + [False] * 20)
    job = scored(world)
    world.land(job, [0, 1])
    assert admits(world) == [Admit(0, (2,))], "the next batch has no numbers yet"
    world.acknowledge(job, [0, 1])
    world.finish(world.job("prompts"))
    world.finish(world.job("rollout"))
    world.finish(world.job("reward"))
    world.land(world.job("gate"), [2])
    assert admits(world)[1:] == [Admit(1, (3, 4))] and world.batches == {0: (0, 2)}


def test_the_gate_decides_once():
    """If an attempt is lost after the gate has decided, the next attempt's decision is ignored."""
    world = world_of(graph(batch=2), [False] * 20)
    job = scored(world)
    world.land(job, [0])
    world.fail(job)
    again = world.job("gate")
    assert again.task.groups == (0, 1)
    assert world.tell(GroupsDropped(0, {0: "other"}, task=again.task.number)) == []
    world.run(lambda count: 0).check_end()
    assert world.batches[0] == (0, 1)


def test_a_lost_attempt_at_a_dropped_group_is_not_missed():
    """The stage wrote the gate's input and was lost before acknowledging: the dropped group is not tried again."""
    slow = Field("slow", dtype="float32")
    early = Toy("early", reads=(RESPONSE,), writes=(slow,), per="group", on=WorkerGroup("other"))
    world = world_of(graph(early, gate(REWARD, slow), batch=2), [False, True] + [False] * 20)
    for stage in ("refit", "evaluate", "prompts", "rollout"):
        world.finish(world.job(stage))
    job = world.job("early")
    world.land(job, [0, 1])
    world.finish(world.job("reward"))
    world.finish(world.job("gate"))
    world.fail(job)
    assert world.job("early").task.groups == (0,), "nobody wants the other"
    world.run(lambda count: 0).check_end()


def test_a_stage_is_over_when_its_last_attempt_at_a_dropped_group_is_lost():
    slow = Field("slow", dtype="float32")
    early = Toy("early", reads=(RESPONSE,), writes=(slow,), per="group", on=WorkerGroup("other", workers=2))
    world = world_of(graph(early, gate(REWARD, slow), batch=2, schedule={"steps": 1}), [False, True] + [False] * 20)
    for stage in ("refit", "evaluate", "prompts"):
        world.finish(world.job(stage))
    world.land(world.job("rollout"), [0, 1])
    kept, lost = (job for job in world.jobs.values() if job.task.stage == "early")
    world.land(lost, [1])
    world.finish(kept)
    while others := [job for job in world.jobs.values() if job is not lost]:
        world.finish(others[0])
    assert world.batches == {0: (0, 2)} and world.done == [-1]
    world.fail(lost)
    world.run(lambda count: 0).check_end()


def test_a_dropped_group_that_waits_for_its_next_attempt_is_not_missed():
    slow, late = Field("slow", dtype="float32"), Field("late", dtype="float32")
    other = WorkerGroup("other")
    early = Toy("early", reads=(RESPONSE,), writes=(slow,), per="group", on=other)
    later = Toy("later", reads=(LOGPROBS,), writes=(late,), per="group", on=other)
    train = {"reads": (LOGPROBS, late), "corrects_off_policy": True}
    described = graph(early, later, gate(REWARD, slow), batch=2, schedule={"max_staleness": 1}, train=train)
    world = world_of(described, [False, False, False, True] + [False] * 20)
    for stage in ("refit", "evaluate", "prompts", "samples", "rollout", "samples", "reward"):
        while world.running(stage):
            world.finish(world.job(stage))
    world.finish(world.job("early"))
    job = world.job("early")
    world.land(job, [2, 3])
    world.finish(world.job("gate"))
    decides = world.job("gate")
    world.finish(world.job("logprobs", 0))
    world.fail(job)
    assert world.running("early", "later") == [("later", 0, (0, 1))], "the earlier step has the worker"
    world.finish(decides)
    world.finish(world.job("later"))
    again = world.job("early").task
    assert (again.groups, again.attempt) == ((2,), 1)
    world.run(lambda count: 0).check_end()


def test_a_gate_before_the_rollout_leaves_a_smaller_lot():
    """The kept groups of one admission are decoded together, even if the last decision drops a group."""
    fit = Toy("gate", reads=(PROMPT,), writes=(KEPT,), gate=KEPT, per="group")
    described = graph(fit, batch=3, rollout={"shape": "stream", "stamps": VERSIONS, "writes": (RESPONSE, VERSIONS)})
    for order in ([0, 1, 2], [1, 0, 2], [2, 0, 1]):
        world = world_of(described, [False, True, False] + [False] * 20)
        for stage in ("refit", "evaluate", "prompts"):
            world.finish(world.job(stage))
        job = world.job("gate")
        for group in order:
            world.land(job, [group])
        assert world.running("rollout") == [("rollout", 0, (0, 2))]
        world.run(lambda count: 0).check_end()


def test_waiting_names_the_gate():
    world = world_of(graph(batch=1, schedule={"steps": 1}), [True] + [False] * 20)
    job = scored(world)
    waits = {stage: what for step, stage, what in world.scheduler.waiting() if step == 0}
    assert waits["logprobs"] == waits["samples"] == ("kept",)
    world.land(job, [0])
    waits = {stage: what for step, stage, what in world.scheduler.waiting() if step == 0}
    assert waits["logprobs"] == ("response", "kept")
    world.acknowledge(job, [0])
    scored(world)
    world.finish(world.job("gate"))
    waits = {stage: what for step, stage, what in world.scheduler.waiting() if step == 0}
    assert waits["train"] == ("logprobs 0", "logprobs"), "it no longer waits for what was dropped"


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
        "stage 'reward' starts on whole batches and runs before 'gate', which depends on it"
    ]
    nothing = {"rollout": {"reads_back": (), "models": ()}}
    nothing |= dict.fromkeys(("logprobs", "train", "refit", "evaluate"))
    assert problems(gate(), **nothing) == ["no stage follows 'gate'"]
    for rounds in (1, 2.5, True, None):
        assert problems(gate(max_rounds=rounds)) == [f"stage 'gate' has max_rounds={rounds!r}"]
    assert problems(gate(per="batch")) == ["stage 'gate' has a gate; it is a map stage per batch and writes 'kept'"]
    unwritten = Toy("gate", reads=(REWARD,), writes=(OUTSIDE,), gate=KEPT, per="group")
    assert problems(unwritten, Toy("late", reads=(OUTSIDE,))) == [
        "stage 'gate' has a gate; it is a map stage per group and writes 'outside'"
    ]
