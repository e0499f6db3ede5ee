"""Sampling and scoring of the torch backend."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline import Model, StageError, WorkerGroup
from pipeline.declare.columns import Ragged
from pipeline.declare.sharding import Plain, Sharding
from pipeline.declare.task import StageContext
from stages.backends import Draws, Sampling, engine, one_shard
from stages.backends.choose import choose
from stages.backends.torch.engine import TorchEngine
from stages.backends.torch.generate import generate
from tests.unit.tiny import QWEN3

torch.set_num_threads(1)
CONFIG = QWEN3
POLICY = Model("tiny", config=CONFIG, alphabet="0123456789abc")
CLOSING = [1, 4, 9]  # makes most responses end early


@pytest.fixture(scope="module")
def backend() -> Any:
    group = WorkerGroup("sampler", backend="torch", threads=1)
    context = StageContext(group=group, rank=0, seed=0, group_size=1, run_dir=None, shared={})
    return engine(context)


def draws(count: int, seed: int = 0) -> Draws:
    """Return draws of `count` samples, each in a group of its own."""
    return Draws(seed, tuple(range(count)), (0,) * count)


def continued(backend: Any, model: Model, prompts: Ragged, most: int, draws: Draws) -> None:
    """Check that samples which are drawn in two calls, cut at places of their own, are those of one call."""
    whole = backend.generate(model, prompts, Sampling(most), draws)
    limits = tuple(2 + 3 * i % (most - 2) for i in range(len(prompts)))
    first = backend.generate(model, prompts, Sampling(max(limits), limits=limits), draws)
    for i, (one, start) in enumerate(zip(whole.response_ids.rows(), first.response_ids.rows())):
        assert torch.equal(one[: limits[i]], start)
        assert bool(first.truncated[i]) == (len(one) > limits[i] or (bool(whole.truncated[i]) and limits[i] == most))
    cut = [i for i in range(len(prompts)) if first.truncated[i] and limits[i] < most]
    so_far = Ragged.of([torch.cat([prompts.rows()[i], first.response_ids.rows()[i]]) for i in cut])
    left = tuple(most - limits[i] for i in cut)
    places = Draws(
        draws.seed, tuple(draws.groups[i] for i in cut), tuple(draws.samples[i] for i in cut),
        tuple(limits[i] for i in cut),
    )  # fmt: skip
    rest = backend.generate(model, so_far, Sampling(max(left), limits=left), places)
    assert len(cut) > 1
    for place, i in enumerate(cut):
        found = torch.cat([first.response_ids.rows()[i], rest.response_ids.rows()[place]])
        assert torch.equal(found, whole.response_ids.rows()[i])
        assert bool(rest.truncated[place]) == bool(whole.truncated[i])


def test_a_sample_that_is_drawn_in_two_calls_is_that_of_one(backend: TorchEngine) -> None:
    prompts = backend.encode(POLICY, RAGGED * 4)
    continued(backend, POLICY, prompts, 12, draws(len(prompts)))


def test_a_response_that_may_leave_the_positions_of_the_model_is_refused(backend: TorchEngine) -> None:
    most = CONFIG["max_position_embeddings"]
    prompts = backend.encode(POLICY, ["1", "01234"])
    backend.generate(POLICY, prompts, Sampling(most - 5), draws(2))
    with pytest.raises(StageError, match=rf"a prompt of 5 tokens and max_tokens={most - 4} exceed {most} tokens"):
        backend.generate(POLICY, prompts, Sampling(most - 4), draws(2))


RAGGED = ["1", "0123456789", "abc", "77", "abcabc"]
SHARED = ["123"] * 3 + ["45678"] * 4 + ["123"]


@pytest.mark.parametrize("texts", [RAGGED * 4, SHARED * 3, ["0123"] * 60], ids=["ragged", "shared", "unpadded"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("microbatch", [0, 3])
def test_rollout_logprobs_are_those_of_scoring(
    backend: TorchEngine, texts: list[str], temperature: float, microbatch: int
) -> None:
    prompts = backend.encode(POLICY, texts)
    made = backend.generate(POLICY, prompts, Sampling(9, temperature), draws(len(texts), seed=1))
    again = backend.score(
        POLICY,
        prompts,
        made.response_ids,
        one_shard(prompts, made.response_ids, Sharding.of(Plain(microbatch))),
        temperature=temperature,
    )
    assert again.lengths == made.logprobs.lengths == made.response_ids.lengths
    assert len(set(made.response_ids.lengths)) > 1
    assert made.logprobs.values.dtype == torch.float32
    assert bool((made.logprobs.values <= 0).all()) and bool((again.values <= 0).all())
    torch.testing.assert_close(again.values, made.logprobs.values, atol=1e-5, rtol=0)


def test_scores_are_those_of_each_sequence_alone(backend: TorchEngine) -> None:
    prompts = backend.encode(POLICY, RAGGED)
    responses = backend.encode(POLICY, ["5", "67a", "1234567", "c0", "9"])
    together = backend.score(POLICY, prompts, responses, one_shard(prompts, responses), temperature=1.0)
    network = backend.network(POLICY, "trained")
    for prompt, response, found in zip(prompts.rows(), responses.rows(), together.rows()):
        with torch.no_grad():
            logprobs = network(input_ids=torch.cat([prompt, response])[None]).logits[0].log_softmax(-1)
        expected = logprobs[len(prompt) - 1 : -1].gather(-1, response[:, None])[:, 0]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_sample_depends_on_its_own_random_numbers_only(backend: TorchEngine) -> None:
    prompts = backend.encode(POLICY, SHARED)
    first = draws(len(SHARED))
    second = replace(first, groups=tuple(4 if i == 4 else 100 + i for i in range(len(SHARED))))
    rows = [
        [row.tolist() for row in backend.generate(POLICY, prompts, Sampling(9), chosen).response_ids.rows()]
        for chosen in (first, second)
    ]
    assert rows[0][4] == rows[1][4]
    assert sum(a != b for a, b in zip(*rows)) >= 5
    alone = backend.generate(POLICY, backend.encode(POLICY, SHARED[4:5]), Sampling(9), Draws(0, (4,), (0,)))
    assert alone.response_ids.values.tolist() == rows[0][4]


def test_a_response_ends_with_its_closing_token_or_is_truncated(backend: TorchEngine) -> None:
    prompts = backend.encode(POLICY, ["12"] * 64)
    made = backend.generate(POLICY, prompts, Sampling(12), draws(64))
    assert 0 < int(made.truncated.sum()) < 64
    for row, truncated in zip(made.response_ids.rows(), made.truncated.tolist()):
        ids = row.tolist()
        assert 1 not in ids[:-1]
        assert (ids[-1] == 1) != truncated
        assert len(ids) == 12 if truncated else len(ids) <= 12


def test_a_stop_text_ends_a_response_and_is_part_of_it(backend: TorchEngine) -> None:
    prompts = backend.encode(POLICY, ["12"] * 32)
    stop = backend.encode(POLICY, ["a"]).values.item()
    made = backend.generate(POLICY, prompts, Sampling(12, stop=("a",)), draws(32))
    rows = [row.tolist() for row in made.response_ids.rows()]
    assert any(row[-1] == stop for row in rows)
    assert not any(stop in row[:-1] for row in rows)


def test_a_stop_text_of_several_tokens_is_refused(backend: TorchEngine) -> None:
    with pytest.raises(StageError, match=r"stop 'ab': this tokenizer splits it into 2 tokens; .* Fix: use a text"):
        backend.generate(POLICY, backend.encode(POLICY, ["1"]), Sampling(2, stop=("ab",)), draws(1))


def test_greedy_takes_the_most_probable_token(backend: TorchEngine) -> None:
    prompts = backend.encode(POLICY, RAGGED)
    made = backend.generate(POLICY, prompts, Sampling(7, temperature=5.0, greedy=True), None)
    network = backend.network(POLICY, "served")
    for prompt, response in zip(prompts.rows(), made.response_ids.rows()):
        ids = prompt.tolist()
        for token in response.tolist():
            with torch.no_grad():
                assert network(input_ids=torch.tensor([ids])).logits[0, -1].argmax().item() == token
            ids.append(token)


def test_dropping_finished_rows_changes_no_sample(backend: TorchEngine) -> None:
    network, count = backend.network(POLICY, "served"), 40
    prompts = backend.encode(POLICY, [RAGGED[i % 5] for i in range(count)])
    numbers = draws(count, seed=3).uniforms(16)
    made = generate(network, prompts, Sampling(16), numbers, closing=CLOSING, pad=0)
    rows = made.response_ids.rows()
    assert sorted(len(row) for row in rows)[count // 2] < 16
    for i, row in enumerate(rows):
        prompt = Ragged(prompts.rows()[i], (prompts.lengths[i],))
        alone = generate(network, prompt, Sampling(16), numbers[i : i + 1], closing=CLOSING, pad=0)
        assert alone.response_ids.values.tolist() == row.tolist()
        torch.testing.assert_close(alone.logprobs.values, made.logprobs.rows()[i], atol=1e-5, rtol=0)


def test_tokens_follow_the_softmax_at_the_temperature() -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0, 1.0]])
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    tokens, logprobs = choose(logits.expand(20_000, 4), Sampling(1, temperature=2.0), grid)
    expected = (logits[0] / 2.0).softmax(-1)
    torch.testing.assert_close(tokens.bincount(minlength=4) / 20_000, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(logprobs, expected.log()[tokens])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1, top_k=2), {0, 3}),
        (Sampling(1, top_k=9), {0, 1, 2, 3}),
        (Sampling(1, top_p=0.5), {0}),
        (Sampling(1, top_p=0.9), {0, 1, 3}),
        (Sampling(1, min_p=0.4), {0, 3}),
        (Sampling(1, min_p=0.2, top_k=2), {0, 3}),
        (Sampling(1, top_k=3, top_p=0.7), {0, 3}),
    ],
)
def test_top_k_and_top_p_cut_the_tail_off_and_leave_the_logprobs(sampling: Sampling, kept: set[int]) -> None:
    probabilities = torch.tensor([[0.55, 0.15, 0.05, 0.25]])
    grid = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    tokens, logprobs = choose(probabilities.log().expand(10_000, 4), sampling, grid)
    assert set(tokens.tolist()) == kept
    index = sorted(kept)
    share = tokens.bincount(minlength=4)[index] / 10_000
    torch.testing.assert_close(share, probabilities[0, index] / probabilities[0, index].sum(), atol=2e-4, rtol=0)
    torch.testing.assert_close(logprobs, probabilities[0].log()[tokens])


@pytest.mark.parametrize("number", [1e-300, 0.5, 1 - 2.0**-53])
def test_a_token_without_probability_is_never_chosen(number: float) -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]])
    tokens, _ = choose(logits, Sampling(1), torch.tensor([number], dtype=torch.float64))
    assert tokens.item() in (1, 3)


@pytest.mark.parametrize("width", [5, 513])
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_choose_a_token(width: int, odd: float) -> None:
    """An index beyond the vocabulary would be an IndexError, and on a GPU the end of the process's context."""
    tokens, logprobs = choose(torch.full((3, width), odd), Sampling(1), torch.rand(3, dtype=torch.float64))
    assert bool((tokens < width).all()) and bool(logprobs.isnan().all())


@pytest.mark.parametrize("width", [511, 512, 513, 20_000])
def test_blocks_of_a_large_vocabulary_find_what_one_running_sum_finds(width: int) -> None:
    random = torch.Generator().manual_seed(width)
    logits = torch.randn((64, width), generator=random) * 4
    logits[:, ::3] = float("-inf")
    numbers = torch.rand(64, generator=random, dtype=torch.float64)
    numbers[:2] = torch.tensor([1e-300, 1 - 2.0**-53])
    tokens, logprobs = choose(logits, Sampling(1, temperature=0.8), numbers)
    scores = (logits / 0.8).log_softmax(-1)
    running = scores.exp().double().cumsum(-1)
    for row, token in enumerate(tokens.tolist()):
        passed = torch.searchsorted(running[row], numbers[row] * running[row, -1], right=True)
        assert token == min(int(passed), int(torch.nonzero(running[row].diff()).max()) + 1)
    assert torch.equal(logprobs, scores.gather(-1, tokens[:, None])[:, 0]) and bool(logprobs.isfinite().all())


def test_padding_never_makes_a_nan(backend: TorchEngine) -> None:
    prompts, answers = (
        backend.encode(POLICY, ["1", "0123456789abc0123456789abc"]),
        backend.encode(POLICY, ["7", "123456"]),
    )
    found = backend.score(POLICY, prompts, answers, one_shard(prompts, answers), temperature=1.0)
    assert bool(found.values.isfinite().all())


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_other_architectures_give_the_same_logprobs_both_ways(backend: TorchEngine, model_type: str) -> None:
    sizes = {
        "llama": {key: value for key, value in CONFIG.items() if key != "model_type"},
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3},
    }
    policy = Model("other", config={"model_type": model_type, **sizes[model_type]}, alphabet="0123456789abc")
    prompts = backend.encode(policy, RAGGED)
    made = backend.generate(policy, prompts, Sampling(6), draws(len(RAGGED)))
    again = backend.score(
        policy,
        prompts,
        made.response_ids,
        one_shard(prompts, made.response_ids, Sharding.of(Plain(2))),
        temperature=1.0,
    )
    torch.testing.assert_close(again.values, made.logprobs.values, atol=1e-5, rtol=0)
