"""Whole runs that sample with vLLM and train with torch: bit for bit the same as runs on torch alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graphs.quickstart import graph
from pipeline.engine.driver import Driver
from pipeline.executors.local import LocalExecutor
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.rundir import RunDir
from tests.optional import need

need("vllm", "vllm")

STEPS = 3


@pytest.fixture
def opened(prepared: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The vLLM engines that a run opens; they are closed after it."""
    from stages.backends.vllm import engine

    found: list[Any] = []
    open_engine = engine.open_engine

    def remembered(context: Any) -> Any:
        found.append(open_engine(context))
        return found[-1]

    monkeypatch.setattr(engine, "open_engine", remembered)
    yield found
    for each in found:
        each.close()


def published(run_dir: RunDir, **settings: Any) -> list[tuple[int, str]]:
    """Return the versions of a run with the hashes of their weights as received by the sampler."""
    torch.set_num_threads(1)
    described = graph(
        steps=STEPS,
        prompts_per_step=8,
        samples_per_prompt=8,
        warm_start_steps=40,
        warm_start_until=1.0,
        evaluate_every=2,
        threads=1,
        **settings,
    )
    Driver(described, plan(described)[0], LocalExecutor(), run_dir=run_dir.create()).execute()
    events = [event for _, event in trace.read(run_dir.events)]
    return [(event.version, event.sha256) for event in events if isinstance(event, trace.Published)]


def test_a_run_that_samples_with_vllm_trains_the_weights_of_one_that_samples_with_torch(
    tmp_path: Path, opened: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """What vLLM says when it starts is not on the screen."""
    with_torch = published(RunDir(tmp_path / "torch"), generator="torch")
    assert [version for version, _ in with_torch] == list(range(STEPS + 1))
    assert len({sha256 for _, sha256 in with_torch}) == STEPS + 1
    assert published(RunDir(tmp_path / "vllm"), generator="vllm") == with_torch
    told = capfd.readouterr()
    assert "WARNING" not in told.out + told.err
    assert len(opened) == 1 and opened[0]._started is None, "the run has ended its engine"
