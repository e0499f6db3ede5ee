"""What a run has in remote storage: its checkpoints, and the record that a resume reads. Knows no processes.

    s3://bucket/runs/quickstart-.../   run.json graph.py plan.json metrics.jsonl events.jsonl samples/ checkpoints/

A checkpoint's manifest is written last, after the record of its steps, so a checkpoint with a manifest is complete. The
newest checkpoint is copied first: if the storage is slower than the run, it is the older ones that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from pipeline.errors import CheckpointError, GraphError, Problem
from pipeline.mirrors.remote import Remote
from pipeline.reading import check_file
from pipeline.record import checkpoint, trace
from pipeline.record.checkpoint import MANIFEST
from pipeline.rundir import RunDir

AT_ONCE = 4  # files that are copied at the same time


class _Stamp(NamedTuple):
    """By what a file is known to be unchanged."""

    size_bytes: int
    written_ns: int

    @staticmethod
    def of(path: Path) -> _Stamp:
        check_file(path)
        found = path.stat()
        return _Stamp(found.st_size, found.st_mtime_ns)


class Mirror:
    """The copy of a run in remote storage. `tell` is called with the step, the bytes that have arrived, and all of
    them, while a checkpoint is copied."""

    def __init__(self, run: RunDir, remote: Remote, tell: Callable[[int, int, int], None]) -> None:
        self._run, self._remote, self._tell = run, remote, tell
        self._sent: dict[str, _Stamp] = {}  # files of the record, as they were when they were sent
        self._complete: dict[int, _Stamp] = {}  # manifests of the checkpoints that are there
        self._removed: set[str] = set()  # names of checkpoints that the run has removed, and the mirror has not yet
        self._offset = 0  # in events.jsonl

    def begin(self) -> None:
        """Claim the remote folder for this run. Raises GraphError if another run is mirrored there."""
        ours, theirs = self._run.run_json.read_bytes(), self._remote.read(self._run.run_json.name)
        if theirs is not None and theirs != ours:
            raise GraphError(
                Problem(
                    where=self._remote.url,
                    what="another run is mirrored there",
                    why="a run is mirrored under the name of its run directory",
                    fix="mirror into another folder, or use another --run-dir",
                )
            )
        if theirs is None:
            self._remote.write(self._run.run_json.name, ours)

    def update(self) -> None:
        """Copy each complete checkpoint that the storage lacks, the newest first, and then remove those that the run
        has removed. Raises CheckpointError if the storage fails; another call goes on from there."""
        while lacking := self.lacking():
            self._send_checkpoint(lacking[-1])
        self._remove_old()

    def lacking(self) -> list[int]:
        """Return the steps of the checkpoints that the storage lacks, ascending."""
        return [step for step in self._run.checkpoint_steps() if not self._has(step)]

    def send_record(self) -> None:
        """Copy the files of the record that have changed."""
        there = {} if self._sent else self._remote.sizes("samples")
        for path in _record(self._run):
            name = str(path.relative_to(self._run.path))
            with suppress(FileNotFoundError):
                stamp = _Stamp.of(path)
                unchanged = there.get(path.name) == stamp.size_bytes if path.parent.name == "samples" else False
                if self._sent.get(name) != stamp and not unchanged:
                    with path.open("rb") as file:
                        self._remote.send(file, name, stamp.size_bytes, lambda size: None)
                self._sent[name] = stamp

    def _has(self, step: int) -> bool:
        """Whether the storage has this checkpoint. It need not have one that is gone or damaged."""
        manifest = self._run.checkpoint(step) / MANIFEST
        try:
            stamp = _Stamp.of(manifest)
            if self._complete.get(step) != stamp:
                if self._remote.read(name_of(manifest, self._run)) != manifest.read_bytes():
                    return checkpoint.damage(manifest.parent, hashed=False) is not None
                self._complete[step] = stamp
        except FileNotFoundError:  # removed meanwhile
            pass
        return True

    def _send_checkpoint(self, step: int) -> None:
        folder = self._run.checkpoint(step)
        manifest = folder / MANIFEST
        with ExitStack() as opened:
            try:
                stamp, content = _Stamp.of(manifest), manifest.read_bytes()
                sizes = {name: file.size_bytes for name, file in checkpoint.manifest_of(folder).files.items()}
                files = {name: opened.enter_context((folder / name).open("rb")) for name in sizes}
            except FileNotFoundError:  # removed meanwhile; what is open stays readable
                return
            self._remote.remove(name_of(manifest, self._run))  # of the same step before a resume
            self._send_files(step, files, sizes)
        self.send_record()
        self._remote.write(name_of(manifest, self._run), content)
        self._complete[step] = stamp

    def _send_files(self, step: int, files: Mapping[str, BinaryIO], sizes: Mapping[str, int]) -> None:
        arrived, folder = 0, self._run.checkpoint(step)

        def advance(size_bytes: int) -> None:
            nonlocal arrived
            arrived += size_bytes
            self._tell(step, arrived, sum(sizes.values()))

        def send(name: str) -> None:
            there = name_of(folder / name, self._run)
            self._remote.send(files[name], there, sizes[name], advance)
            if (size_bytes := self._remote.size(there)) != sizes[name]:
                raise CheckpointError(_differs(f"{self._remote.url}/{there}", sizes[name], size_bytes))

        for_each(send, files)

    def _remove_old(self) -> None:
        for event in self._events():
            if isinstance(event, trace.Removed):
                self._removed.add(event.folder)
        for name in sorted(self._removed):
            if not (self._run.checkpoints / name).exists():
                self._remote.remove(f"checkpoints/{name}/{MANIFEST}")
                self._remote.remove(f"checkpoints/{name}")
            self._removed.remove(name)

    def _events(self) -> Iterator[trace.TraceEvent]:
        """Yield the events since the last call; from the start again if a resume has cut the file."""
        with suppress(OSError, msgspec.DecodeError):
            if self._run.events.stat().st_size < self._offset:
                self._offset = 0
            for offset, event in trace.read(self._run.events, self._offset):
                self._offset = offset
                yield event


def for_each(do: Callable[[str], None], names: Iterable[str]) -> None:
    """Call a function for some names at a time. After the first error, begins no more and raises it."""
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="mirror") as threads:
        try:
            for done in [threads.submit(do, name) for name in names]:
                done.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def record_files(run: RunDir) -> list[Path]:
    """Return the files that a resume needs beside a checkpoint; some may not exist."""
    return [run.run_json, run.graph, run.plan, run.metrics, run.events]


def _record(run: RunDir) -> list[Path]:
    return [*sorted((run.path / "samples").iterdir()), *record_files(run)]


def name_of(path: Path, run: RunDir) -> str:
    """Return the name of a file of a run in its mirror."""
    return str(path.relative_to(run.path))


def _differs(where: str, size_bytes: int, found_bytes: int) -> Problem:
    return Problem(
        where=where,
        what=f"it has {max(found_bytes, 0):,} bytes there, and {size_bytes:,} were written",
        why="a checkpoint is complete when each file is",
        fix="check the storage",
    )
