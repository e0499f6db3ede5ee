"""One vLLM engine in a thread with an event loop of its own, so that any thread and any loop can use it.

It starts the engine when it is first needed and once more when its processes die, loads weights between two tokens,
and keeps for each request which weights computed which of its tokens. It knows token ids and files; models, texts and
stages it does not.
"""

from __future__ import annotations

import asyncio
import atexit
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
from pipeline.errors import PeerLost, Problem, Unfit, told
from stages.backends.interface import Served
from stages.backends.refit.target import NotAsOfferedError, acknowledged, slowest
from stages.backends.vllm import api as versions
from stages.backends.vllm.requests import Request
from stages.backends.vllm.weights import Weights

STALL_S = 900.0  # without any output, a start or a load, while there are requests
START_S = 900.0
ANSWER_S = 600.0  # of the engine to anything but a request
CLOSE_S = 20.0
SHUTDOWN_S = 1.0  # that the engine's processes have to end by themselves; they have nothing to save
LOOK_S = 0.5  # between two looks whether an engine that owes an answer is alive
ATTEMPTS = 2  # of a request, or of a load, when the engine dies under it

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What an engine is started with; it is one of `replicas`. `where` is for messages."""

    folder: Path
    gpus: bool
    tensor_parallel: int
    memory: float  # share of a GPU
    where: str
    replica: int = 0
    replicas: int = 1


class Client:
    """Starts the engine and speaks to it. State is the loop's; `start`, `load` and the like may be called anywhere."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.starts = 0
        self._llm: versions.AsyncLLM | None = None
        self._asleep: versions.AsyncLLM | None = None
        self._live: dict[str, Request] = {}
        self._unread: set[str] = set()  # requests whose logprobs lie in the engine, and nobody wants them
        self._weights: Weights | None = None  # of the version that is served; None is the folder
        self._version: int | None = None
        self.loaded: list[str] = []  # tensors of the last version that went through vLLM's own loader
        self._failures = 0  # to start
        self._failure = self._silent(START_S)
        self._heard_s = time.monotonic()
        self._starting, self._loading = asyncio.Lock(), asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def start(self, work: Coroutine[Any, Any, T]) -> Any:
        """Have work done in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T], deadline_s: float = START_S + ANSWER_S) -> T:
        """Have work done in the loop, and wait for it."""
        future = self.start(work)
        try:
            return future.result(deadline_s)
        except TimeoutError:
            future.cancel()
            raise StageError(self._silent(deadline_s)) from None

    def longest(self) -> int:
        """Tokens of a prompt and its response together, at most."""

        async def ask() -> int:
            return versions.longest(await self._alive())

        return self.call(ask())

    def load(self, weights: Weights) -> Served:
        """Load weights between two tokens, and keep them as those that are served.

        Raises PeerLost where they did not get through; nothing is sampled then until others have. Raises Unfit where
        the engine died and the trainer would have to carry them once more.
        """
        return self.call(self._load(weights))

    def sleep(self) -> tuple[int, int]:
        """Give the GPU's memory away: weights go to the host, the cache is dropped. Nothing may run. Returns the bytes
        in use on the first GPU, by all processes, before and after; an engine that is down stays so, and returns 0."""
        return self.call(self._turn(awake=False))

    def wake(self) -> tuple[int, int]:
        """Take it again. Returns what `sleep` does."""
        return self.call(self._turn(awake=True))

    def check(self) -> None:
        """Raise StageError where requests wait and nothing has been heard for too long."""
        if self._live and time.monotonic() - self._heard_s > STALL_S:
            raise StageError(self._silent(STALL_S))

    def close(self) -> None:
        """End the engine, its processes and the thread. May be called again.

        An engine that does not end in time ends with this process.
        """
        if not self._thread.is_alive():
            return
        atexit.unregister(self.close)
        wait([self.start(self._end())], CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)

    async def sample(self, lot: Sequence[Request]) -> None:
        """Fill requests in. An engine that dies under them is started again, and they begin anew."""
        try:
            for _ in range(ATTEMPTS):
                llm = await self._alive()
                tasks = [asyncio.ensure_future(self._sample(llm, request)) for request in lot]
                try:
                    if all(await asyncio.gather(*tasks)):
                        return await self._read(llm, lot)
                except versions.EngineDeadError:
                    pass  # it took the logprobs with it
                finally:
                    for task in tasks:
                        task.cancel()
        finally:
            self._unread |= {request.name for request in lot if request.logprobs is None and request.whole}
        raise StageError(self._died())

    async def _sample(self, llm: versions.AsyncLLM, request: Request) -> bool:
        """Have the tokens of a request sampled; whether the engine has outlived it."""
        if request.unwanted:
            request.ended = "abort"
            return True
        self._unread.discard(request.name)  # that was in an engine which died
        request.tokens, request.ended, request.spans = [], None, [(0, self._version)]
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
        """Get the logprobs of a lot, unless it was given up."""
        if not all(request.whole for request in lot):
            return
        unread, self._unread = sorted(self._unread), set()
        lengths = {request.name: len(request.tokens) for request in lot}
        found = await self._answer(llm, versions.logprobs(llm, lengths, unread))
        for request, values in zip(lot, found):
            request.logprobs = values

    async def _follow(self, llm: versions.AsyncLLM, request: Request) -> None:
        try:
            async for made in versions.outputs(llm, request.prompt, request.params, request.name):
                request.tokens, request.ended = made
                self._heard_s = time.monotonic()
                if request.unwanted and request.ended is None:
                    await llm.abort(request.name)
        finally:
            if not request.whole:  # by now the engine has been told to abort it, and will hear of this after that
                self._unread.add(request.name)

    async def end(self, requests: Sequence[Request]) -> None:
        """Abort requests; those that vLLM has not yet are aborted when it has."""
        for request in requests:
            request.unwanted = True
        if self._llm is not None and not self._llm.errored:
            await self._llm.abort([request.name for request in requests])

    async def _alive(self) -> versions.AsyncLLM:
        """The engine, started where there is none. Of callers that wait for one start, all share its failure."""
        failures = self._failures
        async with self._starting:
            if self._llm is None or self._llm.errored:
                if self._failures > failures:
                    raise StageError(self._failure)
                await self._open()
            assert self._llm is not None
            return self._llm

    async def _open(self) -> None:
        """Start the engine, with the weights that were served last. Nothing else happens in the loop meanwhile. Raises
        Unfit where those would have to be carried here once more."""
        if self._llm is not None:
            self._lose(self._llm)
        if self._weights is not None and self._weights.route.meeting is not None:
            raise Unfit(self._not_again())
        setup = self.setup
        try:
            self._llm = llm = versions.open_llm(
                setup.folder, gpus=setup.gpus, tensor_parallel=setup.tensor_parallel, memory=setup.memory
            )
        except (RuntimeError, ValueError, OSError) as error:
            self._failures, self._failure = self._failures + 1, self._not_started(error)
            raise StageError(self._failure) from error
        ready = False
        try:
            elsewhere = await self._answer(llm, versions.differing(llm))
            place = {"replica": setup.replica, "replicas": setup.replicas, "by_loader": elsewhere}
            await self._answer(llm, versions.join_transfer(llm, place))
            if self._weights is not None:
                await self._received(llm, self._weights)
            ready = True
        except NotAsOfferedError as error:
            self._failures, self._failure = self._failures + 1, self._overtaken()
            raise StageError(self._failure) from error
        finally:
            if not ready:  # it has other weights than those that were served
                self._lose(llm)
        self._watching = asyncio.ensure_future(self._watch(llm))
        self.starts += 1
        self._heard_s = time.monotonic()

    async def _watch(self, llm: versions.AsyncLLM) -> None:
        """Tell requests of a lost engine: vLLM tells those it had when it noticed, and none that came just then."""
        while not llm.errored:
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(LOOK_S)
        self._lose(llm)

    def _lose(self, llm: versions.AsyncLLM) -> None:
        """Give an engine up: the next use starts another one, where its requests begin anew."""
        end = llm.shutdown
        if self._llm is llm:
            self._llm = None
            end(SHUTDOWN_S)
        for request in self._live.values():
            if request.llm is llm and request.following is not None:
                request.following.cancel()

    async def _load(self, weights: Weights) -> Served:
        carried = weights.route.meeting is not None
        async with self._loading:
            for _ in range(1 if carried else ATTEMPTS):
                llm = await self._alive()
                with suppress(versions.EngineDeadError):
                    return await self._swap(llm, weights)
        raise Unfit(self._not_again()) if carried else StageError(self._died())

    async def _swap(self, llm: versions.AsyncLLM, weights: Weights) -> Served:
        """Pause between two steps, load, note where each request is, go on.

        The cache is cleared: what requests have so far is computed again with the new weights, and no later prompt
        finds keys and values of the old ones. An engine that does not get through this is given up; one that was not
        sent all of it stays paused.
        """
        goes_on, times_s = False, [time.perf_counter()]
        try:
            if self._asleep is llm:  # its weights are nowhere on the GPU
                await self._rouse(llm)
            paused = asyncio.ensure_future(self._answer(llm, versions.pause(llm)))
            paused.add_done_callback(lambda _: times_s.append(time.perf_counter()))
            if self._live:  # they have tokens to come of the step that is under way; else the engine pauses at once
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

    async def _forget(self, llm: versions.AsyncLLM, paused: asyncio.Future[None]) -> None:
        """Clear the cache of an engine, as soon as it is paused."""
        await paused
        await self._answer(llm, versions.forget(llm))

    async def _received(self, llm: versions.AsyncLLM, weights: Weights) -> tuple[Served, dict[str, int]]:
        """Have all ranks bring a version, and check it; also, how many tokens each live request has."""
        receiving = versions.receive(llm, weights.plain(), list(self._live))
        hashing = asyncio.to_thread(digest_of, weights.shares)  # while the engine is at it
        (received, self.loaded, counts), offered = await asyncio.gather(self._answer(llm, receiving), hashing)
        sha256 = acknowledged(weights.shares, [each.summed for each in received], offered)
        return Served(sha256, slowest([each.record for each in received])), counts

    async def _turn(self, *, awake: bool) -> tuple[int, int]:
        llm = self._llm
        if llm is None or llm.errored:
            return 0, 0  # whoever needs it starts it, awake
        before_bytes = await self._answer(llm, versions.bytes_in_use(llm))
        if awake:
            await self._rouse(llm)
        else:
            await self._answer(llm, llm.sleep(level=1))
            self._asleep = llm
        return before_bytes, await self._answer(llm, versions.bytes_in_use(llm))

    async def _rouse(self, llm: versions.AsyncLLM) -> None:
        await self._answer(llm, llm.wake_up())
        self._asleep = None

    async def _answer(self, llm: versions.AsyncLLM, call: Awaitable[T]) -> T:
        """What an engine answers. Raises EngineDeadError where it dies meanwhile: vLLM leaves such callers waiting."""
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
            what=f"the vLLM engine has said nothing for {after_s:g} s",
            why="it owes an answer",
            fix="look into logs/ of the run; a resumed run starts another engine",
        )

    def _died(self) -> Problem:
        return Problem(
            where=self.setup.where,
            what=f"the vLLM engine died {ATTEMPTS} times under one task",
            why="a lost engine is started again once a task",
            fix="look into logs/ of the run; often the memory is short: a smaller model, or fewer samples at a time",
        )

    def _not_again(self) -> Problem:
        return Problem(
            where=self.setup.where,
            what="the vLLM engine died, and the trainer would have to carry the weights here once more",
            why="it does so for a worker in the place of this one, not for an engine",
            fix="resume from the last checkpoint",
        )

    def _overtaken(self) -> Problem:
        return Problem(
            where=self.setup.where,
            what="the vLLM engine died, and the weights that it served are not in the trainer's memory any more",
            why="the trainer is already writing the next version there",
            fix="resume from the last checkpoint",
        )

    def _not_started(self, error: BaseException) -> Problem:
        return Problem(
            where=self.setup.where,
            what=f"vLLM cannot start with the model in {str(self.setup.folder)!r}: {told(error)}",
            why="a vllm worker group samples with it",
            fix="look into logs/ of the run; the architecture must be one that vLLM has, and the memory suffice",
        )
