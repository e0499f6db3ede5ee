"""One vLLM engine in a thread with its own event loop, usable from any thread and any loop.

It starts the engine on first use and again if its processes die, loads weights between two tokens, and records which
weights computed which tokens of each request. It knows token ids and files, not models, texts or stages.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import threading
import time
from collections.abc import Awaitable, Coroutine, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from ops.refit.share import digest_of
from pipeline import StageError
from pipeline.errors import PeerLost, Problem, Unfit, message_of
from stages.backends.interface import ServedWeights
from stages.backends.model.cache_bounds import Bounds, largest
from stages.backends.refit.target import NotAsOfferedError, acknowledged, slowest
from stages.backends.vllm import api as versions
from stages.backends.vllm import cache_scales, families, vision
from stages.backends.vllm.requests import Request
from stages.backends.vllm.weights import VersionShares
from stages.lora import LoRA

STALL_S = 900.0  # without output, start or load while requests are outstanding
START_S = 900.0
ANSWER_S = 600.0  # for a reply to anything but a request
CLOSE_S = 20.0
SHUTDOWN_S = 1.0  # for the engine's processes to exit; they have nothing to save
LOOK_S = 0.5  # between two checks whether a busy engine is alive
ATTEMPTS = 2  # for a request or a load whose engine dies

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Start settings of an engine, which is one of `replicas`. `where` is for error messages."""

    folder: Path
    gpus: bool
    tensor_parallel: int
    memory: float  # share of a GPU, if there is room
    where: str
    cache: str = "auto"  # number format of keys and values
    speculate: int = 0  # drafted tokens per step
    draft: Path | None = None  # the folder of the model that drafts; None: n-grams
    replica: int = 0
    replicas: int = 1
    lora: LoRA | None = None  # of adapters; the weights in the folder then stay
    slots: int = 1  # adapters that are computed together
    routes: bool = False  # whether it returns the experts of each token
    beside_bytes: float = 0.0  # what other groups keep on the same GPU


class Client:
    """Starts the engine and speaks to it. State is the loop's; `start`, `load` and the like may be called anywhere."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.starts = 0
        self._llm: versions.AsyncLLM | None = None
        self._asleep: versions.AsyncLLM | None = None
        self._live: dict[str, Request] = {}
        self._unread: set[str] = set()  # requests whose logprobs in the engine are not needed
        self._weights: VersionShares | None = None  # of the served version; None means the folder
        self._version: int | None = None
        self._adapter: int | None = None  # the served one
        self._numbers = itertools.count(1)  # of adapters
        self._scales: Bounds = {}  # of the cache
        self.loaded: list[str] = []  # tensors of the last version that vLLM's own loader handled
        self._failures = 0  # to start
        self._failure = self._silent(START_S)
        self._heard_s = time.monotonic()
        self._starting, self._loading = asyncio.Lock(), asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def start(self, work: Coroutine[Any, Any, T]) -> Any:
        """Run work in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T], deadline_s: float = START_S + ANSWER_S) -> T:
        """Run work in the loop and wait for it."""
        future = self.start(work)
        try:
            return future.result(deadline_s)
        except TimeoutError:
            future.cancel()
            raise StageError(self._silent(deadline_s)) from None

    def complete(self, requests: Sequence[Request]) -> None:
        """Complete requests and wait for them. Raises StageError if the engine has been silent for too long."""
        future = self.start(self.sample(requests))
        try:
            while not wait([future], LOOK_S).done:
                self.check()
            future.result()
        finally:
            future.cancel()

    def longest(self) -> int:
        """Maximum number of tokens of a prompt and its response."""

        async def ask() -> int:
            return versions.longest(await self._alive())

        return self.call(ask())

    def load(self, weights: VersionShares) -> ServedWeights:
        """Load weights between two tokens and serve them from then on.

        Raises PeerLost if they did not arrive completely; the engine then samples nothing until a later version has.
        Raises Unfit if the engine died and the trainer would have to send them again.
        """
        return self.call(self._load(weights))

    def sleep(self) -> tuple[int, int]:
        """Free GPU memory: weights move to the host, the cache is dropped. Nothing may be running. Returns the bytes in
        use on the first GPU, by all processes, before and after; 0 if the engine is not running."""
        return self.call(self._turn(awake=False))

    def wake(self) -> tuple[int, int]:
        """Reclaim the memory. Returns what `sleep` returns."""
        return self.call(self._turn(awake=True))

    def check(self) -> None:
        """Raise StageError if requests are outstanding and the engine has been silent for too long."""
        if self._live and time.monotonic() - self._heard_s > STALL_S:
            raise StageError(self._silent(STALL_S))

    def close(self) -> None:
        """Stop the engine, its processes and the thread. Idempotent.

        An engine that does not stop in time ends with this process.
        """
        if not self._thread.is_alive():
            return
        atexit.unregister(self.close)
        wait([self.start(self._end())], CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()  # vLLM leaves its sockets open for a loop that only stands still
        if self._llm is not None:  # `_end` did not get that far
            self._llm.shutdown(SHUTDOWN_S)
            self._llm = None

    async def sample(self, lot: Sequence[Request]) -> None:
        """Complete requests. If the engine dies, it is restarted and they start over."""
        try:
            for _ in range(ATTEMPTS):
                llm = await self._alive()
                tasks = [asyncio.ensure_future(self._sample(llm, request)) for request in lot]
                try:
                    if all(await asyncio.gather(*tasks)):
                        return await self._read(llm, lot)
                except versions.EngineDeadError:
                    pass  # the logprobs are gone with it
                finally:
                    for task in tasks:
                        task.cancel()
        finally:
            self._unread |= {request.name for request in lot if request.logprobs is None and request.whole}
        raise StageError(self._died())

    async def _sample(self, llm: versions.AsyncLLM, request: Request) -> bool:
        """Sample the tokens of a request. Returns whether the engine survived it."""
        if request.unwanted:
            request.ended = "abort"
            return True
        self._unread.discard(request.name)  # its engine died
        request.tokens, request.ended, request.spans = [], None, [(0, self._version)]
        request.adapter = self._adapter
        self._live[request.name] = request
        request.llm, request.following = llm, asyncio.ensure_future(self._follow(llm, request))
        try:
            await asyncio.wait({request.following})
            if request.following.cancelled():  # `_lose` does that
                return False
            request.following.result()
            return True
        except versions.EngineDeadError:
            self._heard_s = time.monotonic()
            return False
        finally:
            request.following.cancel()
            del self._live[request.name]

    async def _read(self, llm: versions.AsyncLLM, lot: Sequence[Request]) -> None:
        """Fetch the logprobs of a lot, unless it was canceled."""
        if not all(request.whole for request in lot):
            return
        unread, self._unread = sorted(self._unread), set()
        lengths = {request.name: len(request.tokens) for request in lot}
        found, passes = await self._answer(llm, versions.logprobs(llm, lengths, unread))
        for request, values, count in zip(lot, found, passes):
            request.logprobs, request.passes = values, count

    async def _follow(self, llm: versions.AsyncLLM, request: Request) -> None:
        try:
            prompt = vision.prompt(request.prompt, request.pictures, request.runs)
            async for made in versions.outputs(llm, prompt, request.params, request.name, request.adapter):
                request.tokens, request.ended, request.routes = made
                self._heard_s = time.monotonic()
                if request.unwanted and request.ended is None:
                    await llm.abort(request.name)
        finally:
            if not request.whole:  # the engine was already asked to abort it and handles this afterwards
                self._unread.add(request.name)

    async def end(self, requests: Sequence[Request]) -> None:
        """Abort requests; those that vLLM has not received yet are aborted once it has."""
        for request in requests:
            request.unwanted = True
        if self._llm is not None and not self._llm.errored:
            await self._llm.abort([request.name for request in requests])

    async def _alive(self) -> versions.AsyncLLM:
        """The engine, started if necessary. Callers that wait for the same start share its failure."""
        failures = self._failures
        async with self._starting:
            if self._llm is None or self._llm.errored:
                if self._failures > failures:
                    raise StageError(self._failure)
                await self._open()
            assert self._llm is not None
            return self._llm

    async def _open(self) -> None:
        """Start the engine with the weights served last. Blocks the loop's other work. Raises Unfit if the trainer
        would have to send those weights again."""
        if self._llm is not None:
            self._lose(self._llm)
        if self._weights is not None and self._weights.route.meeting is not None:
            raise Unfit(self._not_again())
        setup = self.setup
        vision.register(families.architecture_of(setup.folder))
        try:
            self._llm = llm = versions.open_llm(
                setup.folder,
                gpus=setup.gpus,
                tensor_parallel=setup.tensor_parallel,
                memory=setup.memory,
                beside_bytes=setup.beside_bytes,
                cache=setup.cache,
                speculate=setup.speculate,
                draft=setup.draft,
                lora=setup.lora,
                slots=setup.slots,
                routes=setup.routes,
            )
        except (RuntimeError, ValueError, OSError) as error:
            self._failures, self._failure = self._failures + 1, self._not_started(error)
            raise StageError(self._failure) from error
        ready = False
        try:
            if setup.speculate:
                await self._answer(llm, versions.verify(llm))
            if layer := await self._answer(llm, versions.refused(llm)):
                raise StageError(self._wrong_layers(layer))
            if setup.cache != "auto":
                if backend := await self._answer(llm, versions.not_in_place(llm)):
                    raise StageError(self._keeps_scales(backend))
                bounds = await self._answer(llm, versions.folder_bounds(llm))
                await self._scale(
                    llm, cache_scales.scales_of(bounds, 1.0 if setup.lora is None else cache_scales.ADAPTED)
                )
            elsewhere = await self._answer(llm, versions.differing(llm)) if setup.lora is None else []
            place = {"replica": setup.replica, "replicas": setup.replicas, "by_loader": elsewhere}
            await self._answer(llm, versions.join_transfer(llm, place))
            if self._weights is not None:
                await self._received(llm, self._weights)
            ready = True
        except NotAsOfferedError as error:
            self._failures, self._failure = self._failures + 1, self._overtaken()
            raise StageError(self._failure) from error
        finally:
            if not ready:  # its weights differ from those that were served
                self._lose(llm)
        self._watching = asyncio.ensure_future(self._watch(llm))
        self.starts += 1
        self._heard_s = time.monotonic()

    async def _watch(self, llm: versions.AsyncLLM) -> None:
        """Fail the requests of a lost engine: vLLM notifies those it had, but not those that arrived just then."""
        while not llm.errored:
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(LOOK_S)
        self._lose(llm)

    def _lose(self, llm: versions.AsyncLLM) -> None:
        """Abandon an engine: the next use starts another one, and its requests start over."""
        end = llm.shutdown
        if self._llm is llm:
            self._llm = None
            end(SHUTDOWN_S)
        for request in self._live.values():
            if request.llm is llm and request.following is not None:
                request.following.cancel()

    async def _load(self, weights: VersionShares) -> ServedWeights:
        carried = weights.route.meeting is not None
        async with self._loading:
            for _ in range(1 if carried else ATTEMPTS):
                llm = await self._alive()
                with suppress(versions.EngineDeadError):
                    return await (self._swap(llm, weights) if self.setup.lora is None else self._add(llm, weights))
        raise Unfit(self._not_again()) if carried else StageError(self._died())

    async def _swap(self, llm: versions.AsyncLLM, weights: VersionShares) -> ServedWeights:
        """Pause between two steps, load, record each request's position, resume.

        The cache is cleared: the engine recomputes the running requests with the new weights, and no later prompt hits
        KV entries of the old ones. An engine that fails here is abandoned; one that did not receive everything stays
        paused.
        """
        goes_on, times_s = False, [time.perf_counter()]
        try:
            if self._asleep is llm:  # its weights are not on the GPU
                await self._rouse(llm)
            paused = asyncio.ensure_future(self._answer(llm, versions.pause(llm)))
            paused.add_done_callback(lambda _: times_s.append(time.perf_counter()))
            if self._live:  # the current step still brings them tokens; otherwise the engine pauses at once
                await paused
            received = self._received(llm, weights)
            served, counts = (await asyncio.gather(self._forget(llm, paused), received))[1]
            times_s.append(time.perf_counter())
            for name, request in self._live.items():
                request.spans.append((counts.get(name, 0), weights.version))
            self._weights, self._version = weights, weights.version
            await self._answer(llm, llm.resume_generation())
            goes_on = True
        except PeerLost:
            goes_on = True
            raise
        finally:
            if not goes_on:
                self._lose(llm)
        times_s.append(time.perf_counter())
        phases = zip(("pause_ms", "receive_ms", "resume_ms"), pairwise(times_s))
        return replace(served, record={**served.record, **{name: 1e3 * (end - begun) for name, (begun, end) in phases}})

    async def _add(self, llm: versions.AsyncLLM, weights: VersionShares) -> ServedWeights:
        """Load an adapter beside those that running requests use, without a pause. Later requests use it."""
        begun_s = time.perf_counter()
        if self._asleep is llm:
            await self._rouse(llm)
        served, _ = await self._received(llm, weights)
        self._weights, self._version = weights, weights.version
        return replace(served, record={**served.record, "receive_ms": 1e3 * (time.perf_counter() - begun_s)})

    async def _forget(self, llm: versions.AsyncLLM, paused: asyncio.Future[None]) -> None:
        """Clear the cache of an engine once it is paused."""
        await paused
        await self._answer(llm, versions.forget(llm))

    async def _received(self, llm: versions.AsyncLLM, weights: VersionShares) -> tuple[ServedWeights, dict[str, int]]:
        """Have all ranks receive a version and verify it. Also returns the token count of each live request."""
        lora, adapter = self.setup.lora, None
        if lora is None:
            receiving = versions.receive(llm, weights.plain(), list(self._live))
        else:
            adapter, used = next(self._numbers), [self._adapter, *(each.adapter for each in self._live.values())]
            keep = {number for number in used if number is not None}
            receiving = versions.receive_adapter(llm, weights.plain(), adapter, lora, keep)
        hashing = asyncio.to_thread(digest_of, weights.shares)  # while the engine does that
        answers, offered = await asyncio.gather(self._answer(llm, receiving), hashing)
        received = [answer.received for answer in answers if answer.received is not None]
        sha256 = acknowledged(weights.shares, [each.summed for each in received], offered)
        self._adapter, self.loaded = adapter, answers[0].loaded
        record = slowest([each.record for each in received])
        if bounds := largest([answer.bounds for answer in answers]):
            record |= await self._scale(llm, cache_scales.scales_of(bounds))
        return ServedWeights(sha256, record), answers[0].tokens

    async def _scale(self, llm: versions.AsyncLLM, scales: Bounds) -> dict[str, float]:
        """Set the scales of the cache, which is empty or will be cleared before the next step, and return them as
        metrics."""
        await self._answer(llm, versions.scale_cache(llm, scales))
        self._scales = scales
        return cache_scales.record_of(scales)

    async def _turn(self, *, awake: bool) -> tuple[int, int]:
        llm = self._llm
        if llm is None or llm.errored:
            return 0, 0  # its next user starts it, awake
        before_bytes = await self._answer(llm, versions.bytes_in_use(llm))
        if awake:
            await self._rouse(llm)
        else:
            await self._answer(llm, llm.sleep(level=1))
            self._asleep = llm
        return before_bytes, await self._answer(llm, versions.bytes_in_use(llm))

    async def _rouse(self, llm: versions.AsyncLLM) -> None:
        await self._answer(llm, llm.wake_up())
        if self._scales:
            await self._scale(llm, self._scales)  # vLLM 0.26 sets them to 1
        self._asleep = None

    async def _answer(self, llm: versions.AsyncLLM, call: Awaitable[T]) -> T:
        """Wait for an engine's reply. Raises EngineDeadError if it dies meanwhile: vLLM would leave the caller
        waiting."""
        task = asyncio.ensure_future(call)
        until_s = time.monotonic() + ANSWER_S
        while not task.done():
            await asyncio.wait({task}, timeout=LOOK_S)
            if not task.done() and (llm.errored or time.monotonic() > until_s):
                task.cancel()
                if llm.errored:
                    raise versions.EngineDeadError
                raise StageError(self._silent(ANSWER_S))
        self._heard_s = time.monotonic()
        return task.result()

    async def _end(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._llm is not None:
            self._llm.shutdown(SHUTDOWN_S)
            self._llm = None

    def _silent(self, after_s: float) -> Problem:
        return Problem(
            where=self.setup.where,
            what=f"the vLLM engine has been silent for {after_s:g} s",
            why="a request is outstanding",
            fix="see logs/ in the run directory; a resumed run starts a new engine",
        )

    def _died(self) -> Problem:
        return Problem(
            where=self.setup.where,
            what=f"the vLLM engine died {ATTEMPTS} times under one task",
            why="a lost engine is restarted once per task",
            fix="see logs/ in the run directory; often memory is short: a smaller model, or fewer samples at a time",
        )

    def _not_again(self) -> Problem:
        return Problem(
            where=self.setup.where,
            what="the vLLM engine died, and the trainer would have to send the weights again",
            why="it does that for a replacement worker, not for an engine",
            fix="resume the run",
        )

    def _overtaken(self) -> Problem:
        return Problem(
            where=self.setup.where,
            what="the vLLM engine died, and the weights that it served are no longer in the trainer's memory",
            why="the trainer is already overwriting them with the next version",
            fix="resume the run",
        )

    def _wrong_layers(self, layer: str) -> Problem:
        return Problem(
            where=self.setup.where,
            what=f"in the vLLM engine of {str(self.setup.folder)!r}, {layer}",
            why="embeddings, output embeddings, norms, routers and biases must not be quantized; the trainer quantizes "
            "the others",
            fix="weights='auto'",
        )

    def _keeps_scales(self, backend: str) -> Problem:
        return Problem(
            where=self.setup.where,
            what=f"cache={self.setup.cache!r}, and vLLM computes attention with {backend} on this GPU",
            why="the scales of the cache change with the weights, and this attention would keep those of its start",
            fix="cache='auto', or a GPU on which vLLM has FlashAttention 3 (Hopper)",
        )

    def _not_started(self, error: BaseException) -> Problem:
        return Problem(
            where=self.setup.where,
            what=f"vLLM cannot start with the model in {str(self.setup.folder)!r}: {message_of(error)}",
            why="a vllm worker group samples with this model",
            fix="see logs/ in the run directory; vLLM must support the architecture, and memory must suffice",
        )
