"""Drafted tokens change no sample: tokens, logprobs and versions are those without drafts."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import Model
from pipeline.declare.columns import Ragged
from stages.backends import Cancelled, Decoded, Sampling
from stages.backends.torch.engine import TorchEngine
from tests.engines import vllm_models as tiny
from tests.engines.test_vllm import GROUPS, NEAR, PLAIN, collected, prompts, rows_of
from tests.optional import need

need("vllm", "vllm")

TOKENS = 3
COLD = Sampling(max_tokens=80, temperature=0.3, top_k=5, top_p=0.9)  # repeats itself
KINDS = {"plain": PLAIN, "cold": COLD, "greedy": replace(COLD, greedy=True)}


def opened(root: Path, model: Model, draft: Model | None = None) -> Iterator[Any]:
    from stages.backends.vllm.engine import open_engine

    backend = open_engine(tiny.context(root, replace(tiny.GROUP, speculate=TOKENS, draft=draft)))
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def by_ngrams(root: Path, model: Model, prepared: None) -> Iterator[Any]:
    yield from opened(root, model)


@pytest.fixture(scope="module")
def by_a_model(root: Path, model: Model, prepared: None) -> Iterator[Any]:
    yield from opened(root, model, draft=model)


@pytest.fixture(scope="module")
def plain(model: Model) -> dict[str, Any]:
    """Samples of the torch backend, which those of vLLM without drafts are equal to, by kind."""
    backend = TorchEngine(torch.device("cpu"), torch.float32)
    ids = prompts(backend, model)
    drawn = tiny.draws(GROUPS)
    return {name: backend.generate(model, ids, kind, None if kind.greedy else drawn) for name, kind in KINDS.items()}


def sampled(backend: Any, model: Model, kind: Sampling) -> Any:
    return backend.generate(model, prompts(backend, model), kind, None if kind.greedy else tiny.draws(GROUPS))


@pytest.mark.parametrize("by", ["by_ngrams", "by_a_model"])
@pytest.mark.parametrize("name", KINDS)
def test_samples_are_those_without_drafts(
    by: str, name: str, plain: dict[str, Any], model: Model, request: pytest.FixtureRequest
) -> None:
    backend = request.getfixturevalue(by)
    made = sampled(backend, model, KINDS[name])
    assert rows_of(made) == rows_of(plain[name])
    assert made.truncated.tolist() == plain[name].truncated.tolist()
    assert (made.logprobs.values - plain[name].logprobs.values).abs().max() < NEAR
    tokens = sum(made.response_ids.lengths)
    if by == "by_a_model":  # it draws the very tokens
        whole = sum(-(-length // (TOKENS + 1)) for length in made.response_ids.lengths)
        assert whole <= made.passes <= whole + len(made.response_ids)
    elif name != "plain":
        assert made.passes < 0.8 * tokens


def test_a_stop_text_ends_a_response_at_the_token_that_completes_it(
    by_a_model: Any, plain: dict[str, Any], model: Model
) -> None:
    texts = by_a_model.decode(model, plain["plain"].response_ids)
    longest = max(range(len(texts)), key=lambda i: len(texts[i]))
    for start in range(9, 13):  # the drafts of a step end at different places
        stop = (texts[longest][start : start + 3], texts[longest][start + 1 : start + 5])
        made = sampled(by_a_model, model, replace(PLAIN, stop=stop))
        end = min(texts[longest].index(text) + len(text) for text in stop)
        assert rows_of(made)[longest] == rows_of(plain["plain"])[longest][:end]


def test_stop_texts_are_looked_for_after_each_token() -> None:
    """Versions of vLLM that look once per step would keep what follows one in the same step."""
    from stages.backends.vllm.api import one_by_one

    seen: list[tuple[list[int], bool]] = []

    def update(_: Any, tokens: list[int], is_closed: bool) -> str | None:
        seen.append((tokens, is_closed))
        return "stop" if tokens == [7] else None

    looks = one_by_one(update)
    assert looks(None, [5, 7, 8], True) == "stop" and seen == [([5], False), ([7], False)]
    assert looks(None, [5, 8], True) is None and seen[2:] == [([5], False), ([8], True)]
    assert looks(None, [], False) is None


def test_weights_change_between_two_steps_of_several_tokens(by_ngrams: Any, model: Model, other: Model) -> None:
    """Each token has the version whose weights give it its logprob."""
    sampling = replace(COLD, max_tokens=700)
    ids = prompts(by_ngrams, model)
    weights = {1: model, 2: other}

    async def run() -> list[Any]:
        stream = by_ngrams.stream(model, ids, sampling, tiny.draws(GROUPS), group_size=4)
        events = asyncio.ensure_future(collected(stream))
        await asyncio.sleep(0.3)
        assert not events.done()
        by_ngrams.serve(model, tiny.shares(other), 2)
        return await events

    by_ngrams.serve(model, tiny.shares(model), 1)
    made = [event for event in asyncio.run(run()) if isinstance(event, Decoded)]
    by_ngrams.serve(model, tiny.shares(model), 1)
    assert sorted(group for event in made for group in event.groups) == list(GROUPS)
    seams = 0
    for event in made:
        own = Ragged.of([ids.rows()[group * 4 + i] for group in event.groups for i in range(4)])
        found = {
            version: tiny.logprobs(tiny.reference(of), own, event.made, sampling.temperature)
            for version, of in weights.items()
        }
        for i, (has, versions) in enumerate(zip(event.made.logprobs.rows(), event.made.versions.rows())):
            stamps = versions.tolist()
            assert stamps == sorted(stamps)
            wanted = torch.stack([found[stamp][i][t] for t, stamp in enumerate(stamps)])
            assert (has - wanted).abs().max() < NEAR
            if 1 in stamps and 2 in stamps:
                at = stamps.index(2)
                seams += bool(
                    (has - found[1][i])[at].abs() > 10 * NEAR and (has - found[2][i])[at - 1].abs() > 10 * NEAR
                )
    assert seams >= 2
    tokens = sum(sum(event.made.response_ids.lengths) for event in made)
    assert sum(event.made.passes for event in made) < 0.8 * tokens


def test_groups_that_nobody_wants_are_given_up(by_ngrams: Any, model: Model) -> None:
    sampling = replace(COLD, max_tokens=700, greedy=True)
    given_up: set[int] = set()

    async def run() -> list[Any]:
        ids = prompts(by_ngrams, model)
        stream = by_ngrams.stream(model, ids, sampling, None, group_size=4, unwanted=lambda group: group in given_up)
        events = asyncio.ensure_future(collected(stream))
        await asyncio.sleep(0.1)
        given_up.add(1)
        return await events

    events = asyncio.run(run())
    assert [sorted(event.tokens) for event in events if isinstance(event, Cancelled)] == [[1]]
    assert {group for event in events if isinstance(event, Decoded) for group in event.groups} == {0, 2, 3}
    assert rows_of(sampled(by_ngrams, model, PLAIN))  # what was given up left nothing behind


def test_tokens_are_accepted_up_to_the_first_that_differs_from_its_draft() -> None:
    from stages.backends.vllm.speculation import accepted

    tokens = torch.tensor([5, 6, 7, 8, 1, 2, 3, 4, 9, 9])
    drafts, ends = torch.tensor([5, 6, 1, 0, 3, 0]), torch.tensor([3, 4, 8, 10])
    found = accepted(tokens, drafts, ends, 4).tolist()
    assert found == [[5, 6, 7, -1], [8, -1, -1, -1], [1, 2, -1, -1], [9, -1, -1, -1]]
    assert accepted(tokens[:2], drafts[:0], torch.tensor([1, 2]), 1).tolist() == [[5], [6]]


def test_the_second_model_runner_is_refused(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    from stages.backends.vllm.api import open_llm

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match="only the first model runner verifies drafts"):
        open_llm(root, gpus=False, tensor_parallel=1, memory=0.5, speculate=2)


def test_a_draft_with_heads_that_the_cpu_build_lacks_is_refused_at_once(tmp_path: Path, model: Model) -> None:
    from stages.backends.vllm.api import open_llm

    draft = Path(shutil.copytree(model.source, tmp_path / "draft"))
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"head_dim": 16}))
    with pytest.raises(ValueError, match="head_dim is 16, and attention on the CPU has 32, 64"):
        open_llm(Path(model.source), gpus=False, tensor_parallel=1, memory=0.5, speculate=2, draft=draft)
