"""The second model runner's table chooses what the rule for all backends says, whatever comes into its slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from stages.backends import Draws, Sampling
from stages.backends.choose import choose
from tests.optional import need

need("vllm", "vllm")

WIDTH = 1000
KINDS = (Sampling(5), replace(Sampling(7), temperature=0.7, top_k=20), replace(Sampling(5), greedy=True))


def settings(name: str, sampling: Sampling, sample: int) -> dict[str, Any]:
    from stages.backends.vllm.choice import request_choice

    return request_choice(name, sampling, None if sampling.greedy else (3, 0, sample, 0))


def step(table: Any, logits_BV: torch.Tensor, slots: list[int], places: list[int]) -> list[int]:
    return table.choose(logits_BV, np.array(slots), torch.tensor(slots), torch.tensor(places)).tolist()


def wanted(logits_BV: torch.Tensor, kinds: list[Sampling], samples: list[int], places: list[int]) -> list[Any]:
    made = []
    for logits_V, sampling, sample, place in zip(logits_BV, kinds, samples, places):
        uniforms_T = Draws(3, (0,), (sample,)).uniforms(sampling.max_tokens + 1)[0]
        uniform_B = None if sampling.greedy else torch.tensor([uniforms_T[place]])
        token_B, logprob_B = choose(logits_V[None], sampling, uniform_B)
        made.append((token_B.item(), logprob_B.item()))
    return made


@pytest.mark.parametrize("kinds", [KINDS[:1] * 3, KINDS, KINDS[1:2] * 3])
def test_each_request_gets_the_tokens_of_its_own_random_numbers(kinds):
    from stages.backends.vllm.sampler import SlotTable

    torch.manual_seed(0)
    table, slots = SlotTable(8, torch.device("cpu")), [5, 0, 2]
    for slot, sample in zip(slots, (0, 1, 2)):
        table.add(slot, settings(f"r{sample}", kinds[sample], sample))
    rows: list[list[tuple[int, float]]] = [[], [], []]
    for place in range(5):
        logits_BV = torch.randn((3, WIDTH)).bfloat16()
        tokens = step(table, logits_BV, slots, [place] * 3)
        expected = wanted(logits_BV, list(kinds), [0, 1, 2], [place] * 3)
        assert tokens == [token for token, _ in expected]
        for row, each in zip(rows, expected):
            row.append(each)
        if place == 2:  # moves to another slot, as after a preemption, and goes through its tokens again
            slots[1] = 7
            table.add(7, settings("r1", kinds[1], 1))
            step(table, torch.randn((1, WIDTH)), [7], [-1])
            assert table.counts(["r0", "r1", "never"]) == {"r0": 3, "r1": 0, "never": 0}
    assert table.counts(["r0", "r1", "r2"]) == {"r0": 5, "r1": 5, "r2": 5}
    taken = table.take({"r0": 5, "r1": 4}, ["r2"])
    for row, part, length in zip(rows, taken, (5, 4)):
        np.testing.assert_allclose(np.frombuffer(part, np.float32), [logprob for _, logprob in row[:length]], rtol=1e-6)
    assert table.counts(["r0", "r2"]) == {"r0": 0, "r2": 0}  # their rows are free again


def test_the_table_grows_and_keeps_what_it_has():
    from stages.backends.vllm.sampler import SlotTable

    table = SlotTable(200, torch.device("cpu"))
    logits_BV = torch.randn((1, WIDTH))
    table.add(0, settings("first", KINDS[0], 0))
    (first,) = wanted(logits_BV, [KINDS[0]], [0], [0])
    assert step(table, logits_BV, [0], [0]) == [first[0]]
    for slot in range(1, 200):  # more rows, and longer ones
        table.add(slot, settings(f"r{slot}", Sampling(5 + slot), slot))
    (second,) = wanted(logits_BV, [KINDS[0]], [0], [1])
    assert step(table, logits_BV, [0], [1]) == [second[0]]
    (part,) = table.take({"first": 2}, [])
    np.testing.assert_allclose(np.frombuffer(part, np.float32), [first[1], second[1]], rtol=1e-6)


def test_requests_without_settings_are_not_ours():
    from stages.backends.vllm.sampler import SlotTable

    table = SlotTable(2, torch.device("cpu"))
    assert not table.has(np.array([0]))
    table.add(0, settings("r", KINDS[0], 0))
    assert table.has(np.array([0])) and not table.has(np.array([0, 1]))
    table.add(0, None)  # the slot has another request now
    assert not table.has(np.array([0]))
