"""The analysis report, on handwritten traces and on simulated ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Schedule
from pipeline.analysis.report import analyse, drops, staleness, utilisation
from pipeline.plan.plan import Plan
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.record.history import Tasks, last_run
from pipeline.simulation.distributions import parse
from pipeline.simulation.durations import Costs, Drawn, Durations
from pipeline.simulation.virtual_run import Fault, Simulation
from tests.examples import few
from tests.unit import toy


def planned(batch: int = 2, **schedule) -> Plan:
    return plan(toy.graph(batch=batch, schedule=Schedule(**({"steps": 4} | schedule)), **toy.streaming()))[0]


class Record:
    """Builds a trace task by task."""

    def __init__(self) -> None:
        self.events: list[trace.TraceEvent] = []
        self.number = 0

    def task(self, stage, step, start_s, end_s, *, groups=(), handed_s=None, told_s=None, group="host", worker=0, **of):
        self.number += 1
        named = {"task": self.number, "stage": stage, "step": step, "attempt": 0, "groups": tuple(groups)}
        handed_s = start_s if handed_s is None else handed_s
        self.events += [
            trace.Submitted(**named, group=group, replica=worker, samples=2 * len(groups), version=0, at_s=handed_s),
            trace.Ran(
                **named,
                group=group,
                worker=worker,
                start_s=start_s,
                end_s=end_s,
                cpu_s=of.get("cpu_s", 0.0),
                metrics={},
            ),
            trace.Acknowledged(**named, at_s=end_s if told_s is None else told_s),
        ]
        return self

    def add(self, *events):
        self.events += events
        return self

    def published(self, version, at_s):
        return self.add(trace.Published(stage="refit", step=version - 1, version=version, sha256="", at_s=at_s))

    def placed(self, *workers):
        return self.add(*(trace.Placed(group=group, worker=rank, node="a", pid=pid) for group, rank, pid in workers))


def trained(step, groups, oldest, *, tokens=0, samples=2):
    count = len(groups)
    return trace.Trained(
        task=1, stage="train", step=step, attempt=0, worker=0, version=step, groups=tuple(groups),
        samples=(samples,) * count, oldest=tuple(oldest), newest=(step,) * count, entries={"logprobs": tokens},
        at_s=0.0,
    )  # fmt: skip


def put(groups, tokens):
    return trace.Put(
        stage="rollout", step=0, attempt=0, fields=("response",), groups=tuple(groups), samples=len(groups),
        size_bytes=0,
        tokens=tuple(tokens), start_s=0.0, end_s=0.0,
    )  # fmt: skip


def dropped(groups, reason, tokens=(), stage=""):
    return trace.Dropped(stage=stage, step=0, groups=tuple(groups), reason=reason, tokens=tuple(tokens), at_s=0.0)


def test_utilisation_is_the_covered_share_of_each_group():
    record = (
        Record()
        .task("rollout", 0, 1.0, 3.0, groups=(0,), group="sampler")
        .task("rollout", 0, 2.0, 4.0, groups=(1,), group="sampler")
        .task("evaluate", 0, 9.0, 12.0, group="sampler")
        .task("train", 0, 0.0, 5.0, groups=(0, 1), group="learner")
    )
    shares = utilisation(planned(), Tasks(record.events), 0.0, 10.0)
    assert shares == {"sampler": pytest.approx(0.4), "learner": pytest.approx(0.5), "host": 0.0}


def test_the_first_steps_are_apart():
    record = Record().published(0, 1.0).published(1, 6.0).published(2, 8.0).published(3, 10.0)
    steps = analyse(record.events, planned()).steps
    assert (steps.warm_up, steps.seconds, steps.mean) == ((5.0,), (2.0, 2.0), 2.0)
    assert (steps.first, steps.last, steps.averaged) == (2, 3, "steps 2 to 3")
    assert analyse(record.events, planned(max_staleness=3)).steps.warm_up == (5.0,)  # at most half of them
    assert analyse(record.events, planned(), warm_up=0).steps.seconds == (5.0, 2.0, 2.0)


def test_a_run_without_a_refit_has_the_steps_that_ended():
    ended = [trace.StepEnded(step=n, metrics={}, at_s=at_s) for n, at_s in enumerate((3.0, 5.0, 7.0))]
    start = trace.Started(graph="toy", start=0, steps=3, executor="ray", monotonic_s=1.0, wall_s=0.0)
    assert analyse([start, *ended], planned()).steps.seconds == (2.0, 2.0)


def test_cores_are_cpu_seconds_a_second():
    record = Record().published(0, 0.0).published(1, 2.0).published(2, 4.0)
    record.task("train", 1, 1.0, 3.0, cpu_s=4.0).task("reward", 1, 3.0, 4.0, cpu_s=0.5)
    assert analyse(record.events, planned()).cores == pytest.approx((2.0 + 0.5) / 2.0)


def test_staleness_counts_samples_and_tokens_by_the_oldest_version():
    record = Record().add(put((0, 1, 2), (10, 30, 20)))
    record.add(trained(2, (0, 1), (2, 1), tokens=80), trained(3, (2,), (1,), tokens=40))
    found = staleness(planned(), Tasks(record.events))
    assert found.samples == {0: 2, 1: 2, 2: 2}
    assert found.tokens == {0: 20, 1: 60, 2: 40}
    assert found.mean == 1.0


def test_drops_by_reason_and_by_length():
    record = Record().add(
        put(range(6), (10, 20, 30, 40, 50, 60)),
        dropped((5,), "stale", (60,)),
        dropped((6, 7), "cancelled", (70, 80)),
        trace.Claimed(step=0, groups=(0, 1, 2, 3, 4), at_s=0.0),
    )
    found = drops(Tasks(record.events))
    assert (found.groups, found.share, found.by_reason) == (3, 3 / 8, {"stale": 1, "cancelled": 2})
    assert [(b.low, b.high, b.admitted, b.dropped) for b in found.by_length] == [
        (10, 20, 2, 0), (30, 40, 2, 0), (50, 60, 2, 1), (70, 80, 2, 2),
    ]  # fmt: skip


def test_equal_lengths_are_in_one_bucket():
    found = drops(Tasks(Record().add(put(range(8), [5] * 7 + [9]), dropped((7,), "stale", (9,))).events))
    assert [(b.low, b.high, b.admitted, b.dropped) for b in found.by_length] == [(5, 5, 7, 0), (9, 9, 1, 1)]


def step(record, n, at_s, *, rollout_s=1.0, refit_handed_s=None):
    """Record one synchronous step from `at_s`: rollout, logprobs, train, refit. Ref and reward take no time."""
    groups = (2 * n, 2 * n + 1)
    t = at_s + rollout_s
    record.task("prompts", n, at_s, at_s, groups=groups)
    record.task("rollout", n, at_s, t, groups=groups, group="sampler")
    record.task("reward", n, t, t, groups=groups)
    record.task("ref", n, t, t, groups=groups, group="learner")
    record.task("logprobs", n, t, t + 0.3, groups=groups, group="learner")
    record.task("train", n, t + 0.3, t + 0.8, groups=groups, group="learner")
    handed_s = t + 0.8 if refit_handed_s is None else refit_handed_s
    record.task("refit", n, handed_s, handed_s + 0.2, group="learner")
    return record.published(n + 1, handed_s + 0.2)


def test_the_path_of_a_synchronous_step_is_the_step():
    record = Record().task("refit", -1, 0.0, 1.0, group="learner").published(0, 1.0)
    step(record, 0, 1.0)
    step(record, 1, 3.0)
    step(record, 2, 5.0, rollout_s=3.0)
    path = analyse(record.events, planned(), warm_up=0).critical_path
    assert path.by_stage == pytest.approx({"rollout": 5 / 3, "train": 0.5, "logprobs": 0.3, "refit": 0.2})
    assert path.steps[2] == pytest.approx({"rollout": 3.0, "train": 0.5, "logprobs": 0.3, "refit": 0.2})
    assert path.by_cause == pytest.approx({"field": 5 / 3 + 0.3 + 0.2, "weights": 0.5})
    assert path.sentence == "rollout-bound: 62 % of the step; train waited 2.17 s per step"


def test_time_on_the_way_is_the_drivers():
    record = Record().task("refit", -1, 0.0, 1.0, group="learner").published(0, 1.0)
    step(record, 0, 1.0, refit_handed_s=4.0)
    path = analyse(record.events, planned(), warm_up=0).critical_path
    assert path.by_stage["no stage"] == pytest.approx(1.2) and path.by_cause["driver"] == pytest.approx(1.2)


def test_a_stage_that_another_must_not_run_beside_is_waited_for():
    record = Record().task("refit", -1, 0.0, 1.0, group="learner").published(0, 1.0)
    step(record, 0, 1.0)
    record.task("evaluate", 0, 3.0, 8.0, group="sampler")  # with the weights served so far
    step(record, 1, 3.0, refit_handed_s=8.0)
    path = analyse(record.events, planned(), warm_up=1).critical_path
    assert path.by_stage == pytest.approx({"evaluate": 5.0, "refit": 0.2})
    assert path.by_cause["fence"] == pytest.approx(5.0)
    assert path.sentence == "evaluate-bound: 96 % of the step; train waited 4.70 s per step"


def test_a_task_that_queues_in_its_process_waits_for_what_runs_there():
    record = Record().placed(("sampler", 0, 7), ("learner", 0, 7), ("host", 0, 7))
    record.task("refit", -1, 0.0, 1.0, group="learner").published(0, 1.0)
    step(record, 0, 1.0)
    record.task("evaluate", 0, 3.0, 5.5, group="sampler")
    record.task("prompts", 1, 3.0, 3.0, groups=(2, 3))
    record.task("rollout", 1, 5.5, 6.0, groups=(2, 3), group="sampler", handed_s=3.0)
    record.task("train", 1, 6.0, 7.0, groups=(2, 3), group="learner")
    record.task("reward", 1, 6.0, 6.0, groups=(2, 3)).task("refit", 1, 7.0, 7.5, group="learner").published(2, 7.5)
    path = analyse(record.events, planned(), warm_up=1).critical_path
    assert path.by_stage == pytest.approx({"evaluate": 2.5, "train": 1.0, "rollout": 0.5, "refit": 0.5})
    assert path.by_cause["worker"] == pytest.approx(2.5)


def test_only_what_came_since_the_last_start_counts():
    def start(at_s):
        return trace.Started(graph="toy", start=0, steps=3, executor="ray", monotonic_s=at_s, wall_s=0.0)

    record = Record().add(start(0.0)).published(0, 1.0).published(1, 99.0).add(start(100.0))
    record.published(1, 101.0).published(2, 103.0)
    assert len(last_run(record.events)) == 3
    assert analyse(record.events, planned(), warm_up=0).steps.seconds == (2.0,)


SECONDS = {"rollout": "lognormal(1, 1)", "train": "0.4 @ 1", "logprobs": "0.1 @ 1", "refit": "0.1", "evaluate": "0.3"}


@settings(deadline=None, max_examples=few(25))
@given(
    st.integers(0, 2), st.booleans(), st.sampled_from(["drain", "in_flight"]), st.integers(0, 99), st.booleans(),
)  # fmt: skip
def test_the_seconds_of_the_path_are_those_of_the_steps(k, drops_stale, refit, seed, faulty):
    described = planned(
        batch=4, steps=8, max_staleness=k, on_stale="drop" if drops_stale and k else "wait", refit=refit
    )
    costs = Costs(dispatch_s={"train": 0.02}, report_s={"rollout": 0.03}, driver_s=0.001)
    times = Durations({s.name: Drawn(parse(SECONDS.get(s.name, "0.01"))) for s in described.stages}, costs)

    def faults(task):
        return Fault(kind="after_put") if faulty and task.number % 9 == 0 and task.attempt == 0 else None

    report = analyse(Simulation(described, times, seed=seed, cores=2, faults=faults).run(), described)
    path = report.critical_path
    assert sum(path.by_stage.values()) == pytest.approx(report.steps.mean)
    assert sum(path.by_cause.values()) == pytest.approx(report.steps.mean)
    assert all(sum(one.values()) == pytest.approx(s) for one, s in zip(path.steps, report.steps.seconds))
    lost = 0.5 if faulty else 0.2  # the time of a lost attempt belongs to no stage
    assert path.by_stage.get("no stage", 0.0) < lost * report.steps.mean
    assert all(0 <= share <= 1 + 1e-9 for share in report.utilisation.values())
    assert sum(report.staleness.samples.values()) == 8 * 4 * 2
    assert max(report.staleness.samples) <= k
