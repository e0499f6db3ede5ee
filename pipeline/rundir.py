"""Names and layout of a run directory, in one place. Knows no content.

runs/quickstart-20260101-120000/
  run.json  graph.py  plan.json  events.jsonl  metrics.jsonl  data_plane.json  lock
  fetched.json (of a run that was fetched from its mirror)
  before-1/ (the record of a run that ended before its first checkpoint, once it has started again)
  samples/step_000001.jsonl  samples/vocabulary.json  checkpoints/step_000100/  failures/step_000003_reward/  logs/
  turns/000100/ (of episodes, by policy version; gone once no run goes on with it)

All of it is private: folders are made with mode 0700, and the files beside them with 0600, whatever the umask. Folders
that exist keep their mode.
"""

from __future__ import annotations

import datetime
import errno
import itertools
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

RUNS = "runs"  # the default folder of runs, in the working directory
_OWNERS = 0o700  # the mode of a folder that only its owner can enter


def private(path: Path) -> Path:
    """Make an empty file that only its owner can read, or take others' access to it if it exists. Returns its path.
    Raises OSError if something else than a file has that name: a pipe would let its writer wait."""
    if os.path.lexists(path) and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    path.touch(mode=0o600)
    if path.stat().st_mode & 0o077:
        with suppress(PermissionError):  # of a file system without modes
            path.chmod(0o600)
    return path


@dataclass(frozen=True)
class RunDir:
    """A run directory by its path. File names count steps from 1: the number is that of finished steps."""

    path: Path

    @staticmethod
    def new(parent: Path, name: str) -> RunDir:
        """Create a new directory below `parent`, named by graph and local time; a number is added if it exists."""
        stem = f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
        for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
            path = parent / f"{stem}{suffix}"
            with suppress(FileExistsError):  # of a run that started in the same second
                path.mkdir(_OWNERS, parents=True)
                return RunDir(path).create()
        raise FileExistsError(f"{parent / stem} and 999 like it exist")

    def create(self) -> RunDir:
        """Create the directory and its folders."""
        for folder in (self.path, self.path / "samples", self.checkpoints, self.failures, self.logs):
            folder.mkdir(_OWNERS, parents=True, exist_ok=True)
        return self

    def check_creatable(self) -> None:
        """Raise the OSError of `create`, if it would raise one, and leave no folder behind."""
        if self.path.is_dir():
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.path))
            return
        missing = [path for path in (self.path, *self.path.parents) if not path.is_dir()]
        made: list[Path] = []
        try:
            for path in reversed(missing):  # only the file system can say whether it makes them: /proc does not
                path.mkdir(_OWNERS)
                made.append(path)
        finally:
            for path in reversed(made):
                with suppress(OSError):  # another process has put something in it
                    path.rmdir()

    def set_aside(self) -> Path:
        """Move the record so far to a folder of its own, `before-1` or the next free one, and return that folder."""
        aside = self._aside()
        kept = (self.plan, self.events, self.metrics, self.path / "samples", self.checkpoints, self.failures, self.logs)
        for path in kept:
            if path.exists():
                path.rename(aside / path.name)
        self.create()
        return aside

    def set_aside_after(self, done: int) -> tuple[list[int], Path]:
        """Move the checkpoints after more than `done` steps to a folder of their own. Returns their steps, and it."""
        later, aside = [steps for steps in self.checkpoint_steps() if steps > done], self.path
        if later:
            aside = RunDir(self._aside()).checkpoints
            aside.mkdir(_OWNERS)
        for steps in later:
            self.checkpoint(steps).rename(aside / self.checkpoint(steps).name)
        return later, aside

    def _aside(self) -> Path:
        """Make the next free folder for what no longer belongs to the run."""
        number = next(n for n in itertools.count(1) if not (self.path / f"before-{n}").exists())
        (aside := self.path / f"before-{number}").mkdir(_OWNERS)
        return aside

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def graph(self) -> Path:
        return self.path / "graph.py"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def data_plane(self) -> Path:
        return self.path / "data_plane.json"

    @property
    def lock(self) -> Path:
        """The file that the process of a live run holds locked."""
        return self.path / "lock"

    @property
    def mark(self) -> Path:
        """A text that the driver writes at each start, for workers to show that they see the same directory."""
        return self.path / "mark"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def fetched(self) -> Path:
        """Where a fetched run came from, and which of its checkpoints were left there."""
        return self.path / "fetched.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def failures(self) -> Path:
        return self.path / "failures"

    @property
    def turns(self) -> Path:
        """The folders, by policy version, of the turns of episodes that are in flight."""
        return self.path / "turns"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log(self, group: str, worker: int) -> Path:
        """Return the path of a worker's output, tracebacks included."""
        return self.logs / f"{group}-{worker}.log"

    def samples(self, step: int) -> Path:
        return self.path / "samples" / f"step_{step + 1:06d}.jsonl"

    def sampled_steps(self) -> list[int]:
        """Return the steps with kept samples, in order, counted from 0."""
        names = (path.stem.removeprefix("step_") for path in (self.path / "samples").glob("step_*.jsonl"))
        return sorted(int(name) - 1 for name in names if name.isdigit())

    @property
    def vocabulary(self) -> Path:
        """The bytes that each token adds to a text."""
        return self.path / "samples" / "vocabulary.json"

    def checkpoint(self, done: int) -> Path:
        """Return the folder of the checkpoint after `done` steps."""
        return self.checkpoints / f"step_{done:06d}"

    def failure(self, step: int, stage: str, rank: int = 0) -> Path:
        return self.failures / (f"step_{step + 1:06d}_{stage}" + (f".rank{rank}" if rank else ""))

    def checkpoint_steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, ascending."""
        return steps_named(path.name for path in self.checkpoints.iterdir()) if self.checkpoints.is_dir() else []


def steps_named(names: Iterable[str]) -> list[int]:
    """Return the steps of the checkpoints among these names of folders, ascending."""
    return sorted(int(name[5:]) for name in names if name.startswith("step_") and name[5:].isdigit())
