"""The commands of an endpoint's episodes, as the worker of the episodes sees them: places of environments.

A command is an environment whose `turn` sends the policy's reply as the answer to its last request, and waits for the
next one. Deadlines, retries and blame are those of other environments.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from pipeline.declare.times import ENVIRONMENT, WORKER, SampleTimes
from stages.episode import children
from stages.episode.companion import companion
from stages.episode.endpoint.keeper import EndCommand, EndedCommand, StartCommand
from stages.episode.endpoint.server import HOST, MODEL, EndpointServer
from stages.episode.endpoint.session import CommandEnded, NextRequest, Session
from stages.episode.environment import Reply
from stages.episode.frames import HostAnswer, UnsendableError, close_stream, frames, send
from stages.episode.host import finite, is_end
from stages.episode.loop_thread import LoopThread
from stages.episode.processes import EnvironmentFailedError

CLOSE_S = 5.0  # until what the commands leave is gone
KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SSL_CERT_FILE")
LOG_CHARACTERS = 4000  # of what a command that failed has printed


class CommandPlace:
    """The command of one episode."""

    def __init__(self, commands: Commands, number: int) -> None:
        self.episodes: set[int] = set()
        self._commands, self._number = commands, number
        self._key = f"sk-{secrets.token_hex(16)}"
        self._session: Session | None = None  # from the start to the end of the command

    async def ask(
        self, method: str, episode: int, deadline_s: float, times: SampleTimes | None = None, **given: Any
    ) -> HostAnswer:
        """Start the command and wait for its first request ("open"), answer it and wait for the next ("turn"), or end
        the command ("close"). Raises EnvironmentFailedError if it takes longer than `deadline_s` seconds, or the
        command fails. `times` gets the time of the command."""
        times = times or SampleTimes()
        times.until(WORKER)
        times.during = lambda: ENVIRONMENT
        try:
            return await asyncio.wrap_future(self.start(method, episode, deadline_s, **given))
        finally:
            times.until(ENVIRONMENT)

    def start(self, method: str, episode: int, deadline_s: float, **given: Any) -> Future[HostAnswer]:
        """Do as `ask` does, without waiting."""
        call = self._close(deadline_s) if method == "close" else self._called(method, deadline_s, **given)
        made: Future[HostAnswer] = self._commands.loop.run(call)
        return made

    def kill(self) -> None:
        """End the command at once."""
        self._commands.loop.run(self._close(0.0))

    async def _called(
        self,
        method: str,
        deadline_s: float,
        *,
        row: Mapping[str, Any] = {},
        seed: Sequence[int] = (),
        reply: Reply | None = None,
    ) -> HostAnswer:
        try:
            async with asyncio.timeout(deadline_s):
                if reply is None:
                    self._session = await self._commands.begin(self._number, self._key, row, seed)
                else:
                    self._running().reply(reply)
                return self._answer(method, await self._running().events.get())
        except TimeoutError:
            await self._close(0.0)
            raise EnvironmentFailedError(method, "deadline", f"it took longer than {deadline_s:g} s") from None
        except UnsendableError as error:
            raise EnvironmentFailedError(method, "unsendable", str(error)) from error

    def _running(self) -> Session:
        if self._session is None:
            raise EnvironmentFailedError("turn", "died")
        return self._session

    def _answer(self, method: str, event: NextRequest | CommandEnded | str) -> HostAnswer:
        if isinstance(event, NextRequest):
            asked = event.asked
            return HostAnswer(number=0, said=event.added, tools=asked.tools, most=asked.most)
        if isinstance(event, str):
            return HostAnswer(number=0, end=event)
        if event.code:
            kind = f"exit_{event.code}" if event.code > 0 else f"signal_{-event.code}"
            self._commands.note(f"episode {self._number} {kind}\n{event.errors[-LOG_CHARACTERS:]}")
            raise EnvironmentFailedError(method, kind, event.errors[-LOG_CHARACTERS:])
        if method == "open":
            raise EnvironmentFailedError(method, "no_request")
        try:
            end, reward = result_in(event.printed)
        except ValueError as error:
            raise EnvironmentFailedError(method, "result", str(error)) from None
        return HostAnswer(number=0, end=end, reward=reward)

    async def _close(self, grace_s: float) -> HostAnswer:
        session, self._session = self._session, None
        if session is not None:
            session.end()
            await self._commands.finish(self._number, self._key, grace_s)
        return HostAnswer(number=0)


class Commands:
    """The commands of a worker: one for each episode, started by a process of their own."""

    closes = True

    def __init__(self, command: Sequence[str], *, variables: Mapping[str, str], log: Path | None, name: str) -> None:
        self._command, self._variables, self._log, self._name = list(command), dict(variables), log, name
        self._numbers, self._episodes = itertools.count(), itertools.count()
        self._server = EndpointServer()
        self._running: dict[int, Session] = {}  # by command
        self._keeper: tuple[subprocess.Popen[bytes], asyncio.StreamWriter] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self.loop = LoopThread("endpoint")

    def number(self) -> int:
        """A number for the next episode."""
        return next(self._episodes)

    def place(self) -> CommandPlace:
        """A place for an episode."""
        return CommandPlace(self, next(self._numbers))

    def fresh(self) -> CommandPlace:
        """As `place`: each has one episode."""
        return self.place()

    async def begin(self, number: int, key: str, row: Mapping[str, Any], seed: Sequence[int]) -> Session:
        """Start a command. What it asks for comes into the session."""
        async with self._starting:
            writer = await self._started()
        session = self._running[number] = self._server.sessions[key] = Session()
        asked = StartCommand(number, filled(self._command, row), self._environment(key, seed), json.dumps(dict(row)))
        send(writer, asked)
        return session

    async def finish(self, number: int, key: str, grace_s: float) -> None:
        """End a command, and wait until it has."""
        self._server.sessions.pop(key, None)
        session = self._running.get(number)
        if session is None or self._keeper is None:
            return
        send(self._keeper[1], EndCommand(number, grace_s))
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s + CLOSE_S):
                await session.has_ended.wait()

    def note(self, text: str) -> None:
        """Write to the log of the commands."""
        if self._log is not None:
            self._log.mkdir(parents=True, exist_ok=True)
            with (self._log / f"{self._name}.log").open("a") as log:
                log.write(f"{text}\n")

    def close(self) -> None:
        """End all commands."""
        with suppress(TimeoutError):
            self.loop.run(self._end()).result(2 * CLOSE_S)
        self.loop.close()

    async def _end(self) -> None:
        if self._keeper is not None and self._serving is not None:
            process, writer = self._keeper
            close_stream(writer)  # which ends the keeper, and it the commands
            try:
                await asyncio.to_thread(process.wait, CLOSE_S)
            except subprocess.TimeoutExpired:
                children.kill(process.pid)
                process.wait()
            await self._serving
        await self._server.stop()

    def _environment(self, key: str, seed: Sequence[int]) -> dict[str, str]:
        """The variables of a command: some of this process, what it needs to find the server, and the graph's."""
        url = f"http://{HOST}:{self._server.port}"
        return {
            **{name: os.environ[name] for name in KEPT if name in os.environ},
            "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key,
            "SLUICE_MODEL": MODEL, "SLUICE_SEED": str(Random(repr(tuple(seed))).getrandbits(31)),
            **self._variables,
        }  # fmt: skip

    async def _started(self) -> asyncio.StreamWriter:
        """The connection to the keeper, which starts with the first command, and again if it died."""
        if not self._server.port:
            await self._server.start()
        if self._keeper is None:
            process, ours = companion("stages.episode.endpoint.keeper", stdout=subprocess.DEVNULL, stderr=None)
            reader, writer = await asyncio.open_connection(sock=ours)
            self._keeper = process, writer
            self._serving = asyncio.get_running_loop().create_task(self._serve(reader))
        return self._keeper[1]

    async def _serve(self, reader: asyncio.StreamReader) -> None:
        """Take what the keeper says until it ends; then all its commands have."""
        async for ended in frames(reader, EndedCommand):
            self._has_ended(ended.number, CommandEnded(ended.code, ended.printed, ended.errors))
        keeper, self._keeper = self._keeper, None
        for number in list(self._running):
            self._has_ended(number, CommandEnded(-9))
        if keeper is not None:
            close_stream(keeper[1])
            keeper[0].poll()

    def _has_ended(self, number: int, event: CommandEnded) -> None:
        if session := self._running.pop(number, None):
            session.events.put_nowait(event)
            session.has_ended.set()


def filled(command: Sequence[str], row: Mapping[str, Any]) -> list[str]:
    """A command with the fields of a row in the places that have their names, such as {prompt}."""
    names = "|".join(map(re.escape, row))
    return (
        [re.sub(rf"\{{({names})\}}", lambda found: str(row[found[1]]), part) for part in command] if row else [*command]
    )


def result_in(printed: str) -> tuple[str, float]:
    """The end and the reward that a command has printed as its last line, a JSON object; "answered" and 0.0 if that is
    something else. Raises ValueError for other values of the two."""
    lines = printed.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        return "answered", 0.0
    end, reward = found.get("end", "answered"), found.get("reward", 0.0)
    if not (is_end(end) and isinstance(reward, int | float) and not isinstance(reward, bool)):
        raise ValueError(f"its last line is {lines[-1]:.100}; end is a word, not lost: or failed:, and reward a number")
    return end, finite(reward)
