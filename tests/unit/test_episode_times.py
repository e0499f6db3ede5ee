"""How episodes spent their time: in the record, on the critical path, and while nothing was sampled."""

from __future__ import annotations

import re
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.analyse import main
from pipeline.analysis.critical_path import critical_path, step_paths
from pipeline.analysis.episodes import alone, episode_times, waits, waits_by_task
from pipeline.analysis.gaps import gaps
from pipeline.analysis.perfetto import perfetto
from pipeline.analysis.tables import tables
from pipeline.declare.task import Task
from pipeline.declare.times import ENVIRONMENT, GENERATE, PROCESS, QUEUE, WORKER, SampleTimes
from pipeline.record import trace
from pipeline.record.history import Tasks, step_ends
from pipeline.record.spent import UNIT_S, parts_of, spent
from tests.examples import few
from tests.unit.test_analysis import Record, planned, step
from tests.web.folders import episodes_of

NAMES = (QUEUE, GENERATE, PROCESS, ENVIRONMENT, WORKER, "another")
PARTS = st.lists(st.tuples(st.sampled_from(NAMES), st.floats(0, 20)), max_size=12)


def sample(start_s: float, *parts: tuple[str, float]) -> SampleTimes:
    """A sample with parts of these lengths."""
    made = SampleTimes(start_s)
    for name, length in parts:
        made.until(name, made.end_s + length)
    return made


def event(number: int, stage: str, step_: int, group: int, *samples: SampleTimes, **at_once: int) -> trace.Spent:
    task = Task(stage=stage, step=step_, groups=(group,), number=number)
    return spent(task, group, samples, at_once, ("sampler", 0))


@settings(deadline=None, max_examples=few(100))
@given(st.lists(st.tuples(st.floats(0, 1e6), PARTS), min_size=1, max_size=6))
def test_the_record_has_every_part_to_a_unit(drawn):
    times = [sample(start_s, *parts) for start_s, parts in drawn]
    made = event(1, "rollout", 0, 7, *times)
    again = msgspec.json.decode(msgspec.json.encode(made), type=trace.Spent)
    for each, parts in zip(times, parts_of(again), strict=True):
        wanted = {name: 0.0 for name, _ in each.parts}
        before_s = each.start_s
        for name, end_s in each.parts:
            wanted[name] += end_s - before_s
            before_s = end_s
        for name, seconds in wanted.items():
            found = sum(part.end_s - part.start_s for part in parts if part.name == name)
            assert found == pytest.approx(seconds, abs=UNIT_S * (1 + len(parts)))
        assert all(a.end_s == b.start_s for a, b in pairwise(parts))
        if parts:
            assert parts[-1].end_s == pytest.approx(each.end_s, abs=2 * UNIT_S)


def test_a_step_of_four_thousand_turns_takes_little_of_the_record():
    turn = (WORKER, 0.0004), (QUEUE, 0.05), (GENERATE, 1.9), (WORKER, 0.0006), (PROCESS, 0.012), (ENVIRONMENT, 0.41)
    groups = [event(n, "rollout", 0, n, *[sample(9.0 + n, *turn * 8) for _ in range(16)]) for n in range(32)]
    assert sum(len(msgspec.json.encode(one)) for one in groups) < 120_000


def test_a_damaged_line_is_no_time():
    made = msgspec.structs.replace(event(1, "rollout", 0, 0, sample(0.0, (QUEUE, 1.0))), samples=("0a7b",))
    with pytest.raises(ValueError, match="no sample's time"):
        list(parts_of(made))


def test_time_that_was_noted_is_not_noted_again():
    made = sample(5.0, (QUEUE, 1.0))
    made.until(GENERATE, 5.5)  # before the end of the part before
    assert made.parts == [(QUEUE, 6.0)] and not made.problem
    made.parts.append((GENERATE, 5.0))
    assert "follows 6.0" in made.problem


@settings(deadline=None, max_examples=few(100))
@given(*[st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6) for _ in range(2)])
def test_alone_is_where_one_runs_and_no_other(spans, others):
    found = list(alone(spans, others))
    for n in range(20):
        inside = [any(a <= n and n + 1 <= b for a, b in each) for each in (spans, others, found)]
        assert inside[2] == (inside[0] and not inside[1])
    assert all(a[1] < b[0] for a, b in pairwise(found))


def episodes() -> Record:
    """Two steps of a toy graph; the second one's rollout, of seconds 3 to 6, has the times of its two groups."""
    record = Record().task("refit", -1, 0.0, 1.0, group="learner").published(0, 1.0)
    step(record, 0, 1.0)
    step(record, 1, 3.0, rollout_s=3.0)
    number = next(e.task for e in record.events if isinstance(e, trace.Ran) and e.stage == "rollout" and e.step == 1)
    first = [
        sample(3.0, (PROCESS, 0.25), (ENVIRONMENT, 0.25), (QUEUE, 0.5), (GENERATE, 0.5)),
        sample(3.0, (ENVIRONMENT, 1.0), (GENERATE, 0.5)),
    ]
    last = [
        sample(3.0, (ENVIRONMENT, 1.0), (GENERATE, 1.0), (WORKER, 0.25), (ENVIRONMENT, 0.5)),
        sample(3.0, (ENVIRONMENT, 0.5), (QUEUE, 0.5), (GENERATE, 0.5)),
    ]
    return record.add(event(number, "rollout", 1, 2, *first), event(number, "rollout", 1, 3, *last))


def test_the_path_goes_along_the_episode_that_ended_last():
    tasks = Tasks(episodes().events)
    path = step_paths(planned(), tasks, step_ends(tasks))[1]
    told = [(one.part, round(one.end_s - one.start_s, 6)) for one in path.spans if one.stage == "rollout"]
    assert told == [(ENVIRONMENT, 1.0), (GENERATE, 1.0), (WORKER, 0.25), (ENVIRONMENT, 0.5), ("", 0.25)]
    assert {one.part for one in path.spans if one.stage != "rollout"} == {""}
    found = critical_path(planned(), tasks, step_ends(tasks)[1:])
    assert found.by_part == {"rollout": pytest.approx({ENVIRONMENT: 1.5, GENERATE: 1.0, WORKER: 0.25, "": 0.25})}
    assert found.by_stage["rollout"] == pytest.approx(3.0)


def test_a_worker_waits_for_environments_while_nothing_is_sampled():
    tasks = Tasks(episodes().events)
    found = [gap for gap in gaps(planned(), tasks, 3.0, 6.0) if gap.group == "sampler"]
    number = next(iter(tasks.spent))
    assert [(g.cause, g.stage, g.task, g.start_s, g.end_s) for g in found] == [
        (ENVIRONMENT, "rollout", number, 3.0, pytest.approx(4.0)),
        (ENVIRONMENT, "rollout", number, pytest.approx(5.25), pytest.approx(5.75)),
    ]


def test_another_task_of_the_worker_is_no_wait():
    record = episodes().task("evaluate", 1, 3.25, 3.5, group="sampler")
    found = [gap for gap in gaps(planned(), Tasks(record.events), 3.0, 6.0) if gap.group == "sampler"]
    assert [(gap.start_s, gap.end_s) for gap in found][:2] == [(3.0, 3.25), (3.5, pytest.approx(4.0))]


def test_a_task_with_groups_that_are_not_known_tells_no_waits():
    record = episodes()
    record.events.pop()
    tasks = Tasks(record.events)
    assert not [gap for gap in gaps(planned(), tasks, 3.0, 6.0) if gap.cause == ENVIRONMENT]
    assert episode_times(tasks, waits_by_task(tasks), 0.0, 9.0)[0].waiting is None


def test_episodes_are_summed_by_part():
    tasks = Tasks(episodes().events)
    (found,) = episode_times(tasks, waits_by_task(tasks), 3.0, 6.0)
    assert (found.stage, found.episodes, found.waiting) == ("rollout", 4, pytest.approx(1.5 / 3.0))
    assert found.parts == pytest.approx(
        {ENVIRONMENT: 3.25 / 4, GENERATE: 2.5 / 4, QUEUE: 1.0 / 4, WORKER: 0.25 / 4, PROCESS: 0.25 / 4}
    )
    assert next(iter(found.parts)) == ENVIRONMENT and found.seconds == pytest.approx(sum(found.parts.values()))
    assert waits([]) == [] and episode_times(Tasks([]), {}, 0.0, 1.0) == []


@pytest.mark.journal_expected  # it has no checkpoints
def test_the_command_and_the_tables_have_the_parts(tmp_path, capsys):
    """Of a run whose episodes are sampled for half of each task, along the path; then their environments work."""
    run = episodes_of(tmp_path / "run", steps=6).path
    assert main([str(run)]) == 0
    told = capsys.readouterr().out
    assert re.search(r"\n  generate +[\d.]+ s +\d+ %", told) and re.search(r"\n  environment +[\d.]+ s", told)
    assert re.search(r"sampler .* \d+ % rollout \(environment\)", told)
    assert re.search(r"rollout: an episode takes .*% generate, .*; for 25 % of the time, all wait for environ", told)
    head, *rows = [line.split(",") for line in "".join(tables(run)["path.csv"]).splitlines()]
    parts = {row[head.index("part")] for row in rows if row[head.index("stage")] == "rollout"}
    assert {GENERATE, ENVIRONMENT} <= parts
    assert '"rollout: generate"' in "".join(perfetto(run))
