"""Divergence is noticed, once per kind; a healthy run is left alone.

recorded_metrics.json has metrics of whole runs of the recipes, by command; grpo and grpo_async ran on a tiny model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engine.divergence import ALIKE, CONSTANT, FACTOR, IN_A_ROW, STILL, Divergence, DivergenceNotice
from pipeline.record import trace
from pipeline.record.runs import open_run
from tests.errors.harness import command, live_text

RECORDED = json.loads(Path(__file__).with_name("recorded_metrics.json").read_text())
DIVERGED = {"quickstart --lr 1": "entropy", "quickstart --lr 100": "entropy", "quickstart --lr 1e6": "no gradient"}
HEALTHY = {"loss": -0.01, "grad_norm": 0.8, "mismatch_kl": 1e-3, "kl": 0.01, "entropy": 0.5}
METRICS = sorted(HEALTHY)


def notices(steps: Iterable[Mapping[str, float]]) -> list[DivergenceNotice]:
    divergence = Divergence()
    return [notice for step, metrics in enumerate(steps) for notice in divergence.take(step, metrics)]


def series(name: str, values: Iterable[float]) -> list[dict[str, float]]:
    return [{f"train/{name}": value} for value in values]


def recorded(run: str) -> list[dict[str, float]]:
    return [dict(zip(RECORDED[run], values)) for values in zip(*RECORDED[run].values())]


@pytest.mark.parametrize("run", sorted(RECORDED.keys() - DIVERGED.keys()))
def test_a_healthy_run_is_left_alone(run: str) -> None:
    assert len(recorded(run)) >= 60
    assert not notices(recorded(run))


@pytest.mark.parametrize("run", sorted(DIVERGED))
def test_a_learning_rate_that_ruins_the_policy_is_noticed_within_a_few_steps(run: str) -> None:
    first = notices(recorded(run))[0]
    assert (first.kind, first.step) == (DIVERGED[run], 3)
    assert first.before and first.before > 0.3  # what it was before it vanished


@given(st.sampled_from(METRICS), st.floats(1e-3, 1e3), st.lists(st.floats(1.0, 0.99 * FACTOR), max_size=80), st.data())
def test_a_bounded_noisy_series_is_never_noticed(
    name: str, scale: float, noise: list[float], data: st.DataObject
) -> None:
    if name in ("kl", "mismatch_kl"):  # they have a scale of their own
        scale = min(scale, 0.02)
    signs = data.draw(st.lists(st.sampled_from([-1, 1]), min_size=len(noise), max_size=len(noise)))
    assert not notices(
        series(name, (scale * size * (sign if name == "loss" else 1) for size, sign in zip(noise, signs)))
    )


@given(st.dictionaries(st.integers(0, 60).map(lambda n: 3 * n), st.floats(1.0, 1e30), max_size=10))
def test_outliers_of_one_step_are_never_noticed(outliers: dict[int, float]) -> None:
    steps = [
        {f"train/{name}": value * outliers.get(step, 1.0) for name, value in HEALTHY.items()} for step in range(180)
    ]
    assert not notices(steps)


@given(
    st.sampled_from(METRICS),
    st.lists(st.floats(0.5, 2.0), max_size=30),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.lists(st.floats(), max_size=10),
)
def test_a_value_that_is_not_finite_is_always_noticed(
    name: str, before: list[float], value: float, after: list[float]
) -> None:
    found = [notice for notice in notices(series(name, [*before, value, *after])) if notice.kind == "not finite"]
    assert [notice.step for notice in found] == [len(before)]
    assert found[0].metric == f"train/{name}" and f"train/{name} is {value}" in found[0].what


def test_a_number_of_the_users_that_is_not_finite_hides_no_loss_that_is_not() -> None:
    found = notices([{"refit/own": math.nan}, {"refit/own": math.nan, "train/loss": math.nan}])
    assert [(notice.metric, notice.step) for notice in found] == [("refit/own", 0), ("train/loss", 1)]
    assert found[0].fix.startswith("correct what computes refit/own, if that is yours")


@given(
    st.sampled_from(["loss", "grad_norm", "kl", "mismatch_kl"]),
    st.lists(st.floats(0.005, 0.02), min_size=5, max_size=60),
    st.floats(1e3, 1e30),
)
def test_an_explosion_is_always_noticed_and_said_once(name: str, before: list[float], value: float) -> None:
    found = notices(series(name, [*before, *[value] * 10]))
    assert [notice.step for notice in found] == [len(before) + IN_A_ROW - 1]
    assert 0.005 <= (found[0].before or 0) <= 0.02


def test_a_divergence_from_the_sampler_is_noticed_from_the_start() -> None:
    assert [notice.kind for notice in notices(series("mismatch_kl", [3.0] * 4))] == ["mismatch"]
    assert not notices(series("grad_norm", [3e4] * 40)), "a gradient has no scale of its own"


def test_what_stands_still_is_noticed() -> None:
    spread = [{"train/grad_norm": 0.0, "advantage/abs_mean": 0.7}] * 5
    assert [(notice.kind, notice.step) for notice in notices(spread)] == [("no gradient", STILL - 1)]
    assert not notices([{"train/grad_norm": 0.0, "advantage/abs_mean": 0.0}] * 5), "equal rewards give no gradient"
    assert [notice.kind for notice in notices(series("entropy", [0.4, *[1e-9] * 5]))] == ["entropy"]
    rewards = [{"reward/mean": 0.25}] * (CONSTANT + 5)
    assert [(notice.kind, notice.step) for notice in notices(rewards)] == [("reward", CONSTANT - 1)]
    assert not notices([{"reward/mean": 0.25 + step % 2 / 1e6} for step in range(90)])
    alike = [{"advantage/zero_spread": 1.0, "reward/mean": step / 100} for step in range(ALIKE + 5)]
    assert [(notice.kind, notice.step) for notice in notices(alike)] == [("reward", ALIKE - 1)]


def test_a_skipped_update_is_noticed() -> None:
    found = notices([{"train/skipped": 0.0, "train/updates": 4.0}, {"train/skipped": 1.0, "train/updates": 3.0}] * 2)
    assert [(notice.step, notice.what) for notice in found] == [(1, "1 of 4 updates were skipped")]


def diverging(schedule: str) -> str:
    """Return a graph of four steps whose loss is not a number at the third, and explodes from then on."""
    loss = 'metrics={"loss": float("nan") if task.step == 2 else 0.5}'
    made = f"Schedule(steps=4, seed=seed, checkpoint_every=1{schedule})"
    return live_text(schedule=made).replace('metrics={"total": self.total}', loss)


LINE = (
    "step 3: {}count/loss is nan, and was 0.5, the median of 2 steps before; what is computed from it means nothing. "
)
FIX = "Fix: a lower lr, a smaller clip_grad or a warmup in Train, from an earlier checkpoint (last checkpoint: step "


def test_a_run_says_so_once_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "graph.py").write_text(diverging(""))
    code, _, told = command(tmp_path, "graph.py", "--executor", "local", "--run-dir", "run")
    assert code == 0 and told.startswith(LINE.format("warning: ") + FIX) and told.count("\n") == 1
    run = open_run(tmp_path / "run")  # its record can be read, though JSON has no NaN
    found = [event for event in run.events if isinstance(event, trace.Diverged)]
    assert [(event.step, event.kind, event.value, event.before) for event in found] == [(2, "not finite", None, 0.5)]
    assert ["count/loss" in line for line in run.metrics] == [True, True, False, True]
    code, said, _ = command(tmp_path, "run", program="analyse")
    assert code == 0 and found[0].problem in said
    code, said, _ = command(tmp_path, "run", "--json", program="analyse")
    assert msgspec.json.decode(said)["diverged"] == [found[0].problem]


def test_a_run_that_is_to_stop_ends_as_on_an_error(tmp_path: Path) -> None:
    (tmp_path / "graph.py").write_text(diverging(', on_divergence="stop"'))
    code, _, told = command(tmp_path, "graph.py", "--executor", "local", "--run-dir", "run")
    first, last = told.splitlines()
    assert code == 3 and first.startswith(LINE.format("") + FIX)
    assert last.startswith("resume: ")
    run = open_run(tmp_path / "run")
    assert run.state == "failed" and run.metrics[-1]["step"] == 3
    assert isinstance(run.events[-1], trace.Failed) and run.events[-1].problems == (first,)
