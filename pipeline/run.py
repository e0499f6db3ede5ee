"""`python -m pipeline.run graph.py [flags]`: check, draw, run, resume or replay a graph.

Exit codes: 0 done; 2 the graph, a flag or a file is wrong; 3 a stage failed; 4 and 5 the data plane; 6 a checkpoint;
130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipeline import console
from pipeline.errors import GraphError, Problem, SluiceError
from pipeline.graph import Graph
from pipeline.load import GraphFile, add_flags, load
from pipeline.plan import Plan, plan
from pipeline.rundir import RunDir

PACKAGES = ("torch", "ray", "TransferQueue", "tensordict", "transformers", "numpy", "networkx", "msgspec")


class RunRecord(msgspec.Struct, kw_only=True):
    """run.json: what was run, with what, where."""

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
    """What a resume reads of a line of metrics.jsonl."""

    step: int


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    started_s = time.monotonic()
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _main(argv, started_s)
    except SluiceError as error:
        console.print_problems(error.problems)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _main(argv: list[str], started_s: float) -> int:
    first = _parser(add_help=False).parse_known_args(argv)[0]
    if first.graph is None:
        _parser(add_help=True).parse_args(argv)
        raise GraphError(
            Problem(
                where="command line",
                what="no graph file is named",
                why="a run starts from a graph file",
                fix="python -m pipeline.run graphs/quickstart.py",
            )
        )
    file = load(Path(first.graph))
    parser = _parser(add_help=True)
    parser.graph_file = first.graph
    parser.description = (file.function.__doc__ or file.module.__doc__ or "").strip().partition("\n\n")[0]
    add_flags(parser, file.flags)
    options = parser.parse_args(argv)
    given = {name[6:]: value for name, value in vars(options).items() if name.startswith("graph.")}
    record = _recorded(options)
    defaults = {flag.name: flag.default for flag in file.flags}
    values = defaults | (record.args if record else {}) | given
    graph = file.build({name: value for name, value in values.items() if name in defaults})
    planned, warnings = plan(graph, gpus=options.gpus)
    console.print_problems(warnings)
    if options.check:
        print(f"{file.path}: {len(planned.stages)} stages, {len(planned.edges)} edges, no problem found")
        return 0
    if options.plan:
        console.print_plan(planned)
        return 0
    if options.replay:
        return _replay(graph, Path(options.replay))
    return _run(file, graph, planned, values, options, record, argv, started_s)


def _parser(*, add_help: bool) -> _Parser:
    parser = _Parser(prog="python -m pipeline.run", add_help=add_help, allow_abbrev=False)
    parser.add_argument("graph", nargs="?", help="a Python file with a function graph()")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="check the graph and stop; starts nothing")
    what.add_argument(
        "--plan", action="store_true", help="draw the graph, its placement and what its edges carry, and stop"
    )
    what.add_argument(
        "--replay", metavar="FOLDER", help="run a failed task again on its saved inputs (RUN/failures/...)"
    )
    what.add_argument("--resume", nargs="?", const="last", metavar="STEP", help="go on from a checkpoint of --run-dir")
    parser.add_argument("--run-dir", metavar="DIR", help="where the run is recorded; default: a new folder in runs/")
    parser.add_argument("--executor", choices=("ray", "local"), default="ray", help="default: ray")
    parser.add_argument("--address", metavar="ADDRESS", help="join a running Ray cluster instead of starting one")
    parser.add_argument("--trusted-network", action="store_true", help="let the data plane listen beyond this machine")
    parser.add_argument("--gpus", type=int, metavar="N", help="check the placement against N GPUs")
    parser.add_argument("--deadline-s", type=float, default=3600.0, help="give up when no task finishes for so long")
    parser.add_argument("--plain", action="store_true", help="plain lines instead of a live one")
    return parser


class _Parser(argparse.ArgumentParser):
    graph_file = "GRAPH"

    def error(self, message: str) -> Any:
        flag, _, expected = message.removeprefix("argument ").partition(": ")
        unknown = expected.partition(" ")[0].partition("=")[0] if flag == "unrecognized arguments" else ""
        near = difflib.get_close_matches(unknown, self._option_string_actions, n=1, cutoff=0.75)
        raise GraphError(
            Problem(
                where=flag if flag.startswith("-") else "command line",
                what=expected if flag.startswith("-") else message,
                why="the flags are those of --help",
                fix=f"did you mean {near[0]}?" if near else f"see {self.prog} {self.graph_file} --help",
            )
        )


def _recorded(options: argparse.Namespace) -> RunRecord | None:
    """The record of the run that is resumed."""
    if options.resume is None:
        return None
    if options.run_dir is None:
        raise GraphError(
            Problem(
                where="--resume",
                what="no run directory is named",
                why="a resume goes on in the run's own directory",
                fix="--run-dir RUN --resume",
            )
        )
    path = RunDir(Path(options.run_dir)).run_json
    if not path.is_file():
        raise GraphError(
            Problem(
                where=f"--run-dir {options.run_dir}",
                what="run.json is not there",
                why="a resume needs a run directory",
                fix="name a folder that a run made",
            )
        )
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunRecord)
    except msgspec.DecodeError as error:
        raise GraphError(
            Problem(where=str(path), what=f"it cannot be read: {error}", why="a run wrote it", fix="restore the file")
        ) from error


def _replay(graph: Graph, folder: Path) -> int:
    from pipeline import replay

    output = replay.run_again(graph, folder)
    for name, value in sorted(output.metrics.items()):
        print(f"{name} {value:g}")
    print(f"{folder}: the task passes now; it returned {', '.join(output.columns) or 'no columns'}")
    return 0


def _run(
    file: GraphFile,
    graph: Graph,
    planned: Plan,
    values: dict[str, Any],
    options: argparse.Namespace,
    record: RunRecord | None,
    argv: list[str],
    started_s: float,
) -> int:
    from pipeline import checkpoint
    from pipeline.engine import Engine

    run_dir = _run_dir(Path(options.run_dir) if options.run_dir else None, planned.name)
    start = 0
    if record:
        start = checkpoint.read(run_dir, _step(options.resume))[1].steps
        _check_resume(record, graph, planned, start)
        _cut_metrics(run_dir, start)
    elif run_dir.events.exists():
        raise GraphError(
            Problem(
                where=f"--run-dir {run_dir.path}",
                what="it holds a run already",
                why="a run does not overwrite another",
                fix="another folder, or --resume",
            )
        )
    else:
        _describe(run_dir, file, planned, values, options.executor, argv, graph.schedule.seed)
    progress = console.Progress(planned, start, plain=options.plain)
    executor = _executor(options, file)
    resume = shlex.join(
        [
            "python",
            "-m",
            "pipeline.run",
            str(file.path),
            "--executor",
            options.executor,
            "--run-dir",
            str(run_dir.path),
            "--resume",
        ]
    )
    print(
        f"{planned.name}: {planned.steps - start} steps of {planned.batch} x {planned.group_size} samples; "
        f"{run_dir.path}",
        flush=True,
    )
    try:
        Engine(
            graph, planned, executor, run_dir=run_dir, start=start, on_step=progress.step, deadline_s=options.deadline_s
        ).execute()
    except SluiceError as error:
        progress.end()
        console.print_problems(error.problems)
        _print_way_on(file, run_dir, values, resume)
        return error.exit_code
    except KeyboardInterrupt:
        progress.end()
        _print_way_on(file, run_dir, values, resume)
        raise
    commands = [
        ("look", f"head {run_dir.metrics} {run_dir.samples(planned.steps - 1)}"),
        ("go on", f"{resume} --steps {planned.steps * 2}" if "steps" in values else resume),
    ]
    console.print_summary(
        planned, progress, run_dir=str(run_dir.path), wall_s=time.monotonic() - started_s, commands=commands
    )
    return 0


def _run_dir(path: Path | None, name: str) -> RunDir:
    try:
        return RunDir(path).create() if path else RunDir.new(Path("runs"), name)
    except OSError as error:
        raise GraphError(
            Problem(
                where=f"--run-dir {path or 'runs'}",
                what=f"the folder cannot be made: {error.strerror}: {error.filename}",
                why="a run records itself there",
                fix="--run-dir with a path that can be written",
            )
        ) from error


def _executor(options: argparse.Namespace, file: GraphFile) -> Any:
    if options.executor == "local":
        from pipeline.executors.local import LocalExecutor

        return LocalExecutor()
    from pipeline.executors.ray import RayExecutor, user_modules

    return RayExecutor(
        address=options.address, modules=user_modules(file.module), trusted_network=options.trusted_network
    )


def _step(text: str) -> int | None:
    if text == "last":
        return None
    if not text.isdigit():
        raise GraphError(
            Problem(
                where=f"--resume {text}",
                what="that is not a step",
                why="checkpoints are named by step",
                fix="--resume 100",
            )
        )
    return int(text)


def _check_resume(record: RunRecord, graph: Graph, planned: Plan, start: int) -> None:
    if record.graph != planned.name or record.seed != graph.schedule.seed:
        raise GraphError(
            Problem(
                where="--resume",
                what=f"the run is of {record.graph!r} with seed {record.seed}, this is {planned.name!r} with seed "
                f"{graph.schedule.seed}",
                why="a resumed run goes on as if it had not stopped",
                fix="the same graph and seed",
            )
        )
    if start >= planned.steps:
        raise GraphError(
            Problem(
                where="--resume",
                what=f"the checkpoint has {start} steps behind it, the graph runs {planned.steps}",
                why="nothing is left to do",
                fix=f"--steps {start * 2}, where graph() has such a parameter",
            )
        )


def _cut_metrics(run_dir: RunDir, start: int) -> None:
    """Steps after the checkpoint are made again: drop their lines."""
    if run_dir.metrics.is_file():
        kept = []
        for number, line in enumerate(run_dir.metrics.read_bytes().splitlines(keepends=True), start=1):
            try:
                done = msgspec.json.decode(line, type=_MetricsLine).step
            except msgspec.DecodeError as error:
                if not line.endswith(b"\n"):  # the line that was being written as the run ended
                    continue
                raise GraphError(
                    Problem(
                        where=f"{run_dir.metrics}:{number}",
                        what=f"this line cannot be read: {error}",
                        why="the resumed run goes on in this file",
                        fix="remove the line, then --resume",
                    )
                ) from error
            if line.endswith(b"\n") and done <= start:
                kept.append(line)
        run_dir.metrics.write_bytes(b"".join(kept))


def _describe(
    run_dir: RunDir, file: GraphFile, planned: Plan, values: dict[str, Any], executor: str, argv: list[str], seed: int
) -> None:
    record = RunRecord(
        graph=planned.name,
        file=str(file.path),
        args=values,
        seed=seed,
        executor=executor,
        command=["python", "-m", "pipeline.run", *argv],
        versions={name: _version(name) for name in PACKAGES},
        python=platform.python_version(),
        machine=f"{platform.machine()}, {os.cpu_count()} cores",
        git=_git(file.path.parent),
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )
    run_dir.run_json.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    run_dir.plan.write_bytes(msgspec.json.format(msgspec.json.encode(planned)))
    shutil.copyfile(file.path, run_dir.graph)


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


def _print_way_on(file: GraphFile, run_dir: RunDir, values: dict[str, Any], resume: str) -> None:
    """The commands that replay what failed and that go on from the last checkpoint."""
    flags = [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    for folder in sorted(run_dir.failures.iterdir(), key=lambda path: path.stat().st_mtime)[-1:]:
        command = ["python", "-m", "pipeline.run", str(file.path), *flags, "--replay", str(folder)]
        print(f"replay: {shlex.join(command)}", file=sys.stderr)
    steps = run_dir.checkpoint_steps()
    if steps:
        print(f"resume: {resume}   (from step {steps[-1]})", file=sys.stderr)
    else:
        print("resume: no checkpoint was written yet; start anew", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
