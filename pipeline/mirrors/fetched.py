"""Makes a run directory from a mirrored run, so that it goes on on another machine. Knows no processes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pipeline.errors import CheckpointError, GraphError, Problem, naming
from pipeline.mirrors.mirror import for_each, name_of, record_files
from pipeline.mirrors.remote import Advance, Remote
from pipeline.record import checkpoint
from pipeline.record.checkpoint import MANIFEST
from pipeline.rundir import RunDir, steps_named

_FETCHED = ".step_fetched_"  # the name of a folder that is being fetched begins so; `checkpoint.clean` removes it


class Fetched(msgspec.Struct, frozen=True, kw_only=True):
    """fetched.json: the checkpoint after `step` steps came from `url`; those after the steps `left` are only there."""

    url: str
    step: int
    left: list[int]


def fetch(remote: Remote, run: RunDir, step: int | None, advance: Advance) -> tuple[int, list[Problem]]:
    """Make a run directory from a mirrored run, with its newest complete checkpoint, or the one after `step`. Returns
    its step, and the problems of newer ones that are not complete.

    Raises GraphError if the directory holds a run or nothing is mirrored there, CheckpointError if no checkpoint is
    complete, the storage fails or the disk is full.
    """
    _check_fetch(remote, run)
    steps = steps_named(remote.sizes("checkpoints"))
    damaged: list[Problem] = []
    with checkpoint.writing(run.path):
        run.create()
        checkpoint.clean(run)
        for number in [step] if step is not None else reversed(steps):
            problem = _fetch_checkpoint(remote, run, number, advance)
            if problem is None:
                left = Fetched(url=remote.url, step=number, left=sorted({*steps} - {number}))
                run.fetched.write_bytes(msgspec.json.format(msgspec.json.encode(left)))
                _fetch_record(remote, run, advance)
                return number, damaged
            damaged.append(problem)
    raise CheckpointError(
        *damaged
        or [
            Problem(
                where=f"{remote.url}/checkpoints",
                what="there is no checkpoint",
                why="a run goes on from a checkpoint",
                fix="start the run again",
            )
        ]
    )


def _check_fetch(remote: Remote, run: RunDir) -> None:
    if run.run_json.exists() or run.events.exists():
        raise GraphError(
            Problem(
                where=str(run.path),
                what="it already holds a run",
                why="a fetched run gets a directory of its own",
                fix="name a new folder",
            )
        )
    if remote.read(run.run_json.name) is None:
        raise GraphError(
            Problem(
                where=remote.url,
                what="no run is mirrored there: it has no run.json",
                why="a mirror is a folder of the --mirror address, with the name of the run directory",
                fix="name that folder, such as s3://bucket/runs/quickstart-20260101-120000",
            )
        )


def _fetch_checkpoint(remote: Remote, run: RunDir, step: int, advance: Advance) -> Problem | None:
    """Fetch a checkpoint. Returns what is wrong if it is not complete; it gets no name then."""
    final = run.checkpoint(step)
    there, folder = name_of(final, run), final.with_name(f"{_FETCHED}{step:06d}")
    folder.mkdir()
    if (content := remote.read(f"{there}/{MANIFEST}")) is not None:
        (folder / MANIFEST).write_bytes(content)
    problem = checkpoint.unreadable(folder)
    if problem is None:
        _fetch_files(remote, run, there, folder, advance)
        problem = checkpoint.damage(folder)
    if problem is None:
        checkpoint.sync_all(folder)
        folder.rename(final)
        return None
    checkpoint.clean(run)
    where = problem.where.replace(str(folder), f"{remote.url}/{there}")
    return msgspec.structs.replace(problem, where=where, fix="--step with another step")


def _fetch_files(remote: Remote, run: RunDir, there: str, folder: Path, advance: Advance) -> None:
    manifest = checkpoint.manifest_of(folder)
    checkpoint.check_room(run, manifest.size_bytes)

    def take(name: str) -> None:
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            return  # `damage` says so
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if remote.size(f"{there}/{name}") >= 0:
            remote.fetch(f"{there}/{name}", folder / name, advance)

    for_each(take, manifest.files)


def _fetch_record(remote: Remote, run: RunDir, advance: Advance) -> None:
    """Fetch the record, run.json last: a folder without it is not taken for a run."""
    for name in remote.sizes("samples"):
        remote.fetch(f"samples/{name}", run.path / "samples" / name, advance)
    for path in reversed(record_files(run)):
        if remote.size(path.name) >= 0:
            with naming(path):
                remote.fetch(path.name, path, advance)
