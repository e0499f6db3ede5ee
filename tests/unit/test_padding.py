"""Rectangles of whole samples: every token is in its place, and results do not depend on how samples share them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Model
from pipeline.declare.columns import Ragged
from pipeline.declare.sharding import Dynamic, Packed, Plain, Sharding
from stages import ClippedLoss
from stages.backends import Batch, Optimization, one_shard
from stages.backends.model.build import load_network, load_tokenizer
from stages.backends.model.padding import pad_around
from stages.backends.torch.optimize import TorchLearner
from stages.backends.torch.score import score
from tests.examples import few
from tests.unit.tiny import QWEN3

torch.set_num_threads(1)
PROMPTS, RESPONSES = (1, 9, 3, 8, 2, 5, 12, 2), (9, 2, 5, 3, 12, 6, 1, 11)  # short with long, long with short
WAYS = [Plain(), Plain(3), Dynamic(30), Dynamic(60), Packed(40)]


def ragged(lengths: Any, first: int = 2) -> Ragged:
    return Ragged.of([torch.arange(length) % 10 + first for length in lengths])


@pytest.fixture(scope="module")
def pristine() -> Any:
    policy = Model("tiny", config=QWEN3, alphabet="0123456789")
    return load_network(policy, load_tokenizer(policy), dtype=torch.float32, device=torch.device("cpu"))


def test_a_long_prompt_moves_its_response_to_the_right() -> None:
    rows = pad_around(ragged((2, 4), first=10), ragged((3, 1), first=20), 0, prompt=3, response=3)
    assert rows.tolist() == [[0, 10, 11, 20, 21, 22], [10, 11, 12, 13, 20, 0]]


@settings(max_examples=few(60), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6), st.integers(0, 3))
def test_every_row_is_its_sample_between_padding(lengths: list[tuple[int, int]], spare: int) -> None:
    prompts, responses = zip(*lengths)
    response = max(responses)
    prompt = max(map(sum, lengths)) - response + spare
    rows = pad_around(ragged(prompts, 100), ragged(responses, 200), 0, prompt, response)
    assert rows.shape == (len(lengths), prompt + response)
    for row, p, t in zip(rows.tolist(), prompts, responses):
        left = max(prompt - p, 0)
        sample = [100 + i for i in range(p)] + [200 + i for i in range(t)]
        assert row == [0] * left + sample + [0] * (prompt + response - left - p - t)


def shard_of(way: Any) -> Any:
    return one_shard(ragged(PROMPTS), ragged(RESPONSES), Sharding.of(way))


def test_the_dynamic_rectangles_here_are_narrower_than_prompt_and_response_apart() -> None:
    microbatches = shard_of(Dynamic(60)).updates[0].microbatches
    longest = [max(PROMPTS[i] for i in microbatch.samples) for microbatch in microbatches]
    assert any(microbatch.prompt < prompt for microbatch, prompt in zip(microbatches, longest))


@pytest.mark.parametrize("way", WAYS[1:], ids=str)
def test_logprobs_do_not_depend_on_the_rectangles(pristine: Any, way: Any) -> None:
    prompts, responses = ragged(PROMPTS), ragged(RESPONSES)
    alone = shard_of(Plain(1))
    expected, found = (
        score(pristine, prompts, responses, shard, temperature=0.7, pad=0) for shard in (alone, shard_of(way))
    )
    assert found.lengths == expected.lengths
    torch.testing.assert_close(found.values, expected.values, atol=1e-5, rtol=0)


@pytest.mark.parametrize("way", WAYS[1:], ids=str)
@pytest.mark.parametrize("loss", [ClippedLoss(kl=0.1), ClippedLoss(aggregation="sequence")], ids=str)
def test_updates_do_not_depend_on_the_rectangles(pristine: Any, way: Any, loss: ClippedLoss) -> None:
    random = torch.Generator().manual_seed(0)
    prompts, responses = ragged(PROMPTS), ragged(RESPONSES)
    now = score(pristine, prompts, responses, shard_of(Plain()), temperature=1.0, pad=0)
    old = Ragged((now.values + 0.3 * torch.randn(now.values.shape, generator=random)).clamp(max=0), now.lengths)
    batch = Batch(prompts, responses, torch.randn(len(PROMPTS), generator=random), old, now, now)
    metrics, gradients = [], []
    for shard in (shard_of(Plain()), shard_of(way)):
        learner = TorchLearner(copy.deepcopy(pristine), Optimization(lr=0.0, clip_grad=0.0), pad=0)
        learner._backward(batch, loss, 1.0, shard.updates[0], shard.packed)
        gradients.append({name: parameter.grad.clone() for name, parameter in learner.parameters.items()})
        learner.optimizer.zero_grad()
        metrics.append(learner.update(batch, loss, temperature=1.0, update=shard.updates[0], packed=shard.packed))
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-4, abs=1e-6)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-4)
