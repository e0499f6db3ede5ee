"""The time left, over the times of steps: of recorded runs, and of runs in which some steps are far from ordinary."""

import itertools

import pytest
from msgspec.structs import replace

from pipeline.cli.time_left import TimeLeft
from pipeline.plan.planner import plan
from tests.unit import toy

# Quickstart on Ray, two cores: the evaluation before training overlaps with step 1, and so does each with a next step.
QUICKSTART = [
    0.09, 0.26, 0.25, 0.25, 0.25, 0.26, 0.25, 0.28, 0.24, 0.27, 0.25, 0.26, 0.26, 0.3, 0.31, 0.27, 0.41, 0.26, 0.26,
    0.58, 0.1, 0.27, 0.27, 0.28, 0.28, 0.27, 0.35, 0.33, 0.31, 0.3, 0.32, 0.29, 0.32, 0.32, 0.27, 0.28, 0.31, 0.33,
    0.33, 0.63, 0.11, 0.27, 0.29, 0.32, 0.27, 0.28, 0.29, 0.35, 0.28, 0.36, 0.36, 0.33, 0.32, 0.31, 0.27, 0.27, 0.28,
    0.28, 0.29, 0.63, 0.1, 0.27, 0.3, 0.28, 0.32, 0.29, 0.28, 0.3, 0.32, 0.29, 0.31, 0.3, 0.28, 0.28, 0.29, 0.3, 0.33,
    0.31, 0.34, 0.58, 0.09, 0.29, 0.35, 0.33, 0.33, 0.32, 0.33, 0.33, 0.33, 0.31, 0.33, 0.34, 0.33, 0.32, 0.32, 0.34,
    0.31, 0.27, 0.27, 0.41,
]  # fmt: skip
ORDINARY_S = [2.0, 2.1, 1.9, 2.2, 1.8, 2.0, 2.05]  # again and again


def steps(count, *, slow=0.0, evaluation=0.0, checkpoint=0.0, every=20, saved=0):
    """The seconds of steps: the first is slow, every few have an evaluation, and a checkpoint delays the next one."""
    made = list(itertools.islice(itertools.cycle(ORDINARY_S), count))
    made[0] += slow
    for step in range(count):
        made[step] += evaluation * ((step + 1) % every == 0 or step == count - 1)
        made[step] += checkpoint * bool(saved and step and step % saved == 0)
    return made


def planned(count, *, every=20, saved=0):
    made = plan(toy.graph(schedule=toy.Schedule(steps=count, checkpoint_every=saved)))[0]
    stages = tuple(replace(stage, every=every) if stage.name == "evaluate" else stage for stage in made.stages)
    return replace(made, stages=stages)


def worst(took_s, made, *, known=0.0, from_step=5):
    """Return the largest error of an estimate after `from_step` steps or more, as a fraction of what was left. The last
    five steps may be off by a step."""
    left, errors = TimeLeft(made, 0), []
    left.before({"time/evaluate_s": known})
    for step, seconds in enumerate(took_s):
        left.took(step, seconds)
        if step + 1 >= from_step and step + 5 < len(took_s):
            true = sum(took_s[step + 1 :])
            errors.append(abs(left.seconds() - true) / true)
    return max(errors)


@pytest.mark.parametrize(
    ("took_s", "given"),
    [
        (QUICKSTART, {"known": 0.2}),
        (steps(100), {}),
        (steps(100, slow=300.0), {}),
        ([*steps(100, slow=60.0)[:1], 10.0, *steps(100)[2:]], {}),
        (steps(100, slow=60.0, evaluation=40.0), {"known": 40.0}),
        (steps(100, evaluation=10.0, every=2), {"known": 10.0, "every": 2}),
        (steps(100, slow=30.0, evaluation=0.0, checkpoint=3.0, saved=10), {"saved": 10}),
        (steps(400, slow=60.0, evaluation=40.0, checkpoint=4.0, saved=50), {"known": 40.0, "saved": 50}),
        ([*steps(6), 300.0, *steps(100)[6:]], {}),  # once, the machine was busy with something else
    ],
    ids=["quickstart", "plain", "first", "second", "evaluation", "every_other", "checkpoint", "all", "stall"],
)
def test_after_five_steps_the_time_left_is_right_within_a_fifth(took_s, given):
    known = given.pop("known", 0.0)
    stalled = took_s.index(300.0) + 2 if 300.0 in took_s else 5
    assert worst(took_s, planned(len(took_s), **given), known=known, from_step=max(stalled, 5)) < 0.2


def test_a_stage_that_lengthens_the_steps_for_good_is_followed():
    took_s = [*[1.0] * 50, *[3.0] * 100]
    left = TimeLeft(planned(150), 0)
    for step, seconds in enumerate(took_s[:75]):
        left.took(step, seconds)
    assert left.seconds() == pytest.approx(75 * 3.0, rel=0.2)


def test_a_part_of_a_run_begins_with_its_own_slow_step_and_a_run_that_is_over_has_no_time_left():
    left = TimeLeft(planned(20), 10)
    for step in range(10, 15):
        left.took(step, 50.0 if step == 10 else 1.0)
    assert left.seconds() == pytest.approx(5.0, rel=0.2)
    for step in range(15, 20):
        left.took(step, 1.0)
    assert left.seconds() == 0.0
    assert TimeLeft(planned(20), 0).seconds() == 0.0  # nothing is known


def test_a_run_that_goes_back_to_a_checkpoint_has_its_steps_before_it_again():
    left = TimeLeft(planned(100), 0)
    for step in (*range(60), *range(40, 50)):
        left.took(step, 2.0)
    assert left.seconds() == pytest.approx(2.0 * 50)
