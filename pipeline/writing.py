"""Writes the record of a run: an error of the disk ends the run with the name of the file, as for a checkpoint.

replace(run.plan, text)              # all of it or nothing
refuse_password(url, flag=..., fix=...)   # of an address that is recorded with the flags
with recording(run.metrics): ...     # whatever else writes there
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.errors import CheckpointError, GraphError, Problem
from pipeline.rundir import private

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
                fix="free disk space, or repair the disk, then --resume",
            )
        ) from error


def replace(path: Path, content: bytes) -> None:
    """Write a file of a run that only its owner can read. Until all of it is on the disk, the old one stays. Raises
    CheckpointError if it cannot be written."""
    partial = path.with_name(f".{path.name}.partial")
    with recording(path):
        try:
            with private(partial).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise
