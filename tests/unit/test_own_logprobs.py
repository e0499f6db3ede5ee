"""Updates whose old logprobs are those of their own pass: the numbers of a stage PrevLogprobs before them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from pipeline import Model, StageContext, Task, WorkerGroup
from pipeline.declare.columns import Ragged
from pipeline.declare.sharding import Packed
from stages import ClippedLoss, PrevLogprobs, Train, TruncatedIS
from stages.backends import engine
from tests.shares import weight_hash
from tests.unit.test_folder import MIXTURE
from tests.unit.tiny import QWEN3

torch.set_num_threads(1)
POLICY = Model("tiny", config=QWEN3, alphabet="0123456789")
REPLAYING = replace(POLICY, config=MIXTURE, router_replay=True)
LEARNER = WorkerGroup("learner", backend="torch", threads=1)


def samples(count: int = 8) -> dict[str, Any]:
    """Return the columns of a batch, without old logprobs."""
    random = torch.Generator().manual_seed(7)

    def ragged(low: int, high: int) -> Ragged:
        lengths = torch.randint(low, high, (count,), generator=random).tolist()
        return Ragged.of([torch.randint(2, 12, (length,), generator=random) for length in lengths])

    prompts, responses = ragged(1, 6), ragged(1, 9)
    sampled = -2.0 + 0.2 * torch.randn(responses.values.shape, generator=random)
    inputs = [p + t - 1 for p, t in zip(prompts.lengths, responses.lengths)]
    experts = [torch.rand(tokens, 2, 4, generator=random).argsort(-1)[..., :2] for tokens in inputs]  # 2 layers, 2 of 4
    return {
        "prompt_ids": prompts,
        "response_ids": responses,
        "advantage": torch.randn(count, generator=random),
        "rollout_logprobs": Ragged(sampled, responses.lengths),
        "token_versions": Ragged(torch.zeros(len(responses.values), dtype=torch.int32), responses.lengths),
        "routed_experts": Ragged.of([chosen.flatten().to(torch.uint8) for chosen in experts]),
    }


def trained(folder: Path, prev: Any, *, model: Model = POLICY, **settings: Any) -> tuple[dict[str, float], str]:
    """Return the metrics of two steps, and the hash of the weights then."""
    stage = Train(model, on=LEARNER, loss=ClippedLoss(correction=TruncatedIS(cap=2.0)), lr=1e-2, prev=prev, **settings)
    context = StageContext(group=LEARNER, rank=0, seed=0, group_size=1, run_dir=folder, shared={}, steps=2)
    run, columns, metrics = stage.setup(context), samples(), {}
    scoring = PrevLogprobs(model, on=LEARNER, microbatch=stage.microbatch, temperature=stage.temperature)
    score = scoring.setup(context)
    for step in range(2):
        task = Task(number=step, stage="train", step=step, groups=tuple(range(8)))
        given = columns if prev == "own" else columns | score(columns, task).columns
        metrics |= {f"{step} {name}": value for name, value in run(given, task).metrics.items()}
    return metrics, weight_hash(engine(context).trained_weights(model))


SETTINGS: list[dict[str, Any]] = [
    {},
    {"minibatches": 2, "temperature": 0.7},
    {"minibatches": 4, "epochs": 2, "microbatch": 1},
    {"minibatches": 2, "microbatch": Packed(40)},
    {"minibatches": 2, "model": REPLAYING},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_no_number_depends_on_where_old_logprobs_come_from(tmp_path: Path, settings: dict[str, Any]) -> None:
    (wanted, weights), (found, own_weights) = (trained(tmp_path, prev, **settings) for prev in ("field", "own"))
    work = [name for name in wanted if name.endswith(("tflops_per_s", " flops", "utilization"))]
    for name in work:
        wanted.pop(name), found.pop(name)
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    if settings.get("microbatch") == 1:
        assert own_weights == weights


def test_what_is_scored_beside_the_first_minibatch_counts_as_work(tmp_path: Path) -> None:
    flops = [trained(tmp_path, prev, minibatches=2)[0]["0 flops"] for prev in ("field", "own")]
    assert flops[0] < flops[1] < flops[0] * 7 / 6  # a forward pass over half of the batch: a sixth, about


@pytest.mark.parametrize(("minibatches", "passes"), [(1, 4), (2, 4 + 2), (4, 4 + 3)])
def test_all_but_the_first_minibatch_is_scored(tmp_path: Path, minibatches: int, passes: int) -> None:
    """Passes through the network per step of 8 samples, 2 at a time."""
    counted = 0

    def count(module: torch.nn.Module, *_: Any) -> None:
        nonlocal counted
        counted += type(module).__name__.endswith("ForCausalLM")

    with register_module_forward_hook(count):
        trained(tmp_path, "own", minibatches=minibatches, microbatch=2)
    assert counted == 2 * passes


def test_only_what_no_stage_writes_is_computed_by_the_update() -> None:
    stage = Train(POLICY, on=LEARNER, lr=1e-2)
    names = [field.name for field in replace(stage, prev="own").reads]
    assert "prev_logprobs" in [field.name for field in stage.reads]
    assert "prev_logprobs" not in names
