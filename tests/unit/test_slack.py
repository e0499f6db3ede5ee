"""The slack of a task is how much slower it may be; on handwritten records and on simulated ones."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.analysis.critical_path import NOBODY, step_paths
from pipeline.analysis.slack import slack
from pipeline.record import trace
from pipeline.record.history import Tasks, step_ends
from pipeline.simulation.durations import Costs
from pipeline.simulation.virtual_run import Fault
from tests.examples import few
from tests.unit.records import records, simulated
from tests.unit.test_analysis import Record, planned

APART = {"reward": "0.31", "ref": "0.07", "logprobs": "0.23", "prompts": "0.05", "rollout": "1", "evaluate": "0.11"}


def published(events) -> list[float]:
    return [event.at_s for event in events if isinstance(event, trace.Published)]


def test_what_the_next_stage_waits_for_has_nothing_to_spare():
    record = Record().task("refit", -1, 0.0, 1.0, group="learner").published(0, 1.0)
    record.task("rollout", 0, 1.0, 2.0, groups=(0, 1), group="sampler")
    record.task("reward", 0, 2.0, 2.5, groups=(0,)).task("reward", 0, 2.5, 2.75, groups=(1,))
    record.task("ref", 0, 2.0, 2.25, groups=(0, 1), group="learner")
    record.task("logprobs", 0, 2.25, 3.0, groups=(0, 1), group="learner")
    record.task("train", 0, 3.0, 4.0, groups=(0, 1), group="learner").task("refit", 0, 4.0, 4.5, group="learner")
    record.task("samples", 0, 3.0, 3.5, groups=(0, 1)).published(1, 4.5)
    found = slack(planned(), Tasks(record.events))
    assert found.steps[0] == pytest.approx(
        {"rollout": 0.0, "reward": 0.25, "ref": 0.0, "logprobs": 0.0, "train": 0.0, "refit": 0.0, "samples": None}
    )
    assert found.tasks[3] == pytest.approx(0.25)  # the second reward waits for the first on its worker
    assert list(found.stages())[-2:] == ["reward", "samples"]


def test_what_came_first_of_a_column_has_more_to_spare():
    record = Record().task("refit", -1, 0.0, 1.0, group="learner").published(0, 1.0)
    record.task("reward", 0, 1.0, 1.5, groups=(0,), worker=0).task("reward", 0, 1.0, 2.0, groups=(1,), worker=1)
    record.task("train", 0, 2.25, 3.0, groups=(0, 1), group="learner")
    record.task("refit", 0, 3.0, 3.5, group="learner").published(1, 3.5)
    found = slack(planned(), Tasks(record.events))
    assert (found.tasks[2], found.tasks[3]) == (pytest.approx(0.75), pytest.approx(0.25))
    assert found.steps[0]["reward"] == pytest.approx(0.25)


def test_what_runs_before_in_the_same_process_is_waited_for():
    record = Record().placed(("sampler", 0, 7), ("learner", 0, 7), ("host", 0, 7))
    record.task("refit", -1, 0.0, 1.0, group="learner").published(0, 1.0)
    record.task("samples", 0, 1.0, 2.0, groups=(0, 1)).task("train", 0, 2.25, 3.0, handed_s=1.0, group="learner")
    record.task("refit", 0, 3.0, 3.5, group="learner").published(1, 3.5)
    assert slack(planned(), Tasks(record.events)).tasks[2] == pytest.approx(0.25)


@settings(deadline=None, max_examples=few(40))
@given(st.data())
def test_a_task_may_be_slower_by_its_slack_and_by_no_more(data):
    free = Costs()  # dispatch and report delays would count as slack
    made, events = simulated(steps=4, seconds=APART, costs=free)
    tasks = Tasks(events)
    found = slack(made, tasks)
    ran = {number: spans[0].end_s - spans[0].start_s for number, spans in tasks.ran.items()}
    number = data.draw(st.sampled_from([n for n, spare in found.tasks.items() if spare is not None and ran[n] > 0]))
    assume(tasks.submitted[number].stage != "rollout")  # a stream would slow down each of its groups
    spare_s = found.tasks[number]
    assert spare_s is not None
    for share, delayed in ((0.9, False), (1.0, True)):
        more_s = share * spare_s + (0.01 if delayed else 0.0)

        def slowed(task, factor=1 + more_s / ran[number]):
            return Fault(kind="straggles", factor=factor) if task.number == number else None

        slower = simulated(steps=4, seconds=APART, costs=free, faults=slowed)[1]
        assert (published(slower) != pytest.approx(published(events))) == delayed


@settings(deadline=None, max_examples=few(40))
@given(records())
def test_slack_is_never_negative_and_every_task_that_ran_has_one(record):
    made, events = record
    tasks = Tasks(events)
    found = slack(made, tasks)
    assert found.tasks.keys() == tasks.ran.keys() & tasks.submitted.keys()
    assert all(spare is None or spare >= 0 for spare in found.tasks.values())
    for step in step_paths(made, tasks, step_ends(tasks)):
        for span in step.spans:
            if span.stage != NOBODY:
                assert span.task is not None and found.tasks[span.task] is not None
