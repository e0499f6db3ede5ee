"""Reads files that a crash, a failing disk or another program may have damaged, or that this user may not read. Knows
no content.

    with readable(path, CheckpointError, why="a checkpoint has it", fix="resume from another step"):
        manifest = decode(path.read_bytes(), Manifest)

`decode` is msgspec's with one kind of error, whatever is wrong with the bytes. `refused` is the problem of an OSError
that nobody expected.
"""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, overload

import msgspec

from pipeline.errors import Problem, SluiceError

T = TypeVar("T")
BROKEN = (OSError, ValueError, RecursionError)  # what reading a damaged file raises: JSON's errors are ValueErrors
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=10**18)]  # a number of things in a file
NOT_A_FILE = "it is not a file"
LONGEST = 300  # characters of a reason


@overload
def decode(data: bytes, kind: type[T]) -> T: ...
@overload
def decode(data: bytes, kind: msgspec.json.Decoder[T]) -> T: ...
@overload
def decode(data: bytes, kind: Any) -> Any: ...
def decode(data: bytes, kind: Any) -> Any:
    """Decode JSON to a type, or with a decoder. Raises msgspec.DecodeError, also for wrong UTF-8 and deep nesting."""
    try:
        return kind.decode(data) if isinstance(kind, msgspec.json.Decoder) else msgspec.json.decode(data, type=kind)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"it is not UTF-8 (byte {error.start} of a text)") from error
    except RecursionError as error:
        raise msgspec.DecodeError("its values are nested too deeply") from error


def is_text(name: str) -> bool:
    """Return whether the name of a file is text: what stands for bytes that are not UTF-8 cannot be recorded."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def reason(error: BaseException) -> str:
    """Return why a file cannot be read: one line."""
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    elif isinstance(error, UnicodeDecodeError):
        text = "it is not UTF-8"
    elif isinstance(error, RecursionError):
        text = "its values are nested too deeply"
    else:
        text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def check_file(path: Path) -> None:
    """Raise OSError if a path is a pipe or a device: who opens a pipe may wait for ever."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, NOT_A_FILE, str(path))


def check_files(folder: Path) -> None:
    """Raise OSError if a folder holds a pipe or a device."""
    for path in folder.iterdir():
        check_file(path)


def refused(error: OSError, where: str = "") -> Problem | None:
    """Return the problem of a path that the file system refuses, at the path or at a place that names it; None if the
    error has no path."""
    if not isinstance(error.filename, str | bytes | os.PathLike):
        return None
    path = os.fsdecode(error.filename)
    why, fix = _cause(error) or ("the command needs it", "correct the path, or use another")
    what = f"{path!r} cannot be read: {reason(error)}" if where else f"the file system refuses it: {reason(error)}"
    return Problem(where=where or path, what=what, why=why, fix=fix)


def _cause(error: OSError) -> tuple[str, str] | None:
    """Return why the file system refuses a path, and what to do, if that is its name, its kind or its permissions."""
    if error.errno == errno.ENAMETOOLONG:
        return "a name has at most 255 bytes, and a path 4,095", "use a shorter path"
    if error.strerror == NOT_A_FILE:
        return "a pipe or a device may let its reader wait for ever", "restore the file, or name another"
    if error.errno not in (errno.EACCES, errno.EPERM) or not isinstance(error.filename, str | bytes | os.PathLike):
        return None
    path = Path(os.fsdecode(error.filename))
    for each in (*reversed(path.parents), path):
        wanted = os.X_OK if each != path else os.R_OK | os.X_OK if each.is_dir() else os.R_OK
        if each.exists() and not os.access(each, wanted):
            typed = shlex.quote(str(each))
            if each.stat().st_uid == os.geteuid():
                return f"the mode of {each} keeps even its owner out", f"chmod -R u+rX {typed}"
            return f"{each} belongs to another user", f"ask its owner for access: chmod -R go+rX {typed}"
    return "this user may not write there", "use a path that you may write to"


@contextmanager
def readable(
    path: Path | str, kind: type[SluiceError], *, why: str, fix: str, also: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn the errors of reading a damaged file, and those in `also`, into one of this kind with one problem."""
    caught: tuple[type[Exception], ...] = (*BROKEN, *also)
    try:
        if isinstance(path, Path):
            check_file(path)
        yield
    except caught as error:
        why, fix = (_cause(error) if isinstance(error, OSError) else None) or (why, fix)
        raise kind(Problem(where=str(path), what=f"it cannot be read: {reason(error)}", why=why, fix=fix)) from error
