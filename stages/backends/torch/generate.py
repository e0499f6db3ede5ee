"""Samples responses token by token. Knows a network and random numbers, not stages, text or refits.

The random number of each (sample, token) is given and selects a token by the cumulative distribution over the
vocabulary, so a sample depends only on its own numbers. Each distinct prompt is prefilled once; its KV cache is then
copied to its samples.

Legend: N samples, G groups, B rows in the network (distinct prompts first, unfinished samples later), P prompt,
T response, S prompt and response so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from pipeline.declare.columns import Ragged
from stages.backends import Cancelled, Decoded, Generation, Sampling, samples_of
from stages.backends.choose import choose
from stages.backends.model.padding import pad_left, unpad_right
from stages.backends.model.vision import Pictures
from stages.backends.torch.cache_names import cache_name
from stages.backends.torch.images import Seen, SeenSample, Sight
from stages.backends.torch.routers import ChosenExperts, Routers, Routes


def generate(
    network: PreTrainedModel,
    prompt_ids: Ragged,
    sampling: Sampling,
    uniforms: np.ndarray | None,
    *,
    closing: Sequence[int],
    pad: int,
    version: int = 0,
    routers: Routers | None = None,
    seen: Seen | None = None,
) -> Generation:
    """Sample responses to N prompts: `decode` with all of them in one group."""
    events = decode(
        network,
        prompt_ids,
        sampling,
        uniforms,
        closing=closing,
        pad=pad,
        group_size=len(prompt_ids),
        version=lambda: version,
        routers=routers,
        seen=seen,
    )
    return next(event.made for event in events if isinstance(event, Decoded))


@torch.no_grad()
def decode(
    network: PreTrainedModel,
    prompt_ids: Ragged,
    sampling: Sampling,
    uniforms: np.ndarray | None,
    *,
    closing: Sequence[int],
    pad: int,
    group_size: int,
    version: Callable[[], int],
    unwanted: Callable[[int], bool] = lambda group: False,
    routers: Routers | None = None,
    seen: Seen | None = None,
) -> Iterator[Decoded | Cancelled | None]:
    """Sample responses to N prompts. Yields one item per token: the groups that ended with it, or None.

    `uniforms` [N, max_tokens] in (0, 1); `closing` ids end a response and are part of it. Each `group_size` prompts
    form a group. Between two items the network's weights may change in place: `version()`, read at each forward pass,
    stamps the tokens drawn from its logits, and the cache of earlier tokens is kept. Groups that became `unwanted` are
    also closed there, which yields one extra item. With `routers`, samples have the experts of their tokens.
    """
    stamp = version()
    with _recording(routers) as experts:
        cache, logits_BV, mask_BS, next_B = _prefill(network, prompt_ids, pad, seen)
    device = network.device
    uniforms_NT = None if uniforms is None else torch.as_tensor(uniforms, device=device)
    samples = _Samples(len(prompt_ids), group_size, sampling, closing, pad, device)
    if experts:
        distinct = _distinct(prompt_ids, None if seen is None else seen[1])
        samples.routes = Routes(experts, *distinct, sampling.max_tokens)
    rows_B = torch.arange(len(prompt_ids), device=device)
    cached = {cache_name(network.forward): cache}
    for t in range(sampling.max_tokens):
        uniform_B = None if uniforms_NT is None else uniforms_NT[rows_B, t]
        chosen_B, logprobs_B = choose(logits_BV, sampling, uniform_B)
        samples.add(rows_B, chosen_B, logprobs_B, stamp)
        ended = samples.ended()
        yield Decoded(ended, samples.made(ended)) if ended else None
        if given_up := tuple(group for group in samples.running if unwanted(group)):
            yield Cancelled(samples.give_up(given_up))
        if not samples.running:
            return
        if samples.open * 2 <= len(rows_B):  # finished rows cost as much as open ones; compacting the cache costs once
            keep = (~samples.closed_N[rows_B]).nonzero()[:, 0]
            _select(cache, keep)
            rows_B, chosen_B, next_B = rows_B[keep], chosen_B[keep], next_B[keep]
            mask_BS = None if mask_BS is None else mask_BS[keep]
        if mask_BS is not None:
            mask_BS = torch.cat([mask_BS, mask_BS.new_ones(len(mask_BS), 1)], dim=1)
        stamp = version()
        with _recording(routers) as experts:
            logits_BV = network(
                input_ids=chosen_B[:, None],
                attention_mask=mask_BS,
                position_ids=_positions(next_B + t, seen, needed=mask_BS is not None),
                use_cache=True,
                **cached,
            ).logits[:, -1]
        if samples.routes and experts:
            samples.routes.add(rows_B, t, experts)


def _recording(routers: Routers | None) -> AbstractContextManager[ChosenExperts | None]:
    return routers.recording() if routers else nullcontext()


class _Samples:
    """The N samples of a decode batch so far, in groups of `size`: tokens, logprobs, and which are still open.

    `running` are the groups with an open sample, ascending; `open` is the number of open samples.
    """

    def __init__(
        self, count: int, size: int, sampling: Sampling, closing: Sequence[int], pad: int, device: torch.device
    ) -> None:
        self.size, self.pad, self.ends = size, pad, torch.tensor(sorted(closing), device=device)
        self.tokens_NT = torch.full((count, sampling.max_tokens), pad, device=device)
        self.logprobs_NT = torch.zeros(count, sampling.max_tokens, device=device)
        self.lengths_N = torch.zeros(count, dtype=torch.long, device=device)
        self.limits_N = torch.tensor([sampling.limit(n) for n in range(count)], device=device)
        self.whole_N = torch.zeros(count, dtype=torch.bool, device=device)  # with a closing token
        self.closed_N = torch.zeros(count, dtype=torch.bool, device=device)
        self.versions_T: list[int] = []  # one forward pass computes one token of every sample
        self.running, self.open = list(range(count // size)), count
        self.routes: Routes | None = None

    def add(self, rows_B: torch.Tensor, chosen_B: torch.Tensor, logprobs_B: torch.Tensor, version: int) -> None:
        """Add the next token of these samples, except those already closed."""
        t = len(self.versions_T)
        open_B = ~self.closed_N[rows_B]
        self.tokens_NT[rows_B, t] = torch.where(open_B, chosen_B, self.pad)
        self.logprobs_NT[rows_B, t] = logprobs_B
        self.lengths_N[rows_B] += open_B
        self.whole_N[rows_B] |= open_B & torch.isin(chosen_B, self.ends)
        self.closed_N |= self.whole_N | (self.lengths_N >= self.limits_N)
        self.versions_T.append(version)

    def ended(self) -> tuple[int, ...]:
        """The groups that ended since the last call."""
        open_G = (~self.closed_N).view(-1, self.size).sum(-1).tolist()
        before = self.running
        self.running = [group for group in before if open_G[group]]
        self.open = sum(open_G)
        return tuple(group for group in before if not open_G[group])

    def give_up(self, groups: Sequence[int]) -> dict[int, int]:
        """Close running groups. Returns the length of each one's longest samples, which are the open ones."""
        self.closed_N.view(-1, self.size)[list(groups)] = True
        self.ended()
        return dict.fromkeys(groups, len(self.versions_T))

    def made(self, groups: Sequence[int]) -> Generation:
        """The samples of these groups so far."""
        everything = len(groups) * self.size == len(self.closed_N)
        rows = slice(None) if everything else torch.tensor(samples_of(groups, self.size), device=self.closed_N.device)
        lengths, width = self.lengths_N[rows].tolist(), len(self.versions_T)
        versions_NT = torch.tensor(self.versions_T, dtype=torch.int32).expand(len(lengths), width)
        return Generation(
            unpad_right(self.tokens_NT[rows, :width], lengths),
            unpad_right(self.logprobs_NT[rows, :width], lengths),
            ~self.whole_N[rows].cpu(),
            unpad_right(versions_NT, lengths),
            routes=self.routes.of(samples_of(groups, self.size), lengths) if self.routes else None,
        )


def _positions(next_B: torch.Tensor, seen: Seen | None, *, needed: bool) -> torch.Tensor | None:
    """Positions of the next tokens; with images, those of time, height and width, which are equal for text."""
    if seen is not None:
        return next_B[None, :, None].expand(3, -1, -1)
    return next_B[:, None] if needed else None


def _prefill(
    network: PreTrainedModel, prompt_ids: Ragged, pad: int, seen: Seen | None
) -> tuple[DynamicCache, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Cache and next-token logits [N, V] of N prompts, the mask [N, P] if any is padded, and the next positions [N]."""
    prompts, prompt_of = _distinct(prompt_ids, None if seen is None else seen[1])
    of_sample = torch.tensor(prompt_of, device=network.device)
    lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=network.device)
    prompts_BP = pad_left(Ragged.of(prompts), pad).to(network.device)
    width = prompts_BP.shape[1]
    mask_BP = positions_BP = None
    if bool((lengths_B != width).any()):
        mask_BP = (torch.arange(width, device=network.device) >= width - lengths_B[:, None]).long()
        positions_BP = (mask_BP.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=network.config)
    given = {"input_ids": prompts_BP, "attention_mask": mask_BP, "use_cache": True, cache_name(network.forward): cache}
    if seen is None:
        next_B, logits_BPV = lengths_B, network(position_ids=positions_BP, logits_to_keep=1, **given).logits
    else:
        sight = _sight(network, prompts_BP, prompts, prompt_of, seen)
        next_B = sight.ends
        with sight.shown(network) as arguments:
            logits_BPV = network(position_ids=sight.positions_4NS[1:], logits_to_keep=1, **given, **arguments).logits
    _select(cache, of_sample)
    mask = None if mask_BP is None else mask_BP[of_sample]
    return cache, logits_BPV[:, -1][of_sample], mask, next_B[of_sample]


def _select(cache: DynamicCache, rows_B: torch.Tensor) -> None:
    """Keep these rows of a cache, in this order; `batch_select_indices` would not select recurrent states."""
    cache.reorder_cache(rows_B)  # type: ignore[arg-type]


def _sight(
    network: PreTrainedModel, prompts_BP: torch.Tensor, prompts: Sequence[torch.Tensor], prompt_of: Sequence[int],
    seen: Seen,
) -> Sight:  # fmt: skip
    """The images of distinct prompts, padded on the left."""
    vision, pictures = seen
    samples = []
    for b, prompt in enumerate(prompts):
        length, own = len(prompt), pictures[prompt_of.index(b)]
        start = prompts_BP.shape[1] - length
        samples.append(SeenSample(row=b, start=start, length=length, prompt=length, pictures=own))
    return Sight.of(network, vision, prompts_BP, samples)


def _distinct(prompt_ids: Ragged, pictures: Sequence[Pictures] | None) -> tuple[list[torch.Tensor], list[int]]:
    """The distinct prompts in order of first appearance, and each sample's index into them."""
    rows = prompt_ids.rows()
    keys = [(*row.tolist(), *(pictures[n].names if pictures else ())) for n, row in enumerate(rows)]
    place: dict[tuple[int | str, ...], int] = {}
    index = [place.setdefault(key, len(place)) for key in keys]
    first = {p: i for i, p in reversed(list(enumerate(index)))}
    return [rows[first[p]] for p in range(len(place))], index
