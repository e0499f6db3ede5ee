"""The scheduler step by step: what starts when, where and in which order, and how lost and stale groups are handled."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Field, Graph, Schedule, WorkerGroup
from pipeline.plan.planner import plan
from pipeline.schedule.events import Admit, Cancel, Claim, Clear, Drop, Finished, Landed, Run, Save
from pipeline.schedule.staleness import admissible, askable, too_old
from tests.examples import few
from tests.unit import toy
from tests.unit.toy import LOGPROBS, REF, RESPONSE, REWARD, VERSIONS, Toy
from tests.unit.world import World

VALUES = Field("values", dtype="float32", dims="N T")
GAIN = Field("gain", dtype="float32")
JUDGED = Field("judged", dtype="float32")


def build(*more, **options):
    """Return the plan of the toys plus `more`; `streaming` makes them asynchronous, rewarded on `scorer` workers."""
    changes = options.pop("changes", {})
    scorer = WorkerGroup("scorer", workers=options.pop("scorer", 1))
    if (streaming := options.pop("streaming", None)) is not None:
        changes = toy.streaming(**({"reward": {"on": scorer}} | streaming), **changes)
    schedule = Schedule(**({"steps": 3} | options.pop("schedule", {})))
    made = toy.graph(schedule=schedule, **options, **changes)
    return plan(Graph(name="toy", source=made.source, stages=(*made.stages, *more), schedule=schedule))[0]


def published(planned, **options):
    """Return a world in which the first weights are served and evaluated."""
    world = World(planned, **options)
    world.finish(world.job("refit"))
    while "evaluate" in {job.task.stage for job in world.jobs.values()}:
        world.finish(world.job("evaluate"))
    return world


def rest(world, *stages, but=()):
    """Finish every task of these stages, including tasks that start meanwhile, except the jobs in `but`."""
    while jobs := [job for job in world.jobs.values() if job.task.stage in stages and job not in but]:
        world.finish(jobs[0])


def sampled(planned, *steps, **options):
    """Return a world with the first weights served, prompts made, and whole batches sampled and scored."""
    world = published(planned, **options)
    rest(world, "prompts", "samples")
    for step in steps:
        world.finish(world.job("rollout", step))
        rest(world, "prompts", "reward")
    return world


def trained(world, step, but=()):
    """Finish all tasks of the learner and the scorer until the weights of a step are served."""
    while (job := next((job for job in world.jobs.values() if job.stage.shape == "transfer"), None)) is None:
        stages = ("prompts", "samples", "reward", "logprobs", "ref", "train", "gain", "critic")
        world.finish(next(job for job in world.jobs.values() if job.task.stage in stages and job not in but))
    assert job.task.step == step
    world.finish(job)
    rest(world, "prompts", "samples")


@given(
    st.randoms(use_true_random=False),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(0, 2),
)
@settings(max_examples=few(100), deadline=None)
def test_any_order_of_completion_trains_every_group_exactly_once(random, batch, steps, every, staleness, start):
    planned = build(
        batch=batch,
        schedule={"steps": steps + start, "checkpoint_every": every, "max_staleness": staleness},
        changes={"train": {"corrects_off_policy": True}},
    )
    world = World(planned, start=start).run(random.randrange)
    world.check_end()
    assert world.batches == {
        step: tuple(range(step * batch, (step + 1) * batch)) for step in range(start, steps + start)
    }
    assert len(world.attempts) == sum(len(task.groups) or 1 for task in world.ran), "each handed out once"


# Presence, fences and checkpoints.


def test_a_reader_starts_once_after_its_last_field():
    world = published(build(batch=2))
    prompts = world.job("prompts", 0)
    world.land(prompts, [1])
    assert world.running("rollout", "reward") == [("rollout", 0, (1,))]
    assert world.tell(Landed(0, (1,), ("prompt",), task=prompts.task.number)) == [], "what lands again starts nothing"
    world.finish(world.job("rollout"))
    assert world.running("rollout", "reward") == [], (
        "the host makes prompts, and those of the other group are not there"
    )
    world.land(prompts, [0])
    world.acknowledge(prompts, [0, 1])
    assert world.running("rollout", "reward") == [("reward", 0, (1,)), ("rollout", 0, (0,))]


def test_a_batch_stage_waits_for_the_whole_batch():
    world = published(build(batch=2))
    world.land(world.job("prompts", 0), [0, 1])
    rollout = world.job("rollout")
    world.land(rollout, [1])
    assert world.running("logprobs") == []
    world.land(rollout, [0])
    assert world.running("logprobs") == [("logprobs", 0, (0, 1))], "canonical order, not arrival"


def test_the_weights_do_not_change_under_those_who_use_them():
    world = sampled(build(batch=1, streaming={}, schedule={"max_staleness": 1}), 0, 1)
    world.finish(world.job("logprobs"))
    assert world.running("ref", "train") == [("ref", 0, (0,))]
    world.finish(world.job("ref"))
    assert world.running("train", "logprobs", "ref") == [("train", 0, (0,))]
    train = world.job("train")
    world.land_weights(train)
    assert world.running("refit", "logprobs") == [], "train has not acknowledged"
    world.acknowledge(train, [0])
    assert world.running("refit") == [("refit", 0, ())] and world.running("logprobs", "ref") == [], "both are taken"
    world.finish(world.job("refit"))
    assert world.running("logprobs", "ref") == [("ref", 1, (1,))]
    world.finish(world.job("ref"))
    assert world.job("logprobs", 1).task.version == 1


def test_train_waits_for_the_checkpoint_of_the_step_before():
    world = World(build(batch=1, schedule={"steps": 2, "checkpoint_every": 1}))
    while not world.saving:
        world.finish(next(iter(world.jobs.values())))
    while world.jobs:
        world.finish(next(iter(world.jobs.values())))
    assert ("train", 1) not in world.attempts
    assert any("checkpoint 1" in what for _, stage, what in world.scheduler.waiting() if stage == "train")
    world.save()
    assert world.running("train") == [("train", 1, (1,))]


def test_waiting_names_what_is_missing():
    world = World(build(batch=1))
    world.land_weights(world.job("refit"))
    waits = {stage: what for step, stage, what in world.scheduler.waiting() if step == 0}
    ahead = {stage: what for step, stage, what in world.scheduler.waiting() if step == 1}
    assert ahead["rollout"] == ("version 1", "prompt")
    assert waits["reward"] == ("prompt", "response")
    assert waits["train"] == ("logprobs 0", "refit -1", "reward", "logprobs")
    assert waits["refit"] == ("evaluate -1", "trained_weights")


def test_a_graph_without_weights_runs_step_after_step():
    rollout = {"reads_back": (), "models": ()}
    world = World(build(changes={"rollout": rollout, **dict.fromkeys(("logprobs", "train", "refit", "evaluate"))}))
    world.run(lambda count: 0).check_end()
    assert sorted(world.cleared) == list(range(12))


def test_without_weights_to_send_batches_are_trained_in_turn():
    rollout = {"reads_back": (), "models": ()}
    changes = {"rollout": rollout, "refit": None, "evaluate": None, "logprobs": {"models": ()}}
    planned = build(batch=1, schedule={"max_staleness": 2}, streaming={}, changes=changes)
    world = World(planned)
    for stage in ("prompts", "rollout", "reward", "logprobs", "ref"):
        for step in (2, 1):
            while (
                any((job.task.stage, job.task.step) == (stage, 0) for job in world.jobs.values()) and stage == "prompts"
            ):
                world.finish(world.job("prompts"))
            while any((job.task.stage, job.task.step) == (stage, step) for job in world.jobs.values()):
                world.finish(world.job(stage, step))
    world.run(lambda count: count - 1).check_end()
    assert [task.step for task in world.ran if task.stage == "train"] == [0, 1, 2]


def test_a_version_is_published_when_every_transfer_has_sent_its_weights():
    other = WorkerGroup("other", backend="torch")
    served = Field("served_elsewhere", dtype="weights", dims="", unit="version")
    refit = dict(reads=(toy.TRAINED,), writes=(served,), per="batch", shape="transfer", on=toy.LEARNER, to=other)
    judge = Toy("judge", reads=(RESPONSE,), reads_back=(served,), on=other, models=(toy.POLICY,), per="group")
    second = Toy("second", models=(toy.POLICY,), **refit)
    world = World(build(second, judge, batch=2, streaming={"sampler": 2}, schedule={"steps": 2}))
    world.finish(world.job("refit"))
    assert world.scheduler.version == -1 and world.running("rollout") == []
    world.finish(world.job("second"))
    assert world.scheduler.version == 0
    while not world.running("refit", "second"):
        world.finish(next(iter(world.jobs.values())))
    first, last = sorted(("refit", "second"), key=world.running("refit", "second")[0][0].__ne__)
    world.serve(world.job(first), 0)
    assert world.scheduler.version == 0, "a replica that has one of the two does not make the version"
    world.finish(world.job(first))
    world.serve(world.job(last), 0)
    assert world.scheduler.version == 1
    world.run(lambda count: count - 1).check_end()
    assert len(world.saved) == 1, "one checkpoint, behind the last of them"


def test_a_late_report_of_earlier_weights_does_not_take_the_version_back():
    judge = Toy("judge", reads=(RESPONSE,), writes=(JUDGED,), on=WorkerGroup("judge"))
    schedule = {"max_staleness": 1, "refit": "in_flight"}
    world = sampled(build(judge, batch=1, streaming={}, schedule=schedule, changes={"evaluate": None}), 0, 1)
    trained(world, 0)
    trained(world, 1)
    assert world.scheduler.version == 2 and (0, "judge", ()) in world.scheduler.waiting(), "step 0 is not over"
    assert world.scheduler.handle(Landed(0, (), ("served_weights",))) == [] and world.scheduler.version == 2


# How far rollout runs ahead.


@given(st.integers(0, 50), st.integers(0, 4), st.integers(1, 64), st.integers(0, 9999))
def test_asking_never_passes_the_bound_of_staleness(version, ahead, batch, asked):
    more = askable(version=version, ahead=ahead, batch=batch, asked=asked)
    assert more >= 0
    assert asked + more == max(asked, (ahead + version + 1) * batch)


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_admission_never_passes_the_capacity(capacity, held):
    assert held + admissible(capacity=capacity, held=held) == max(capacity, held)


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 5))
def test_a_sample_is_too_old_when_more_versions_lie_between_than_allowed(oldest, step, k):
    assert too_old(oldest=oldest, step=step, max_staleness=k) == (step - oldest > k)


@pytest.mark.parametrize(
    ("staleness", "depth", "ahead"), [(0, None, 0), (1, None, 1), (3, None, 3), (3, 1, 1), (2, 0, 0)]
)
@pytest.mark.parametrize("on_stale", ["wait", "drop"])
def test_rollout_runs_ahead_by_the_bound_and_no_further(staleness, depth, ahead, on_stale):
    schedule = {"steps": 8, "max_staleness": staleness, "pipeline_depth": depth, "on_stale": on_stale}
    world = World(build(batch=1, schedule=schedule, streaming={}, changes={"evaluate": None}))
    for _ in range(200):  # everything but training proceeds as far as it can
        free = [job for job in world.jobs.values() if job.task.stage != "train"]
        if not free:
            break
        world.finish(free[0])
    asked = {group for stage, group in world.attempts if stage == "rollout"}
    assert asked == set(range(ahead + 1))
    if on_stale == "wait":
        assert len(world.admitted) == staleness + 2, "one batch of prompts is ready"


def test_a_batch_beside_one_that_waits_for_its_weights_is_admitted_when_it_begins():
    world = sampled(build(batch=1, streaming={}, changes={"evaluate": None}), 0)
    rest(world, "prompts", "samples", "logprobs", "ref", "train")
    assert 0 in world.cleared and list(world.admitted) == [0, 1], "there is room for batch 2, and batch 1 waits"
    world.finish(world.job("refit"))
    assert list(world.admitted) == [0, 1, 2]


# Workers.


def test_a_replica_has_one_task_and_groups_are_divided_evenly():
    sampler = WorkerGroup("sampler", backend="torch", workers=2)
    changes = {name: {"on": sampler} for name in ("rollout", "evaluate")} | {"refit": {"to": sampler}}
    world = published(build(batch=6, changes=changes))
    prompts = world.job("prompts", 0)
    world.land(prompts, [0, 1, 2, 4, 5])
    assert world.running("rollout") == [("rollout", 0, (0, 1)), ("rollout", 0, (2, 4, 5))]
    assert {job.task.replica for job in world.jobs.values() if job.task.stage == "rollout"} == {0, 1}
    world.land(prompts, [3])
    assert len(world.running("rollout")) == 2
    free = world.job("rollout").task.replica
    world.finish(world.job("rollout"))
    assert [job.task.replica for job in world.jobs.values() if job.task.groups == (3,)] == [free]


def test_streams_run_beside_each_other_and_beside_a_task():
    judge = Toy("judge", reads=(RESPONSE,), per="group", on=WorkerGroup("sampler", backend="torch", workers=2))
    world = published(build(judge, batch=4, streaming={"sampler": 2}, schedule={"max_staleness": 1}))
    world.land(world.job("prompts", 0), [0, 1, 2, 3])
    world.finish(world.job("prompts", 0))
    world.finish(world.job("prompts", 1))
    assert world.running("rollout") == [("rollout", at // 4, (at, at + 1)) for at in (0, 2, 4, 6)], "lots, divided"
    replicas = [job.task.replica for job in world.jobs.values() if job.stage.shape == "stream"]
    assert sorted(replicas) == [0, 0, 1, 1], "the one that streams the fewest"


def test_a_stage_with_sharding_takes_all_replicas_and_is_not_overtaken():
    learner = WorkerGroup("learner", backend="torch", workers=2)
    judge = Toy("judge", reads=(RESPONSE,), writes=(JUDGED,), per="group", on=learner)
    world = sampled(build(judge, batch=2, streaming={"learner": 2}, schedule={"max_staleness": 1}), 0)
    assert world.running("logprobs", "ref", "judge") == [("judge", 0, (0, 1)), ("logprobs", 0, (0, 1))]
    assert world.job("logprobs").task.replica == 0 and world.job("judge").task.replica == 1
    world.finish(world.job("rollout", 1))
    rest(world, "reward")
    world.finish(world.job("logprobs", 0))
    assert world.running("logprobs", "ref") == [("ref", 0, (0, 1))]
    world.finish(world.job("ref", 0))
    assert world.running("logprobs", "ref", "judge", "train") == [("judge", 0, (0, 1))], "a replica is kept free"
    assert (0, "train", ()) in world.scheduler.waiting()
    world.finish(world.job("judge"))
    assert world.running("logprobs", "ref", "judge", "train") == [("train", 0, (0, 1))]
    assert world.job("train").task.replica is None
    world.run(lambda count: 0).check_end()


@pytest.mark.parametrize("refit", ["drain", "in_flight"])
def test_a_transfer_takes_both_groups_and_drains_streams_or_does_not(refit):
    schedule = {"steps": 4, "max_staleness": 2, "refit": refit}
    world = published(build(batch=1, streaming={}, schedule=schedule))
    world.finish(world.job("prompts", 0))
    world.finish(world.job("prompts", 1))
    world.finish(world.job("rollout", 0))
    rest(world, "reward", "logprobs", "ref", "train")
    if refit == "drain":
        assert world.running("refit") == [], "a sequence is being sampled"
        world.finish(world.job("prompts", 2))
        assert world.running("rollout") == [("rollout", 1, (1,))], "new ones are held back"
        world.finish(world.job("rollout", 1))
        assert world.running("refit", "rollout") == [], "the learner has used the time"
        rest(world, "logprobs", "ref")
    else:
        assert world.running("refit", "rollout") == [("refit", 0, ()), ("rollout", 1, (1,))]
        world.finish(world.job("rollout", 1))
        world.finish(world.job("prompts", 2))
    assert world.running("refit", "rollout", "ref", "logprobs") == [("refit", 0, ())], "it has both groups whole"
    world.finish(world.job("refit"))
    assert world.running("rollout") == [("rollout", 2, (2,))]
    assert world.job("rollout").task.version == 1
    world.run(lambda count: 0).check_end()


@pytest.mark.parametrize("refit", ["drain", "in_flight"])
def test_a_replica_samples_as_soon_as_it_has_the_version(refit):
    world = published(build(batch=2, streaming={"sampler": 2}, schedule={"steps": 3, "refit": refit}))
    rest(world, "prompts", "samples", "rollout", "reward", "logprobs", "ref", "train")
    assert world.running("refit", "rollout") == [("refit", 0, ())]
    world.serve(world.job("refit"), 1)
    assert [
        (job.task.groups, job.task.replica, job.task.version) for job in world.jobs.values() if job.stage.stamps
    ] == [((3,), 1, 1)], "what the other will sample is settled, and waits for it"
    world.serve(world.job("refit"), 1)
    assert len(world.running("rollout")) == 1, "once"
    world.finish(world.job("refit"))
    assert world.running("rollout") == [("rollout", 1, (2,)), ("rollout", 1, (3,))]
    assert world.job("rollout", 1).task.version == 1
    world.run(lambda count: 0).check_end()


def test_who_takes_the_place_of_a_served_replica_waits_for_the_transfer():
    world = published(build(batch=2, streaming={"sampler": 2}))
    rest(world, "prompts", "samples", "rollout", "reward", "logprobs", "ref", "train")
    world.serve(world.job("refit"), 0)
    world.fail(world.job("rollout"))
    assert world.running("refit", "rollout") == [("refit", 0, ())], "the new one has what was served before"
    world.serve(world.job("refit"), 1)
    assert world.running("rollout") == [("rollout", 1, (3,))]
    world.finish(world.job("refit"))
    assert world.running("rollout") == [("rollout", 1, (2,)), ("rollout", 1, (3,))]
    world.run(lambda count: 0).check_end()


@pytest.mark.parametrize("refit", ["drain", "in_flight"])
def test_what_waits_for_a_replica_waits_for_the_transfer_that_comes_again(refit):
    world = published(build(batch=2, streaming={"sampler": 2}, schedule={"steps": 3, "refit": refit}))
    rest(world, "prompts", "samples", "rollout", "reward", "logprobs", "ref", "train")
    world.serve(world.job("refit"), 0)
    world.fail(world.job("refit"))
    assert world.running("rollout") == [("rollout", 1, (2,))], "the other replica has older weights"
    if refit == "drain":
        assert world.running("refit") == [], "a sequence is being sampled"
        world.finish(world.job("rollout"))
    world.finish(world.job("refit"))
    assert ("rollout", 1, (3,)) in world.running("rollout")
    world.run(lambda count: 0).check_end()


def test_a_task_that_is_no_stream_waits_for_the_transfer_that_comes_again_too():
    sampler = WorkerGroup("sampler", backend="torch", workers=2)
    changes = {name: {"on": sampler} for name in ("rollout", "evaluate")} | {"refit": {"to": sampler}}
    world = World(build(batch=2, changes=changes))
    rest(world, "prompts", "samples")
    world.serve(world.job("refit"), 1)
    world.fail(world.job("refit"))
    assert world.running("rollout", "refit") == [("refit", -1, ())], "a replica has older weights"
    world.run(lambda count: 0).check_end()


def test_a_sampler_that_dies_beside_a_transfer_that_is_lost_too_goes_on_with_what_was_served():
    world = published(build(batch=1, streaming={}, schedule={"max_staleness": 2, "refit": "in_flight"}))
    world.finish(world.job("prompts", 0))
    world.finish(world.job("prompts", 1))
    world.finish(world.job("rollout", 0))
    rest(world, "reward", "logprobs", "ref", "train")
    assert world.running("refit", "rollout") == [("refit", 0, ()), ("rollout", 1, (1,))]
    world.fail(world.job("rollout"))
    assert world.running("refit", "rollout") == [("refit", 0, ())]
    world.fail(world.job("refit"))
    assert world.running("refit", "rollout") == [("refit", 0, ()), ("rollout", 1, (1,))]
    world.run(lambda count: 0).check_end()


def test_what_waits_for_a_replica_samples_for_the_batch_that_is_next_when_it_begins():
    world = World(build(batch=2, streaming={"sampler": 2}, schedule=DROP))
    rest(world, "prompts", "samples")
    world.serve(world.job("refit"), 1)
    rest(world, "prompts", "rollout", "reward")
    assert world.batches == {0: (1, 2)}, "what the other replica has is waiting for it"
    world.finish(world.job("refit"))
    assert world.running("rollout") == [("rollout", 1, (0,)), ("rollout", 1, (3,))]
    world.run(lambda count: 0).check_end()


def test_a_lost_transfer_lets_streams_go_on_and_comes_again():
    world = sampled(build(batch=1, streaming={}, schedule={"max_staleness": 2}), 0, 1, 2)
    rest(world, "logprobs", "ref", "train")
    world.fail(world.job("refit", 0))
    assert world.job("refit").task.attempt == 1
    world.run(lambda count: 0).check_end()


# Priorities.


def test_the_learner_takes_the_earlier_step_and_then_what_is_behind():
    world = published(build(batch=1, streaming={}, schedule={"max_staleness": 1}))
    rest(world, "prompts", "samples")
    world.finish(world.job("rollout", 0))
    assert world.running("logprobs", "ref") == [("logprobs", 0, (0,))]
    world.finish(world.job("rollout", 1))
    world.finish(world.job("logprobs"))
    assert world.running("logprobs", "ref") == [("ref", 0, (0,))], "not ref of step 1, which is ready too"
    world.finish(world.job("ref"))
    assert world.running("logprobs", "ref", "train") == [("ref", 1, (1,))], "no reward yet: better than to idle"


def test_train_comes_before_the_logprobs_of_the_next_step():
    world = sampled(build(batch=1, streaming={}, schedule={"max_staleness": 1}), 0, 1)
    world.finish(world.job("logprobs"))
    world.finish(world.job("ref"))
    assert world.running("logprobs", "ref", "train") == [("train", 0, (0,))]


def test_of_one_step_the_longer_way_to_the_weights_comes_first():
    critic = Toy("critic", reads=(RESPONSE,), writes=(VALUES,), per="batch", on=toy.LEARNER)
    gain = Toy("gain", reads=(VALUES,), writes=(GAIN,), per="group")
    train = {"reads": (REWARD, LOGPROBS, REF, VERSIONS, GAIN)}
    world = published(build(critic, gain, batch=1, streaming={"train": train}))
    world.finish(world.job("prompts", 0))
    world.land(world.job("rollout"), [0])
    assert world.running("logprobs", "ref", "critic") == [("critic", 0, (0,))]


def test_what_no_weights_depend_on_comes_last():
    judge = Toy("judge", reads=(RESPONSE,), writes=(JUDGED,), per="group", on=toy.LEARNER)
    world = sampled(build(judge, batch=1, streaming={}, schedule={"max_staleness": 1}), 0, 1)
    order = []
    while not world.running("train"):
        order += world.running("logprobs", "ref", "judge")
        world.finish(next(job for job in world.jobs.values() if job.task.stage in ("logprobs", "ref", "judge")))
    assert order == [("logprobs", 0, (0,)), ("ref", 0, (0,))]
    trained(world, 0)
    assert world.running("logprobs", "ref", "judge") == [("ref", 1, (1,))], "nor before a later step"
    world.run(lambda count: 0).check_end()


def test_what_no_weights_depend_on_waits_for_streams_and_never_for_ever():
    schedule = {"steps": 8, "max_staleness": 2, "refit": "in_flight"}
    world = sampled(build(batch=1, streaming={}, schedule=schedule, changes={"evaluate": {"every": 1}}), 0, 1)
    trained(world, 0)
    assert world.running("rollout", "evaluate") == [("rollout", 2, (2,)), ("rollout", 3, (3,))], "put off"
    rest(world, "logprobs", "ref", "train")
    assert world.running("refit", "evaluate") == [("evaluate", 0, ())], "the next weights wait for nothing else"
    world.finish(world.job("evaluate"))
    world.finish(world.job("refit"))
    rest(world, "prompts", "samples")
    assert [stage for stage, _, _ in world.running("rollout", "evaluate")] == ["rollout"] * 3
    rest(world, "rollout", "prompts", "samples")
    assert world.running("evaluate") == [("evaluate", 1, ())], "no stream runs"
    world.run(lambda count: 0).check_end()


# Runs of groups.


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 0, 4, 1, 3)])
def test_runs_of_groups_are_the_same_in_any_order(order):
    world = published(build(batch=5, streaming={"run_groups": 2}))
    world.finish(world.job("prompts", 0))
    rollout = world.job("rollout")
    for group in order:
        world.land(rollout, [group])
        world.acknowledge(rollout, [group])
    world.run(lambda count: 0)
    runs = {task.groups for task in world.ran if task.stage == "ref" and task.step == 0}
    assert runs == {(0, 1), (2, 3), (4,)}


def test_a_run_starts_as_soon_as_all_of_it_is_there():
    world = published(build(batch=4, streaming={"run_groups": 2}))
    world.finish(world.job("prompts", 0))
    world.land(world.job("rollout"), [2, 1])
    assert world.running("logprobs") == []
    world.land(world.job("rollout"), [3])
    assert world.running("logprobs", "ref") == [("logprobs", 0, (2, 3))]
    world.finish(world.job("logprobs"))
    world.finish(world.job("ref"))
    assert world.running("train") == [] and world.scheduler.absent(0, "logprobs") == [0, 1]


# Lost attempts.


def test_what_was_not_acknowledged_is_handed_out_again_as_the_next_attempt():
    world = published(build(batch=4, streaming={}))
    world.finish(world.job("prompts", 0))
    lost = world.job("rollout")
    world.land(lost, [1])
    world.acknowledge(lost, [1])
    world.land(lost, [2])
    world.fail(lost)
    again = world.job("rollout").task
    assert (again.groups, again.attempt) == ((0, 2, 3), 1) and again.number > lost.task.number
    assert world.scheduler.owed(lost.task) is None and world.scheduler.owed(again) is not None
    assert world.tell(Landed(0, (0,), ("response", "token_versions"), task=lost.task.number)) == []
    assert world.tell(Finished(lost.task, (0,))) == []
    assert world.scheduler.absent(0, "response") == [0, 3]
    world.fail(world.job("rollout"))
    assert world.job("rollout").task.attempt == 2
    world.run(lambda count: 0).check_end()


# Claimed batches.

DROP = {"steps": 6, "max_staleness": 1, "on_stale": "drop"}


def claims(world):
    return [d for _, decisions in world.log for d in decisions if isinstance(d, Claim)]


def sample(world, *groups):
    """Yield these groups, those of one task together."""
    for job in [job for job in world.jobs.values() if job.task.stage == "rollout"]:
        if mine := [group for group in groups if group in job.left]:
            world.finish(job, mine)
    assert all(("rollout", group) in world.acked for group in groups)


def streamed(world, *groups):
    """Sample and score these groups one by one."""
    for group in groups:
        sample(world, group)
    rest(world, "reward")


def dropping(*more, **options):
    world = published(build(*more, batch=2, streaming={}, changes={"evaluate": None}, **{"schedule": DROP} | options))
    rest(world, "prompts", "samples")
    return world


def test_the_first_groups_that_are_ready_are_the_batch():
    world = dropping()
    assert sorted(world.admitted) == [0, 1, 2, 3]
    streamed(world, 3)
    assert claims(world) == []
    streamed(world, 1)
    assert claims(world) == [Claim(0, (1, 3))]
    assert world.running("logprobs") == [("logprobs", 0, (1, 3))]


def decided(world):
    """Return the decisions on the event that led to the last claim, without tasks."""
    last = next(told for _, told in reversed(world.log) if any(isinstance(d, Claim) for d in told))
    return [decision for decision in last if not isinstance(decision, Run)]


def test_what_is_still_sampled_and_too_old_is_cancelled_and_replaced():
    world = dropping(schedule=DROP | {"refit": "in_flight"})
    streamed(world, 3, 1)
    trained(world, 0)
    first, second = (job for job in world.jobs.values() if job.task.stage == "rollout" and job.task.version == 0)
    streamed(world, 5, 4)
    cancels = [Cancel(first.task, (0,)), Cancel(second.task, (2,))]
    unwritten = Clear(2, (0, 2), ("toy.train+samples",), last=False)
    assert decided(world) == [Claim(1, (4, 5)), Drop(2, (0, 2), "cancelled"), unwritten, *cancels, Admit(2, (6, 7))]
    assert not world.cleared & {0, 2}, "they are still held"
    world.acknowledge(first, [0])
    assert 0 in world.cleared
    world.land(second, [2])
    world.acknowledge(second, [2])
    assert 2 in world.cleared and world.scheduler.absent(2, "reward") == [6, 7], "it came too late"
    world.run(lambda count: 0).check_end()


def test_what_is_ready_and_too_old_is_dropped_and_replaced():
    world = dropping(scorer=2)
    streamed(world, 0, 1)
    sample(world, 2, 3)
    slow, quick = (job for job in world.jobs.values() if job.task.stage == "reward")
    trained(world, 0, but=[slow, quick])
    sample(world, 4, 5)
    world.finish(quick)
    rest(world, "reward", but=[slow])
    assert world.batches[1] == (3, 4) and decided(world)[1] == Drop(2, (2,), "stale")
    assert 2 not in world.cleared, "its reward is being computed"
    world.finish(slow)
    assert 2 in world.cleared
    world.run(lambda count: 0).check_end()


def test_a_lost_attempt_has_no_age():
    """Groups waiting for their next attempt will be sampled by newer weights."""
    world = dropping(schedule=DROP | {"refit": "in_flight", "max_staleness": 2})
    streamed(world, 0, 1)
    streamed(world, 2, 3)
    slow = next(job for job in world.jobs.values() if job.left == [4, 5])
    trained(world, 0)
    rollout = next(job for job in world.jobs.values() if job.left == [6, 7])
    world.land(rollout, [6, 7])
    world.acknowledge(rollout, [6, 7])
    rest(world, "logprobs", "ref", "train")
    assert world.running("refit") == [("refit", 1, ())], "no stream may start"
    world.fail(slow)
    assert world.running("rollout") == []
    rest(world, "reward")
    assert world.batches[2] == (6, 7) and not world.dropped
    world.finish(world.job("refit"))
    again = next(job for job in world.jobs.values() if job.left == [4, 5])
    assert (again.task.attempt, again.task.version) == (1, 2)
    world.run(lambda count: 0).check_end()


def test_tokens_that_landed_stay_as_old_as_they_are_when_the_attempt_is_lost():
    world = dropping(schedule=DROP | {"refit": "in_flight"})
    streamed(world, 0, 1)
    slow = next(job for job in world.jobs.values() if job.left == [2, 3])
    world.land(slow, [2])
    trained(world, 0)
    world.fail(slow)
    streamed(world, 4, 5)
    assert world.batches[1] == (4, 5) and world.dropped == {2: "cancelled"}
    world.run(lambda count: 0).check_end()


def test_a_stage_of_the_pool_that_shares_the_sampler_is_not_put_off():
    judge = Toy("judge", reads=(RESPONSE,), writes=(JUDGED,), per="group", on=toy.streaming()["rollout"]["on"])
    world = published(build(judge, batch=1, streaming={}, changes={"evaluate": None}, schedule=DROP))
    assert "judge" in world.plan.pool
    rest(world, "prompts", "samples")
    world.land(world.job("rollout"), [0])
    assert world.running("judge") == [("judge", 0, (0,))], "no batch is claimed without it"


def test_a_checkpoint_names_what_is_to_come_again():
    world = dropping(schedule=DROP | {"checkpoint_every": 1, "max_staleness": 2, "refit": "in_flight"})
    streamed(world, 1, 5)
    streamed(world, 0, 4)
    trained(world, 0)
    assert world.saves == {0: Save(0, 6, (0, 2, 3, 4))}, "those of the next batch, and those of none"
    other = World(world.plan, start=1, next_group=6, pending=(0, 2, 3, 4))
    assert list(other.admitted) == [0, 2, 3, 4] and other.scheduler.version == 0
    fresh = World(world.plan)
    for either in (other, fresh):
        either.finish(either.job("refit"))
    assert list(other.admitted) == [0, 2, 3, 4, 6, 7] and len(fresh.admitted) == 6, "as much as a run that begins"
    other.run(lambda count: 0).check_end()


def test_what_is_still_to_come_again_is_named_by_the_next_checkpoint():
    pending = (2, 3, 5, 7, 8, 9, 10)
    world = World(build(batch=2, schedule={"steps": 6, "checkpoint_every": 1}), start=1, next_group=12, pending=pending)
    while not world.saves:
        world.step(lambda count: 0)
    assert world.batches[1] == (2, 3) and len(world.admitted) < 7
    assert world.saves[1] == Save(1, 12, (5, 7, 8, 9, 10))
    world.run(lambda count: 0).check_end()


@given(st.integers(0, 2), st.randoms(use_true_random=False))
@settings(max_examples=few(30), deadline=None)
def test_what_a_dropping_run_left_is_trained_once_by_one_that_waits(staleness, rng):
    """A run resumed with another schedule loses no group and trains none twice."""
    schedule = DROP | {"checkpoint_every": 1, "max_staleness": 2}
    world = World(build(batch=2, streaming={}, schedule=schedule))
    while 1 not in world.saves:
        world.step(rng.randrange)
    save = world.saves[1]
    waits = schedule | {"max_staleness": staleness, "on_stale": "wait"}
    planned = build(batch=2, streaming={}, schedule=waits)
    other = World(planned, start=2, next_group=save.next_group, pending=save.pending)
    while 2 not in other.saves:
        other.step(rng.randrange)
    last = World(planned, start=3, next_group=other.saves[2].next_group, pending=other.saves[2].pending)
    last.run(rng.randrange).check_end()
    groups = [g for of in (world.batches[0], world.batches[1], other.batches[2], *last.batches.values()) for g in of]
    assert len(groups) == len(set(groups)) == 12
    skipped = set(range(max(groups))) - set(groups) - set(world.dropped)
    assert not skipped, "nothing is passed over"


@pytest.mark.parametrize("ahead", [0, 1])
def test_stages_may_be_called_what_the_scheduler_waits_for(ahead, monkeypatch):
    """`version n` and `checkpoint n` are also the displayed names of two fences of this graph. Both are waited for.

    A check refuses such stage names because they confuse readers of records; the scheduler does not depend on it.
    """
    monkeypatch.setattr("pipeline.plan.structure.reserved", lambda graph, stages: ())
    user = dict(per="batch", on=toy.LEARNER, models=(toy.POLICY,))
    planned = build(
        batch=2,
        schedule={"steps": 4, "max_staleness": ahead, "checkpoint_every": 1},
        changes={
            "train": None,
            "version": user
            | dict(reads=(REWARD, LOGPROBS), writes=(toy.TRAINED,), trains=toy.POLICY, corrects_off_policy=True),
            "checkpoint": user | dict(reads=(REWARD,)),
            "stop": user | dict(reads=(RESPONSE,)),
            "rollout": dict(on=toy.LEARNER),
        },
    )
    fences = {(fence.before, fence.after) for fence in planned.fences}
    assert fences >= {("version", "rollout"), ("checkpoint", "version"), ("stop", "version")}
    for seed in range(30):
        World(planned).run(random.Random(seed).randrange).check_end()
