"""Pads ragged rows to rectangles and back: prompts on the left, responses on the right.

Legend: N samples, P prompt width, T response width; by default the longest row. W = P + T.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeline.declare.columns import Ragged


def pad_left(column: Ragged, fill: int, width: int | None = None) -> torch.Tensor:
    """[N, P], right-aligned rows."""
    lengths = torch.tensor(column.lengths)
    width = max(column.lengths) if width is None else width
    if len(column.values) == width * len(lengths):
        return column.values.view(len(lengths), width)
    padded_NP = column.values.new_full((len(lengths), width), fill)
    padded_NP[(torch.arange(width) >= width - lengths[:, None]).to(padded_NP.device)] = column.values
    return padded_NP


def pad_right(column: Ragged, fill: float = 0, width: int | None = None) -> torch.Tensor:
    """[N, T], left-aligned rows."""
    lengths = torch.tensor(column.lengths)
    width = max(column.lengths) if width is None else width
    if len(column.values) == width * len(lengths):
        return column.values.view(len(lengths), width)
    padded_NT = column.values.new_full((len(lengths), width), fill)
    padded_NT[(torch.arange(width) < lengths[:, None]).to(padded_NT.device)] = column.values
    return padded_NT


def pad_around(prompts: Ragged, responses: Ragged, fill: int, prompt: int, response: int) -> torch.Tensor:
    """[N, W], each row a prompt and its response, together at most `prompt + response` tokens.

    Responses start at column `prompt`. A longer prompt starts at column 0, and its response after it.
    """
    lengths_N1, ends_N1 = torch.tensor(prompts.lengths)[:, None], torch.tensor(responses.lengths)[:, None]
    columns_W, left_N1 = torch.arange(prompt + response), (prompt - lengths_N1).clamp(min=0)
    split_N1 = left_N1 + lengths_N1
    rows_NW = prompts.values.new_full((len(lengths_N1), prompt + response), fill)
    device = rows_NW.device
    rows_NW[((columns_W >= left_N1) & (columns_W < split_N1)).to(device)] = prompts.values
    rows_NW[((columns_W >= split_N1) & (columns_W < split_N1 + ends_N1)).to(device)] = responses.values
    return rows_NW


def unpad_right(padded_NT: torch.Tensor, lengths: Sequence[int]) -> Ragged:
    """The first `lengths[i]` entries of each row, on the CPU."""
    padded_NT = padded_NT.cpu()
    kept_NT = torch.arange(padded_NT.shape[1]) < torch.tensor(lengths)[:, None]
    return Ragged(padded_NT[kept_NT], tuple(lengths))
