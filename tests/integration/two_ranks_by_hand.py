"""Training on two data-parallel ranks, written by hand in one process: torch and transformers.

The oracle for what each of two ranks trains on. The samples of a rank and of its passes come from a search through all
divisions, one of which must be the best; the gradients of both ranks are added. It imports nothing of the engine or the
stages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, combinations, pairwise, product
from typing import Any, TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence

from tests.integration.handwritten import PAD, k3, selected

T = TypeVar("T")
Passes = list[list[int]]  # of one rank, by position in the batch


@dataclass(frozen=True)
class Lengths:
    """The samples of a batch in tokens. Two ranks share their cost evenly: n + quadratic * n^2 for n tokens."""

    prompts: list[int]
    responses: list[int]
    quadratic: float

    def total(self, sample: int) -> int:
        return self.prompts[sample] + self.responses[sample]

    def cost(self, samples: Iterable[int]) -> float:
        return sum(n + self.quadratic * n * n for n in map(self.total, samples))

    def rectangle(self, samples: Sequence[int]) -> tuple[int, int]:
        """Return the widths of prompts and responses in the smallest rectangle that holds these samples."""
        response = max(self.responses[i] for i in samples)
        return max(map(self.total, samples)) - response, response


@dataclass(frozen=True)
class Cut:
    """How a rank cuts its samples into passes. `size` is in samples if "plain", in tokens with padding if "dynamic", in
    tokens of a row if "packed"."""

    kind: str
    size: int

    def together(self, members: Sequence[int], lengths: Lengths) -> tuple[Passes, Passes]:
        """Return the passes of two ranks that train together: equally many, and the i-th ones of similar length."""
        if self.kind == "plain":
            first, second = (
                [half[i : i + self.size] for i in range(0, len(half), self.size)] for half in halves(members, lengths)
            )
            return first, second
        if self.kind == "dynamic":
            order = sorted(members, key=lengths.total, reverse=True)
            pairs = list(zip(order[::2], order[1::2]))
            first, second = one_of_each([([a], [b]) for a, b in pairs], lengths)
            edges = widest_first([lengths.total(a) for a, _ in pairs], self.size)
            first, second = ([joined(each[a:b]) for a, b in pairwise(edges)] for each in (first, second))
            return first, second
        rows = sorted(self.rows(members, lengths, multiple=2), key=lengths.cost, reverse=True)
        return one_of_each(list(zip(rows[::2], rows[1::2])), lengths)

    def alone(self, members: Sequence[int], lengths: Lengths) -> Passes:
        """Return the passes of a rank that scores its samples by itself."""
        if self.kind == "plain":
            return [list(members[i : i + self.size]) for i in range(0, len(members), self.size)]
        if self.kind == "dynamic":
            order = sorted(members, key=lengths.total, reverse=True)
            edges = widest_first(list(map(lengths.total, order)), self.size)
            return [order[a:b] for a, b in pairwise(edges)]
        return self.rows(members, lengths, multiple=1)

    def width(self, samples: Sequence[int], batch: Sequence[int], lengths: Lengths) -> tuple[int, int]:
        """Return the widths of prompts and responses in a pass; "plain" passes are as wide as the batch needs."""
        if self.kind == "plain":
            return max(lengths.prompts[i] for i in batch), max(lengths.responses[i] for i in batch)
        return lengths.rectangle(samples)

    def rows(self, members: Sequence[int], lengths: Lengths, multiple: int) -> Passes:
        """Return the fewest rows, in multiples of `multiple`; among those, the only or the most even ones."""
        for count in range(multiple, len(members) + 1, multiple):
            if found := list(packings(members, [[] for _ in range(count)], lengths, self.size)):
                return only(found, lambda rows: sum(lengths.cost(row) ** 2 for row in rows))
        raise AssertionError("the samples do not fit")


def joined(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def only(choices: Iterable[T], worth: Callable[[T], Any]) -> T:
    """Return the choice of the lowest value, which no other choice has."""
    ranked = sorted(choices, key=worth)
    assert len(ranked) == 1 or worth(ranked[0]) < worth(ranked[1]), "these lengths have two best divisions"
    return ranked[0]


def halves(members: Sequence[int], lengths: Lengths) -> tuple[list[int], list[int]]:
    """Return the two halves with the most even cost, each in canonical order."""
    splits = [
        ([members[0], *some], [i for i in members[1:] if i not in some])
        for some in combinations(members[1:], len(members) // 2 - 1)
    ]
    return only(splits, lambda split: abs(lengths.cost(split[0]) - lengths.cost(split[1])))


def one_of_each(pairs: Sequence[tuple[list[int], list[int]]], lengths: Lengths) -> tuple[Passes, Passes]:
    """Give each of two ranks one item of every pair, with the most even cost."""
    turns = [(0, *turn) for turn in product((0, 1), repeat=len(pairs) - 1)]
    splits = [
        ([pair[i] for pair, i in zip(pairs, turn)], [pair[1 - i] for pair, i in zip(pairs, turn)]) for turn in turns
    ]
    return only(splits, lambda split: abs(lengths.cost(joined(split[0])) - lengths.cost(joined(split[1]))))


def widest_first(widths: Sequence[int], tokens: int) -> list[int]:
    """Return where to cut samples of these widths, in descending order: the cheapest passes of at most `tokens` tokens
    each, padding included. A pass costs its tokens, and a sixteenth of `tokens` whatever is in it."""
    inner = range(1, len(widths))
    cuts = [(0, *some, len(widths)) for count in range(len(widths)) for some in combinations(inner, count)]
    sizes = {edges: [(b - a) * widths[a] for a, b in pairwise(edges)] for edges in cuts}
    fitting = [edges for edges in cuts if max(sizes[edges]) <= tokens]
    return list(only(fitting, lambda edges: sum(sizes[edges]) + len(sizes[edges]) * tokens / 16))


def packings(members: Sequence[int], rows: Passes, lengths: Lengths, tokens: int) -> Iterator[Passes]:
    """Yield all ways to put the samples into these rows, none empty and none above `tokens` tokens."""
    if not members:
        if all(rows):
            yield [sorted(row) for row in rows]
        return
    for number, row in enumerate(rows):
        if sum(map(lengths.total, row)) + lengths.total(members[0]) <= tokens:
            yield from packings(members[1:], [*rows[:number], [*row, members[0]], *rows[number + 1 :]], lengths, tokens)
        if not row:
            return  # other empty rows are the same


@dataclass(frozen=True)
class Samples:
    """The samples of a step. `drawn` are the tokens of responses that the policy drew; others are not trained.
    `advantages` has one per token."""

    prompts: list[torch.Tensor]
    responses: list[torch.Tensor]
    drawn: list[torch.Tensor]
    advantages: list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of both sides of the comparison. `at_once` are the samples that ranks score at a time."""

    cut: Cut
    quadratic: float
    minibatches: int
    at_once: int
    lr: float
    kl: float
    clip: float = 0.2


def train(model: Any, steps: Sequence[Samples], s: Settings) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train, and return the mean loss of each step and the final weights."""
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.lr, weight_decay=0.0, fused=True)
    losses = []
    for samples in steps:
        count = len(samples.prompts)
        lengths = Lengths(list(map(len, samples.prompts)), list(map(len, samples.responses)), s.quadratic)
        old, ref = (scored(each, samples, lengths, s) for each in (model, reference))
        total = 0.0
        for start in range(0, count, count // s.minibatches):
            minibatch = range(start, start + count // s.minibatches)
            tokens = sum(int(samples.drawn[i].sum()) for i in minibatch)
            gradients = []
            ranks = s.cut.together(minibatch, lengths)
            widths = [s.cut.width(joined(passes), range(count), lengths) for passes in zip(*ranks)]
            for passes in ranks:
                part = 0.0
                for members, width in zip(passes, widths):
                    loss = loss_of(model, samples, sorted(members), width, old, ref, s) / tokens
                    loss.backward()
                    part += loss.item()
                total += part
                gradients.append([parameter.grad for parameter in model.parameters()])
                optimizer.zero_grad()
            for parameter, one, two in zip(model.parameters(), *gradients):
                parameter.grad = one + two
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(total / s.minibatches)
    return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def loss_of(
    model: Any,
    samples: Samples,
    members: list[int],
    width: tuple[int, int],
    old: list[torch.Tensor],
    ref: list[torch.Tensor],
    s: Settings,
) -> torch.Tensor:
    """Return the sum over the tokens of one pass: the clipped policy loss and the KL term."""

    def padded(rows: list[torch.Tensor]) -> torch.Tensor:
        longest = torch.zeros(width[1])  # a row of the full width, removed again
        return pad_sequence([*rows, longest], batch_first=True)[:-1]

    new = padded(logprobs_of(model, samples, members, width, packed=s.cut.kind == "packed"))
    before, frozen = (padded([column[i] for i in members]) for column in (old, ref))
    mask = padded([samples.drawn[i].float() for i in members]).bool()
    weight = padded([samples.advantages[i] for i in members])
    ratio = torch.exp(new - before)
    clipped = ratio.clamp(1 - s.clip, 1 + s.clip)
    per_token = -torch.min(ratio * weight, clipped * weight) + s.kl * k3(new - frozen)
    return torch.where(mask, per_token, 0.0).sum()


@torch.no_grad()
def scored(model: Any, samples: Samples, lengths: Lengths, s: Settings) -> list[torch.Tensor]:
    """Return the logprobs of each sample's tokens. The ranks score runs of samples, each rank its half of a run."""
    found: dict[int, torch.Tensor] = {}
    count = len(samples.prompts)
    for start in range(0, count, s.at_once):
        run = range(start, min(start + s.at_once, count))
        for half in halves(run, lengths):
            for members in map(sorted, s.cut.alone(half, lengths)):
                width = s.cut.width(members, run, lengths)
                rows = logprobs_of(model, samples, members, width, packed=s.cut.kind == "packed")
                found |= zip(members, rows)
    return [found[i] for i in range(count)]


def logprobs_of(
    model: Any, samples: Samples, members: list[int], width: tuple[int, int], *, packed: bool
) -> list[torch.Tensor]:
    """Return the logprobs of each sample's response from one pass, a rectangle of these widths or one packed row."""
    prompts, responses = ([column[i] for i in members] for column in (samples.prompts, samples.responses))
    sizes = [len(response) for response in responses]
    if packed:
        rows = [torch.cat([prompt, response]) for prompt, response in zip(prompts, responses)]
        positions = torch.cat([torch.arange(len(row) - 1) for row in rows])
        starts = accumulate((len(row) - 1 for row in rows), initial=0)
        keep = [start + torch.arange(len(p) - 1, len(row) - 1) for start, p, row in zip(starts, prompts, rows)]
        inputs = torch.cat([row[:-1] for row in rows])
        logits = model(
            input_ids=inputs[None], position_ids=positions[None], use_cache=False, logits_to_keep=torch.cat(keep)
        ).logits
        return list(selected(logits, torch.cat(responses)[None])[0].split(sizes))
    left = [max(width[0] - len(prompt), 0) for prompt in prompts]
    rows = torch.full((len(members), sum(width)), PAD)
    for row, skipped, prompt, response in zip(rows, left, prompts, responses):
        row[skipped : skipped + len(prompt) + len(response)] = torch.cat([prompt, response])
    mask = positions = None
    if any(left):
        mask = (torch.arange(sum(width) - 1) >= torch.tensor(left)[:, None]).long()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(
        input_ids=rows[:, :-1],
        attention_mask=mask,
        position_ids=positions,
        use_cache=False,
        logits_to_keep=width[1],
    ).logits
    found = selected(logits, rows[:, width[0] :])
    starts = [max(len(prompt) - width[0], 0) for prompt in prompts]
    return [row[start : start + size] for row, start, size in zip(found, starts, sizes)]
