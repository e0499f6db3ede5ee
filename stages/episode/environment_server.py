"""Environments of a worker group, on one of its workers: passes calls of the sampling workers on to its process.

    server = EnvironmentServer(Processes(Calculator(), count=1, log=folder))
    address = server.listen("127.0.0.1")

The process is beside this worker, which enforces the deadlines and measures what the environment takes. When a
connection ends, its episodes are closed.
"""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from dataclasses import dataclass

from msgspec.structs import asdict

from pipeline import StageError
from pipeline.declare.task import ServerAddress
from pipeline.declare.times import ENVIRONMENT, SampleTimes
from stages.episode.admission import admits, keep_alive, new_key
from stages.episode.frames import SentAnswer, SentCall, close_stream, frames, send
from stages.episode.processes import EnvironmentFailedError, EnvironmentProcess, Processes

END_S = 10.0  # to begin to listen, to end that, and for an environment to close that nobody waits for


class EnvironmentServer:
    """Serves who knows its key, with the environment of these processes."""

    def __init__(self, processes: Processes) -> None:
        self._processes, self._key = processes, new_key()
        self._listening: dict[str, asyncio.Server] = {}  # by address

    def listen(self, host: str) -> ServerAddress:
        """Listen at an address, if that has not been asked before."""
        if host not in self._listening:
            self._listening[host] = self._processes.loop.run(asyncio.start_server(self._serve, host, 0)).result(END_S)
        port = self._listening[host].sockets[0].getsockname()[1]
        return ServerAddress(host=host, port=port, key=self._key)

    def close(self) -> None:
        """End the processes, and with their loop the connections."""
        for listening in self._listening.values():
            self._processes.loop.soon(listening.close)
        self._processes.close()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        guest = _Guest(self._processes, writer)
        try:
            if await admits(self._key, reader, writer):
                keep_alive(writer)
                async for call in frames(reader, SentCall):
                    guest.take(call)
        except (TimeoutError, asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
            pass  # it did not know how to enter, or this is the end
        finally:
            guest.leave()
            close_stream(writer)


@dataclass
class _OpenEpisode:
    """An open episode of a connection: its process, its number there, and its last call. `own`: nobody else's."""

    place: EnvironmentProcess
    number: int
    own: bool
    call: asyncio.Task[None] | None = None


class _Guest:
    """One connection, with its open episodes."""

    def __init__(self, processes: Processes, writer: StreamWriter) -> None:
        self._processes, self._writer = processes, writer
        self._open: dict[int, _OpenEpisode] = {}

    def take(self, call: SentCall) -> None:
        """Answer a call. One that its episode has made before, and that is not answered yet, is not wanted any more."""
        if call.method == "open":
            place = self._processes.fresh() if call.own else self._processes.place()
            self._open[call.episode] = _OpenEpisode(place, self._processes.number(), call.own)
            place.episodes.add(self._open[call.episode].number)
        held = self._open[call.episode]
        if held.call is not None:
            held.call.cancel()
        if call.method == "kill" or (call.method == "close" and not held.own):
            del self._open[call.episode]
            held.place.episodes.discard(held.number)
        if call.method == "kill":
            held.place.kill()
        else:
            held.call = asyncio.ensure_future(self._answer(call, held.place, held.number))

    def leave(self) -> None:
        """Close the episodes that are open, and wait for none."""
        for held in self._open.values():
            if held.call is not None:
                held.call.cancel()
            held.place.episodes.discard(held.number)
            if held.own:
                held.place.kill()
            else:
                held.place.start("close", held.number, END_S)
        self._open.clear()

    async def _answer(self, call: SentCall, place: EnvironmentProcess, number: int) -> None:
        given = {"row": call.row, "seed": call.seed, "reply": call.reply}
        times = SampleTimes()
        try:
            found = await place.ask(call.method, number, call.deadline_s, times, **given)
            answer = SentAnswer(**asdict(found) | {"number": call.number}, took_s=times.seconds(ENVIRONMENT))
        except EnvironmentFailedError as error:
            took_s = times.seconds(ENVIRONMENT)
            answer = SentAnswer(number=call.number, error=(error.kind, error.text), took_s=took_s)
        except StageError:
            answer = SentAnswer(number=call.number, error=self._processes.unusable, is_loaded=False)
        send(self._writer, answer)
