"""Records a run in its run directory, and reads that record back for a resume."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec

from pipeline.cli.listing import example
from pipeline.cli.load import GraphFile
from pipeline.errors import GraphError, Problem
from pipeline.plan.plan import Plan
from pipeline.precedence import typed
from pipeline.reading import decode, readable
from pipeline.rundir import RunDir, private
from pipeline.writing import recording, replace

PACKAGES = ("torch", "ray", "TransferQueue", "tensordict", "transformers", "numpy", "networkx", "msgspec")


class RunRecord(msgspec.Struct, kw_only=True):
    """run.json: the graph, its flags, and the environment of the run."""

    graph: str
    file: str
    args: dict[str, Any]
    seed: int
    executor: str
    command: list[str]
    versions: dict[str, str]
    python: str
    machine: str
    git: str | None
    started: str


class _MetricsLine(msgspec.Struct):
    """The part of a line of metrics.jsonl that a resume reads."""

    step: int


class _Sizes(msgspec.Struct):
    """The part of plan.json that a resume reads."""

    batch: int
    group_size: int


def describe(
    run_dir: RunDir, file: GraphFile, planned: Plan, values: dict[str, Any], executor: str, argv: list[str], seed: int
) -> None:
    """Write run.json and a copy of the graph file."""
    source = Path(file.module.__file__ or file.path)  # absolute, as the graph file may leave the working directory
    record = RunRecord(
        graph=planned.name,
        file=file.named,
        args=values,
        seed=seed,
        executor=executor,
        command=[*typed("pipeline.run"), *argv],
        versions={name: _version(name) for name in PACKAGES},
        python=platform.python_version(),
        machine=f"{platform.machine()}, {os.cpu_count()} cores",
        git=_git(source.parent),
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )
    replace(run_dir.run_json, msgspec.json.format(msgspec.json.encode(record)))
    with recording(run_dir.graph):
        shutil.copyfile(source, private(run_dir.graph))


def recorded(path: str | None, here: Path = Path()) -> RunRecord:
    """Return the record of the run to resume, by its path from `here`. Raises GraphError if `path` is not a run
    directory."""
    if path is None:
        raise GraphError(
            Problem(
                where="--resume",
                what="no run directory is named",
                why="a run resumes in its own directory",
                fix=f"--run-dir {example(here=here)} --resume",
            )
        )
    record = RunDir(here / path).run_json
    if not record.is_file():
        raise GraphError(
            Problem(
                where=f"--run-dir {path}",
                what="run.json does not exist",
                why="a resume needs a run directory",
                fix="name a folder that a run created",
            )
        )
    with readable(record, GraphError, why="a run wrote it", fix="restore the file"):
        return decode(record.read_bytes(), RunRecord)


def resume_step(text: str) -> int | None:
    """Parse the STEP of --resume; None is the newest. Raises GraphError if it is not a step."""
    if text == "last":
        return None
    if not text.isdigit():
        raise GraphError(
            Problem(
                where=f"--resume {text}",
                what="that is not a step",
                why="checkpoints are named by step, and --resume alone takes the last",
                fix="--resume",
            )
        )
    return int(text)


def check_resume(
    run_dir: RunDir, record: RunRecord, planned: Plan, seed: int, start: int, *, lasts: bool, unended: bool
) -> None:
    """Raise GraphError if `planned` does not continue the recorded run. `lasts`: its number of steps is a flag.
    `unended`: every step is done, and its end is left to record."""
    if record.graph != planned.name or record.seed != seed:
        raise GraphError(
            Problem(
                where="--resume",
                what=f"the run is {record.graph!r} with seed {record.seed}, this is {planned.name!r} with seed {seed}",
                why="a resumed run continues as if it had not stopped",
                fix="use the same graph and seed",
            )
        )
    if start >= planned.steps and not unended:
        raise GraphError(
            Problem(
                where="--resume",
                what=f"the checkpoint is of step {start}, the graph runs {planned.steps} steps",
                why="nothing is left to do",
                fix=f"--steps {start * 2}" if lasts else "Schedule(steps=...) with more steps",
            )
        )
    if not start and not run_dir.plan.is_file():  # the run ended before its workers started
        return
    with readable(run_dir.plan, GraphError, why="a run wrote it", fix="restore the file"):
        before = decode(run_dir.plan.read_bytes(), _Sizes)
    if (before.batch, before.group_size) != (planned.batch, planned.group_size):
        raise GraphError(
            Problem(
                where="--resume",
                what=f"the run has {before.batch} x {before.group_size} samples per step, this has "
                f"{planned.batch} x {planned.group_size}",
                why="the next prompt and the random numbers depend on the samples so far",
                fix="use the same batch and the same number of samples per prompt",
            )
        )


def cut_metrics(run_dir: RunDir, start: int) -> list[Problem]:
    """Drop the lines of steps after the checkpoint from metrics.jsonl; these steps run again. Returns a warning if
    the record of a step before is not there."""
    kept: dict[int, bytes] = {}
    if run_dir.metrics.is_file():
        with readable(run_dir.metrics, GraphError, why="the resumed run appends to this file", fix="restore the file"):
            lines = run_dir.metrics.read_bytes().splitlines(keepends=True)
        for number, line in enumerate(lines, start=1):
            try:
                done = decode(line, _MetricsLine).step
            except msgspec.DecodeError as error:
                if not line.endswith(b"\n") or not line.strip(b"\0\n"):  # the run ended while it wrote this line
                    continue
                raise GraphError(
                    Problem(
                        where=f"{run_dir.metrics}:{number}",
                        what=f"this line cannot be read: {error}",
                        why="the resumed run appends to this file",
                        fix="remove the line, then --resume",
                    )
                ) from error
            if 0 <= done <= start:  # 0 is the warm start
                kept[done] = line.removesuffix(b"\n") + b"\n"
        replace(run_dir.metrics, b"".join(line for _, line in sorted(kept.items())))
    lost = [run_dir.metrics] if len(kept.keys() - {0}) < start else []
    lost += [run_dir.events] if start and not run_dir.events.is_file() else []
    return [_incomplete(path, start) for path in lost]


def _incomplete(path: Path, start: int) -> Problem:
    return Problem(
        where=str(path),
        what=f"it does not have all of the {start} steps before the checkpoint",
        why="the run goes on from the checkpoint, which is whole",
        fix="restore the file from a copy, if there is one",
        warning=True,
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _git(folder: Path) -> str | None:
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    if shutil.which("git") is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    return done.stdout.strip() or None
