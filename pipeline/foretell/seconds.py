"""GpuWork in amounts becomes seconds, with the rates of a GPU. Pure arithmetic; knows no stage."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from pipeline.declare.work import Decoding, GpuWork

Rates = Mapping[str, float]  # amounts per second
DEVICE = ("products", "attention", "moved_bytes", "vocabulary_bytes")  # one after another, while the host launches
SERIAL = ("passes", "updated_bytes", "copied_bytes")


def lacking(work: GpuWork, rates: Rates) -> list[str]:
    """Return the amounts of `work` for which there is no rate."""
    names = (*DEVICE, "layers", *SERIAL)
    return [name for name in names if getattr(work, name) and name not in rates]


def seconds(work: GpuWork, rates: Rates) -> float:
    """Return the seconds of a task whose amounts all have rates."""

    def spent(*names: str) -> float:
        return sum(getattr(work, name) / rates[name] for name in names if getattr(work, name))

    return work.seconds + spent(*SERIAL) + max(spent(*DEVICE), spent("layers"))


def finished(decoding: Decoding, rates: Rates, prompt: int, groups: Sequence[Sequence[int]]) -> list[float]:
    """Return after how many seconds each group of responses, given by lengths in tokens, is finished by one replica.

    A sequence starts once the cache has room for all of it, in order; a group's prompt is computed once. A step takes
    the longer of reading the weights and multiplying by them, and then reads the cache of every sequence and does the
    host's work for each.
    """
    waiting = [(length, number) for number, group in enumerate(groups) for length in group][::-1]
    running: list[tuple[int, int, int]] = []  # the step at which a sequence ends, its length, its group
    at_s = sum(prompt * decoding.products / rates["products"] for _ in groups)
    step, taken, context = 0, 0, 0  # context: tokens in the cache that a step reads
    ends = [0.0] * len(groups)
    while waiting or running:
        while waiting and (not running or taken + prompt + waiting[-1][0] <= decoding.most_tokens):
            length, number = waiting.pop()
            heapq.heappush(running, (step + length, length, number))
            taken, context = taken + prompt + length, context + prompt
        count, steps = len(running), running[0][0] - step
        products_s = count * decoding.products / rates["products"]
        each_s = max(products_s, decoding.weights_bytes / rates["weights_bytes"]) + count / rates["tokens"]
        read = steps * context + count * steps * (steps + 1) / 2
        at_s += steps * each_s + read * decoding.cache_bytes / rates["cache_bytes"]
        step, context = step + steps, context + count * steps
        while running and running[0][0] == step:
            _, length, number = heapq.heappop(running)
            taken, context = taken - prompt - length, context - prompt - length
            ends[number] = at_s
    return ends
