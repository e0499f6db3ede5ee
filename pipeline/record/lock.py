"""One run at a time in a run directory: an exclusive lock on a file in it, named `lock`.

    with held(run_dir, where="--run-dir runs/a"):
        ...  # nobody else writes here

The kernel frees the lock when its process ends, however it ends. Child processes do not hold it. Readers need no lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO

import msgspec

from pipeline.errors import GraphError, Problem, naming
from pipeline.forks import closed_in_copies
from pipeline.reading import decode
from pipeline.rundir import RunDir, private

_HELD = (errno.EWOULDBLOCK, errno.EACCES)  # flock's answer, and that of file systems that emulate it


class Holder(msgspec.Struct):
    """The process that holds the lock, or was the last to hold it."""

    pid: int
    host: str


def is_alive(pid: int) -> bool:
    """Return whether a process of this machine has that id."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def holder_lives(run_dir: RunDir) -> bool | None:
    """Return whether the last holder of the lock is a living process; None if that cannot be known from here: it was on
    another machine, or is not known."""
    try:
        holder = None if run_dir.lock.is_symlink() else decode(run_dir.lock.read_bytes(), Holder)
    except (OSError, msgspec.DecodeError):
        return None
    return is_alive(holder.pid) if holder and holder.pid > 0 and holder.host == socket.gethostname() else None


@contextmanager
def held(run_dir: RunDir, *, where: str) -> Iterator[Problem | None]:
    """Hold the lock of a run directory within the context.

    Raises GraphError at `where` if another process holds it, or the folder is not writable. Yields a warning if the
    file system has no locks.
    """
    try:
        file = private(run_dir.lock).open("a+b", buffering=0)  # nothing is left to write when it is closed
    except OSError as error:
        raise GraphError(_unwritable(where, error)) from error
    with ExitStack() as ends:
        ends.callback(_close, file)
        warning = None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                file.seek(0)
                raise GraphError(_written(where, file.read())) from None
            warning = _unlocked(where, error)
        closed_in_copies(file)  # a copy may outlive this process
        try:
            with naming(run_dir.lock):
                file.truncate(0)
                file.write(msgspec.json.encode(Holder(pid=os.getpid(), host=socket.gethostname())))
        except OSError as error:
            raise GraphError(_unwritable(where, error)) from error
        yield warning


def _close(file: FileIO) -> None:
    with suppress(OSError):  # user code may have closed it
        file.close()


def _written(where: str, content: bytes) -> Problem:
    try:
        holder = decode(content, Holder)
        by = f"process {holder.pid} on {holder.host}"
    except msgspec.DecodeError:  # it has just taken the lock
        by = "another process"
    return Problem(
        where=where,
        what=f"a run is writing it: {by}",
        why="two runs in one folder would overwrite each other's record",
        fix="use another folder, or wait until that run has ended",
    )


def _unwritable(where: str, error: OSError) -> Problem:
    return Problem(
        where=where,
        what=f"a file in it cannot be written: {error.strerror}: {error.filename}",
        why="the run is recorded there",
        fix="use --run-dir with a writable path",
    )


def _unlocked(where: str, error: OSError) -> Problem:
    return Problem(
        where=where,
        what=f"its file system has no locks: {error.strerror}",
        why="nothing keeps a second run out of this folder",
        fix="start one run at a time in it, or use another file system",
        warning=True,
    )
