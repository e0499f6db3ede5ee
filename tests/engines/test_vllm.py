"""The vLLM backend on a real engine: its samples, their logprobs, and weight changes during generation."""

import asyncio
import importlib
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ops.refit.share import digest_of
from pipeline import Model, StageError, Task, WorkerGroup
from pipeline.declare.columns import Ragged
from pipeline.declare.held import Closes
from stages import Episode, Rollout
from stages.backends import Cancelled, Decoded, Draws, Generation, Sampling, part
from stages.backends.torch.engine import TorchEngine
from stages.backends.vllm.limits import problems
from stages.episode.attempts import Attempts
from tests.engines import vllm_models as tiny
from tests.optional import need
from tests.shares import shares_of
from tests.sockets import files, listening
from tests.unit.environments import Echo, OneTurn
from tests.unit.test_torch_generate import continued
from tests.waiting import until

need("vllm", "vllm")

GROUPS = (0, 1, 2, 3)
PLAIN = Sampling(max_tokens=48)
NEAR = 1e-4


@pytest.fixture(scope="module")
def started(root: Path, prepared: None) -> Iterator[Any]:
    from stages.backends.vllm.engine import open_engine

    backend = open_engine(tiny.context(root))
    yield backend
    backend.close()


@pytest.fixture
def backend(started: Any, model: Model) -> Any:
    """The module's engine, serving the first weights as version 1."""
    if started.served_version(model) != 1:
        started.serve(model, tiny.shares(model), 1)
    return started


@pytest.fixture(scope="module")
def torch_backend() -> TorchEngine:
    return TorchEngine(torch.device("cpu"), torch.float32)


def prompts(backend: Any, model: Model, groups: tuple[int, ...] = GROUPS) -> Ragged:
    return backend.encode(model, tiny.texts(groups))


def rows_of(made: Generation) -> list[list[int]]:
    return [row.tolist() for row in made.response_ids.rows()]


async def collected(stream: Any) -> list[Any]:
    return [event async for event in stream]


def test_an_engine_is_reached_by_its_owner_only(backend: Any) -> None:
    """Its processes unpickle what they receive, on the loopback interface and through files that others cannot open."""
    others = re.compile("ray|tests/forked.py")

    def pids() -> list[int]:
        """Those of this process; its children may also be of Ray, if tests of it ran here."""
        children = psutil.Process().children(recursive=True)
        return [os.getpid(), *(child.pid for child in children if not others.search(" ".join(child.cmdline())))]

    paths = until(lambda: files(pids()))
    assert [one for one in listening(pids()) if not one.is_loopback] == []
    assert not [path for path in paths if path.stat().st_mode & 0o022]  # to connect is to write


@pytest.mark.parametrize(
    "sampling",
    [
        PLAIN,
        replace(PLAIN, temperature=0.7),
        replace(PLAIN, temperature=1.3, top_k=5),
        replace(PLAIN, top_p=0.8),
        replace(PLAIN, temperature=0.7, min_p=0.1, top_p=0.9, top_k=12),
        replace(PLAIN, greedy=True),
    ],
    ids=["plain", "cool", "top_k", "top_p", "all", "greedy"],
)
def test_samples_are_those_of_the_torch_backend(
    backend: Any, torch_backend: TorchEngine, model: Model, sampling: Sampling
) -> None:
    prompt_ids = prompts(backend, model)
    made = backend.generate(model, prompt_ids, sampling, None if sampling.greedy else tiny.draws(GROUPS))
    same = torch_backend.generate(model, prompt_ids, sampling, None if sampling.greedy else tiny.draws(GROUPS))
    assert rows_of(made) == rows_of(same)
    assert made.truncated.tolist() == same.truncated.tolist()
    temperature = 1.0 if sampling.greedy else sampling.temperature
    assert tiny.farthest(made, tiny.logprobs(tiny.reference(model), prompt_ids, made, temperature)) < NEAR
    assert set(made.versions.values.tolist()) == {1} and made.versions.values.dtype == torch.int32


def test_a_sample_that_is_drawn_in_two_calls_is_that_of_one(backend: Any, model: Model) -> None:
    continued(backend, model, prompts(backend, model), 24, tiny.draws(GROUPS))


def test_episodes_are_those_of_the_torch_backend(
    backend: Any, torch_backend: TorchEngine, model: Model, root: Path
) -> None:
    """Turns are requests of their own, and drawn as the stage says; with one turn, an episode is a rollout."""
    task = Task(number=1, stage="episode", step=0, groups=GROUPS, version=1)
    drawn = {"on": tiny.GROUP, "samples_per_prompt": 4, "top_k": 12, "min_p": 0.1}
    given = drawn | {"turn_tokens": 12, "tokens": 60, "environments": 1}
    columns = {"prompt": tiny.texts(GROUPS)}
    stages = [Episode(model, environment, **given) for environment in (Echo(), OneTurn())]
    stages.append(Rollout(model, max_tokens=12, **drawn))
    found: list[list[dict[str, Any]]] = []
    for engine in (backend, torch_backend):
        described = tiny.GROUP if engine is backend else replace(tiny.GROUP, backend="torch")
        context = replace(tiny.context(root, described), shared={"engine": engine})
        try:
            found.append(
                [rows_by_sample(asyncio.run(collected(stage.setup(context)(columns, task)))) for stage in stages]
            )
        finally:
            for held in context.shared.values():
                if held is not engine and isinstance(held, Closes):
                    held.close()
    (turns, one, rollout), (same, *_) = found
    assert [len(ends) for ends in turns["turn_ends"]] == [3] * 16
    for name in ("response_ids", "conversation", "end", "turn_ends"):
        assert all(equal(a, b) for a, b in zip(turns[name], same[name], strict=True)), name
    for name in rollout.keys() - {"rollout_logprobs"}:
        assert all(equal(a, b) for a, b in zip(rollout[name], one[name], strict=True)), name
    near = zip(rollout["rollout_logprobs"], one["rollout_logprobs"], strict=True)
    assert all(torch.allclose(a, b, atol=NEAR) for a, b in near)  # vLLM computes what is cached in other batches


def test_turns_find_earlier_ones_in_the_cache_until_the_weights_change(
    backend: Any, model: Model, other: Model, root: Path, monkeypatch: Any
) -> None:
    """Each turn is a request that computes what the one before it has not, in whole blocks. Between the second and the
    third turn the weights change: the third computes all of the conversation with the new ones."""
    prompt = "what follows + " * 16
    given = {"on": tiny.GROUP, "samples_per_prompt": 1, "environments": 1, "top_k": 20}
    stage = Episode(model, Echo(4), turns=4, tokens=80, turn_tokens=12, **given)
    context = replace(tiny.context(root), group_size=1, shared={"engine": backend})
    requests: list[tuple[int, int]] = []  # tokens of the prompt, and how many of them were in the cache
    client = importlib.import_module("stages.backends.vllm.client")
    generate = client.versions.AsyncLLM.generate

    async def counted(self: Any, *given: Any, **named: Any) -> Any:
        async for output in generate(self, *given, **named):
            yield output
        requests.append((len(output.prompt_token_ids), output.num_cached_tokens))

    asked = Attempts.turn

    async def refitted(self: Any, reply: Any) -> Any:
        if len(requests) == 2:
            backend.serve(model, tiny.shares(other), 2)
        return await asked(self, reply)

    monkeypatch.setattr(client.versions.AsyncLLM, "generate", counted)
    monkeypatch.setattr(Attempts, "turn", refitted)
    task = Task(number=1, stage="episode", step=0, groups=(77,), version=1)
    try:
        made = rows_by_sample(asyncio.run(collected(stage.setup(context)({"prompt": [prompt]}, task))))
    finally:
        context.shared.pop("engine")
        for held in context.shared.values():
            if isinstance(held, Closes):
                held.close()
    block = backend.client(model)._llm.vllm_config.cache_config.block_size
    ids, ends, versions = made["response_ids"][0], made["turn_ends"][0].tolist(), made["token_versions"][0]
    computed = [len(made["prompt_ids"][0]) + end - 1 for end in ends]  # when the turn has ended
    assert [cached for _, cached in requests] == [0, computed[0] // block * block, 0, computed[2] // block * block]
    assert computed[2] // block > len(made["prompt_ids"][0]) // block > 0, "tokens that were drawn are found too"
    drawn = Generation(Ragged.of([ids]), Ragged.of([ids]), torch.zeros(1), Ragged.of([ids]))
    assert [int(versions[end - 1]) for end in ends] == [1, 1, 2, 2]
    for of, version in ((model, 1), (other, 2)):
        (wanted,) = tiny.logprobs(tiny.reference(of), Ragged.of(made["prompt_ids"]), drawn, 1.0)
        has = made["rollout_logprobs"][0]
        assert (has - wanted)[versions == version].abs().max() < NEAR


def rows_by_sample(outputs: list[Any]) -> dict[str, list[Any]]:
    """All columns, in the order of the samples."""
    rows = {
        i: {
            name: column.rows()[n] if isinstance(column, Ragged) else column[n]
            for name, column in output.columns.items()
        }
        for output in outputs
        for n, i in enumerate(output.index or ())
    }
    return {name: [rows[i][name] for i in sorted(rows)] for name in rows[0]}


def equal(one: Any, two: Any) -> bool:
    return torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


def test_a_closing_token_is_part_of_the_response(backend: Any, model: Model) -> None:
    eos = backend.tokenizer(model).eos_token_id
    made = backend.generate(model, prompts(backend, model), PLAIN, tiny.draws(GROUPS))
    assert {True, False} == set(made.truncated.tolist())
    for row, truncated in zip(rows_of(made), made.truncated.tolist()):
        assert (eos in row[:-1], row[-1] == eos) == (False, not truncated)
        assert len(row) == PLAIN.max_tokens or not truncated


def test_weights_that_are_served_are_those_that_sample(
    backend: Any, torch_backend: TorchEngine, model: Model, other: Model
) -> None:
    sent = tiny.shares(other)
    assert backend.serve(model, sent, 7).sha256 == digest_of(sent)
    assert backend.client(model).loaded == []
    assert backend.served_version(model) == 7
    prompt_ids = prompts(backend, model)
    made = backend.generate(model, prompt_ids, PLAIN, tiny.draws(GROUPS))
    assert rows_of(made) == rows_of(torch_backend.generate(other, prompt_ids, PLAIN, tiny.draws(GROUPS)))
    assert tiny.farthest(made, tiny.logprobs(tiny.reference(other), prompt_ids, made, 1.0)) < NEAR
    assert set(made.versions.values.tolist()) == {7}


@pytest.mark.parametrize("change", ["missing", "more", "shape", "dtype"])
def test_other_weights_are_refused_and_change_nothing(backend: Any, model: Model, change: str) -> None:
    wrong = tiny.weights_of(model)
    name = "model.norm.weight"
    if change == "missing":
        del wrong[name]
    elif change == "more":
        wrong["lm_head.weight"] = wrong["model.embed_tokens.weight"].clone()  # tied, and therefore named only once
    else:
        wrong[name] = wrong[name][:-1] if change == "shape" else wrong[name].double()
    with pytest.raises(StageError, match="lm_head.weight" if change == "more" else name):
        backend.serve(model, shares_of(wrong), 9)
    assert backend.served_version(model) == 1
    made = backend.generate(model, prompts(backend, model), PLAIN, tiny.draws(GROUPS))
    assert tiny.farthest(made, tiny.logprobs(tiny.reference(model), prompts(backend, model), made, 1.0)) < NEAR


def test_a_sample_depends_on_its_draw_only(backend: Any, model: Model) -> None:
    prompt_ids = prompts(backend, model)
    together = rows_of(backend.generate(model, prompt_ids, PLAIN, tiny.draws(GROUPS)))
    order = list(reversed(range(len(together))))
    turned = Ragged.of([prompt_ids.rows()[i] for i in order])
    drawn = tiny.draws(GROUPS)
    drawn = Draws(drawn.seed, tuple(drawn.groups[i] for i in order), tuple(drawn.samples[i] for i in order))
    assert rows_of(backend.generate(model, turned, PLAIN, drawn)) == together[::-1]
    alone = backend.generate(model, Ragged.of([prompt_ids.rows()[5]]), PLAIN, Draws(0, (1,), (1,)))
    assert rows_of(alone) == [together[5]]
    elsewhere = rows_of(backend.generate(model, prompt_ids, PLAIN, tiny.draws(GROUPS, seed=1)))
    assert sum(a != b for a, b in zip(elsewhere, together)) > len(together) // 2


def test_a_prompt_that_the_engine_remembers_is_computed_again_with_new_weights(
    backend: Any, model: Model, other: Model
) -> None:
    """It is longer than a cache block, which equal prompts share."""
    prompt_ids = backend.encode(model, ["0123456789 abcdefghij + " * 12] * 4)
    for weights in (model, other, model):
        backend.serve(model, tiny.shares(weights), 2)
        for _ in range(2):
            made = backend.generate(model, prompt_ids, PLAIN, tiny.draws((0,)))
            assert tiny.farthest(made, tiny.logprobs(tiny.reference(weights), prompt_ids, made, 1.0)) < NEAR


def test_weights_change_between_two_tokens(backend: Any, model: Model, other: Model) -> None:
    """Each token has the logprob and version of the weights that computed it; two of three swaps happen at once."""
    sampling = Sampling(max_tokens=900, top_k=30)
    prompt_ids = prompts(backend, model)
    weights = {1: model, 2: other, 3: model, 4: other}
    sent = {version: tiny.shares(of) for version, of in weights.items()}

    async def run() -> list[Any]:
        stream = backend.stream(model, prompt_ids, sampling, tiny.draws(GROUPS), group_size=4, version=3)
        events = asyncio.ensure_future(collected(stream))
        for versions in ((2,), (3, 4)):
            await asyncio.sleep(0.3)
            assert not events.done()
            for version in versions:
                backend.serve(model, sent[version], version)
        return await events

    made = [event for event in asyncio.run(run()) if isinstance(event, Decoded)]
    assert sorted(group for event in made for group in event.groups) == list(GROUPS)
    seams = 0
    for event in made:
        ids = Ragged.of([prompt_ids.rows()[group * 4 + i] for group in event.groups for i in range(4)])
        by_version = {
            version: tiny.logprobs(tiny.reference(of), ids, event.made, 1.0) for version, of in weights.items()
        }
        for i, (has, versions) in enumerate(zip(event.made.logprobs.rows(), event.made.versions.rows())):
            stamps = versions.tolist()
            assert stamps == sorted(stamps)
            of_stamp = torch.stack([by_version[stamp][i][t] for t, stamp in enumerate(stamps)])
            assert (has - of_stamp).abs().max() < NEAR
            for t in (t for t in range(1, len(stamps)) if stamps[t - 1 : t + 1] == [1, 2]):
                # The seam is exact if the weights distinguish the tokens on its two sides.
                before, after = (has - by_version[2][i])[t - 1].abs(), (has - by_version[1][i])[t].abs()
                seams += bool(before > 10 * NEAR and after > 10 * NEAR)
    assert seams >= 2


def test_groups_come_out_when_their_last_sample_ends(backend: Any, model: Model) -> None:
    sampling = replace(PLAIN, max_tokens=300)
    events = asyncio.run(
        collected(backend.stream(model, prompts(backend, model), sampling, tiny.draws(GROUPS), group_size=4))
    )
    assert len(events) > 1 and all(isinstance(event, Decoded) for event in events)
    assert sorted(group for event in events for group in event.groups) == list(GROUPS)
    longest = [max(event.made.response_ids.lengths) for event in events]
    assert longest == sorted(longest) and longest[0] < longest[-1]
    whole = rows_of(backend.generate(model, prompts(backend, model), sampling, tiny.draws(GROUPS)))
    for event in events:
        assert rows_of(event.made) == [whole[group * 4 + i] for group in event.groups for i in range(4)]


def test_the_engine_reports_a_sample_every_64_tokens(backend: Any, model: Model, monkeypatch: Any) -> None:
    client = importlib.import_module("stages.backends.vllm.client")
    seen: dict[str, list[int]] = {}

    async def counted(llm: Any, prompt: Any, params: Any, name: str, *others: Any) -> Any:
        async for tokens, *rest in outputs(llm, prompt, params, name, *others):
            seen.setdefault(name, []).append(len(tokens))
            yield tokens, *rest

    outputs = client.versions.outputs
    monkeypatch.setattr(client.versions, "outputs", counted)
    sampling = replace(PLAIN, max_tokens=300, greedy=True)
    made = backend.generate(model, prompts(backend, model), sampling, tiny.draws(GROUPS))
    assert [counts[-1] for counts in seen.values()] == list(made.response_ids.lengths)
    assert max(map(len, seen.values())) <= 2 + 300 // 64, "each report costs time that the worker's other tasks need"


def test_groups_that_nobody_wants_are_given_up(backend: Any, model: Model) -> None:
    sampling = replace(PLAIN, max_tokens=600, greedy=True)  # greedy decoding loops up to max_tokens
    given_up: set[int] = set()

    async def run() -> list[Any]:
        stream = backend.stream(
            model, prompts(backend, model), sampling, None, group_size=4, unwanted=lambda group: group in given_up
        )
        events = asyncio.ensure_future(collected(stream))
        await asyncio.sleep(0.2)
        given_up.add(1)
        await asyncio.sleep(0.2)
        given_up.add(3)
        return await events

    events = asyncio.run(run())
    gone = {group: tokens for event in events if isinstance(event, Cancelled) for group, tokens in event.tokens.items()}
    assert gone.keys() == {1, 3} and all(0 < tokens < sampling.max_tokens for tokens in gone.values())
    assert gone[1] < gone[3]
    assert {group for event in events if isinstance(event, Decoded) for group in event.groups} == {0, 2}
    assert not backend.client(model)._live


def test_streams_wake_when_their_requests_end_and_share_one_timer(backend: Any, model: Model, monkeypatch: Any) -> None:
    """The timer looks for what nobody wants, here once an hour; an error of that look ends its stream only."""
    running = importlib.import_module("stages.backends.vllm.running")
    monkeypatch.setattr(running, "LOOK_S", 3600.0)
    timers: list[asyncio.TimerHandle] = []
    call_later = asyncio.BaseEventLoop.call_later

    def kept(self: Any, delay: float, *given: Any, **named: Any) -> asyncio.TimerHandle:
        made = call_later(self, delay, *given, **named)
        if delay == running.LOOK_S:
            timers.append(made)
        return made

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_later", kept)
    prompt_ids = prompts(backend, model)
    asked = [part(prompt_ids, range(4 * group, 4 * group + 4)) for group in GROUPS]

    async def run() -> list[Any]:
        async with asyncio.timeout(60):
            return await asyncio.gather(
                *(
                    collected(backend.stream(model, ids, PLAIN, tiny.draws((group,)), group_size=4, unwanted=wanted))
                    for group, ids, wanted in zip((*GROUPS, 4), (*asked, asked[0]), [lambda group: False] * 4 + [fails])
                ),
                return_exceptions=True,
            )

    def fails(group: int) -> bool:
        raise KeyError("unwanted")

    *made, failed = asyncio.run(run())
    whole = rows_of(backend.generate(model, prompt_ids, PLAIN, tiny.draws(GROUPS)))
    assert [row for (event,) in made for row in rows_of(event.made)] == whole
    assert isinstance(failed, KeyError) and [timer.cancelled() for timer in timers] == [True]
    assert not backend._streams._watched


def test_an_engine_that_is_silent_ends_what_waits_for_it(backend: Any, model: Model, monkeypatch: Any) -> None:
    monkeypatch.setattr(importlib.import_module("stages.backends.vllm.client"), "STALL_S", -1.0)
    given = model, prompts(backend, model), replace(PLAIN, max_tokens=900, greedy=True), None
    with pytest.raises(StageError, match="has been silent for -1 s"):
        asyncio.run(collected(backend.stream(*given, group_size=4)))
    with pytest.raises(StageError, match="has been silent for -1 s"):
        backend.generate(*given)


def test_a_stream_that_is_left_ends_its_requests(backend: Any, model: Model) -> None:
    sampling = replace(PLAIN, max_tokens=900, greedy=True)

    async def run() -> None:
        stream = backend.stream(model, prompts(backend, model), sampling, None, group_size=4)
        task = asyncio.ensure_future(collected(stream))
        await asyncio.sleep(0.2)
        assert backend.client(model)._live
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    backend.generate(model, prompts(backend, model), replace(PLAIN, max_tokens=1), tiny.draws(GROUPS))
    assert not backend.client(model)._live


def test_a_stop_text_of_several_tokens_ends_a_response(backend: Any, model: Model) -> None:
    prompt_ids = prompts(backend, model)
    free = backend.generate(model, prompt_ids, PLAIN, tiny.draws(GROUPS))
    longest = max(range(len(free.response_ids)), key=lambda i: free.response_ids.lengths[i])
    text = backend.decode(model, free.response_ids)[longest]
    stop = text[20:23]
    end = text.index(stop) + len(stop)
    made = backend.generate(model, prompt_ids, replace(PLAIN, stop=(stop,)), tiny.draws(GROUPS))
    assert rows_of(made)[longest] == rows_of(free)[longest][:end]  # one token per character
    assert not made.truncated[longest]
    assert tiny.farthest(made, tiny.logprobs(tiny.reference(model), prompt_ids, made, 1.0)) < NEAR


def test_what_does_not_fit_is_refused(backend: Any, model: Model, other: Model) -> None:
    with pytest.raises(StageError, match=r"exceed 1024 tokens; this is the most that the model's config allows"):
        backend.generate(model, prompts(backend, model), replace(PLAIN, max_tokens=1020), tiny.draws(GROUPS))
    with pytest.raises(StageError, match="serves one model"):
        backend.generate(other, prompts(backend, model), PLAIN, tiny.draws(GROUPS))
    with pytest.raises(StageError, match="trained and frozen"):
        backend.generate(model.frozen(), prompts(backend, model), PLAIN, tiny.draws(GROUPS))


def test_an_engine_that_slept_samples_as_before(backend: Any, model: Model) -> None:
    before = rows_of(backend.generate(model, prompts(backend, model), PLAIN, tiny.draws(GROUPS)))
    backend.sleep()
    backend.wake()
    assert rows_of(backend.generate(model, prompts(backend, model), PLAIN, tiny.draws(GROUPS))) == before


def test_weights_wake_an_engine_that_sleeps(backend: Any, model: Model, other: Model) -> None:
    """On a GPU, the weights would otherwise be written to unmapped memory."""
    backend.sleep()
    sent = tiny.shares(other)
    assert backend.serve(model, sent, 8).sha256 == digest_of(sent)
    client = backend.client(model)
    assert not client.call(client._llm.is_sleeping())
    made = backend.generate(model, prompts(backend, model), PLAIN, tiny.draws(GROUPS))
    assert set(made.versions.values.tolist()) == {8}


def test_a_group_that_asks_for_gpus_of_a_cpu_build_is_refused(root: Path) -> None:
    from stages.backends.vllm.engine import open_engine

    with pytest.raises(StageError, match="built for the CPU"):
        open_engine(tiny.context(root, WorkerGroup("sampler", backend="vllm", gpus=1)))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"workers": 2, "pipeline_parallel": 2}, "pipeline_parallel=2"),
        ({"workers": 2, "context_parallel": 2}, "context_parallel=2"),
        ({"workers": 2, "expert_parallel": 2}, "expert_parallel=2"),
        ({"workers": 2, "fully_sharded": True}, "fully_sharded"),
        ({"workers": 2, "gpus": 4}, "4 GPUs for 2 workers"),
    ],
)
def test_groups_that_vllm_cannot_run_are_named(settings: dict[str, Any], named: str) -> None:
    found = list(problems(WorkerGroup("sampler", backend="vllm", **settings), "graph.py:1"))
    assert len(found) == 1 and named in found[0].what and found[0].where == "graph.py:1"


@pytest.mark.parametrize("settings", [{}, {"gpus": 4, "tensor_parallel": 2}, {"workers": 2, "tensor_parallel": 2}])
def test_groups_that_vllm_runs_have_no_problem(settings: dict[str, Any]) -> None:
    assert not list(problems(WorkerGroup("sampler", backend="vllm", **settings), "graph.py:1"))
