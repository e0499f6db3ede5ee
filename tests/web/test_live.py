"""The live state derived from a record, at any point of it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.record import trace
from pipeline.web.live import Live
from tests.examples import few
from tests.unit.records import records, simulated


def seconds(at_s: float) -> float:
    return at_s


@settings(max_examples=few(120), deadline=None)
@given(records())
def test_tasks_and_groups_in_flight_are_those_of_the_record(record):
    plan, events = record
    live = Live(plan)
    for event in events:
        live.apply(event)
    now = live.picture(seconds)
    last = max((n for n, event in enumerate(events) if isinstance(event, trace.Started)), default=0)
    since = events[last:]
    admitted = {group for event in since if isinstance(event, trace.Admitted) for group in event.groups}
    gone = {
        group
        for event in since
        if isinstance(event, trace.Dropped) or (isinstance(event, trace.Cleared) and event.last)
        for group in event.groups
    }
    assert now.in_flight == len(admitted - gone)
    assert now.ended == any(isinstance(event, trace.Ended) for event in since)
    if now.ended:
        assert {stage.state for stage in now.stages.values()} == {"done"}
    for task in now.tasks:
        assert now.stages[task.stage].state == "running"


def test_a_stage_says_what_it_waits_for():
    plan, events = simulated(steps=2, batch=2)
    said = set()
    live = Live(plan)
    for event in events:
        live.apply(event)
        said |= {(name, stage.why) for name, stage in live.picture(seconds).stages.items() if stage.state == "waiting"}
    reader = next(stage for stage in plan.stages if stage.name == "train")
    assert any(name == "train" and any(field in why for field in reader.reads) for name, why in said)
    assert ("refit", "waits for trained_weights") in said


def test_a_failure_is_at_its_stage():
    plan, events = simulated(steps=1)
    live = Live(plan)
    for event in events[:10]:
        live.apply(event)
    live.apply(trace.Failed(stage="train", step=0, error="it broke", problems=("where: what",), at_s=1.0))
    now = live.picture(seconds)
    assert now.stages["train"].state == "failed" and now.failed == "it broke" and not now.tasks


@settings(max_examples=few(40), deadline=None)
@given(st.integers(0, 99))
def test_depth_counts_groups_that_a_reader_was_not_given(seed):
    plan, events = simulated(steps=3, seed=seed)
    live = Live(plan)
    for event in events:
        live.apply(event)
        now = live.picture(seconds)
        assert all(0 < count <= now.in_flight for count in now.depth.values())
