"""Metrics of a step: a pool stage's report about a group counts for the step that trains the group."""

from __future__ import annotations

import pytest

from graphs import quickstart
from pipeline import Graph
from pipeline.declare.task import Task
from pipeline.engine.tally import Tally
from pipeline.plan.plan import Plan
from pipeline.plan.planner import plan
from stages import Filter


@pytest.fixture(scope="module")
def dropping() -> Plan:
    made = plan(quickstart.graph(steps=4, max_staleness=1, on_stale="drop"))[0]
    assert "reward" in made.pool and "train" not in made.pool
    return made


def test_a_group_counts_for_the_step_that_claims_it(dropping: Plan) -> None:
    tally = Tally(dropping)
    for group, reward in ((0, 0.25), (1, 0.75), (2, 1.0)):
        tally.report(Task(stage="reward", step=0, groups=(group,)), {"reward/mean": reward}, 16, (group,))
    tally.claimed(0, (0, 2))
    tally.claimed(1, (1,))
    assert tally.close(0, 1.0)["reward/mean"] == pytest.approx((0.25 + 1.0) / 2)
    assert tally.close(1, 2.0)["reward/mean"] == pytest.approx(0.75)


def test_what_comes_after_the_claim_counts_for_it_too(dropping: Plan) -> None:
    tally = Tally(dropping)
    tally.claimed(1, (3,))
    tally.report(Task(stage="reward", step=0, groups=(3,)), {"reward/mean": 0.5}, 16, (3,))
    assert "reward/mean" not in tally.close(0, 1.0)
    assert tally.close(1, 2.0)["reward/mean"] == 0.5


def test_a_lost_group_counts_for_no_step(dropping: Plan) -> None:
    tally = Tally(dropping)
    for group, reward in ((0, 0.0), (1, 1.0)):
        tally.report(Task(stage="reward", step=0, groups=(group,)), {"reward/mean": reward}, 16, (group,))
    tally.dropped(0, (0,), "stale")
    tally.claimed(0, (1,))
    closed = tally.close(0, 1.0)
    assert closed["reward/mean"] == 1.0 and closed["dropped/stale"] == 1.0


def test_without_a_pool_a_report_counts_for_its_step_by_samples() -> None:
    tally = Tally(plan(quickstart.graph(steps=4))[0])
    tally.report(Task(stage="reward", step=1, groups=(0, 1)), {"reward/mean": 1.0}, 32, (0, 1))
    tally.report(Task(stage="reward", step=1, groups=(2,)), {"reward/mean": 0.0}, 16, (2,))
    assert tally.close(1, 1.0)["reward/mean"] == pytest.approx(2 / 3)


def test_what_a_gate_drops_ahead_counts_for_the_batch_being_filled() -> None:
    described = quickstart.graph(steps=4, max_staleness=1)
    gated = Graph(
        name="gated",
        source=described.source,
        stages=(*described.stages, Filter("zero_spread")),
        schedule=described.schedule,
        host=described.host,
    )
    made = plan(gated)[0]
    assert made.on_stale == "wait" and {"rollout", "filter"} <= set(made.pool)
    tally = Tally(made)
    tally.admitted(0, 6, 0.0)
    for group, reward in ((0, 0.0), (1, 1.0)):
        tally.report(Task(stage="reward", step=0, groups=(group,)), {"reward/mean": reward}, 16, (group,))
    tally.dropped(0, (0,), "filter")
    tally.claimed(0, (1,))
    closed = tally.close(0, 1.0)
    assert closed["reward/mean"] == 0.5, "of all that were sampled"
    assert (closed["filter/admitted"], closed["filter/dropped"], closed["filter/acceptance"]) == (2, 1, 0.5)
    assert "dropped/stale" not in closed
