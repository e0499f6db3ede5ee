"""A folder in storage that fsspec reaches: s3://, gs://, sftp://, or a path. Knows no runs.

    remote = opened("s3://bucket/runs", flag="--mirror").within("quickstart-20260101-120000")
    remote.send(file, "checkpoints/step_000100/train/weights.safetensors", size_bytes)

Keys come from where the storage's package looks for them: the environment, or files of the user.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.errors import CheckpointError, GraphError, Problem, SluiceError, message_of
from pipeline.writing import refuse_password

CHUNK_BYTES = 16 << 20
_FLAT = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "cos", "memory"}  # they have no folders to make

_FIXES = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free disk space there")
Advance = Callable[[int], None]  # is called with the bytes of each part that has arrived


def check_address(url: str, *, flag: str) -> None:
    """Raise GraphError if an address has a password, an unknown protocol, or one whose package is not installed. Asks
    no other machine."""
    fix = "remove it; the storage's package takes keys from the environment or its own files"
    refuse_password(url, flag=flag, fix=fix)
    if "?" in url:
        raise GraphError(
            Problem(
                where=flag,
                what="the address has a query, the part after its question mark",
                why="flags are written into the run directory, and a query may hold a key",
                fix=fix,
            )
        )
    from fsspec import get_filesystem_class
    from fsspec.utils import get_protocol

    with _usable(url, flag):
        get_filesystem_class(get_protocol(url))


def opened(url: str, *, flag: str) -> Remote:
    """Return the folder at an address. Raises GraphError as `check_address` does."""
    check_address(url, flag=flag)
    from fsspec.core import url_to_fs

    with _usable(url, flag):
        filesystem, path = url_to_fs(url)
    return Remote(filesystem, path.rstrip("/") or path, url.rstrip("/"))


@contextmanager
def _usable(url: str, flag: str) -> Iterator[None]:
    """Turn whatever fsspec raises for an address into a GraphError."""
    try:
        yield
    except Exception as error:  # a storage may connect here, with errors of its own
        what, fix = message_of(error).removeprefix("ValueError: "), "s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, or a path"
        if isinstance(error, ImportError):
            what, fix = f"a package is missing: {error}", "install it, as in pip install s3fs (s3://) or gcsfs (gs://)"
        why = "fsspec reaches the storage"
        raise GraphError(Problem(where=f"{flag} {url}", what=what, why=why, fix=fix)) from error


def check_apart(url: str, run: Path, *, flag: str) -> None:
    """Raise GraphError if a mirror at this address would be the run's own folder, or in it."""
    scheme, _, folder = url.rpartition("://")
    here = run.resolve()
    there = (Path(folder).expanduser() / here.name).resolve()
    if scheme in ("", "file", "local") and here in (there, *there.parents):
        raise GraphError(
            Problem(
                where=f"{flag} {url}",
                what="the mirror would be in the run's own folder" if there != here else "it is where the run is",
                why=f"the mirror of this run is {there}",
                fix="use a folder elsewhere, on another disk or machine",
            )
        )


class Remote:
    """Files below one folder, by their names relative to it. Every method raises CheckpointError if the storage does
    not do what it is asked."""

    def __init__(self, filesystem: Any, path: str, url: str) -> None:
        self.url = url
        self._filesystem, self._path = filesystem, path

    def within(self, name: str) -> Remote:
        """Return a folder below this one."""
        return Remote(self._filesystem, self._at(name), f"{self.url}/{name}")

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if there is none."""
        with self._asked(name, may_lack=True):
            self._filesystem.invalidate_cache()
            content: bytes = self._filesystem.cat_file(self._at(name))
            return content
        return None

    def size(self, name: str) -> int:
        """Return the bytes of a file; -1 if there is none."""
        with self._asked(name, may_lack=True):
            self._filesystem.invalidate_cache()
            return int(self._filesystem.info(self._at(name))["size"])
        return -1

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of each file in a folder, 0 for a folder, by name; empty if there is no such folder."""
        with self._asked(folder, may_lack=True):
            self._filesystem.invalidate_cache()
            entries = self._filesystem.ls(self._at(folder), detail=True)
            return {entry["name"].rstrip("/").rpartition("/")[2]: int(entry["size"] or 0) for entry in entries}
        return {}

    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""
        with self._asked(name):
            self._make_folder(name)
            self._filesystem.pipe_file(self._at(name), content)

    def send(self, file: BinaryIO, name: str, size_bytes: int, advance: Advance) -> None:
        """Write a file with the first `size_bytes` bytes of an open one, which may grow meanwhile."""
        with self._asked(name):
            self._make_folder(name)
            with self._filesystem.open(self._at(name), "wb") as written:
                while size_bytes > 0 and (part := file.read(min(size_bytes, CHUNK_BYTES))):
                    written.write(part)
                    size_bytes -= len(part)
                    advance(len(part))

    def fetch(self, name: str, path: Path, advance: Advance) -> None:
        """Write a local file with the content of one here. An OSError of the disk stays one."""
        with self._asked(name):
            taken = self._filesystem.open(self._at(name), "rb")
        with taken, path.open("wb") as written:
            while True:
                with self._asked(name):
                    part = taken.read(CHUNK_BYTES)
                if not part:
                    return
                written.write(part)
                advance(len(part))

    def remove(self, name: str) -> None:
        """Remove a file or a folder with all it has; nothing if there is none."""
        with self._asked(name, may_lack=True):
            self._filesystem.rm(self._at(name), recursive=True)

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path

    def _make_folder(self, name: str) -> None:
        protocol = self._filesystem.protocol
        if _FLAT.isdisjoint([protocol] if isinstance(protocol, str) else protocol):
            self._filesystem.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)

    @contextmanager
    def _asked(self, name: str, *, may_lack: bool = False) -> Iterator[None]:
        try:
            yield
        except SluiceError:
            raise
        except Exception as error:  # each storage has errors of its own
            if may_lack and isinstance(error, FileNotFoundError):
                return
            raise CheckpointError(
                Problem(
                    where=f"{self.url}/{name}" if name else self.url,
                    what=f"the storage did not do what it was asked: {message_of(error)}",
                    why="the run is mirrored there",
                    fix=_FIXES.get(getattr(error, "errno", 0), "check the address, the keys and the network"),
                )
            ) from error
