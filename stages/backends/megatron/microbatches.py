"""Turns a microbatch into the tensors of one pass: a packed row or a rectangle, and where logits are needed.

Both hold each sample as prompt and response without the last token, from position 0; padding is at the end, where
causal attention never sees it. Knows token ids, no model.

Legend: N samples, S positions per row, P longest prompt, T longest response, R response tokens of all samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from ops.packing import pack, rectangle
from pipeline.declare.columns import Ragged
from pipeline.declare.sharding import Microbatch


@dataclass(frozen=True, eq=False)
class Row:
    """The inputs of one pass.

    ids_NS, positions_S   input tokens and positions; N is 1 in a packed row
    packed                the starts of a packed row's samples
    keep_R, targets_R     indices in [S * N], position-major, at which response tokens are predicted, and the tokens
    lengths, width        response lengths, and the width of the rectangle that they are padded to
    """

    ids_NS: torch.Tensor
    positions_S: torch.Tensor
    packed: PackedSeqParams | None
    keep_R: torch.Tensor
    targets_R: torch.Tensor
    lengths: tuple[int, ...]
    width: int

    @property
    def mask(self) -> torch.Tensor:
        """[N, T], True for response tokens."""
        lengths_N1 = torch.tensor(self.lengths, device=self.keep_R.device)[:, None]
        return torch.arange(self.width, device=self.keep_R.device) < lengths_N1

    def rectangle(self, values_R: torch.Tensor) -> torch.Tensor:
        """Reshape one value per response token to [N, T]."""
        return rectangle(values_R, self.lengths, self.width)


def tokens_of(prompt_ids: Ragged, response_ids: Ragged, microbatch: Microbatch, *, packed: bool, multiple: int) -> int:
    """Number of input tokens of the pass, padding included."""
    if packed:
        return _up(sum(prompt_ids.lengths) + sum(response_ids.lengths) - len(prompt_ids), multiple)
    return len(prompt_ids) * _up(microbatch.prompt + microbatch.response - 1, multiple)


def row_of(
    prompt_ids: Ragged,
    response_ids: Ragged,
    microbatch: Microbatch,
    *,
    packed: bool,
    multiple: int,
    least: int,
    device: torch.device,
) -> Row:
    """The pass over these samples, padded to at least `least` tokens and a multiple of `multiple` positions."""
    made = _packed if packed else _padded
    return made(prompt_ids, response_ids, microbatch, multiple, least, device)


def _packed(
    prompt_ids: Ragged, response_ids: Ragged, microbatch: Microbatch, multiple: int, least: int, device: torch.device
) -> Row:
    row = pack(prompt_ids.rows(), response_ids.rows())
    lengths = [p + t - 1 for p, t in zip(prompt_ids.lengths, response_ids.lengths)]
    size = _up(max(sum(lengths), least), multiple)
    ids_1S, positions_S = row.ids_1S, row.positions_1S[0]
    if spare := size - sum(lengths):
        lengths.append(spare)  # padding is an extra sample without targets
        ids_1S = torch.cat([ids_1S, ids_1S.new_zeros(1, spare)], dim=1)
        positions_S = torch.cat([positions_S, torch.arange(spare)])
    starts = torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="sbhd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    return Row(
        ids_1S.to(device),
        positions_S.to(device),
        packed,
        row.keep_R.to(device),
        row.targets_1R[0].to(device),
        response_ids.lengths,
        microbatch.response,
    )


def _padded(
    prompt_ids: Ragged, response_ids: Ragged, microbatch: Microbatch, multiple: int, least: int, device: torch.device
) -> Row:
    size = _up(microbatch.prompt + microbatch.response - 1, multiple)
    rows = max(len(prompt_ids), -(-least // size))
    ids_NS = torch.zeros(rows, size, dtype=torch.long)
    keep = []
    for i, (prompt, response) in enumerate(zip(prompt_ids.rows(), response_ids.rows())):
        length = len(prompt) + len(response) - 1
        ids_NS[i, :length] = torch.cat([prompt, response[:-1]])
        keep.append(torch.arange(len(prompt) - 1, length) * rows + i)
    return Row(
        ids_NS.to(device),
        torch.arange(size, device=device),
        None,
        torch.cat(keep).to(device),
        response_ids.values.to(device),
        response_ids.lengths,
        microbatch.response,
    )


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
