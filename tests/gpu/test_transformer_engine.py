"""Transformer Engine layers train like Megatron-core's own, up to rounding, and use the same folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.processes import each
from tests.optional import need

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}  # sizes that attention on a GPU supports
MIXTURE = SIZES | {"moe_intermediate_size": 64}
# Relative. bfloat16 has 8 bits, and Adam turns tiny gradients into full-size steps.
NEAR = {"before": 0.01, "gradient": 0.1, "weight": 0.02, "after": 0.1}


def trained(rank: int, folder: str, family: str) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the results of `megatron_cases.measure` and whether a checkpoint restores the same run.

    Of two processes, the first uses Megatron-core's own layers."""
    from stages.backends.megatron import fused
    from tests.engines import megatron_cases as cases

    if rank == 0:
        fused.fused_on = lambda groups: fused.Fused()  # type: ignore[assignment]
    groups = cases.join(cases.Ranks(), 1, torch.device("cuda", 0), 0)
    case = cases.Case(family, cases.RankLayout(), microbatching=cases.Packed(64), recompute=family == "llama")
    tensors, metrics = cases.measure(cases.MegatronEngine(groups), Path(folder), case)
    names = {name for name, _ in cases.MegatronEngine(groups).network(cases.Model(folder)).named_parameters()}
    metrics |= cases.checkpointed(Path(folder), Path(folder) / f"saved {rank}", groups)
    metrics["norms within layers"] = float(any("layer_norm_weight" in name for name in names))
    return {name: tensor.float().cpu() for name, tensor in tensors.items()}, metrics


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_it_trains_as_the_local_layers_do(gpus: list[str], tmp_path: Path, family: str) -> None:
    need("transformer_engine", "transformer_engine")
    from tests.engines import megatron_cases as cases

    folder = cases.make_folder(family, tmp_path / family, **(MIXTURE if "moe" in family else SIZES))
    both = each(trained, [gpus[0], gpus[0]], str(folder), family)
    for found in both:
        assert not isinstance(found, Exception), found
    (wanted, local), (made, fused) = both
    assert made.keys() == wanted.keys()
    for kind, near in NEAR.items():
        names = [name for name in wanted if name.startswith(kind) or name.endswith(kind)]
        off = sum(float((made[name] - wanted[name]).square().sum()) for name in names)
        far = (off / sum(float(wanted[name].square().sum()) for name in names)) ** 0.5
        print(f"{family}: {kind} {far:.4f}")
        assert far < near, kind
    assert (local["norms within layers"], fused["norms within layers"]) == (0.0, 1.0)
    for metrics in (local, fused):
        assert (
            metrics["frozen is as before"] == metrics["trained is unchanged"] == metrics["resumed is the same"] == 1.0
        )
