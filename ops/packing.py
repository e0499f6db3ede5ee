"""Packs samples into one row without padding, and unpacks per-token values of the row into a rectangle.

    row = pack(prompt_ids, response_ids)
    logits_1RV = network(row.ids_1S, position_ids=row.positions_1S, logits_to_keep=row.keep_R).logits
    logprobs_NT = rectangle(selected_logprobs(logits_1RV, row.targets_1R)[0], response_lengths, width)

Positions restart at 0 for each sample, which is how a network separates samples (transformers,
masking_utils.find_packed_sequence_indices). Callers decide which samples share a row.

Legend: N samples, S tokens of the row, R response tokens of the row, T longest response, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class PackedRow:
    """One row. The last token of a response is only a target, so it is not in the input.

    ids_1S, positions_1S   input ids, and positions inside each sample
    keep_R                 positions in the row whose logits predict the response tokens
    targets_1R             the response tokens
    """

    ids_1S: torch.Tensor
    positions_1S: torch.Tensor
    keep_R: torch.Tensor
    targets_1R: torch.Tensor


def pack(prompts: Sequence[torch.Tensor], responses: Sequence[torch.Tensor]) -> PackedRow:
    """Pack one prompt [P] and one response [T] per sample, ids of one integer dtype, into a row.

    Raises ValueError for a sample without prompt or response: its first token would be predicted from another sample.
    """
    ids, positions, keep = [], [], []
    start = 0
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if not len(prompt) or not len(response):
            raise ValueError(f"sample {i} has {len(prompt)} prompt and {len(response)} response tokens; both need one")
        size = len(prompt) + len(response) - 1
        ids += [prompt, response[:-1]]
        positions.append(torch.arange(size, device=prompt.device))
        keep.append(torch.arange(start + len(prompt) - 1, start + size, device=prompt.device))
        start += size
    return PackedRow(
        torch.cat(ids)[None], torch.cat(positions)[None], torch.cat(keep), torch.cat(list(responses))[None]
    )


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
