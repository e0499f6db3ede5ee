"""Runs programs that nobody trusts, such as code that a policy wrote. Knows processes and namespaces, no rewards.

    sandbox = Sandbox()                                       # raises SandboxError where the machine allows none
    ran = sandbox.run(["python3", "main.py"], files={"main.py": "print(6 * 7)"})
    ran.output, ran.code, ran.why                             # "42\\n", 0, ""

A program sees no network, no process and no file but the system's (read-only), Python's, and its own folder in memory,
which is gone with it. Its processor time, memory, files, processes and output are limited, and at its deadline all of
it is killed, as it is if the caller dies. It runs as nobody: without root's rights on the machine, and without any
inside. Linux namespaces do this (`inside.py`), and a filter of system calls (`calls.py`); the kernel is shared, so this
is no defence against one that has holes.
"""

from __future__ import annotations

import itertools
import marshal
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from ops.sandbox.calls import refusing
from ops.sandbox.given import Wrong, call_problems, limit_problems, readable_problems, refuse

FOLDER = "/work"  # where a program starts, with its files
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
FIRST_USER, USERS = 200_000, 50_000  # of programs that a root starts: one each, so that processes are counted apart
CHUNK = 1 << 16
_INSIDE = Path(__file__).with_name("inside.py")
_users = itertools.count(os.getpid())


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What a program may use.

    seconds       until it is killed
    cpu_s         processor seconds of each of its processes
    memory_bytes  addresses of each of its processes
    folder_bytes  its folder in memory, and the largest file
    processes     at the same time, threads included
    output_bytes  of its output, and of its errors; it is killed when it writes more
    """

    seconds: float = 10.0
    cpu_s: int = 10
    memory_bytes: int = 512 << 20
    folder_bytes: int = 32 << 20
    processes: int = 32
    output_bytes: int = 1 << 18

    def problems(self) -> Iterator[Wrong]:
        """What is wrong with them, as (what, why, fix)."""
        return limit_problems(asdict(self), asdict(SandboxLimits()))


@dataclass(frozen=True, kw_only=True)
class SandboxRun:
    """How a program ended: its exit code, minus the number of the signal that ended it; what it wrote; and why it was
    killed: "deadline", "output", or nothing."""

    code: int
    output: str
    error: str
    why: str = ""
    took_s: float = field(default=0.0, compare=False)

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.code == 0 and not self.why


class SandboxError(RuntimeError):
    """This machine allows no sandbox, or one could not be set up; with the reason."""


class Sandbox:
    """Runs programs one at a time; threads may share it. Raises SandboxError if this machine allows none."""

    def __init__(self, limits: SandboxLimits | None = None, *, readable: Sequence[str] = ()) -> None:
        """`readable` are further files and folders that programs may read. Raises ValueError for limits that
        are none."""
        self.limits = limits or SandboxLimits()
        refuse([*self.limits.problems(), *readable_problems(readable)])
        wanted = [*SYSTEM, sys.base_prefix, *readable]
        self._filter = refusing(machine := os.uname().machine)
        if not self._filter:
            raise SandboxError(f"a sandbox does not start: it knows no system calls of {machine}, to refuse some")
        self._readable = [path for path in dict.fromkeys(wanted) if os.path.exists(path)]
        ran = self.run(["true"])
        if not ran.ok:
            raise SandboxError(f"a sandbox does not start: {ran.error.strip() or ran.why or ran.code}")

    def run(self, command: Sequence[str], *, files: Mapping[str, str] | None = None, stdin: str = "") -> SandboxRun:
        """Run a command in a folder that has these files, by their names in it. Raises SandboxError if the sandbox
        itself fails, and ValueError for a command that is none."""
        refuse(call_problems(command, files or {}, stdin))
        begun_s = time.monotonic()
        user = FIRST_USER + next(_users) % USERS if os.getuid() == 0 else None
        limits = asdict(self.limits)
        limits["processes"] += 0 if user is not None else _threads(os.getuid())  # which the kernel counts by user
        given = {
            "command": list(command), "files": dict(files or {}), "stdin": stdin, "readable": self._readable,
            "user": user, "folder": FOLDER, "limits": limits, "path": _path(),
            "filter": self._filter,
        }  # fmt: skip
        reading, writing = os.pipe()
        failing, failed = os.pipe()
        with os.fdopen(writing, "wb") as orders, os.fdopen(failing, "rb") as failure:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_INSIDE), str(reading), str(failed)],
                pass_fds=[reading, failed], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True, env={},
            )  # fmt: skip
            os.close(reading)
            os.close(failed)
            try:
                with suppress(BrokenPipeError):
                    orders.write(marshal.dumps(given))
                    orders.close()
                written = read_output(process, self.limits, begun_s + self.limits.seconds)
            finally:
                end_group(process)
            if said := failure.read().decode():
                raise SandboxError(said)
        return SandboxRun(
            code=exit_code(process.returncode),
            output=written.output.decode(errors="replace"),
            error=written.error.decode(errors="replace"),
            why=written.why,
            took_s=time.monotonic() - begun_s,
        )


@dataclass(frozen=True, kw_only=True)
class SandboxOutput:
    """What a program wrote until it ended or why it did not, and whether it began."""

    output: bytes
    error: bytes
    why: str
    began: bool


def read_output(
    process: subprocess.Popen[bytes], limits: SandboxLimits, deadline_s: float, mark: bytes = b""
) -> SandboxOutput:
    """Read what a program writes until it ends, its deadline or its limit. If there is a mark, the program begins once
    its errors have it, and has `limits.seconds` from then on."""
    assert process.stdout and process.stderr
    parts: dict[IO[bytes], bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    why, errors = "", parts[process.stderr]
    with selectors.DefaultSelector() as selector:
        for stream in parts:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map() and not why:
            ready = selector.select(max(0.0, deadline_s - time.monotonic()))
            why = "" if ready else "deadline"
            for key, _ in ready:
                written: Any = key.fileobj
                made = os.read(written.fileno(), CHUNK)
                if not made:
                    selector.unregister(written)
                parts[written] += made
                if mark and mark in errors:
                    del errors[: errors.index(mark) + len(mark)]
                    mark, deadline_s = b"", time.monotonic() + limits.seconds
                if len(parts[written]) > limits.output_bytes:
                    why = "output"
    if not why:
        try:
            process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            why = "deadline"
    made_out, made_err = (bytes(part[: limits.output_bytes]) for part in parts.values())
    return SandboxOutput(output=made_out, error=made_err, why=why, began=not mark)


def exit_code(code: int) -> int:
    """The exit code of a program, minus the number of a signal that has ended it; from that of what ran it."""
    return 128 - code if 128 < code <= 128 + signal.NSIG else code


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process with all that is in its group or ends with it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream:
            stream.close()


def _threads(user: int) -> int:
    """How many threads a user runs."""
    found = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found += len(os.listdir(folder / "task")) if folder.stat().st_uid == user else 0
    return found


def _path() -> str:
    return os.pathsep.join([os.path.join(sys.base_prefix, "bin"), "/usr/local/bin", "/usr/bin", "/bin"])
