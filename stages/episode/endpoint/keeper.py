"""The process that starts the commands of a worker's episodes: python -m stages.episode.endpoint.keeper FD.

Ends, with all processes that the commands have started, when the other end of its socket is closed: when the run has
ended or was killed. Each command has a session and a folder of its own, which go with it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec

from stages.episode import children
from stages.episode.frames import close_stream, frames, send

SHOWN = 1 << 16  # last bytes of what a command printed
NOT_STARTED = 127  # the code of a command that could not be started, as in a shell


class StartCommand(msgspec.Struct, frozen=True, tag="start"):
    """Start a command, with these variables and this text on its standard input."""

    number: int
    command: list[str]
    variables: dict[str, str]
    given: str


class EndCommand(msgspec.Struct, frozen=True, tag="end"):
    """End a command: by SIGTERM, and after `grace_s` seconds by SIGKILL."""

    number: int
    grace_s: float


class EndedCommand(msgspec.Struct, frozen=True):
    """A command has ended."""

    number: int
    code: int
    printed: str
    errors: str


class CommandKeeper:
    """Starts and ends commands for the other end of the connection."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers: dict[int, int] = {}  # of commands that run, by process
        self._writer: asyncio.StreamWriter | None = None

    async def serve(self, connection: socket.socket) -> None:
        """Serve until the connection ends."""
        connection.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=connection)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)
        async for asked in frames(reader, StartCommand | EndCommand):
            if isinstance(asked, StartCommand):
                self._start(asked)
            else:
                self._end(asked)
        close_stream(self._writer)

    def _start(self, asked: StartCommand) -> None:
        place = self._folder / str(asked.number)
        (place / "work").mkdir(parents=True)
        (place / "given").write_text(asked.given)
        try:
            with (
                (place / "given").open() as given,
                (place / "out").open("wb") as out,
                (place / "err").open("wb") as err,
            ):
                made = subprocess.Popen(
                    asked.command, cwd=place / "work", env=asked.variables, stdin=given, stdout=out, stderr=err,
                    start_new_session=True,
                )  # fmt: skip
        except (OSError, ValueError) as error:
            self._say(EndedCommand(asked.number, NOT_STARTED, "", f"{asked.command[0]}: {error}"))
            return
        made.returncode = 0  # it is waited for below
        self._numbers[made.pid] = asked.number

    def _end(self, asked: EndCommand) -> None:
        for pid in [pid for pid, number in self._numbers.items() if number == asked.number]:
            _signal(pid, signal.SIGTERM if asked.grace_s else signal.SIGKILL)
            if asked.grace_s:
                asyncio.get_running_loop().call_later(asked.grace_s, self._kill, pid, asked.number)

    def _kill(self, pid: int, number: int) -> None:
        if self._numbers.get(pid) == number:
            _signal(pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Take the codes of processes that have ended: commands, and what they have left behind."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if (number := self._numbers.pop(pid, None)) is not None:
                _signal(pid, signal.SIGKILL)  # others of its session
                place = self._folder / str(number)
                code = os.waitstatus_to_exitcode(status)
                self._say(EndedCommand(number, code, _end_of(place / "out"), _end_of(place / "err")))
                shutil.rmtree(place, ignore_errors=True)

    def _say(self, message: EndedCommand) -> None:
        assert self._writer is not None
        send(self._writer, message)


def _signal(session: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(session, number)


def _end_of(path: Path) -> str:
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - SHOWN))
        return file.read().decode(errors="replace")
    return ""


def main() -> None:
    """Serve the socket that the command line names."""
    children.adopt()
    folder = Path(tempfile.mkdtemp(prefix="sluice-endpoint-"))
    try:
        asyncio.run(CommandKeeper(folder).serve(socket.socket(fileno=int(sys.argv[1]))))
    finally:
        children.end_all()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
