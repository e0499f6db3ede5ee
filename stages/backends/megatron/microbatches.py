"""Turns a microbatch into the tensors of one pass: a packed row or a rectangle, and where logits are needed.

Both hold each sample as prompt and response without the last token, from position 0; padding is at the end, where
causal attention never sees it. A packed row has the prompt of samples that share it once. Context-parallel ranks get
slices of one packed row. Knows token ids, no model.

Legend: N samples, S positions per row, P longest prompt, T longest response, R response tokens of all samples, M those
that this rank predicts: R, except for a slice, K keys of all sections.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn.functional import pad

from ops.packing import Section, keys_of, pack, ranges, rectangle
from pipeline.declare.columns import Ragged
from pipeline.declare.lengths import spared
from pipeline.declare.sharding import Microbatch
from stages.backends.device import sent
from stages.backends.megatron.slices import Slices, found


@dataclass
class SharedRow(PackedSeqParams):
    """The sections of a packed row whose samples share prompts: the starts of their queries and of their keys, the
    last ones causal, and where in the row each key is, [K]."""

    keys_K: torch.Tensor = None  # type: ignore[assignment]  # the fields before it have defaults


@dataclass(frozen=True, eq=False)
class PassRow:
    """The inputs of one pass.

    ids_NS, positions_S   input tokens and positions; N is 1 in a packed row
    packed                the starts of a packed row's samples, also of a slice's whole row; or a `SharedRow`
    keep_M, targets_M     indices in [S * N], position-major, at which response tokens are predicted, and the tokens
    here_M                of a slice: which of the R response tokens these are
    experts               of each position, [S, N, layers with experts, experts chosen]; None if routers choose
    lengths, width        response lengths, and the width of the rectangle that they are padded to
    """

    ids_NS: torch.Tensor
    positions_S: torch.Tensor
    packed: PackedSeqParams | None
    keep_M: torch.Tensor
    targets_M: torch.Tensor
    lengths: tuple[int, ...]
    width: int
    here_M: torch.Tensor | None = None
    experts: torch.Tensor | None = None

    @cached_property
    def mask(self) -> torch.Tensor:
        """[N, T], True for response tokens."""
        lengths_N1 = sent(torch.tensor(self.lengths), self.keep_M.device)[:, None]
        return torch.arange(self.width, device=self.keep_M.device) < lengths_N1

    def rectangle(self, values_R: torch.Tensor) -> torch.Tensor:
        """Reshape one value per response token to [N, T]."""
        return rectangle(values_R, self.lengths, self.width, self.mask)


def tokens_of(
    prompt_ids: Ragged, response_ids: Ragged, microbatch: Microbatch, *, packed: bool, multiple: int, slices: Slices
) -> int:
    """Number of input tokens of the pass, padding included; of all slices of a row together."""
    if packed:
        tokens = sum(slices.padded(_lengths(prompt_ids, response_ids)))
        return _up(tokens - sum(spared(prompt_ids.lengths, microbatch.shared)), multiple * slices.multiple)
    return len(prompt_ids) * _up(microbatch.prompt + microbatch.response - 1, multiple)


def row_of(
    prompt_ids: Ragged,
    response_ids: Ragged,
    microbatch: Microbatch,
    *,
    packed: bool,
    multiple: int,
    slices: Slices,
    least: int,
    device: torch.device,
) -> PassRow:
    """The pass over these samples, padded to at least `least` tokens and a multiple of `multiple` positions per rank.

    Of a packed row, only this rank's slice; `least` counts the whole row.
    """
    if packed and microbatch.shared:
        assert slices.ranks == 1, "slices are of whole samples"
        return _shared(prompt_ids, response_ids, microbatch, multiple, least, device)
    if packed:
        return _packed(prompt_ids, response_ids, microbatch, multiple, slices, least, device)
    assert slices.ranks == 1, "a rectangle has no slices"
    return _padded(prompt_ids, response_ids, microbatch, multiple, least, device)


def _packed(
    prompt_ids: Ragged,
    response_ids: Ragged,
    microbatch: Microbatch,
    multiple: int,
    slices: Slices,
    least: int,
    device: torch.device,
) -> PassRow:
    row, lengths = pack(prompt_ids.rows(), response_ids.rows()), _lengths(prompt_ids, response_ids)
    padded = slices.padded(lengths)
    size = _up(max(sum(padded), least), multiple * slices.multiple)
    if spare := size - sum(padded):
        lengths.append(0)  # the rest is an extra sample without tokens
        padded.append(spare)
    start_N = torch.tensor([0, *padded]).cumsum(0)
    described = _described(sent(start_N.to(torch.int32), device), max(padded), slices.ranks > 1)
    inputs = (row.ids_1S[0], row.positions_1S[0])
    if slices.ranks == 1:  # samples follow each other, and each position is this rank's
        ids_S, positions_S = (pad(values_S, (0, size - len(values_S))) for values_S in inputs)
        keep_M, targets_M, here_M = row.keep_R, row.targets_1R[0], None
    else:
        at_S = ranges(start_N[:-1], torch.tensor(lengths))  # where each token is in the padded row
        own_S = slices.positions(padded)
        here_R, keep_M = found(own_S, at_S[row.keep_R], size)
        ids_S, positions_S = (_spread(values_S, at_S, size)[own_S] for values_S in inputs)
        targets_M, here_M = row.targets_1R[0, here_R], sent(here_R, device)
    return PassRow(
        sent(ids_S[None], device),
        sent(positions_S, device),
        described,
        sent(keep_M, device),
        sent(targets_M, device),
        response_ids.lengths,
        microbatch.response,
        here_M,
    )


def _shared(
    prompt_ids: Ragged, response_ids: Ragged, microbatch: Microbatch, multiple: int, least: int, device: torch.device
) -> PassRow:
    """A row that has each shared prompt once. Its sections have more keys than queries."""
    row = pack(prompt_ids.rows(), response_ids.rows(), microbatch.shared)
    tokens = row.ids_1S.shape[1]
    spare = _up(max(tokens, least), multiple) - tokens
    sections = [*row.sections, *([Section(spare)] if spare else [])]
    queries, keys = ([0, *counts] for counts in zip(*((each.size, each.before + each.size) for each in sections)))
    starts_q, starts_k = (sent(torch.tensor(counts).cumsum(0).to(torch.int32), device) for counts in (queries, keys))
    return PassRow(
        sent(pad(row.ids_1S, (0, spare)), device),
        sent(pad(row.positions_1S[0], (0, spare)), device),
        SharedRow(
            qkv_format="sbhd",
            cu_seqlens_q=starts_q,
            cu_seqlens_kv=starts_k,
            max_seqlen_q=max(queries),
            max_seqlen_kv=max(keys),
            keys_K=sent(keys_of(sections), device),
        ),
        sent(row.keep_R, device),
        sent(row.targets_1R[0], device),
        response_ids.lengths,
        microbatch.response,
    )


def _spread(values_S: torch.Tensor, at_S: torch.Tensor, size: int) -> torch.Tensor:
    """A row of `size` numbers with these values, and zeros elsewhere."""
    made = values_S.new_zeros(size)
    made[at_S] = values_S
    return made


def _described(starts_N: torch.Tensor, longest: int, sliced: bool) -> PackedSeqParams:
    """The samples of the whole row.

    For slices, Transformer Engine wants their starts with and without padding. Both are the same here: padding at the
    end of a sample is computed like a token, so that no number is undefined, and causal attention never sees it.
    """
    padded = starts_N if sliced else None
    return PackedSeqParams(
        qkv_format="sbhd",
        cu_seqlens_q=starts_N,
        cu_seqlens_kv=starts_N,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _padded(
    prompt_ids: Ragged, response_ids: Ragged, microbatch: Microbatch, multiple: int, least: int, device: torch.device
) -> PassRow:
    size = _up(microbatch.prompt + microbatch.response - 1, multiple)
    rows = max(len(prompt_ids), -(-least // size))
    ids_NS = torch.zeros(rows, size, dtype=torch.long)
    keep = []
    for i, (prompt, response) in enumerate(zip(prompt_ids.rows(), response_ids.rows())):
        length = len(prompt) + len(response) - 1
        ids_NS[i, :length] = torch.cat([prompt, response[:-1]])
        keep.append(torch.arange(len(prompt) - 1, length) * rows + i)
    return PassRow(
        sent(ids_NS, device),
        torch.arange(size, device=device),
        None,
        sent(torch.cat(keep), device),
        sent(response_ids.values, device),
        response_ids.lengths,
        microbatch.response,
    )


def _lengths(prompt_ids: Ragged, response_ids: Ragged) -> list[int]:
    """Input tokens of each sample."""
    return [p + t - 1 for p, t in zip(prompt_ids.lengths, response_ids.lengths)]


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
