"""Packs samples into one row without padding, and unpacks per-token values of the row into a rectangle.

    row = pack(prompt_ids, response_ids)
    logits_1RV = network(row.ids_1S, position_ids=row.positions_1S, logits_to_keep=row.keep_R).logits
    logprobs_NT = rectangle(selected_logprobs(logits_1RV, row.targets_1R)[0], response_lengths, width)

Positions restart at 0 for each sample, which is how a network separates samples (transformers,
masking_utils.find_packed_sequence_indices). Callers decide which samples share a row.

Samples that share a prompt can have it once, `pack(prompt_ids, response_ids, shared=(2, 1))`: the row then is a list of
sections. A prompt is one, and each response one that continues its positions and attends to it as well. The prompt's
last position predicts the first token of every response.

Legend: N samples, S tokens of the row, R response tokens of the row, K keys of all sections, T longest response, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Section(NamedTuple):
    """`size` neighboring tokens of a row, one after the other in one sample. They attend to each other and to
    `before` tokens from position `prefix` of the row, causally."""

    size: int
    prefix: int = 0
    before: int = 0


@dataclass(frozen=True, eq=False)
class PackedRow:
    """One row. The last token of a response is only a target, so it is not in the input.

    ids_1S, positions_1S   input ids, and positions inside each sample
    keep_R                 positions in the row whose logits predict the response tokens
    targets_1R             the response tokens
    sections               the row, cut; a sample is one section unless it shares its prompt
    """

    ids_1S: torch.Tensor
    positions_1S: torch.Tensor
    keep_R: torch.Tensor
    targets_1R: torch.Tensor
    sections: tuple[Section, ...]


def pack(prompts: Sequence[torch.Tensor], responses: Sequence[torch.Tensor], shared: Sequence[int] = ()) -> PackedRow:
    """Pack one prompt [P] and one response [T] per sample, ids of one integer dtype, into a row.

    `shared` are the sizes of runs of samples with the same prompt, which the row has once; empty: no sample shares.

    Raises ValueError for a sample without prompt or response: its first token would be predicted from another sample;
    and for samples that are said to share a prompt and have different ones.
    """
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if not len(prompt) or not len(response):
            raise ValueError(f"sample {i} has {len(prompt)} prompt and {len(response)} response tokens; both need one")
    if different := differing(prompts, shared):
        raise ValueError(f"samples {different[0]} and {different[1]} are to share a prompt, and have different ones")
    ids: list[torch.Tensor] = []
    positions: list[tuple[int, int]] = []  # from, and how many
    keep: list[tuple[int, int]] = []
    sections: list[Section] = []
    start = first = 0  # the next token of the row, and the next sample
    for size in shared or [1] * len(prompts):
        prompt, begin, before = prompts[first], start, len(prompts[first])
        ids.append(prompt)
        positions.append((0, before))
        start += before
        parts = [Section(before)]
        for response in responses[first : first + size]:
            own = len(response) - 1
            ids.append(response[:-1])
            positions.append((before, own))
            keep += [(begin + before - 1, 1), (start, own)]
            parts.append(Section(own, begin, before))
            start += own
        sections += [Section(start - begin)] if size == 1 else [part for part in parts if part.size]
        first += size
    where = prompts[0].device
    return PackedRow(
        torch.cat(ids)[None],
        ranges(*torch.tensor(positions).T)[None].to(where),
        ranges(*torch.tensor(keep).T).to(where),
        torch.cat(list(responses))[None],
        tuple(sections),
    )


def differing(prompts: Sequence[torch.Tensor], shared: Sequence[int]) -> tuple[int, int] | None:
    """Two samples of one of the runs, whose sizes are `shared`, with different prompts; None if there are none."""
    first = 0
    for size in shared:
        for i in range(first + 1, first + size):
            if not torch.equal(prompts[i], prompts[first]):
                return first, i
        first += size
    return None


def keys_of(sections: Sequence[Section]) -> torch.Tensor:
    """The positions in the row of the keys of each section, [K] on the CPU: its prefix, then its own tokens."""
    made, start = [], 0
    for size, prefix, before in sections:
        made += [(prefix, before), (start, size)]
        start += size
    return ranges(*torch.tensor(made).T)


def ranges(start_N: torch.Tensor, size_N: torch.Tensor) -> torch.Tensor:
    """Concatenated ranges of whole numbers: `size` numbers from `start`, for each entry."""
    first_N = size_N.cumsum(0) - size_N
    return (start_N - first_N).repeat_interleave(size_N) + torch.arange(int(size_N.sum()))


def rectangle(
    values_R: torch.Tensor, lengths_N: Sequence[int], width: int, mask_NT: torch.Tensor | None = None
) -> torch.Tensor:
    """Unpack the entries of all samples in a row to [N, width], with 0 as padding on the right; differentiable.

    `mask_NT` is True where an entry goes, if the caller has it; making it waits for the work of a GPU. Raises
    ValueError if the lengths do not add up to R or one exceeds `width`.
    """
    if sum(lengths_N) != len(values_R) or max(lengths_N) > width:
        raise ValueError(f"{len(values_R)} entries are not rows of {list(lengths_N)}, each {width} at most")
    if mask_NT is None:
        lengths = torch.tensor(lengths_N, device=values_R.device)
        mask_NT = torch.arange(width, device=values_R.device) < lengths[:, None]
    return values_R.new_zeros(len(lengths_N), width).masked_scatter(mask_NT, values_R)
