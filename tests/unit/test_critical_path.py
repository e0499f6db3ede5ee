"""Spans of the critical path: they tile every step, lie within the tasks they name, and sum to the step seconds."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings

from pipeline.analysis.critical_path import NOBODY, Walker, critical_path, step_paths
from pipeline.analysis.waits import Reason
from pipeline.record.history import Tasks, step_ends
from pipeline.simulation.virtual_run import Fault
from tests.examples import few
from tests.unit.records import records, simulated
from tests.unit.test_analysis import Record, planned, step


def streams_that_put_nothing():
    """Return a run in which a task waited for a stream whose groups were all dropped."""
    return simulated(
        steps=4, sampler=2, seed=46, max_staleness=1, on_stale="drop", refit="in_flight",
        faults=lambda task: Fault(kind="after_put") if task.number % 7 == 0 and not task.attempt else None,
    )  # fmt: skip


@settings(deadline=None, max_examples=few(60))
@example(streams_that_put_nothing())
@given(records())
def test_spans_tile_each_step_and_lie_in_their_tasks(record):
    made, events = record
    tasks = Tasks(events)
    ends = step_ends(tasks)
    paths = step_paths(made, tasks, ends)
    assert [(path.start_s, path.end_s, path.step) for path in paths] == [(a, b, n) for (a, _), (b, n) in pairwise(ends)]
    for path in paths:
        marks = [path.start_s, *(span.end_s for span in path.spans)]
        assert [span.start_s for span in path.spans] == marks[:-1] and marks[-1] == path.end_s
        for span in path.spans:
            assert span.start_s < span.end_s
            if span.stage == NOBODY:
                assert (span.task, span.group, span.worker) == (None, "", None)
                continue
            ran = tasks.ran[span.task]
            assert {one.stage for one in ran} == {span.stage}
            assert (span.group, span.worker) in {(one.group, one.worker) for one in ran}
            assert min(one.start_s for one in ran) <= span.start_s
            assert span.end_s <= max(one.end_s for one in ran) + 1e-9
    summed = critical_path(made, tasks, ends)
    for path, seconds in zip(paths, summed.steps, strict=True):
        assert path.seconds("stage") == seconds and sum(path.seconds("cause").values()) == pytest.approx(
            path.end_s - path.start_s
        )


def test_a_span_names_its_task_its_worker_and_why_it_was_waited_for():
    record = Record().task("refit", -1, 0.0, 1.0, group="learner").published(0, 1.0)
    step(record, 0, 1.0)
    step(record, 1, 3.0, refit_handed_s=6.0)
    path = step_paths(planned(), Tasks(record.events), step_ends(Tasks(record.events)))[1]
    told = [(s.stage, s.cause, s.task, s.group, s.worker, round(s.end_s - s.start_s, 6)) for s in path.spans]
    assert told == [
        ("rollout", "field", 10, "sampler", 0, 1.0),
        ("logprobs", "field", 13, "learner", 0, 0.3),
        ("train", "weights", 14, "learner", 0, 0.5),
        (NOBODY, "driver", None, "", None, 1.2),
        ("refit", "field", 15, "learner", 0, 0.2),
    ]


def test_tasks_that_wait_for_each_other_at_one_time_end_the_path():
    """As a damaged record may say: without an end, an analysis would not end either."""
    spans = {n: [SimpleNamespace(stage="s", group="g", worker=0, start_s=1.0, end_s=2.0)] for n in (0, 1)}
    tasks = SimpleNamespace(ran=spans, submitted={n: SimpleNamespace(number=n, at_s=0.0) for n in (0, 1)})
    waits = SimpleNamespace(
        queued=lambda task, begun_s: Reason(begun_s, "worker", 1 - task.number), worked_until=lambda task, at_s: at_s
    )
    found, at_s, last = Walker(tasks, waits).back(Reason(3.0, "field", 0), 0.0, 4.0)
    assert at_s == 1.0 and last is None and {span.task for span in found} == {None, 0, 1}
