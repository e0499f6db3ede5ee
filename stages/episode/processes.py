"""Processes of environments, as the worker of their episodes sees them: started, asked, and killed at a deadline.

    processes = Processes(Calculator(), count=4, log=folder)
    place = processes.place()                              # the process with the fewest episodes
    answer = await place.ask("open", episode=0, deadline_s=60.0, row={"prompt": "1+1="}, seed=(0, 0, 0))
    processes.close()

An event loop in a thread of its own talks to them, so a deadline counts the environment's time and not the worker's.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import StageError
from pipeline.declare.times import ENVIRONMENT, PROCESS, WORKER, SampleTimes
from pipeline.errors import Problem
from stages.episode import children
from stages.episode.companion import companion, import_path
from stages.episode.environment import METHODS, Environment, plain_methods
from stages.episode.frames import (
    HostAnswer,
    HostCall,
    Opening,
    UnsendableError,
    close_stream,
    framed,
    frames,
    send_frame,
)
from stages.episode.host import NOT_LOADED, READY
from stages.episode.loop_thread import LoopThread
from stages.pickling import pickled

START_S = 60.0  # for a process, and the environment's modules
CLOSE_S = 5.0  # until what a killed process leaves is closed


class EnvironmentFailedError(Exception):
    """A call of an environment failed: `kind` is the class of what it raised, "deadline", or "died"."""

    def __init__(self, method: str, kind: str, text: str = "") -> None:
        super().__init__(f"{method}: {kind}: {text.removeprefix(f'{kind}: ')}")
        self.method, self.kind, self.text = method, kind, text


def frame_of(call: HostCall) -> bytes:
    """The frame of a call. Raises EnvironmentFailedError for one that cannot be sent."""
    try:
        return framed(call)
    except UnsendableError as error:
        raise EnvironmentFailedError(call.method, "unsendable", str(error)) from error


class PlaceLostError(EnvironmentFailedError):
    """The worker beside an environment is gone, or cannot be reached: the environment itself has not failed."""

    def __init__(self, method: str) -> None:
        super().__init__(method, "unreachable")


@dataclass
class _Waiting:
    """A call that was not answered yet. `timer` runs from the moment when it is sent."""

    call: HostCall
    frame: bytes
    deadline_s: float
    future: Future[HostAnswer]
    timer: asyncio.TimerHandle | None = None
    sent_s: float | None = None  # when it was sent,
    answered_s: float | None = None  # and answered


class EnvironmentProcess:
    """One process of environments, and the episodes in it. Its callbacks run in the loop of `processes`."""

    def __init__(self, processes: Processes, name: str) -> None:
        self._processes = processes
        self.episodes: set[int] = set()
        self.is_lost = False  # killed, or found dead
        self._numbers = itertools.count()
        self._sent: dict[int, _Waiting] = {}
        self._queue: deque[_Waiting] = deque()  # calls of methods that run one by one, while one of them runs
        self._runs_one = False
        self._writer: asyncio.StreamWriter | None = None
        self._is_ready = False  # deadlines begin then
        with processes.log(name) as log:
            self._process, ours = companion("stages.episode.host", stdout=log, stderr=log)
        self._opening = framed(Opening(processes.pickled, import_path()))
        self.serving = processes.loop.run(self._serve(ours))

    async def ask(
        self, method: str, episode: int, deadline_s: float, times: SampleTimes | None = None, **given: Any
    ) -> HostAnswer:
        """Call a method of the environment. Raises EnvironmentFailedError if it raises, takes longer than `deadline_s`
        seconds, its process dies, or the call cannot be sent; an overdue process is killed. Raises StageError if the
        environment cannot be loaded there. `times` gets the time until the call was sent, and that in the
        environment."""
        times = times or SampleTimes()
        times.until(WORKER)
        waiting = self._asked(method, episode, deadline_s, **given)
        times.during = lambda: PROCESS if waiting.sent_s is None else ENVIRONMENT
        try:
            return await asyncio.wrap_future(waiting.future)
        finally:
            times.until(PROCESS, waiting.sent_s)
            times.until(ENVIRONMENT, waiting.answered_s)

    def start(self, method: str, episode: int, deadline_s: float, **given: Any) -> Future[HostAnswer]:
        """Call a method as `ask` does, without waiting for its answer."""
        return self._asked(method, episode, deadline_s, **given).future

    def _asked(self, method: str, episode: int, deadline_s: float, **given: Any) -> _Waiting:
        call = HostCall(number=next(self._numbers), episode=episode, method=method, **given)
        waiting = _Waiting(call, frame_of(call), deadline_s, Future())
        self._processes.loop.soon(self._add, waiting)
        return waiting

    def kill(self) -> None:
        """End the process, with all that it has started."""
        lost, self.is_lost = self.is_lost, True
        if not lost:  # later the number may be that of others
            children.kill(self._process.pid)
        self._process.wait()

    def _add(self, waiting: _Waiting) -> None:
        if waiting.call.method == "close":  # what its episode still waits for is not wanted any more
            self._queue = deque(each for each in self._queue if each.call.episode != waiting.call.episode)
        self._queue.append(waiting)
        self._send()

    def _send(self) -> None:
        """Send what may run now."""
        if self.is_lost:
            self._lose()
            return
        while self._writer is not None and self._is_ready and (waiting := self._next()):
            self._runs_one = self._runs_one or waiting.call.method in self._processes.one_by_one
            self._sent[waiting.call.number] = waiting
            waiting.sent_s = time.monotonic()
            waiting.timer = asyncio.get_running_loop().call_later(waiting.deadline_s, self._overdue, waiting)
            send_frame(self._writer, waiting.frame)

    def _next(self) -> _Waiting | None:
        """Take the next call that may run now. A coroutine overtakes methods that wait for their turn."""
        if self._runs_one and len(self._processes.one_by_one) == len(METHODS):
            return None  # without a look at each of thousands
        for waiting in self._queue:
            if not (self._runs_one and waiting.call.method in self._processes.one_by_one):
                self._queue.remove(waiting)
                return waiting
        return None

    def _check_start(self) -> None:
        if not self._is_ready:
            self.kill()

    def _overdue(self, waiting: _Waiting) -> None:
        text = f"it took longer than {waiting.deadline_s:g} s"
        self._fail(waiting, EnvironmentFailedError(waiting.call.method, "deadline", text))
        self.kill()

    async def _serve(self, ours: socket.socket) -> None:
        """Connect, and take answers until the process ends."""
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(self._opening)
        starting = asyncio.get_running_loop().call_later(START_S, self._check_start)
        async for answer in frames(reader, HostAnswer):
            self._take(answer)
        self.kill()
        starting.cancel()
        self._processes.forget(self)
        close_stream(self._writer)
        self._lose()

    def _take(self, answer: HostAnswer) -> None:
        if answer.number == NOT_LOADED:
            self._processes.unusable = answer.error
        if answer.number == READY:
            self._is_ready = True
            self._send()
        if (waiting := self._sent.pop(answer.number, None)) is None:
            return
        waiting.answered_s = time.monotonic()
        if waiting.call.method in self._processes.one_by_one:
            self._runs_one = False
        if answer.error:
            self._fail(waiting, EnvironmentFailedError(waiting.call.method, *answer.error))
        elif self._is_awaited(waiting):
            waiting.future.set_result(answer)
        self._send()

    def _lose(self) -> None:
        """Every call that waits has failed."""
        for waiting in (*self._sent.values(), *self._queue):
            self._fail(waiting, self._processes.died(waiting.call.method))
        self._sent.clear()
        self._queue.clear()

    def _fail(self, waiting: _Waiting, error: Exception) -> None:
        if self._is_awaited(waiting):
            waiting.future.set_exception(error)

    def _is_awaited(self, waiting: _Waiting) -> bool:
        """Whether a call has no result yet and somebody wants one; its deadline has passed with this call."""
        if waiting.timer is not None:
            waiting.timer.cancel()
        return not waiting.future.done() and waiting.future.set_running_or_notify_cancel()


class Processes:
    """At least `count` processes of one environment; those that die are replaced when one is wanted."""

    def __init__(self, environment: Environment, *, count: int, log: Path | None, name: str = "environment") -> None:
        self.pickled = pickled(environment)
        self._count, self._log, self._name = count, log, name
        self.closes = type(environment).close is not Environment.close  # more than to forget the state
        self.one_by_one = plain_methods(environment)  # of which a process runs one at a time
        self.unusable: tuple[str, str] | None = None
        self._made, self._episodes = itertools.count(), itertools.count()
        self._places: list[EnvironmentProcess] = []
        self._all: set[EnvironmentProcess] = set()  # that live, those of one episode too
        self._lock = threading.Lock()
        self.loop = LoopThread("environments")

    def log(self, name: str) -> Any:
        """The file for what a process prints."""
        if self._log is None:
            return open(os.devnull, "ab")
        self._log.mkdir(parents=True, exist_ok=True)
        return (self._log / f"{name}.log").open("ab")

    def number(self) -> int:
        """A number for the next episode."""
        return next(self._episodes)

    def place(self) -> EnvironmentProcess:
        """The process with the fewest episodes, started if there are fewer than `count`."""
        with self._lock:
            living = [place for place in self._places if not place.is_lost]
            self._places = living
            idle = next((place for place in living if not place.episodes), None)
            if idle is None and len(living) < self._count:
                living.append(self._start())
                return living[-1]
            return idle or min(living, key=lambda place: len(place.episodes))

    def fresh(self) -> EnvironmentProcess:
        """A process for one episode alone, whose owner kills it."""
        return self._start()

    def died(self, method: str) -> Exception:
        """What to raise if a process died that was to run this method: StageError if it could not load the
        environment."""
        if self.unusable:
            return StageError(not_loaded(*self.unusable))
        return EnvironmentFailedError(method, "died")

    def forget(self, place: EnvironmentProcess) -> None:
        """A process has died."""
        self._all.discard(place)

    def close(self) -> None:
        """End all processes."""
        for place in list(self._all):
            place.kill()
            with suppress(TimeoutError):
                place.serving.result(CLOSE_S)
        self.loop.close()

    def _start(self) -> EnvironmentProcess:
        made = EnvironmentProcess(self, f"{self._name}-{next(self._made)}")
        self._all.add(made)
        return made


def not_loaded(kind: str, text: str) -> Problem:
    """Return the problem of an environment that raised this when its process loaded it."""
    return Problem(
        where="environment",
        what=f"it cannot be loaded in a process of its own: {kind}: {text}",
        why="environments run beside the worker, from what the graph's file imports",
        fix="import in the graph's file what it needs, or install it on this machine",
    )
