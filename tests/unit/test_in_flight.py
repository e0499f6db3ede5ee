"""Events between two tokens of a rollout: other streams, weight swaps, cancelled groups."""

import asyncio
import itertools
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from ops.refit.transports import TRANSPORTS
from pipeline import Model, Output, StageContext, StageError, Task, WorkerGroup
from pipeline.declare.columns import Columns, Ragged
from pipeline.declare.ranks import open_store
from pipeline.errors import PeerLost
from stages import Refit, Rollout
from stages.backends import Cancelled, Decoded, Draws, Sampling, engine, samples_of
from tests.shares import carried, route_of, shares_of, source_of, weight_hash
from tests.unit.streams import collected, whole
from tests.unit.tiny import QWEN3

torch.set_num_threads(1)
POLICY = Model("tiny", config=QWEN3, alphabet="0123456789abc")
SAMPLER = WorkerGroup("sampler", backend="torch", threads=1)
LEARNER = WorkerGroup("learner", backend="torch", threads=1)
STOP = ("3", "7", "a")  # makes most responses end early
G = 3
PROMPTS = ("1", "0123456789", "abc", "77", "abcabc", "5")
ROLLOUT = Rollout(POLICY, on=SAMPLER, samples_per_prompt=G, max_tokens=12, stop=STOP)

Weights = dict[str, torch.Tensor]


def context(group: WorkerGroup = SAMPLER) -> StageContext:
    return StageContext(group=group, rank=0, seed=0, group_size=G, run_dir=None, shared={})


def columns_of(groups: tuple[int, ...]) -> Columns:
    return {"prompt": [PROMPTS[group % len(PROMPTS)] for group in groups for _ in range(G)]}


def task_of(groups: tuple[int, ...], version: int = 0) -> Task:
    return Task(stage="rollout", step=0, groups=groups, version=version)


def rolled_out(here: StageContext, groups: tuple[int, ...], stage: Rollout = ROLLOUT) -> list[Output]:
    return collected(stage.setup(here)(columns_of(groups), task_of(groups)))


def other_weights(weights: Weights) -> Weights:
    generator = torch.Generator().manual_seed(1)
    return {name: w + 0.05 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}


@dataclass
class Passes:
    """Records each forward pass of a served network: its rows, its cache, and whether gradients were on."""

    backend: Any
    rows: list[int] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)
    grad: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        def note(module: Any, args: Any, kwargs: Any) -> None:
            self.rows.append(len(kwargs["input_ids"]))
            self.caches.append(weakref.ref(kwargs["past_key_values"]))
            self.grad.append(torch.is_grad_enabled())

        self.backend.network(POLICY, "served").register_forward_pre_hook(note, with_kwargs=True)


async def after(pauses: int, act: Callable[[], Any]) -> None:
    """Call `act` after `pauses` tokens of the stream that runs concurrently."""
    for _ in range(pauses):
        await asyncio.sleep(0)
    act()


def together(stream: AsyncIterator[Any], *beside: Awaitable[None]) -> list[Any]:
    """Return what a stream yields while `beside` runs concurrently."""

    async def collect() -> list[Any]:
        return [event async for event in stream]

    async def run() -> list[Any]:
        made, *_ = await asyncio.gather(collect(), *beside)
        return made

    return asyncio.run(run())


def by_hand(network: Any, prompt: torch.Tensor, response: torch.Tensor, weights_T: list[Weights]) -> torch.Tensor:
    """Return the logprobs of a response, token by token on one cache; `weights_T[t]` compute the logits of token t."""
    cache, found, inputs = DynamicCache(config=network.config), [], prompt
    for token, weights in zip(response, weights_T, strict=True):
        network.load_state_dict(weights)
        with torch.no_grad():
            logits = network(input_ids=inputs[None], past_key_values=cache, use_cache=True).logits[0, -1]
        found.append(logits.log_softmax(-1)[token])
        inputs = token[None]
    return torch.stack(found)


def samples_in(events: list[Decoded], prompt_ids: Ragged) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the prompt, response, logprobs and versions of each sample."""
    for event in events:
        rows = zip(event.made.response_ids.rows(), event.made.logprobs.rows(), event.made.versions.rows(), strict=True)
        for sample, row in zip(samples_of(event.groups, G), rows, strict=True):
            yield prompt_ids.rows()[sample], *row


@pytest.mark.parametrize("seam", [1, 4, 6])
def test_the_seam_is_where_the_weights_changed_and_the_cache_before_it_stays(seam: int) -> None:
    backend: Any = engine(context())
    old = backend.served_weights(POLICY)
    new = other_weights(old)
    backend.serve(POLICY, shares_of(old), 4)
    prompt_ids = backend.encode(POLICY, [text for text in PROMPTS for _ in range(G)])
    draws = Draws(0, tuple(range(len(prompt_ids))), (0,) * len(prompt_ids))
    stream = backend.stream(POLICY, prompt_ids, Sampling(12, stop=STOP), draws, group_size=G)
    events = together(stream, after(seam - 1, lambda: backend.serve(POLICY, shares_of(new), 5)))
    network = backend.network(POLICY, "served")
    crossed = 0
    for prompt, ids, logprobs, versions in samples_in(events, prompt_ids):
        count = len(ids)
        assert versions.dtype == torch.int32
        assert versions.tolist() == [4 if t < seam else 5 for t in range(count)]
        right = by_hand(network, prompt, ids, [old if t < seam else new for t in range(count)])
        torch.testing.assert_close(logprobs, right, atol=1e-5, rtol=0)
        if count > seam:
            crossed += 1
            only_old, only_new = (by_hand(network, prompt, ids, [weights] * count) for weights in (old, new))
            assert (logprobs - only_old)[seam:].abs().max() > 1e-3
            assert (logprobs - only_new)[:seam].abs().max() > 1e-3
            assert (logprobs - only_new)[seam:].abs().max() > 1e-3  # a recomputed cache would give this
    assert crossed >= 3


class Meeting:
    """The target side of a transfer."""

    side, is_near = "target", True

    def __init__(self, payloads: list[Any]) -> None:
        self.payloads = payloads

    def take(self) -> list[Any]:
        return self.payloads


def test_a_refit_between_two_tokens_is_in_the_token_versions() -> None:
    here = context()
    backend: Any = engine(here)
    refit, groups = Refit(POLICY, source=LEARNER, target=SAMPLER).setup(here), (3, 0, 8, 11)

    def publish(step: int) -> None:
        weights = other_weights(backend.served_weights(POLICY))
        refit(Meeting(shares_of(weights)), Task(stage="refit", step=step))

    run = ROLLOUT.setup(here)
    publish(1)
    outputs = together(run(columns_of(groups), task_of(groups, version=1)), after(2, lambda: publish(2)))
    versions = [row.tolist() for row in whole(outputs)["token_versions"].rows()]
    assert versions == [([2, 2, 2] + [3] * 9)[: len(row)] for row in versions]
    assert max(map(len, versions)) > 3


def test_a_refit_that_did_not_get_through_holds_a_stream_until_one_has() -> None:
    here, groups, store = context(), (3, 0, 8), open_store("127.0.0.1", 1, deadline_s=60.0)
    backend: Any = engine(here)
    weights = backend.served_weights(POLICY)
    source, gloo = source_of(weights), TRANSPORTS["gloo"]
    store.set("lost", "worker learner.0 died")

    def lose() -> None:
        with pytest.raises(PeerLost, match=r"did not reach all workers: lost: worker learner.0 died"):
            backend.serve(POLICY, [source.share(weights, gloo)], 3, route_of(store, "lost"))

    async def repair() -> None:
        await after(2, lose)
        await asyncio.sleep(0.3)  # time enough to sample everything
        share, route = source.share(weights, gloo), route_of(store, "next")
        with carried(source, share, 4, route):
            assert backend.serve(POLICY, [share], 4, route).record["received_bytes"] == share.model_bytes

    versions = whole(together(ROLLOUT.setup(here)(columns_of(groups), task_of(groups, version=2)), repair()))
    rows = [row.tolist() for row in versions["token_versions"].rows()]
    assert rows == [([2, 2, 2] + [4] * 9)[: len(row)] for row in rows] and max(map(len, rows)) > 3


@pytest.mark.parametrize("model", [POLICY, POLICY.frozen()], ids=["trainable", "frozen"])
def test_a_copy_that_was_never_served_is_of_the_tasks_version(model: Model) -> None:
    here, groups = context(), (0, 1)
    if not model.trainable:  # the served copy is a separate one
        engine(here).serve(POLICY, shares_of(engine(here).served_weights(POLICY)), 9)
    run = replace(ROLLOUT, model=model).setup(here)
    versions = whole(collected(run(columns_of(groups), task_of(groups, version=6))))["token_versions"]
    assert set(versions.values.tolist()) == {6}


def test_weights_that_do_not_fit_change_neither_the_copy_nor_its_version() -> None:
    backend: Any = engine(context())
    backend.serve(POLICY, shares_of(backend.served_weights(POLICY)), 2)
    before = weight_hash(backend.served_weights(POLICY))
    wrong = {name: weights[:1] + 1 for name, weights in backend.served_weights(POLICY).items()}
    with pytest.raises(StageError, match="weights only load into the same architecture"):
        backend.serve(POLICY, shares_of(wrong), 3)
    assert backend.served_version(POLICY) == 2
    assert weight_hash(backend.served_weights(POLICY)) == before


def decode_batches(prompts: int, lengths: Sequence[int]) -> list[int]:
    """Return the rows per forward pass: distinct prompts, then samples; ended rows are removed once they are half."""
    passes, rows = [prompts], len(lengths)
    for t in range(1, max(lengths)):
        still_open = sum(length > t for length in lengths)
        rows = still_open if still_open * 2 <= rows else rows
        passes.append(rows)
    assert any(b * 2 == a for a, b in itertools.pairwise(passes[1:]))
    return passes


def test_groups_that_come_early_are_those_of_generate_bit_for_bit() -> None:
    backend: Any = engine(context())
    passes = Passes(backend)
    texts = [text for text in PROMPTS * 2 for _ in range(G)]
    draws = Draws(5, tuple(range(len(texts))), (0,) * len(texts))
    sampling = Sampling(30, stop=STOP)
    prompt_ids = backend.encode(POLICY, texts)
    seen_after: dict[int, int] = {}
    events: list[Decoded] = []

    async def collect() -> None:
        async for event in backend.stream(POLICY, prompt_ids, sampling, draws, group_size=G):
            events.append(event)
            seen_after.update(dict.fromkeys(event.groups, len(passes.rows)))

    asyncio.run(collect())
    in_stream, passes.rows[:] = list(passes.rows), []
    made = backend.generate(POLICY, prompt_ids, sampling, draws)
    assert passes.rows == in_stream  # same decode batches, so same rounding
    assert in_stream == decode_batches(len(texts) // 2 // G, made.response_ids.lengths)
    assert sorted(seen_after) == list(range(12)) and len(events) > 3
    for event in events:
        assert list(event.groups) == sorted(event.groups)
        index = samples_of(event.groups, G)
        for name in ("response_ids", "logprobs"):
            part, full = getattr(event.made, name).rows(), getattr(made, name).rows()
            assert all(torch.equal(row, full[i]) for row, i in zip(part, index, strict=True))
        assert event.made.truncated.tolist() == made.truncated[index].tolist()
        longest = max(made.response_ids.lengths[i] for i in index)
        assert {seen_after[group] for group in event.groups} == {longest}  # right after its last token


def test_interleaved_streams_are_those_that_run_alone_bit_for_bit() -> None:
    parts = [(0, 1, 2), (3,), (4, 9), (10, 11, 12, 13), (14,)]
    alone = [whole(rolled_out(context(), groups)) for groups in parts]
    here = context()
    run, pauses, grad = ROLLOUT.setup(here), [], []
    passes = Passes(engine(here))

    async def collect(groups: tuple[int, ...]) -> list[Output]:
        return [output async for output in run(columns_of(groups), task_of(groups))]

    async def beside() -> None:
        for _ in range(12):
            pauses.append(len(passes.rows))
            grad.append(torch.is_grad_enabled())
            await asyncio.sleep(0)

    async def everything() -> list[Any]:
        return (await asyncio.gather(beside(), *map(collect, parts)))[1:]

    made = asyncio.run(everything())
    assert len(set(pauses)) > 8  # it ran between tokens of the streams
    assert all(grad) and not any(passes.grad)  # the streams' no_grad did not leak
    for outputs, expected in zip(made, alone, strict=True):
        found = whole(outputs)
        for name, column in expected.items():
            if isinstance(column, Ragged):
                assert found[name].lengths == column.lengths
                assert torch.equal(found[name].values, column.values), name
            else:
                assert list(found[name]) == list(column)


LONG = replace(ROLLOUT, max_tokens=20, stop=())  # nearly every response reaches max_tokens


def test_cancelled_groups_leave_between_two_tokens() -> None:
    groups = (5, 7, 2, 9, 4)
    expected = whole(rolled_out(context(), groups[1:], LONG))
    here = context()
    here.cancelled.add(5)  # so that positions in the decode batch differ from those in the task
    passes = Passes(engine(here))
    stream = LONG.setup(here)(columns_of(groups), task_of(groups))
    outputs = together(stream, after(4, lambda: here.cancelled.update((2, 4, 1000))))
    before, given_up = [output for output in outputs if output.cancelled]
    assert given_up.columns == {} and given_up.metrics == {}
    assert before.cancelled == {0: 0} and given_up.cancelled == {2: 5, 4: 5}  # after five tokens
    assert passes.rows[:5] == [4, 12, 12, 12, 12] and max(passes.rows[5:]) <= 6
    kept = [output for output in outputs if not output.cancelled]
    assert sorted(i for output in kept for i in output.index) == [3, 4, 5, 9, 10, 11]
    assert whole(kept)["response"] == expected["response"][:3] + expected["response"][6:9]
    left = [expected["rollout_logprobs"].rows()[i] for i in (0, 1, 2, 6, 7, 8)]
    torch.testing.assert_close(whole(kept)["rollout_logprobs"].values, torch.cat(left), atol=1e-5, rtol=0)


def test_a_stream_ends_where_all_its_groups_are_cancelled() -> None:
    here = context()
    passes = Passes(engine(here))
    stream = LONG.setup(here)(columns_of((1, 2)), task_of((1, 2)))
    outputs = together(stream, after(1, lambda: here.cancelled.update((1, 2))))
    assert [output.cancelled for output in outputs] == [{0: 2, 1: 2}]
    assert len(passes.rows) == 2


def test_groups_that_are_cancelled_before_their_decode_batch_cost_nothing() -> None:
    here, groups = context(), (5, 6, 7, 8)
    passes = Passes(engine(here))
    here.cancelled.update((6, 7, 8))
    outputs = collected(replace(LONG, decode_batch=2).setup(here)(columns_of(groups), task_of(groups)))
    assert [dict(output.cancelled) for output in outputs if output.cancelled] == [{1: 0}, {2: 0, 3: 0}]
    assert max(passes.rows) == G
    expected = whole(rolled_out(context(), (5,), LONG))
    assert whole(outputs)["response"] == expected["response"]


def test_a_group_that_has_ended_is_not_cancelled_any_more() -> None:
    backend: Any = engine(context())
    texts = [text for text in PROMPTS for _ in range(G)]
    draws = Draws(5, tuple(range(len(texts))), (0,) * len(texts))
    unwanted: set[int] = set()
    prompt_ids, sampling = backend.encode(POLICY, texts), Sampling(30, stop=STOP)

    async def collect() -> list[Any]:
        events = []
        stream = backend.stream(
            POLICY, prompt_ids, sampling, draws, group_size=G, unwanted=lambda group: group in unwanted
        )
        async for event in stream:
            events.append(event)
            unwanted.update(range(len(PROMPTS)))
        return events

    first, second = asyncio.run(collect())
    assert isinstance(first, Decoded) and isinstance(second, Cancelled)
    assert set(first.groups) | second.tokens.keys() == set(range(len(PROMPTS)))
    assert not set(first.groups) & second.tokens.keys()
    tokens = max(first.made.response_ids.lengths)
    assert set(second.tokens.values()) == {tokens}


def test_a_stream_that_is_closed_early_lets_go_of_its_cache() -> None:
    here, groups = context(), (0, 1, 2, 3, 4)
    passes = Passes(engine(here))

    async def first() -> None:
        stream = ROLLOUT.setup(here)(columns_of(groups), task_of(groups))
        assert len((await anext(stream)).index) < len(groups) * G
        assert passes.caches[0]() is not None
        await stream.aclose()
        assert passes.caches[0]() is None

    asyncio.run(first())
