"""Processes of environments, as the worker of their episodes sees them: started, asked, and killed at a deadline.

    processes = Processes(Calculator(), count=4, log=folder)
    place = processes.place()                              # the process with the fewest episodes
    answer = await place.ask("open", episode=0, deadline_s=60.0, row={"prompt": "1+1="}, seed=(0, 0, 0))
    processes.close()

An event loop in a thread of its own talks to them, so a deadline counts the environment's time and not the worker's.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pipeline import StageError
from pipeline.errors import Problem
from stages.episode.environment import Environment
from stages.episode.frames import HEAD, HostAnswer, HostCall, Opening, framed
from stages.episode.host import NOT_LOADED
from stages.pickling import pickled

START_S = 60.0  # for a process, and the environment's modules
T = TypeVar("T")


class EnvironmentFailedError(Exception):
    """A call of an environment failed: `kind` is the class of what it raised, "deadline", or "died"."""

    def __init__(self, method: str, kind: str, text: str = "") -> None:
        super().__init__(f"{method}: {kind}: {text}")
        self.method, self.kind, self.text = method, kind, text


class _ProcessDied(Exception):  # noqa: N818 - never leaves this file
    """What waits for an answer gets this."""


class EnvironmentProcess:
    """One process of environments, and the episodes in it."""

    def __init__(self, processes: Processes, name: str) -> None:
        self._processes, self._name = processes, name
        self.episodes: set[int] = set()
        self.is_lost = False
        self._why = "died"
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[HostAnswer]] = {}
        self._turn = asyncio.Lock()  # of methods that are no coroutines: one runs at a time
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "stages.episode.host", str(theirs.fileno())]
        folders = [folder for folder in (os.path.abspath(path or ".") for path in sys.path)]
        with processes.log(name) as log:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
            )  # fmt: skip
        theirs.close()
        self._socket = ours
        self._opening = framed(Opening(processes.pickled, folders))
        self._ready = processes.run(self._connect())

    async def ask(self, method: str, episode: int, deadline_s: float, **given: Any) -> HostAnswer:
        """Call a method of the environment. Raises EnvironmentFailedError if it raises, takes longer than `deadline_s`
        seconds, or its process dies; an overdue process is killed. Raises StageError if the environment cannot be
        loaded there."""
        return await asyncio.wrap_future(self._processes.run(self._ask(method, episode, deadline_s, given)))

    async def _connect(self) -> None:
        self._socket.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        self._writer.write(self._opening)
        self._reading = asyncio.ensure_future(self._read(reader))

    async def _ask(self, method: str, episode: int, deadline_s: float, given: dict[str, Any]) -> HostAnswer:
        with suppress(EnvironmentFailedError):
            await asyncio.wrap_future(self._ready)
        if self._processes.one_by_one(method):
            async with self._turn:
                return await self._answered(method, episode, deadline_s, given)
        return await self._answered(method, episode, deadline_s, given)

    async def _answered(self, method: str, episode: int, deadline_s: float, given: dict[str, Any]) -> HostAnswer:
        if self.is_lost:
            raise self._processes.died(method)
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._writer.write(framed(HostCall(number=number, episode=episode, method=method, **given)))
        try:
            answer = await asyncio.wait_for(asyncio.shield(waiting), deadline_s)
        except TimeoutError:
            self.kill("died")
            raise EnvironmentFailedError(method, "deadline", f"it took longer than {deadline_s:g} s") from None
        except _ProcessDied:
            raise self._processes.died(method) from None
        finally:
            self._waiting.pop(number, None)
        if answer.error:
            raise EnvironmentFailedError(method, *answer.error)
        return answer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
                answer = msgspec.msgpack.decode(await reader.readexactly(size), type=HostAnswer)
                if answer.number == NOT_LOADED:
                    assert answer.error
                    self._processes.unusable = answer.error
                elif (waiting := self._waiting.get(answer.number)) and not waiting.done():
                    waiting.set_result(answer)
        self._lose()

    def _lose(self) -> None:
        """Every call that waits has failed."""
        self.is_lost = True
        self._processes.forget(self)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(_ProcessDied())
                waiting.exception()  # may be nobody's

    def kill(self, why: str = "died") -> None:
        """End the process, with all that it started in its session."""
        self._why, self.is_lost = why, True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Processes:
    """At least `count` processes of one environment; those that die are replaced when one is wanted."""

    def __init__(self, environment: Environment, *, count: int, log: Path | None, name: str = "environment") -> None:
        self.pickled = pickled(environment)
        self._count, self._log, self._name = count, log, name
        self._methods = {method: getattr(environment, method) for method in ("open", "turn", "close")}
        self.unusable: tuple[str, str] | None = None
        self._made, self._episodes = itertools.count(), itertools.count()
        self._places: list[EnvironmentProcess] = []
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="environments").start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Any:
        """Run a coroutine in the loop of these processes. Returns its concurrent future."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def one_by_one(self, method: str) -> bool:
        """Whether a process runs one call of this method at a time."""
        return not inspect.iscoroutinefunction(self._methods[method])

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
            return StageError(_not_loaded(*self.unusable))
        return EnvironmentFailedError(method, "died")

    def forget(self, place: EnvironmentProcess) -> None:
        """A process has died."""
        with self._lock:
            self._places = [other for other in self._places if other is not place]

    def close(self) -> None:
        """End all processes."""
        for place in list(self._places):
            place.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _start(self) -> EnvironmentProcess:
        return EnvironmentProcess(self, f"{self._name}-{next(self._made)}")


def _not_loaded(kind: str, text: str) -> Problem:
    return Problem(
        where="environment",
        what=f"it cannot be loaded in a process of its own: {kind}: {text}",
        why="environments run beside the worker, from what the graph's file imports",
        fix="import in the graph's file what it needs, or install it on this machine",
    )
