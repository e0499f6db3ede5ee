"""Mamba-2 (arXiv 2405.21060) of Megatron-core's linear layers. Knows tensors and process groups, no names.

Megatron-core's own class needs mamba-ssm and Triton; here a CPU computes the scan with torch (ops/state_space.py), and
a GPU with the kernels of mamba-ssm and causal-conv1d where they are installed. Tensor-parallel ranks hold whole groups
of heads, so nothing but the output is summed over ranks.

Legend: S positions, N rows, C hidden size, D channels, H this rank's heads, P channels of a head, G groups of heads, Z
size of a state, K positions of a row with shared prompts repeated.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch.nn.functional import silu, softplus

from ops.packing import ranges
from ops.state_space import convolved, scanned
from stages.backends.megatron.copies import gathered
from stages.backends.megatron.microbatches import SharedRow
from stages.backends.model.decoder import StateSpace


class GatedNorm(torch.nn.Module):
    """RMSNorm of each group of heads, after the gate (transformers, Zamba2RMSNormGated)."""

    def __init__(self, channels: int, groups: int, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(channels, dtype=config.params_dtype))
        self.groups, self.eps = groups, config.layernorm_epsilon

    def forward(self, values: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Returns [..., channels], in the dtype of the gate."""
        wide = (values.float() * silu(gate.float())).unflatten(-1, (self.groups, -1))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.flatten(-2).to(gate.dtype)


class StateSpaceMixer(MegatronModule):
    """A Mamba-2 mixer, in the place of a layer's `self_attention`. `scan` computes with the kernels."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        shape: StateSpace,
        linear: tuple[Any, Any],
        scan: bool,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.shape, self.scan, self.ranks = shape, scan, pg_collection.tp.size()
        given: Any = {
            "config": config,
            "bias": False,
            "init_method": None,
            "is_expert": False,
            "tp_group": pg_collection.tp,
        }
        self.in_proj = linear[0](
            config.hidden_size,
            sum(shape.projected),
            **given,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
        )
        channels, dtype = sum(shape.convolved) // self.ranks, config.params_dtype
        self.conv1d = torch.nn.Conv1d(
            channels, channels, shape.kernel, groups=channels, bias=shape.bias, dtype=dtype
        )  # holds the weights
        for name in ("A_log", "D", "dt_bias"):
            setattr(self, name, torch.nn.Parameter(torch.zeros(shape.heads // self.ranks, dtype=dtype)))
        self.norm = GatedNorm(shape.inner // self.ranks, shape.groups // self.ranks, config)
        self.out_proj = linear[1](
            shape.inner,
            config.hidden_size,
            **given,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
        )

    def forward(
        self,
        hidden_SNC: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns [S, N, C] and no bias. State and convolution restart at each sample's first token. A section that
        continues a shared prompt computes the prompt's state again, from its inputs."""
        projected_SND, _bias = self.in_proj(hidden_SNC)
        gate_size, *others = (size // self.ranks for size in self.shape.projected)
        gate_SND, mixed_SND, step_SNH = projected_SND.split([gate_size, sum(others[:3]), others[3]], dim=-1)
        if isinstance(packed_seq_params, SharedRow):
            mixed_SND, step_SNH = (gathered(each, packed_seq_params.keys_K) for each in (mixed_SND, step_SNH))
        sample_S = _samples(packed_seq_params, len(mixed_SND), mixed_SND.device)
        compute = self._by_kernel if self.scan else self._by_torch
        made_SND = compute(mixed_SND.transpose(0, 1), step_SNH.transpose(0, 1), sample_S).transpose(0, 1)
        if isinstance(packed_seq_params, SharedRow):
            made_SND = made_SND[_last(packed_seq_params)]
        output: tuple[torch.Tensor, torch.Tensor | None] = self.out_proj(self.norm(made_SND, gate_SND))
        return output

    def _by_torch(self, mixed_NSD: torch.Tensor, step_NSH: torch.Tensor, sample_S: torch.Tensor) -> torch.Tensor:
        """The scan of the convolved values, [N, S, D] in float32, before the gate."""
        bias_D = None if self.conv1d.bias is None else self.conv1d.bias.float()
        weight_DK = self.conv1d.weight[:, 0].float()
        made_NSD = silu(convolved(mixed_NSD.float(), weight_DK, bias_D, sample_S)).to(mixed_NSD.dtype).float()
        x_NSHP, b_NSGZ, c_NSGZ = self._divided(made_NSD)
        step_NSH = softplus(step_NSH.float() + self.dt_bias.float())
        found = scanned(x_NSHP, step_NSH, self._decay(), b_NSGZ, c_NSGZ, sample_S, chunk=self.shape.chunk)
        return (found + x_NSHP * self.D.float()[:, None]).flatten(-2)

    def _by_kernel(self, mixed_NSD: torch.Tensor, step_NSH: torch.Tensor, sample_S: torch.Tensor) -> torch.Tensor:
        """The same by the kernels, in the dtype of their input."""
        from causal_conv1d import causal_conv1d_fn
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        sample_NS = sample_S.to(torch.int32).expand(len(mixed_NSD), -1).contiguous()
        made_NDS = causal_conv1d_fn(
            mixed_NSD.contiguous().transpose(1, 2),  # channels last, which it needs to separate samples
            self.conv1d.weight[:, 0],
            self.conv1d.bias,
            seq_idx=sample_NS,
            activation="silu",
        )
        x_NSHP, b_NSGZ, c_NSGZ = self._divided(made_NDS.transpose(1, 2))
        made: torch.Tensor = mamba_chunk_scan_combined(
            x_NSHP,
            step_NSH.contiguous(),
            self._decay(),
            b_NSGZ,
            c_NSGZ,
            self.shape.chunk,
            D=self.D.float(),
            dt_bias=self.dt_bias.float(),
            dt_softplus=True,
            seq_idx=sample_NS,
        )
        return made.flatten(-2)

    def _divided(self, made_NSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape, sizes = self.shape, [size // self.ranks for size in self.shape.convolved]
        x_NSD, b_NSD, c_NSD = made_NSD.split(sizes, dim=-1)
        return (
            x_NSD.unflatten(-1, (-1, shape.head_dim)),
            b_NSD.unflatten(-1, (-1, shape.state)),
            c_NSD.unflatten(-1, (-1, shape.state)),
        )

    def _decay(self) -> torch.Tensor:
        decay: torch.Tensor = -self.A_log.float().exp()
        return decay


def _samples(packed: PackedSeqParams | None, size: int, device: torch.device) -> torch.Tensor:
    """The number of the sample that each position belongs to, counted with shared prompts repeated."""
    if packed is None:
        return torch.zeros(size, dtype=torch.long, device=device)
    starts: Any = packed.cu_seqlens_kv
    return torch.searchsorted(starts[1:].long(), torch.arange(size, device=device), right=True)


def _last(packed: PackedSeqParams) -> torch.Tensor:
    """Where the row's own positions are among those of a row with shared prompts repeated."""
    queries, ends = packed.cu_seqlens_q.diff().cpu().long(), packed.cu_seqlens_kv[1:].cpu().long()
    return ranges(ends - queries, queries).to(packed.cu_seqlens_q.device)
