"""The kernels of mamba-ssm and causal-conv1d give what torch computes on the same GPU: outputs and gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stages.backends.model.decoder import StateSpace

SHAPE = StateSpace(heads=8, head_dim=16, groups=2, state=16, kernel=4, chunk=32)
SAMPLES = torch.tensor([0] * 50 + [1] * 3 + [2] * 75)


class Linear(torch.nn.Linear):
    """A matrix that one rank holds."""

    def __init__(self, inputs: int, outputs: int, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=False)


def made(dtype: torch.dtype) -> Any:
    from megatron.core.transformer import TransformerConfig

    from stages.backends.megatron.state_space import StateSpaceMixer

    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=1, params_dtype=dtype)
    group: Any = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    torch.manual_seed(3)
    mixer = StateSpaceMixer(config, 1, shape=SHAPE, linear=(Linear, Linear), scan=True, pg_collection=group)
    for parameter in mixer.parameters():
        parameter.data.normal_(std=0.5)
    return mixer


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-2), (torch.bfloat16, 5e-2)])  # the kernels use TF32
def test_kernels_are_as_torch_and_restart_at_each_sample(dtype: torch.dtype, near: float) -> None:
    pytest.importorskip("mamba_ssm")
    pytest.importorskip("causal_conv1d")
    mixer = made(dtype).cuda()
    generator = torch.Generator().manual_seed(5)
    mixed = torch.randn(1, len(SAMPLES), sum(SHAPE.convolved), generator=generator).cuda().to(dtype).requires_grad_()
    step = torch.randn(1, len(SAMPLES), SHAPE.heads, generator=generator).cuda().to(dtype).requires_grad_()
    given = [mixed, step, mixer.A_log, mixer.D, mixer.dt_bias, mixer.conv1d.weight, mixer.conv1d.bias]
    found = []
    for compute in (mixer._by_kernel, mixer._by_torch):
        values = compute(mixed, step, SAMPLES.cuda())
        found.append([values, *torch.autograd.grad(values.float().square().sum(), given)])
    for kernel, plain in zip(*found):
        assert float((kernel.float() - plain.float()).norm() / plain.float().norm()) < near
