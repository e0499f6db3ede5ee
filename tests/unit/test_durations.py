"""Distributions, least squares, and durations fitted to a recorded run."""

from __future__ import annotations

import statistics

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Schedule
from pipeline.declare.task import Task
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.simulation.distributions import parse, uniform
from pipeline.simulation.durations import Came, Costs, Drawn, Durations, LinearFit, Recorded
from pipeline.simulation.least_squares import non_negative
from pipeline.simulation.recorded import fitted
from pipeline.simulation.shares import ProcessShares
from pipeline.simulation.virtual_run import Fault, Simulation
from tests.examples import few
from tests.unit import toy
from tests.unit.test_analysis import Record, planned


def drawn(text, count, **sizes):
    distribution = parse(text)
    sizes = {"groups": 1, "samples": 1} | sizes
    return [distribution.draw(**sizes, seed=3, counters=(i,)) for i in range(count)]


def test_sums_of_fixed_and_proportional_parts():
    assert drawn("0.2 + 0.001/sample + 0.05/group", 1, groups=2, samples=32) == pytest.approx([0.2 + 0.032 + 0.1])
    assert parse("0.2@1.5").cores == 1.5
    assert parse("uniform(1, 1) + 2") == parse("uniform(1,1)+2")


@pytest.mark.parametrize(
    ("text", "mean"),
    [("lognormal(2.0, 0.8)", 2.0), ("exponential(0.5)", 0.5), ("uniform(1, 3)", 2.0), ("constant(4)", 4.0)],
)
def test_distributions_have_the_mean_that_they_say(text, mean):
    assert statistics.fmean(drawn(text, 20_000)) == pytest.approx(mean, rel=0.03)


def test_sigma_is_that_of_the_logarithm():
    import math

    logs = [math.log(value) for value in drawn("lognormal(2.0, 0.8)", 20_000)]
    assert statistics.stdev(logs) == pytest.approx(0.8, rel=0.03)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is neither a number of seconds"),
        ("-1", "is neither a number of seconds"),
        ("nan", "is neither a number of seconds"),
        ("1e999", "too large"),
        ("1e300", "too large"),
        ("normal(1, 2)", "is not one of"),
        ("lognormal(1)", "takes 2 numbers"),
        ("uniform(2, 1)", "low above its high"),
        ("1 @ 0", "not a number of cores"),
        ("__import__('os')", "is neither a number of seconds"),
        ("1/token", "is neither a number of seconds"),
    ],
)
def test_what_is_no_distribution_is_refused(text, told):
    with pytest.raises(ValueError, match=told):
        parse(text)


@given(st.integers(), st.lists(st.integers(), max_size=4))
def test_random_numbers_are_functions_of_what_they_are_for(seed, counters):
    assert 0 < uniform(seed, *counters) < 1
    assert uniform(seed, *counters) == uniform(seed, *counters)
    assert uniform(seed, *counters, 1) != uniform(seed, *counters, 2)


@given(st.floats(0, 2), st.floats(0, 0.01), st.lists(st.integers(1, 1000), min_size=2, max_size=8, unique=True))
def test_least_squares_find_a_line(fixed, slope, sizes):
    if fixed + slope < 1e-6:
        return
    rows = [((1.0, float(n)), fixed + slope * n) for n in sizes]
    (a, b), error = non_negative(rows)
    assert error < 1e-9
    assert a + b * 500 == pytest.approx(fixed + slope * 500, rel=1e-4)


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(0.1, 10)), min_size=2, max_size=8))
def test_least_squares_are_not_negative_and_least(points):
    rows = [((1.0, x), y) for x, y in points]
    (a, b), error = non_negative(rows)
    assert a >= 0 and b >= 0
    for da, db in [(0.01, 0), (-0.01, 0), (0, 0.001), (0, -0.001)]:
        other = (a + da, b + db)
        if min(other) >= 0:
            assert sum(((other[0] + other[1] * x) / y - 1) ** 2 for x, y in points) >= error - 1e-9


def test_one_size_is_taken_to_be_in_proportion():
    assert non_negative([((1.0, 512.0), 0.2), ((1.0, 512.0), 0.2)])[0] == pytest.approx((0.0, 0.2 / 512))


def test_recorded_groups_come_as_they_came_and_others_as_one_of_them():
    times = Recorded(line=LinearFit(fixed_s=1.0, cores=1.0), came={0: Came(0.5, 0.0, 10), 1: Came(1.0, 3.0, 20)})
    work = times.stream(Task(stage="rollout", step=0, groups=(1, 0)), group_size=2, seed=0)
    assert [(part.work_s, part.wait_s, part.positions) for part in work.parts] == [(0.5, 0.0, (1,)), (1.0, 3.0, (0,))]
    assert work.tokens == (20, 10)
    unknown = times.stream(Task(stage="rollout", step=1, groups=tuple(range(2, 30))), group_size=2, seed=0)
    assert {(part.work_s, part.wait_s) for part in unknown.parts} == {(0.5, 0.0), (1.0, 3.0)}


def test_a_stream_computes_the_tokens_of_all_samples():
    """Of two groups of four samples, with 10 and 20 tokens each."""
    line = LinearFit(per_sample_s=0.5, per_token_s=0.1)
    times = Recorded(line=line, came={0: Came(1.0, 0.0, 10), 1: Came(0.5, 0.0, 20)})
    work = times.stream(Task(stage="rollout", step=0, groups=(0, 1), number=0), group_size=4, seed=0)
    assert work.parts[-1].work_s == pytest.approx(8 * 0.5 + 4 * (10 + 20) * 0.1)


def test_a_few_steps_have_all_ratios_about_equally_often():
    ratios = tuple(1 + i / 10 for i in range(10))
    times = Recorded(line=LinearFit(fixed_s=1.0, cores=1.0, ratios=ratios), batch=4)
    made = [
        times.work(Task(stage="train", step=n, groups=(4 * n,)), samples=1, tokens=0, seed=5).work_s for n in range(20)
    ]
    assert statistics.fmean(made) == pytest.approx(statistics.fmean(ratios), abs=0.05)


SECONDS = {
    "prompts": "0.001",
    "rollout": "lognormal(0.5, 0.5)",
    "reward": "0.01 + 0.002/sample @ 1",
    "logprobs": "0.05 + 0.01/sample @ 1",
    "ref": "0.02/sample @ 2",
    "train": "0.3 @ 2",
    "refit": "0.07",
    "evaluate": "0.1 @ 1",
    "samples": "0.002",
}


def simulate(schedule, times, **options):
    planned = plan(toy.graph(batch=8, schedule=schedule, **toy.streaming(run_groups=2)))[0]
    simulation = Simulation(planned, times, **options)
    return planned, simulation.run(), simulation.now_s


def test_a_record_gives_back_the_seconds_that_made_it():
    costs = Costs(dispatch_s={"train": 0.004}, report_s={"rollout": 0.02}, checkpoint_s=0.5)
    given_times = Durations({name: Drawn(parse(text)) for name, text in SECONDS.items()}, costs)
    planned, events, _ = simulate(Schedule(steps=8, checkpoint_every=4), given_times)
    times, _ = fitted(planned, events)
    logprobs = times.stages["logprobs"].line
    for samples in {e.samples for e in events if isinstance(e, trace.Submitted) and e.stage == "logprobs"}:
        assert logprobs.seconds(samples, 0, 0.5) == pytest.approx(0.05 + 0.01 * samples)
    assert logprobs.cores == pytest.approx(1.0)
    assert times.stages["ref"].line.per_sample_s == pytest.approx(0.02, rel=1e-6)
    assert times.stages["ref"].line.cores == pytest.approx(2.0)
    assert times.stages["train"].line.seconds(16, 0, 0.5) == pytest.approx(0.3)
    assert times.stages["refit"].line.cores == 0.0
    assert times.costs.dispatch_s["train"] == pytest.approx(0.004)
    assert times.costs.report_s["rollout"] == pytest.approx(0.02)
    assert times.costs.checkpoint_s == pytest.approx(0.5)


@pytest.mark.parametrize("schedule", [Schedule(steps=10), Schedule(steps=10, max_staleness=1, refit="in_flight")])
def test_a_run_is_simulated_from_the_record_of_a_synchronous_one(schedule):
    times = Durations({name: Drawn(parse(text)) for name, text in SECONDS.items()})
    planned, events, _ = simulate(Schedule(steps=10), times)
    again, _ = fitted(planned, events, cores=2)
    _, _, truth_s = simulate(schedule, times, cores=2)
    _, _, found_s = simulate(schedule, again, cores=2)
    assert found_s == pytest.approx(truth_s, rel=0.03)


def test_the_first_step_is_left_out():
    def faults(task):
        first = task.stage == "train" and task.step == 0
        return Fault(kind="straggles", factor=20.0) if first else None

    times = Durations({name: Drawn(parse(text)) for name, text in SECONDS.items()})
    planned, events, _ = simulate(Schedule(steps=4), times, faults=faults)
    assert fitted(planned, events)[0].stages["train"].line.seconds(16, 0, 0.999) == pytest.approx(0.3)


def test_a_stream_is_not_charged_for_what_ran_in_between():
    """Groups arrive at 2.0 s and 5.0 s; rewards occupy the worker from 1.0 s to 1.5 s and from 3.0 s to 4.0 s."""
    planned = plan(toy.graph(batch=2, schedule=Schedule(steps=2), **toy.streaming()))[0]
    named = {"step": 0, "attempt": 0}

    def task(number, stage, groups, start_s, end_s, handed_s, cpu_s=0.0):
        of = {"task": number, "stage": stage, "groups": groups, **named}
        place = {"group": "sampler", "replica": 0}
        return [
            trace.Submitted(**of, **place, samples=2 * len(groups), version=0, at_s=handed_s),
            trace.Ran(**of, group="sampler", worker=0, start_s=start_s, end_s=end_s, cpu_s=cpu_s, metrics={}),
            trace.Acknowledged(**of, at_s=end_s),
        ]

    def put(group, at_s):
        of = {"stage": "rollout", "fields": ("response",), "groups": (group,), **named}
        return trace.Put(**of, samples=2, size_bytes=0, tokens=(10 * group + 10,), start_s=at_s, end_s=at_s)

    events = [
        trace.Placed(group="sampler", worker=0, node="a", pid=5),
        *task(1, "rollout", (0, 1), 0.0, 5.0, 0.0, cpu_s=1.5),
        *task(2, "reward", (7,), 1.0, 1.5, 1.0),
        *task(3, "reward", (8,), 3.0, 4.0, 1.25),  # submitted while the other reward ran
        put(0, 2.0),
        put(1, 5.0),
    ]
    times, _ = fitted(planned, events)
    rollout = times.stages["rollout"]
    assert rollout.line.cores == pytest.approx(1.0)  # 1.5 CPU seconds in the 1.5 s up to the first group
    assert rollout.line.seconds(4, 0, 0.5) == pytest.approx(1.5)
    assert rollout.came == {
        0: Came(1.0, 0.0, 10),
        1: Came(1.0, 3.0, 20),
    }  # group 1 was only waiting while the other reward ran, so no time is subtracted
    assert times.costs.dispatch_s["reward"] == pytest.approx((0.0 + 3.0 - 1.25 - 0.25) / 2)
    sampler = planned.groups[[group.name for group in planned.groups].index("sampler")]
    on_gpu = [msgspec.structs.replace(group, gpus=1) if group is sampler else group for group in planned.groups]
    times, _ = fitted(msgspec.structs.replace(planned, groups=on_gpu), events)
    rollout = times.stages["rollout"]
    assert rollout.line.cores == pytest.approx(1.5 / 3.5)  # streams share a GPU all the time, not its worker's cores
    assert rollout.line.seconds(4, 0, 0.5) == pytest.approx(3.5)
    assert rollout.came == {0: Came(pytest.approx(1.5 / 3.5), 0.0, 10), 1: Came(1.0, 0.0, 20)}


def ahead(times, *, sampler=1, steps=10, k=2, seed=0):
    """The plan and the record of a run that samples `k` steps ahead on GPUs."""
    schedule = Schedule(steps=steps, max_staleness=k, refit="in_flight")
    made = plan(toy.graph(batch=4, schedule=schedule, **toy.streaming(sampler=sampler)))[0]
    groups = [msgspec.structs.replace(group, gpus=group.workers * (group.name == "sampler")) for group in made.groups]
    on_gpus = msgspec.structs.replace(made, groups=tuple(groups))
    return on_gpus, Simulation(on_gpus, times, seed=seed).run()


def engines(rollout_s, train_s, costs=None):
    """The durations of a stream that takes `rollout_s` of an engine for itself, and of updates."""
    seconds = dict.fromkeys(SECONDS, "0") | {"refit": "0.01 @ 1", "train": f"{train_s} @ 1"}
    seconds["rollout"] = f"{rollout_s} @ 0.5"
    return Durations({name: Drawn(parse(text)) for name, text in seconds.items()}, costs or Costs())


def published(events):
    return [event.at_s for event in events if isinstance(event, trace.Published)]


@given(
    alone=st.integers(1, 30),
    train=st.integers(1, 20),
    k=st.integers(1, 3),
    sampler=st.integers(1, 2),
    room=st.sampled_from([0, 8, 16]),
)
@settings(deadline=None, max_examples=few(20))
def test_streams_that_shared_an_engine_are_simulated_as_they_were(alone, train, k, sampler, room):
    """A stream has 8 samples, or 4 on each of two samplers. Without `room` for all, the last ones wait."""
    alone_s = alone / 10 + 0.0137  # so that nothing ends at the same time
    costs = Costs(room={"sampler": room} if room else {})
    planned, events = ahead(engines(alone_s, train / 10, costs), sampler=sampler, k=k)
    again, _ = fitted(planned, events)
    line = again.stages["rollout"].line
    assert [line.seconds(8 // sampler, 0, u) for u in (0.0, 0.5, 0.99)] == pytest.approx([alone_s] * 3)
    assert published(Simulation(planned, again).run()) == pytest.approx(published(events), rel=0.1)


@pytest.mark.parametrize("room", [8, 16])
def test_how_many_samples_an_engine_had_room_for_is_seen_in_the_record(room):
    for given_room in ({"sampler": room}, {}):
        assert fitted(*ahead(engines(1.0, 0.3, Costs(room=given_room))))[0].costs.room == given_room


def room_seen(apart, seed, room):
    """The room that is seen in the record of streams that take 1 s of the engine each, `apart` more or less."""
    seconds = dict.fromkeys(SECONDS, "0") | {"refit": "0.01 @ 1", "train": "0.3 @ 1"}
    seconds["rollout"] = f"uniform({1 - apart:.1f}, {1 + apart:.1f}) @ 0.5"
    times = Durations({name: Drawn(parse(text)) for name, text in seconds.items()}, Costs(room=room))
    return fitted(*ahead(times, seed=seed))[0].costs.room


@given(st.integers(0, 50))
@settings(deadline=None, max_examples=few(20))
def test_streams_that_take_their_own_time_are_not_taken_to_wait_for_room(seed):
    """All are computed at once."""
    assert room_seen(0.2, seed, {}) == {}


def test_room_is_seen_only_if_it_makes_streams_far_more_equal():
    """It leaves 0.44 of the squared error, or 0.56 where what streams take themselves is further apart."""
    assert room_seen(0.7, 0, {"sampler": 16}) == {"sampler": 16}
    assert room_seen(0.8, 0, {"sampler": 16}) == {}


def test_a_stream_that_has_not_ended_takes_its_part_too():
    planned, events = ahead(engines(1.0, 0.3))
    ran = [e for e in events if isinstance(e, trace.Ran) and e.stage == "rollout"]
    cut = events[: events.index(ran[5]) + 1]
    assert sum(isinstance(e, trace.Submitted) and e.stage == "rollout" for e in cut) > 6, "a stream still runs"
    line = fitted(planned, cut)[0].stages["rollout"].line
    assert [line.seconds(8, 0, u) for u in (0.0, 0.5, 0.99)] == pytest.approx([1.0] * 3)


SPANS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted).map(tuple), max_size=6)


@given(SPANS, SPANS, st.integers(0, 60), st.integers(0, 60))
def test_the_time_behind_seconds_is_the_one_within_which_they_were_given(blocked, streams, start, seconds):
    shares = ProcessShares(blocked, streams)
    end_s = shares.behind(start, seconds)
    assert shares.within(start, end_s) == pytest.approx(seconds)
    free = [at for at in range(start, start + seconds) if not any(a <= at < b for a, b in blocked)]
    by_hand = sum(1 / max(1, sum(a <= at < b for a, b in streams)) for at in free)
    assert shares.within(start, start + seconds) == pytest.approx(by_hand)


def test_a_sampler_computes_again_as_fast_as_a_stage_that_scores_on_as_many_gpus():
    times = Durations({name: Drawn(parse(text)) for name, text in SECONDS.items()})
    planned, events, _ = simulate(Schedule(steps=4), times)
    gpus = {"sampler": 2, "learner": 6}
    groups = [msgspec.structs.replace(group, gpus=gpus.get(group.name, 0)) for group in planned.groups]
    on_gpus = msgspec.structs.replace(planned, groups=groups)
    each = planned.batch * planned.group_size * 3  # steps after the first
    tokens = each * statistics.fmean(n for e in events if isinstance(e, trace.Put) and e.step for n in e.tokens)
    ran = [e for e in events if isinstance(e, trace.Ran) and e.step > 0]
    scored_s = sum(e.end_s - e.start_s for e in ran if e.stage == "logprobs")
    found = fitted(on_gpus, events)[0].costs.again_s
    assert found == pytest.approx(scored_s * 3 / tokens)
    assert fitted(planned, events)[0].costs.again_s == 0.0, "no GPU"
    in_flight = msgspec.structs.replace(on_gpus, refit="in_flight")
    assert fitted(in_flight, events)[0].costs.again_s == 0.0, "part of the recorded rollout"


@pytest.mark.parametrize("executor", ["ray", "local"])
def test_the_drivers_seconds_are_without_those_of_tasks_in_its_process(executor):
    """In each of four steps, two tasks use 0.5 CPU seconds each, and the driver uses 0.2 s besides."""
    record = Record()
    record.add(trace.Started(graph="toy", start=0, steps=4, executor=executor, monotonic_s=0.0, wall_s=0.0))
    for n in range(4):
        groups = (2 * n, 2 * n + 1)
        record.task("rollout", n, n, n + 0.5, groups=groups, group="sampler", cpu_s=0.5)
        record.task("train", n, n + 0.5, n + 0.9, groups=groups, group="learner", cpu_s=0.5)
        own_s = n * (1.2 if executor == "local" else 0.2)
        record.add(
            trace.StepEnded(step=n, metrics={}, at_s=n + 0.95, driver_cpu_s=1 + own_s, processes_cpu_s=5 + 1.2 * n)
        )
    costs = fitted(planned(), record.events)[0].costs
    assert costs.driver_s == pytest.approx(0.1) and costs.beside_cpu_s == pytest.approx(0.1)
