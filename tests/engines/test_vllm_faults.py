"""vLLM engines that die under their worker, and workers that die before their engine."""

import asyncio
import multiprocessing
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ops.refit.share import digest_of
from ops.refit.transports import TRANSPORTS
from pipeline import Model, StageError
from pipeline.declare.ranks import open_store
from pipeline.errors import PeerLost, Unfit
from stages.backends import PULL, Decoded, Sampling
from stages.backends.vllm.weights import VersionShares
from tests.engines import vllm_models as tiny
from tests.engines.prepared import engines, kill, runs
from tests.optional import need
from tests.shares import carried, route_of, shares_of, source_of

need("vllm", "vllm")
versions = need("vllm", "stages.backends.vllm.api")
psutil = need("vllm", "psutil")

GROUPS = (0, 1, 2, 3)
LONG = Sampling(max_tokens=100, greedy=True)  # greedy decoding loops up to max_tokens
DEADLINE_S = 500.0  # for what hangs, so that threads end before pytest's own timeout
POLL_S = 0.05


@pytest.fixture(scope="module")
def backend(root: Path, model: Model, prepared: None) -> Iterator[Any]:
    from stages.backends.vllm.engine import open_engine

    backend = open_engine(tiny.context(root))
    yield backend
    backend.close()
    wait_for(lambda: not engines())


def wait_for(what: Callable[[], Any]) -> Any:
    until_s = time.monotonic() + DEADLINE_S
    while not (found := what()):
        assert time.monotonic() < until_s, "waited for too long"
        time.sleep(POLL_S)
    return found


def kill_engines() -> None:
    found = engines()
    assert found
    kill(found)


def busy(backend: Any, model: Model) -> bool:
    """Return whether any request has tokens."""
    return any(request.tokens for request in list(backend.client(model)._live.values()))


def rows_of(events: list[Any]) -> dict[int, list[list[int]]]:
    made = [event for event in events if isinstance(event, Decoded)]
    found = {}
    for event in made:
        rows = [row.tolist() for row in event.made.response_ids.rows()]
        found |= {group: rows[i * 4 : i * 4 + 4] for i, group in enumerate(event.groups)}
    return found


def streamed(backend: Any, model: Model, meanwhile: Callable[[], None] = lambda: None) -> list[Any]:
    """Return the events of a stream of all groups. `meanwhile` runs in a thread; no request ends before it returns,
    even if the engine is faster."""
    over, outputs = threading.Event(), versions.outputs

    async def held(*given: Any) -> AsyncIterator[tuple[list[int], str | None, Any]]:
        async for tokens, ended, experts in outputs(*given):
            yield tokens, None, None
            while not over.is_set():
                await asyncio.sleep(POLL_S)
            yield tokens, ended, experts

    def disturb() -> None:
        try:
            meanwhile()
        finally:
            over.set()

    async def collected() -> list[Any]:
        prompt_ids = backend.encode(model, tiny.texts(GROUPS))
        return [event async for event in backend.stream(model, prompt_ids, LONG, None, group_size=4)]

    async def run() -> list[Any]:
        events, _ = await asyncio.gather(collected(), asyncio.to_thread(disturb))
        return events

    with patch.object(versions, "outputs", held):
        return asyncio.run(run())


def test_a_lost_engine_is_started_again_with_the_weights_it_served(backend: Any, model: Model, root: Path) -> None:
    other = tiny.folder(root, 1)
    backend.serve(model, tiny.shares(other), 4)
    starts, undisturbed = backend.client(model).starts, rows_of(streamed(backend, model))

    def lose() -> None:
        wait_for(lambda: busy(backend, model))
        kill_engines()

    events = streamed(backend, model, lose)
    assert backend.client(model).starts == starts + 1
    assert rows_of(events) == undisturbed and undisturbed.keys() == set(GROUPS)
    assert {int(version) for event in events for version in event.made.versions.values} == {4}
    assert backend.served_version(model) == 4


def test_an_engine_that_died_between_tasks_is_started_again(backend: Any, model: Model) -> None:
    before = rows_of(streamed(backend, model))
    starts = backend.client(model).starts
    kill_engines()
    wait_for(lambda: not engines())
    assert rows_of(streamed(backend, model)) == before
    assert backend.client(model).starts == starts + 1


def test_an_engine_that_cannot_load_is_given_up_and_serves_what_it_served(backend: Any, model: Model) -> None:
    """Weights that passed every check fail to load; the content of such an engine is unknown."""
    before, starts = rows_of(streamed(backend, model)), backend.client(model).starts
    wrong = {name: torch.cat([weight, weight]) for name, weight in tiny.weights_of(model).items()}

    def load() -> None:
        wait_for(lambda: busy(backend, model))
        with pytest.raises(Exception, match="collective_rpc"):
            backend.client(model).load(VersionShares(shares_of(wrong), 5, PULL))

    events = streamed(backend, model, load)
    assert rows_of(events) == before
    assert {int(version) for event in events for version in event.made.versions.values} == {4}
    assert backend.client(model).starts == starts + 1


def test_an_engine_that_dies_twice_under_a_task_ends_it(backend: Any, model: Model) -> None:
    streamed(backend, model)  # it may have died before
    starts = backend.client(model).starts

    def lose_twice() -> None:
        for again in range(2):
            wait_for(lambda again=again: backend.client(model).starts == starts + again and busy(backend, model))
            kill_engines()

    with pytest.raises(StageError, match="died 2 times under one task"):
        streamed(backend, model, lose_twice)


def test_weights_that_the_trainer_carries(backend: Any, model: Model, root: Path) -> None:
    """After a failed refit, an engine waits for the next one. If the engine dies, its worker must be replaced."""
    weights, store = tiny.weights_of(tiny.folder(root, 1)), open_store("127.0.0.1", 1, deadline_s=240.0)
    backend.serve(model, shares_of(weights), 10)
    pulled = rows_of(streamed(backend, model))
    source, starts = source_of(weights), backend.client(model).starts
    share = source.share(weights, TRANSPORTS["gloo"])
    store.set("lost", "worker learner.0 died")
    with pytest.raises(PeerLost, match=r"worker learner.0 died"):
        backend.serve(model, [share], 11, route_of(store, "lost"))
    waiting = asyncio.run(asyncio.wait_for(asyncio.to_thread(backend.client(model).longest), DEADLINE_S))
    assert waiting > 0 and backend.served_version(model) == 10
    route = route_of(store, "next")
    with carried(source, share, 12, route):
        served = backend.serve(model, [share], 12, route)
    assert served.sha256 == digest_of([share]) and served.record["received_bytes"] == share.model_bytes
    assert rows_of(streamed(backend, model)) == pulled and backend.client(model).starts == starts
    kill_engines()
    wait_for(lambda: not engines())
    with pytest.raises(Unfit, match="the trainer would have to send the weights again"):
        streamed(backend, model)
    backend.client(model)._weights = None  # as in the worker that replaces it


def test_an_engine_whose_weights_were_overwritten_meanwhile_serves_nothing(
    backend: Any, model: Model, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of this engine: the run would have to be resumed. All waiting tasks get the same failure."""
    weights = tiny.weights_of(tiny.folder(root, 2))
    source = source_of(weights)
    backend.serve(model, [source.share(weights, TRANSPORTS["pull"])], 6)
    for name in weights:
        weights[name] = weights[name] * 0.5
    for _ in range(2):  # the second share overwrites the first version
        source.share(weights, TRANSPORTS["pull"])
    kill_engines()
    wait_for(lambda: backend.client(model)._llm is None)
    opened, open_llm = [], versions.open_llm
    monkeypatch.setattr(versions, "open_llm", lambda *given, **named: opened.append(1) or open_llm(*given, **named))
    for tasks in (1, 2):
        with pytest.raises(StageError, match="are no longer in the trainer's memory"):
            streamed(backend, model)
        assert len(opened) == tasks
        wait_for(lambda: not engines())


def worker(root: Path, model: Model, test: Any) -> None:
    """A worker that has sampled, with an engine that is spawned as in a run."""
    from stages.backends.vllm.engine import open_engine

    backend = open_engine(tiny.context(root))
    backend.generate(model, backend.encode(model, tiny.texts((0,))), replace(LONG, max_tokens=4), None)
    test.send([child.pid for child in psutil.Process().children() if "resource_tracker" not in str(child.cmdline())])
    test.recv()  # ends with the test's process, if nothing kills this one


def test_an_engine_ends_with_its_worker(root: Path, model: Model, prepared: None) -> None:
    """Even a killed worker, which could not end it."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=worker, args=(root, model, theirs))
    process.start()
    theirs.close()
    found = ours.recv()  # EOFError if the worker has ended
    assert found and all(runs(each) for each in found)
    process.kill()
    process.join()
    wait_for(lambda: not any(runs(each) for each in found))
