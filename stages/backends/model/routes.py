"""The experts of each token, from the field of a batch to the positions of a pass. Knows tensors, no network.

    tokens, rows = numbered(prompts, responses)                      # where the tokens of a pass are in the field
    given = table(routes, prompts, responses, layers=2, chosen=8)    # [1 + tokens, layers, chosen]
    given[pack(tokens.rows(), rows.rows()).ids_1S]                   # of each position of a row

The number of a token stands for the token wherever a pass places it, so rows, rectangles and slices need no rule of
their own. Number 0 is padding. A field entry with the largest number of its dtype is a token whose experts are not
known; its own router chooses.

Legend: T tokens of a pass, K experts chosen, L layers with experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from pipeline import StageError
from pipeline.declare.columns import Ragged
from pipeline.errors import Problem

EXPERTS = "routed_experts"


def unknown(dtype: torch.dtype) -> int:
    """What stands for an expert that is not known: the largest number of an integer dtype."""
    return torch.iinfo(dtype).max


def numbered(prompts: Sequence[int], responses: Sequence[int], shared: Sequence[int] = ()) -> tuple[Ragged, Ragged]:
    """Return the numbers, from 1, of the tokens of prompts and of responses with these lengths. The last token of a
    response is no input: its number is 0. Samples that share a prompt, in runs of these sizes, have the first one's
    numbers for it."""
    before: list[torch.Tensor] = []
    after: list[torch.Tensor] = []
    start = 1
    first_of_run = {sum(shared[:i]) for i in range(len(shared))}
    for sample, (prompt, response) in enumerate(zip(prompts, responses)):
        again = shared and sample not in first_of_run
        before.append(before[-1] if again else torch.arange(start, start + prompt))
        own = torch.arange(start + prompt, start + prompt + response)
        own[-1:] = 0
        after.append(own)
        start += prompt + response - 1
    return Ragged.of(before), Ragged.of(after)


def table(
    routes: Ragged, prompts: Sequence[int], responses: Sequence[int], *, layers: int, chosen: int
) -> torch.Tensor:
    """The experts of each token by its number, [1 + tokens, L, K], with the field's dtype.

    Raises StageError if the field has another number of entries than these samples have tokens, layers and experts.
    """
    wanted = tuple((p + t - 1) * layers * chosen for p, t in zip(prompts, responses))
    if routes.lengths != wanted:
        at = next(i for i, (has, wants) in enumerate(zip(routes.lengths, wanted)) if has != wants)
        raise StageError(
            Problem(
                where=f"sample {at} of a microbatch",
                what=f"{EXPERTS} has {routes.lengths[at]} entries",
                why=f"{wanted[at] // layers // chosen} tokens in {layers} layers with {chosen} experts each have "
                f"{wanted[at]}",
                fix="sample and train with the same model",
            )
        )
    none = routes.values.new_full((1, layers, chosen), unknown(routes.values.dtype))
    return torch.cat([none, routes.values.view(-1, layers, chosen)])


class Disagreement:
    """Counts the tokens whose experts are given, in every layer, and those for which the router would have chosen other
    ones."""

    def __init__(self) -> None:
        self._counts: torch.Tensor | None = None

    def choice(self, own_TK: torch.Tensor, given_TK: torch.Tensor) -> torch.Tensor:
        """Return each token's experts, [T, K]: the given ones, or the router's own where they are not known."""
        known_T = given_TK[:, 0] != unknown(given_TK.dtype)
        given_TK = given_TK.to(own_TK.dtype)
        same_T = (own_TK[:, :, None] == given_TK[:, None, :]).any(-1).all(-1)
        counts = torch.stack([(known_T & ~same_T).sum(), known_T.sum()])
        self._counts = counts if self._counts is None else self._counts + counts
        return torch.where(known_T[:, None], given_TK, own_TK)

    def clear(self) -> None:
        """Count from 0 again."""
        self._counts = None

    def share(self, device: torch.device) -> float:
        """The share of tokens and layers that would have had other experts, over all ranks, which call it together."""
        counts = torch.zeros(2, dtype=torch.long, device=device) if self._counts is None else self._counts
        if dist.is_initialized():
            dist.all_reduce(counts)
        differing, given = counts.tolist()
        return differing / given if given else 0.0
