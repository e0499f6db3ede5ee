"""Every idle second of every worker has exactly one cause, on handwritten records and on simulated ones."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings

from pipeline.analysis.gaps import CAUSES, gaps, workers
from pipeline.analysis.idle import idle_by_group, idle_by_worker
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.record.history import Tasks
from tests.examples import few
from tests.unit import toy
from tests.unit.records import records
from tests.unit.test_analysis import Record, planned, step


def found(record, start_s, end_s, group, **schedule):
    """Return (cause, stage, field, seconds) of the gaps of a worker group, in order."""
    every = gaps(planned(**schedule), Tasks(record.events), start_s, end_s)
    return [(g.cause, g.stage, g.field, pytest.approx(g.end_s - g.start_s)) for g in every if g.group == group]


def end_of(events) -> float:
    """Return the last time in a record."""
    return max([getattr(e, name) for e in events for name in ("at_s", "end_s") if hasattr(e, name)], default=1.0)


@settings(deadline=None, max_examples=few(60))
@given(records())
def test_gaps_and_tasks_tile_the_time_of_every_worker(record):
    made, events = record
    tasks = Tasks(events)
    for start_s, end_s in ((0.0, end_of(events)), (end_of(events) / 3, end_of(events) / 2)):
        every = list(gaps(made, tasks, start_s, end_s))
        assert {gap.cause for gap in every} <= CAUSES.keys()
        by_worker = idle_by_worker(workers(made, tasks), every, end_s - start_s)
        assert [(one.group, one.worker) for one in by_worker] == workers(made, tasks)
        for one in by_worker:
            own = [gap for gap in every if (gap.group, gap.worker) == (one.group, one.worker)]
            assert all(a.end_s <= b.start_s for a, b in pairwise(own))
            ran = [s for spans in tasks.ran.values() for s in spans if (s.group, s.worker) == (one.group, one.worker)]
            assert not [(g, r) for g in own for r in ran if max(g.start_s, r.start_s) < min(g.end_s, r.end_s)]
            open_ = [n for n in tasks.submitted if n not in tasks.ran]
            if not open_:  # otherwise a task has no recorded end
                assert one.idle_s == pytest.approx(end_s - start_s - covered(ran, start_s, end_s))
            assert sum(part.seconds for part in one.parts) == pytest.approx(one.idle_s)
            assert 0 <= one.idle_s <= one.wall_s + 1e-9
        for group in idle_by_group(by_worker):
            members = [one.idle_s for one in by_worker if one.group == group.group]
            assert group.idle_s == pytest.approx(sum(members) / len(members))
            assert sum(part.seconds for part in group.parts) == pytest.approx(group.idle_s)


def covered(spans, start_s, end_s) -> float:
    """Return how many seconds of an interval the spans cover."""
    marks = sorted({start_s, end_s, *(min(max(t, start_s), end_s) for s in spans for t in (s.start_s, s.end_s))})
    return sum(b - a for a, b in pairwise(marks) if any(s.start_s <= a and b <= s.end_s for s in spans))


def two_steps():
    record = Record().task("refit", -1, 0.0, 1.0, group="learner").published(0, 1.0)
    step(record, 0, 1.0)
    return step(record, 1, 3.0, rollout_s=3.0)


def test_a_sampler_waits_for_weights_and_a_learner_for_samples():
    record = two_steps()
    assert found(record, 3.0, 7.0, "learner") == [("field", "rollout", "response", 3.0)]
    record.task("prompts", 2, 3.0, 3.0, groups=(4, 5)).task("rollout", 2, 7.0, 8.0, groups=(4, 5), group="sampler")
    assert found(record, 5.0, 8.0, "sampler") == [
        ("field", "logprobs", "logprobs", 0.3),
        ("weights", "train", "trained_weights", 0.5),
        ("weights", "refit", "served_weights", 0.2),
    ]


def test_what_is_on_its_way_is_the_drivers():
    record = Record().task("refit", -1, 0.0, 1.0, group="learner").published(0, 1.0)
    record.task("reward", 0, 1.0, 2.0, groups=(0, 1), told_s=2.5)
    record.task("train", 0, 3.0, 4.0, groups=(0, 1), group="learner", handed_s=2.75)
    assert found(record, 1.0, 4.0, "learner") == [
        ("field", "reward", "reward", 1.0),
        ("driver", "", "", 0.5),  # until the report arrives
        ("driver", "", "", 0.5),  # until train starts
    ]


def test_a_checkpoint_is_not_the_drivers_other_business():
    record = two_steps().add(trace.Held(step=1, start_s=7.25, end_s=8.0))
    record.task("logprobs", 2, 8.5, 9.0, groups=(4, 5), group="learner", handed_s=8.5)
    causes = [(cause, seconds) for cause, _, _, seconds in found(record, 7.0, 9.0, "learner")]
    assert causes == [("driver", 0.25), ("checkpoint", 0.75), ("driver", 0.5)]


def test_turns_are_told_apart():
    record = two_steps()
    turned = {"group": "learner", "worker": 0, "memory_bytes": 0}
    record.add(
        trace.Turned(**turned, awake=False, start_s=3.5, end_s=4.0),
        trace.Turned(**turned, awake=True, start_s=5.0, end_s=5.5),
    )
    causes = [(cause, seconds) for cause, _, _, seconds in found(record, 3.0, 6.0, "learner")]
    assert causes == [("field", 0.5), ("turn", 0.5), ("field", 1.0), ("turn", 0.5), ("field", 0.5)]


def test_admission_is_waited_for_when_there_was_no_room():
    record = Record().task("refit", -1, 0.0, 1.0, group="learner").published(0, 1.0)
    record.add(trace.Admitted(step=0, groups=(0, 1), version=0, at_s=0.5))
    record.add(trace.Admitted(step=1, groups=(2, 3), version=0, at_s=4.0))
    record.task("prompts", 0, 0.5, 0.5, groups=(0, 1)).task("prompts", 1, 4.0, 4.0, groups=(2, 3))
    record.task("rollout", 0, 1.0, 2.0, groups=(0, 1), group="sampler")
    record.task("rollout", 1, 4.0, 5.0, groups=(2, 3), group="sampler")
    assert found(record, 1.0, 5.0, "sampler") == [("room", "", "", 2.0)]
    record.task("refit", 0, 3.0, 3.999, group="learner")
    told = [("driver", "", "", 0.5), ("weights", "refit", "served_weights", 0.999), ("driver", "", "", 0.001)]
    assert found(record, 2.5, 5.0, "sampler") == told


def test_before_the_first_task_the_run_starts_and_behind_the_last_nothing_is_left():
    started = trace.Started(graph="toy", start=0, steps=1, executor="ray", monotonic_s=0.0, wall_s=0.0)
    record = Record().add(started).task("refit", -1, 2.0, 3.0, group="learner").published(0, 3.0)
    assert found(record, 0.0, 4.0, "learner") == [("start", "", "", 2.0), ("open", "", "", 1.0)]
    record.add(trace.Ended(steps=1, rows_left=0, at_s=4.0))
    assert found(record, 0.0, 4.0, "learner") == [("start", "", "", 2.0), ("done", "", "", 1.0)]


def test_a_task_that_runs_still_is_no_idle_time():
    record = two_steps()
    record.number += 1
    named = {"task": record.number, "stage": "rollout", "step": 2, "attempt": 0, "groups": (4, 5)}
    record.add(trace.Submitted(**named, group="sampler", replica=0, samples=4, version=2, at_s=7.5))
    assert found(record, 7.5, 9.0, "sampler") == []
    record.add(trace.Retried(**named, reason="its process has ended", at_s=8.0))
    assert found(record, 7.5, 9.0, "sampler") == [("open", "", "", 1.0)]


def test_a_worker_that_needs_the_others_waits_for_them():
    record = Record().task("refit", -1, 0.0, 1.0, group="learner").published(0, 1.0)
    record.task("reward", 0, 1.0, 1.5, groups=(0, 1)).task("ref", 0, 1.0, 3.0, groups=(2, 3), group="learner")
    train = {"task": 9, "stage": "train", "step": 0, "attempt": 0, "groups": (0, 1)}
    record.add(trace.Submitted(**train, group="learner", replica=None, samples=4, version=0, at_s=3.0))
    for worker in (0, 1):
        ran = {"group": "learner", "worker": worker, "start_s": 3.0, "end_s": 4.0, "cpu_s": 0.0, "metrics": {}}
        record.add(trace.Ran(**train, **ran))
    record.placed(("learner", 0, 1), ("learner", 1, 2))
    made = plan(toy.graph(batch=2, **toy.streaming(learner=2)))[0]
    every = [gap for gap in gaps(made, Tasks(record.events), 1.0, 4.0) if gap.worker == 1]
    assert [(gap.cause, gap.stage, gap.end_s) for gap in every] == [("worker", "ref", 3.0)]


def test_a_turn_of_the_group_on_the_same_gpus_is_waited_for():
    made = planned()
    learner, others = made.groups[1], (made.groups[0], *made.groups[2:])
    made = msgspec.structs.replace(made, groups=(*others, msgspec.structs.replace(learner, colocated="sampler")))
    record = Record().task("refit", -1, 0.0, 1.0, group="learner").published(0, 1.0)
    record.task("reward", 0, 1.0, 1.5, groups=(0, 1)).task("evaluate", 0, 1.0, 3.0, group="sampler")
    record.task("train", 0, 3.0, 4.0, groups=(0, 1), group="learner")
    every = [gap for gap in gaps(made, Tasks(record.events), 1.0, 4.0) if gap.group == "learner"]
    assert [(gap.cause, gap.stage, gap.end_s) for gap in every] == [("turn", "evaluate", 3.0)]
