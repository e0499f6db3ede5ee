"""Prompts computed once give the numbers of prompts computed for each sample, with both attention kernels of a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.processes import each
from tests.gpu.test_transformer_engine import MIXTURE, NEAR, SIZES
from tests.optional import need

PROMPTS, RESPONSES = (70,) * 3 + (5,) + (130,) * 2, (1, 40, 7, 3, 90, 66)  # tokens
SHARED = (3, 1, 2)  # samples of each prompt
KERNELS = ("torch", "transformer_engine")


def attended(network: Any, device: torch.device) -> dict[str, torch.Tensor]:
    """What the attention of a layer computes for a row of shared prompts, its gradients, and the same on the CPU in
    float32, as `CPU <name>`."""
    from pipeline.declare.columns import Ragged
    from pipeline.declare.sharding import Microbatch
    from stages.backends.megatron.attention import CausalAttention
    from stages.backends.megatron.microbatches import row_of
    from stages.backends.megatron.slices import Slices

    columns = (
        Ragged(torch.ones(sum(PROMPTS), dtype=torch.long), PROMPTS),
        Ragged(torch.ones(207, dtype=torch.long), RESPONSES),
    )
    microbatch = Microbatch(tuple(range(len(PROMPTS))), max(PROMPTS), max(RESPONSES), SHARED)
    config, made, found = network.config, torch.Generator().manual_seed(1), {}
    tokens, size = 0, config.kv_channels
    for where in (torch.device("cpu"), device):
        how: Any = {"packed": True, "multiple": 8, "slices": Slices(), "least": 0, "device": where}
        row = row_of(*columns, microbatch, **how)
        if not tokens:
            tokens = row.ids_NS.shape[1]
            heads = (config.num_attention_heads, config.num_query_groups, config.num_query_groups)
            given = [torch.randn(tokens, 1, count, size, generator=made).bfloat16() for count in heads]
            slope = torch.randn(tokens, 1, heads[0] * size, generator=made).bfloat16()
        on_cpu = where.type == "cpu"
        core = CausalAttention(config) if on_cpu else network.decoder.layers[0].self_attention.core_attention
        inputs = [each.to(where, torch.float32 if on_cpu else torch.bfloat16).requires_grad_() for each in given]
        out = core(*inputs, packed_seq_params=row.packed)
        out.backward(slope.to(out))
        tensors = {"output": out.detach(), **{f"gradient {i}": each.grad for i, each in enumerate(inputs)}}
        found |= {f"{'CPU ' if on_cpu else ''}{name}": tensor.float().cpu() for name, tensor in tensors.items()}
    return found


def both(rank: int, folder: str, family: str) -> tuple[dict[str, torch.Tensor], ...]:
    """What `attended` returns, and the tensors of `megatron_cases.measure` of plain and of shared rows.

    Of two processes, the first uses Megatron-core's own layers and torch's attention."""
    from stages.backends.megatron import fused
    from tests.engines import megatron_cases as cases

    if KERNELS[rank] == "torch":
        fused.fused_on = lambda groups: fused.Fused()  # type: ignore[assignment]
    device = torch.device("cuda", 0)
    groups = cases.join(cases.Ranks(), 1, device, 0)
    found = [attended(cases.MegatronEngine(groups).network(cases.Model(folder)), device)]
    for shared in (False, True):
        rows = cases.Packed(100, shared=shared)
        recompute = family == "qwen3_moe"
        case = cases.Case(family, cases.RankLayout(), microbatching=rows, recompute=recompute, grouped=True)
        tensors, _ = cases.measure(cases.MegatronEngine(groups), Path(folder), case)
        found.append({name: tensor.float().cpu() for name, tensor in tensors.items()})
    return tuple(found)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_shared_prompts_give_the_numbers_of_plain_rows(gpus: list[str], tmp_path: Path, family: str) -> None:
    need("transformer_engine", "transformer_engine")
    from tests.engines import megatron_cases as cases

    folder = cases.make_folder(family, tmp_path / family, **(MIXTURE if "moe" in family else SIZES))
    for kernel, found in zip(KERNELS, each(both, [gpus[0], gpus[0]], str(folder), family)):
        assert not isinstance(found, Exception), found
        attention, plain, shared = found
        for name in ("output", "gradient 0", "gradient 1", "gradient 2"):
            far = float((attention[name] - attention[f"CPU {name}"]).norm() / attention[f"CPU {name}"].norm())
            print(f"{family}, {kernel}: attention's {name} {far:.4f}")
            assert far < 0.02, (kernel, name)
        assert plain.keys() == shared.keys()
        for kind, near in NEAR.items():
            names = [name for name in plain if name.startswith(kind) or name.endswith(kind)]
            off = sum(float((shared[name] - plain[name]).square().sum()) for name in names)
            far = (off / sum(float(plain[name].square().sum()) for name in names)) ** 0.5
            print(f"{family}, {kernel}: {kind} {far:.4f}")
            assert far < near, (kernel, kind)
