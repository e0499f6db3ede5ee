"""Reads files that a crash, a failing disk or another program may have damaged. Knows no content.

    with readable(path, CheckpointError, why="a checkpoint has it", fix="resume from another step"):
        manifest = decode(path.read_bytes(), Manifest)

`decode` is msgspec's with one kind of error, whatever is wrong with the bytes.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, overload

import msgspec

from pipeline.errors import Problem, SluiceError

T = TypeVar("T")
BROKEN = (OSError, ValueError, RecursionError)  # what reading a damaged file raises: JSON's errors are ValueErrors
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=10**18)]  # a number of things in a file
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
        raise OSError(errno.EINVAL, "it is not a file", str(path))


def check_files(folder: Path) -> None:
    """Raise OSError if a folder holds a pipe or a device."""
    for path in folder.iterdir():
        check_file(path)


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
        raise kind(Problem(where=str(path), what=f"it cannot be read: {reason(error)}", why=why, fix=fix)) from error
