"""The folder of a new run: whether it can be made and holds no run yet, which --check asks too, and making it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import GraphError, Problem
from pipeline.reading import is_text
from pipeline.rundir import RUNS, RunDir


def near(path: Path, here: Path) -> str:
    """Return a path as it may be typed: from the folder `here`, if it is below that."""
    text = str(path.relative_to(here) if path.is_relative_to(here) else path)
    return f"./{text}" if text.startswith("-") else text


def check_new(named: str | None, here: Path) -> None:
    """Raise GraphError if the folder of --run-dir, or runs/, cannot be made, or holds a run. Leaves nothing there."""
    run_dir = RunDir(here / (named or RUNS))
    with _makes(named, here):
        run_dir.check_creatable()
    check_empty(run_dir, here)


def check_empty(run_dir: RunDir, here: Path) -> None:
    """Raise GraphError if a directory holds a run."""
    if run_dir.events.exists():
        raise GraphError(
            Problem(
                where=f"--run-dir {(typed := shlex.quote(near(run_dir.path, here)))}",
                what="it already holds a run",
                why="a run never overwrites another",
                fix=f"--run-dir {typed} --resume, or another folder",
            )
        )


def make(named: str | None, graph: str, here: Path) -> RunDir:
    """Make the directory of --run-dir, or a new one for this graph in runs/. Raises GraphError if it cannot be made."""
    with _makes(named, here):
        return RunDir(here / named).create() if named else RunDir.new(here / RUNS, graph)


@contextmanager
def _makes(named: str | None, here: Path) -> Iterator[None]:
    """Turn an OSError of this block, which makes the folder, into a GraphError; raise one if its path is no text."""
    if not is_text(f"{here}{named}"):
        raise GraphError(
            Problem(
                where=f"--run-dir {named or RUNS}",
                what="its path is not UTF-8",
                why="the record of a run names its files",
                fix="use another folder, or a UTF-8 locale (LC_ALL=C.UTF-8)",
            )
        )
    try:
        yield
    except OSError as error:
        raise GraphError(
            Problem(
                where=f"--run-dir {named or RUNS}",
                what=f"the folder cannot be created: {error.strerror}: {near(Path(error.filename or ''), here)}",
                why="the run is recorded there",
                fix="use --run-dir with a writable path",
            )
        ) from error
