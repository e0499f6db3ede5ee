"""Writes the record of a run: an error of the disk ends the run with the name of the file, as for a checkpoint.

replace(run.plan, text)              # all of it or nothing
refuse_password(url, flag=..., fix=...)   # of an address that is recorded with the flags
with whole(path) as partial: ...  # the same for another file
with recording(run.metrics): ...     # whatever else writes there
way_out(error, "make it writable")   # what to do about an OSError
exhausted(error)                  # the error of a run if a machine has no more files, disk or memory
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.errors import CheckpointError, GraphError, Problem
from pipeline.rundir import private

_WAYS_OUT = {
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free disk space or raise the quota",
    errno.EIO: "repair the disk, or copy the run directory to another one",
    errno.EROFS: "mount its file system for writing",
    errno.EACCES: "let this user write there",
    errno.EPERM: "let this user write there",
    errno.ENOMEM: "free memory",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n), or close those that your code opens",
    errno.ENFILE: "raise the system's limit on open files (fs.file-max)",
    errno.EBADF: "let your code close only files that it opened",
    errno.ENOENT: "leave the run directory in its place until the run has ended",
    errno.ESTALE: "leave the run directory in its place until the run has ended",
    errno.EINVAL: "move away what has the name of this file",
    errno.EISDIR: "move away what has the name of this file",
    errno.ENOTDIR: "move away what has the name of this folder",
    errno.EEXIST: "move away what has the name of this folder",
    errno.ELOOP: "move away the symbolic link that has the name of this file",
}
_EXHAUSTED = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_PASSWORD = re.compile(r"//[^/@\s]*:[^/@\s]+@")


def refuse_password(address: str, *, flag: str, fix: str) -> None:
    """Raise GraphError if an address that a flag names contains a password."""
    if _PASSWORD.search(address):
        raise GraphError(
            Problem(
                where=flag,
                what="the address contains a password",
                why="flags are written into the run directory",
                fix=fix,
            )
        )


def way_out(error: OSError, otherwise: str) -> str:
    """Return what to do about a file that could not be written; `otherwise` if the error does not say enough."""
    return _WAYS_OUT.get(error.errno or 0, otherwise)


def exhausted(error: OSError) -> CheckpointError | None:
    """Return the error to report if this one says that the machine has no more of something: files, disk, memory. None
    if it says something else."""
    if error.errno not in _EXHAUSTED:
        return None
    what, fix = f"the run cannot go on: {error.strerror}", f"{_WAYS_OUT[error.errno]}, then --resume"
    where, why = str(error.filename or "this process"), "its checkpoints are complete"
    return CheckpointError(Problem(where=where, what=what, why=why, fix=fix))


@contextmanager
def recording(path: Path | str) -> Iterator[None]:
    """Turn an OSError of this block, which writes `path`, into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            Problem(
                where=str(path),
                what=f"the record could not be written: {error.strerror or error}",
                why="a run goes on only while it is recorded; its checkpoints are complete",
                fix=f"{way_out(error, 'free disk space, or repair the disk')}, then --resume",
            )
        ) from error


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Write a file in the context under the name that this gives it, and give it its own at the end: until then, or if
    that fails, the old one stays."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.rename(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def replace(path: Path, content: bytes) -> None:
    """Write a file of a run that only its owner can read. Until all of it is on the disk, the old one stays. Raises
    CheckpointError if it cannot be written."""
    with recording(path), whole(path) as partial, private(partial).open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
