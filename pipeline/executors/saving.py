"""Saves the state of a worker's runners: copied where the host has room, and then written while its tasks go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from pipeline.declare.held import Copies, Saves, Weighs
from pipeline.errors import CALLED, Problem, SluiceError, StageError, shown
from pipeline.executors.host_memory import free_bytes
from pipeline.forks import Original
from pipeline.record.checkpoint import files_below, writing

ROOM = 0.8  # of the free memory of a host: the most that copies take
Fails = Callable[[str, BaseException], SluiceError]


class Saving:
    """The checkpoints of one worker; `fails` makes the error of a stage that could not save its state."""

    def __init__(self, fails: Fails, original: Original) -> None:
        self._fails, self._original = fails, original
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writes: list[Future[None]] = []

    def hold(self, runners: Mapping[str, Saves], folder: Path, ranks: int) -> None:
        """Copy the state of each stage's runner and begin to write the copy below `folder`, or write the state if there
        is no room or the runner makes no copies. All `ranks` of a group may lie on one host and copy at the same time,
        so each asks for room for all of them."""
        for name, runner in runners.items():
            place = folder / name
            with self._named(name, place):
                place.mkdir(parents=True, exist_ok=True)
                write = runner.copied() if isinstance(runner, Copies) and _has_room(ranks * _weight(runner)) else None
                if write is None:
                    runner.save(place)
                else:
                    self._writes.append(self._disk.submit(self._write, name, place, write))

    def finish(self) -> None:
        """Wait until all that is held is written. Raises the error of a write that failed."""
        writes, self._writes = self._writes, []
        for write in writes:
            write.result()

    def files(self, names: Iterable[str], folder: Path) -> dict[str, int]:
        """Return the size of each file that these stages have below `folder`, by its path below it. Call it when no
        rank writes: a file may have another name while it is written. Raises CheckpointError if a stage has left what
        a resume could not read."""
        sizes: dict[str, int] = {}
        for name in names:
            with self._named(name, folder / name):
                sizes |= {file: path.stat().st_size for file, path in files_below(folder, folder / name)}
        return sizes

    def size_bytes(self, runners: Mapping[str, Saves]) -> int:
        """Return how many bytes `hold` writes, as far as the runners know. Raises StageError if one does not say it in
        numbers."""
        total = 0
        for name, runner in runners.items():
            if isinstance(runner, Weighs):
                with self._named(name, Path(name)):
                    total += _weight(runner)
        return total

    def close(self) -> None:
        """Write no more."""
        self._disk.shutdown(wait=False, cancel_futures=True)

    def _write(self, name: str, place: Path, write: Callable[[Path], None]) -> None:
        with self._named(name, place):
            write(place)

    @contextmanager
    def _named(self, name: str, place: Path) -> Iterator[None]:
        """Raise CheckpointError if the disk of `place` is full or fails, and the stage's error for everything else."""
        with writing(place):
            try:
                with self._original.only(name):
                    yield
            except CALLED as error:
                if isinstance(error, OSError) and str(error.filename or place).startswith(str(place)):
                    raise
                raise self._fails(name, error) from error


def _weight(runner: Weighs) -> int:
    size_bytes = runner.saved_bytes()
    if isinstance(size_bytes, int | float) and 0 <= size_bytes < math.inf:
        return int(size_bytes)
    what, why = f"it returned {shown(size_bytes)}", "the free space and memory are checked against it"
    raise StageError(Problem(where="saved_bytes()", what=what, why=why, fix="return a number of bytes, 0 or more"))


def _has_room(size_bytes: int) -> bool:
    return size_bytes <= ROOM * free_bytes()
