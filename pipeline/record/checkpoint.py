"""Checkpoints: written to a temporary folder, synced, described by a manifest written last, and renamed.

    checkpoints/step_000100/   manifest.json  train/...   (what the stages saved: safetensors and JSON, never pickle)

`read` accepts a folder only if every file matches the manifest's size and sha256. Folders that are being written or
removed have other names, so whatever is called `step_...` was complete once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import msgspec

from pipeline.errors import CheckpointError, Problem, naming
from pipeline.reading import Count, decode, is_text, reason
from pipeline.rundir import RunDir, steps_named
from pipeline.writing import way_out

FORMAT = 1
MANIFEST = "manifest.json"
SEEN_S, LOOK_S = 60.0, 0.1  # how long a network file system may take to show a file, and how often we look
_UNFINISHED = ".step_"  # how the names of folders begin that are being written or removed


class SavedFile(msgspec.Struct, frozen=True):
    """A file of a checkpoint."""

    size_bytes: Count
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`steps` is the number of finished steps, `version` the policy version, `next_group` the next admission number.

    `pending` are groups that were admitted but not trained, in a run whose batches are not fixed; they are admitted
    first after a resume.
    """

    format: int
    graph: str
    steps: Count
    version: Count
    next_group: Count
    seed: int
    files: dict[str, SavedFile]
    pending: tuple[Count, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())


class Draft:
    """A checkpoint that is being written.

    draft = Draft(run, steps=100)
    with draft.kept():
        ...                           # fill draft.folder
        manifest = draft.finish(graph="quickstart", next_group=3200, seed=0)
        draft.put()

    The folder has another name until `put` renames it, so a checkpoint that exists is complete. An OSError of any of
    these names its file.
    """

    def __init__(self, run: RunDir, steps: int) -> None:
        self.steps, self.final = steps, run.checkpoint(steps)
        self.folder = self.final.with_name(f".{self.final.name}.partial")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def see(self, written: Mapping[str, Mapping[str, int]]) -> None:
        """Wait until this machine sees all files that workers have written, with at least these sizes, by worker and by
        path below the folder. Raises CheckpointError for one that it does not see."""
        ends_s = time.monotonic() + SEEN_S
        writers = {file: worker for worker, files in written.items() for file in files.items()}  # ranks share folders
        for (name, size_bytes), worker in writers.items():
            while (found_bytes := _size(self.folder / name)) < size_bytes:
                if time.monotonic() > ends_s:
                    raise CheckpointError(self._unseen(worker, name, size_bytes, found_bytes))
                time.sleep(LOOK_S)  # a network file system may show it late

    def _unseen(self, worker: str, name: str, size_bytes: int, found_bytes: int) -> Problem:
        found = "does not see it" if found_bytes < 0 else f"sees {found_bytes:,} bytes of it"
        return Problem(
            where=str(self.final / name),
            what=f"worker {worker} wrote it with {size_bytes:,} bytes, and the driver {found}",
            why="a checkpoint is complete when the driver sees what every worker has written",
            fix="--run-dir on storage that all machines share, under the same path, then --resume",
        )

    def finish(self, *, graph: str, next_group: int, seed: int, pending: tuple[int, ...] = ()) -> Manifest:
        """Sync the files and folders, then write the manifest. Raises CheckpointError for what a resume could not
        read."""
        files = {}
        for name, path in sorted(files_below(self.folder, self.folder)):
            files[name] = SavedFile(path.stat().st_size, _sha256(path))
        sync_all(self.folder)
        manifest = Manifest(
            format=FORMAT,
            graph=graph,
            steps=self.steps,
            version=self.steps,
            next_group=next_group,
            seed=seed,
            files=files,
            pending=pending,
        )
        path = self.folder / MANIFEST
        with naming(path):
            path.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        _sync(path)
        _sync(self.folder)
        return manifest

    def put(self) -> None:
        """Give the complete folder its name. If a checkpoint has it, because a run that resumed before this step
        writes the step again, that one is removed, or gets its name back if the renaming fails."""
        aside = _aside(self.final) if self.final.exists() else None
        if aside:
            self.final.rename(aside)
        try:
            self.folder.rename(self.final)
        except OSError:
            if aside:
                aside.rename(self.final)
            raise
        _sync(self.final.parent)
        if aside:
            shutil.rmtree(aside, ignore_errors=True)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Remove what was written if this block fails: it may be what filled the disk."""
        try:
            yield
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove what has no name yet."""
        shutil.rmtree(self.folder, ignore_errors=True)


def files_below(folder: Path, place: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files in the folder `place`, each with its path below `folder`. Raises CheckpointError for anything
    else there but folders, for a name that is no text, and if `place` is no folder."""
    if place.is_symlink() or not place.is_dir():
        raise _unkept(place, "is not there, or no folder", "a checkpoint has a folder for each stage with state")
    for parent, folders, files in os.walk(place, onerror=_raise):
        for path in (Path(parent, name) for name in (*folders, *files)):
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                kind = "a symbolic link" if path.is_symlink() else "neither a file nor a folder"
                raise _unkept(path, f"is {kind}", "a checkpoint is files, which can be checked and copied")
            if not is_text(name := str(path.relative_to(folder))):
                raise _unkept(path, "has a name that is not UTF-8", "the manifest of a checkpoint lists names")
            if path.is_file():
                yield name, path


def _raise(error: OSError) -> NoReturn:
    raise error


def _unkept(path: Path, what: str, why: str) -> CheckpointError:
    fix = "let save() and what copied() returns write files into the folder that they are given"
    return CheckpointError(Problem(where=str(path), what=f"what was saved {what}", why=why, fix=fix))


@contextmanager
def writing(where: Path) -> Iterator[None]:
    """Turn an OSError of this block into the error of a checkpoint that could not be written; `where` is its place if
    the OSError names no file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            Problem(
                where=str(error.filename or where),
                what=f"a checkpoint could not be written: {error.strerror or error}",
                why="the run must be able to resume; earlier checkpoints are complete",
                fix=f"{way_out(error, 'make the folder writable')}, then --resume",
            )
        ) from error


def clean(run: RunDir) -> None:
    """Remove what a run that was killed was writing or removing."""
    for left in run.checkpoints.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)


def check_room(run: RunDir, needed_bytes: int) -> None:
    """Raise CheckpointError if the file system has no room for this many bytes. Writes nothing."""
    free_bytes = shutil.disk_usage(run.checkpoints).free
    if free_bytes < needed_bytes:
        kept = run.checkpoint_steps()
        raise CheckpointError(
            Problem(
                where=str(run.checkpoints),
                what=f"a checkpoint has {needed_bytes:,} bytes, and {free_bytes:,} are free here",
                why=f"it was not begun; {'earlier checkpoints are complete' if kept else 'there is no earlier one'}",
                fix="free disk space, then --resume"
                + ("; Schedule(keep_checkpoints=2) keeps fewer checkpoints" if len(kept) > 2 else ""),
            )
        )


def last_bytes(run: RunDir) -> int:
    """Return the size of the newest checkpoint whose files have the sizes in its manifest; 0 if there is none."""
    for steps in reversed(run.checkpoint_steps()):
        folder = run.checkpoint(steps)
        if damage(folder, hashed=False) is None:
            return manifest_of(folder).size_bytes
    return 0


def old(run: RunDir, newest: int, *, keep: int, every: int) -> list[int]:
    """Return the steps up to `newest` whose checkpoints are neither among the last `keep` whole ones nor after a
    multiple of `every` steps. One whose files have other sizes than its manifest says is not whole.

    Checkpoints of later steps do not count: a run that resumed before them will write them again.
    """
    steps = [step for step in run.checkpoint_steps() if step <= newest]
    whole = [step for step in steps if damage(run.checkpoint(step), hashed=False) is None]
    first = whole[-keep] if len(whole) > keep else 0
    return [step for step in steps if step < first and not (every and step % every == 0)]


def remove(folder: Path) -> None:
    """Remove a checkpoint, which loses its name first: half of it is never taken for one."""
    aside = _aside(folder)
    folder.rename(aside)
    _sync(folder.parent)
    shutil.rmtree(aside)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.removed")


def read(run: RunDir, steps: int | None = None) -> tuple[Path, Manifest, list[Problem]]:
    """Return the newest complete checkpoint, or the one after `steps`, and the problems of skipped newer ones.

    Raises CheckpointError if none is complete, or the requested one is not.
    """
    damaged: list[Problem] = []
    for number in [steps] if steps is not None else reversed(run.checkpoint_steps()):
        folder = run.checkpoint(number)
        problem = damage(folder)
        if problem is None:
            return folder, manifest_of(folder), damaged
        damaged.append(problem)
    if steps is None:
        damaged = [msgspec.structs.replace(problem, fix="start again in another folder") for problem in damaged]
    raise CheckpointError(
        *(
            damaged
            or [
                Problem(
                    where=str(run.checkpoints),
                    what="there is no checkpoint",
                    why="a run resumes from a checkpoint",
                    fix="start the run again, with Schedule(checkpoint_every=10)",
                )
            ]
        )
    )


def damage(folder: Path, *, hashed: bool = True) -> Problem | None:
    """Return what is wrong with a checkpoint; without `hashed`, files of the right size are right."""
    if problem := unreadable(folder):
        return problem
    for name, file in manifest_of(folder).files.items():
        try:
            where, what, why = _difference(folder, name, file, hashed=hashed) or ("", "", "")
        except (OSError, ValueError, RuntimeError) as error:  # a NUL in its name, or links in a circle
            where, what, why = MANIFEST, f"it names {name!r}: {reason(error)}", "it lists files that can be read"
        if what:
            return Problem(where=str(folder / where), what=what, why=why, fix=_another(folder))
    return None


def unreadable(folder: Path) -> Problem | None:
    """Return what is wrong with the manifest of a checkpoint, whatever files there are."""
    fix = _another(folder)
    if not (folder / MANIFEST).is_file():
        why = "a checkpoint without its manifest is not one" if folder.is_dir() else "no such folder"
        return Problem(where=str(folder), what="manifest.json does not exist", why=why, fix=fix)
    try:
        manifest = manifest_of(folder)
    except (msgspec.DecodeError, OSError) as error:
        return Problem(
            where=str(folder / MANIFEST), what=f"it cannot be read: {reason(error)}", why="its format is fixed", fix=fix
        )
    if manifest.format != FORMAT:
        return Problem(
            where=str(folder / MANIFEST),
            what=f"format {manifest.format}",
            why=f"this version reads format {FORMAT}",
            fix=fix,
        )
    if manifest.steps != int(folder.name.rpartition("_")[2]):
        return Problem(
            where=str(folder / MANIFEST),
            what=f"it is of step {manifest.steps}",
            why="a checkpoint's folder has the name of its step",
            fix=fix,
        )
    return None


def _another(folder: Path) -> str:
    """Return the fix for a checkpoint that cannot be read: the last other one that has a manifest, if there is one."""
    others = sorted(path for path in folder.parent.glob("step_*") if path != folder and (path / MANIFEST).is_file())
    steps = steps_named(path.name for path in others)
    return f"--resume {steps[-1]}, or start again in another folder" if steps else "start again in another folder"


def manifest_of(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint. Raises msgspec.DecodeError or OSError."""
    return decode((folder / MANIFEST).read_bytes(), Manifest)


def _difference(folder: Path, name: str, file: SavedFile, *, hashed: bool) -> tuple[str, str, str] | None:
    """Return where, what and why something is wrong with a file of a checkpoint."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        return MANIFEST, f"it names {name!r}", "that lies outside it"
    if not path.is_file():
        return name, "the file does not exist", "the manifest lists it"
    if path.stat().st_size != file.size_bytes or (hashed and _sha256(path) != file.sha256):
        return name, "size or sha256 differ from the manifest", "the file is damaged"
    return None


def _size(path: Path) -> int:
    """Return the size of a file in bytes, -1 if there is no such file."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_all(folder: Path) -> None:
    """Sync the files and folders below a folder, and itself. An OSError names the one that could not be synced."""
    for path in sorted(folder.rglob("*")):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
