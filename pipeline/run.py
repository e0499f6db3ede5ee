"""`python -m pipeline.run graph.py [flags]`: check, draw, run, resume or replay a graph.

Exit codes: 0 done; 2 the graph, a flag or a file is wrong; 3 a stage failed; 4 and 5 the data plane; 6 a checkpoint;
130 stopped by Ctrl-C, 143 by SIGTERM, after the step in training was finished and saved (a second signal ends the run
at once).
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pipeline import screen, view
from pipeline.cli import console
from pipeline.cli.choice import choose, print_choice
from pipeline.cli.command import Parser, above_0, end, exit_code, graph_named, natural
from pipeline.cli.episode import replay_episode
from pipeline.cli.executor_flags import add_executor_flags, executor_problems, executor_words
from pipeline.cli.flags import add_flags, as_flag, fixed_by_flags, given_in, spelled
from pipeline.cli.foretold import add_assumptions, add_on, assumed_in, foretold, gpus_of, print_memory
from pipeline.cli.listing import print_list
from pipeline.cli.load import GraphFile, in_time, load
from pipeline.cli.orphans import leave_none
from pipeline.cli.output import outliving
from pipeline.cli.resume import RunRecord, check_resume, cut_metrics, describe, recorded, resume_step
from pipeline.cli.run_folder import check_empty, check_new, make, near
from pipeline.declare.graph import Graph
from pipeline.declare.interpreter import elsewhere
from pipeline.engine.termination import Termination
from pipeline.errors import GraphError, Problem, SluiceError, WorkerLost, refusals, together_with
from pipeline.forks import Original, exit_now, kept
from pipeline.forward import add_services, wanted_of
from pipeline.forwarders.beside import beside
from pipeline.mirrors.beside import mirrored
from pipeline.mirrors.remote import check_address, check_apart
from pipeline.plan.plan import Plan
from pipeline.plan.planner import plan
from pipeline.precedence import typed
from pipeline.reading import readable
from pipeline.record.lock import held
from pipeline.rundir import RUNS, RunDir
from pipeline.writing import exhausted

EXIT_CODES = """exit codes: 0 done; 2 the graph, a flag or a file is wrong; 3 a stage failed; 4, 5 the data plane;
6 a checkpoint; 130 stopped by Ctrl-C (143 SIGTERM, 129 SIGHUP, 131 SIGQUIT), after a step in training was finished and
saved (a second signal ends the run at once)"""


@dataclass(frozen=True)
class _Asked:
    """A parsed command line: the working directory at its start, which user code may leave, the graph and its plan, the
    values of its flags, the record of the run to resume, if any, and the failures that this run has from before."""

    here: Path
    argv: list[str]
    options: argparse.Namespace
    file: GraphFile
    graph: Graph
    planned: Plan
    values: dict[str, Any]
    record: RunRecord | None
    failures: frozenset[tuple[int, Path]] = frozenset()

    def near(self, path: Path) -> str:
        """Return a path as it may be typed: from the working directory, if it is below that."""
        return near(path, self.here)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    with kept():
        return exit_code(_main, argv)


def _main(argv: list[str]) -> int:
    started_s, here = time.monotonic(), Path.cwd()
    before = _parser(add_help=False)
    before.graph_file = next((word for word in argv if word.endswith(".py")), before.graph_file)
    first = before.parse_known_args(argv)[0]
    named = graph_named(argv, first.graph)
    if first.list is not None:
        print_list(_runs_in(first.list))
        return 0
    if (first.episode or first.live) and not (first.episode and first.replay):
        where, what = ("--episode", "--replay RUN") if first.episode else ("--live", "--replay RUN --episode ...")
        why, fix = "an episode is played again from the record of its run", f"add {what}"
        raise GraphError(Problem(where=where, what=f"{what} is missing", why=why, fix=fix))
    if named is None:
        _parser(add_help=True).parse_args(argv)
        raise GraphError(
            Problem(
                where="command line",
                what="no graph file is named",
                why="a run starts from a graph file",
                fix=f"choose a recipe: {' '.join(typed('pipeline.run'))} --list",
            )
        )
    leave_none()
    with in_time(Path(named)), Original().only(named):
        file = load(named)
        parser = _parser(add_help=True)
        parser.graph_file = named
        parser.description = file.says
        add_flags(parser, file.flags)
        options = parser.parse_args(argv)
        given = given_in(options)
        record = recorded(options.run_dir, here) if options.resume is not None else None
        defaults = {flag.name: flag.default for flag in file.flags}
        values = defaults | (record.args if record else {}) | given
        gpus = gpus_of(options)
        with together_with(_flag_problems(options, here)), fixed_by_flags(file.flags, given, values):
            with elsewhere() if gpus and options.plan else nullcontext():
                own = {name: value for name, value in values.items() if name in defaults}
                if gpus and not record:
                    choice = choose(file, own, given, gpus, assumed_in(options))
                    print_choice(choice, gpus, whole=False)
                    own, values = choice.values, values | choice.values
                graph = file.build(own)
                planned, warnings = plan(graph, gpus=gpus.count if gpus else options.gpus)
                made = foretold(graph, planned, gpus, options) if gpus else None
            console.print_problems(as_flag(warning, file.flags, given) for warning in warnings)
            if problems := tuple(executor_problems(options, graph, file.module)):
                raise GraphError(*problems)
    if options.check:
        print(f"{file.named}: {len(planned.stages)} stages, {len(planned.edges)} edges, no problem found")
        return 0
    if options.plan:
        console.print_plan(planned)
        if gpus and made:
            print_memory(made, gpus)
        return 0
    if options.replay:
        return _replay(graph, Path(options.replay), options.episode, live=options.live)
    return _run(_Asked(here, argv, options, file, graph, planned, values, record), wanted_of(options), started_s)


def _parser(*, add_help: bool) -> Parser:
    parser = Parser(
        prog=" ".join(typed("pipeline.run")), usage="%(prog)s GRAPH [flags]", add_help=add_help, epilog=EXIT_CODES
    )
    parser.add_argument("graph", nargs="?", help="a Python file with a function graph(), or the name of a recipe")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--list",
        nargs="?",
        const=RUNS,
        metavar="FOLDER",
        help=f"list the recipes and the runs in FOLDER, default {RUNS}",
    )
    what.add_argument("--check", action="store_true", help="check the graph and stop; starts nothing")
    what.add_argument(
        "--plan", action="store_true", help="draw the graph, its placement and the data on its edges, and stop"
    )
    what.add_argument(
        "--replay",
        metavar="FOLDER",
        help="run a failed task again on its saved inputs (RUN/failures/...), or an episode of a run (--episode)",
    )
    parser.add_argument(
        "--episode", metavar="NAME", help="with --replay RUN: play this kept episode again, STEP/GROUP/SAMPLE"
    )
    parser.add_argument("--live", action="store_true", help="with --episode: also sample it again")
    what.add_argument("--resume", nargs="?", const="last", metavar="STEP", help="resume from a checkpoint in --run-dir")
    parser.add_argument("--run-dir", metavar="DIR", help="where the run is recorded; default: a new folder in runs/")
    add_executor_flags(parser)
    gpus = parser.add_mutually_exclusive_group()
    gpus.add_argument("--gpus", type=natural, metavar="N", help="check the placement against N GPUs")
    add_on(gpus)
    add_assumptions(parser)
    parser.add_argument(
        "--deadline-s", type=above_0, default=3600.0, metavar="S", help="fail if no task finishes for this long"
    )
    parser.add_argument(
        "--restarts", type=natural, default=2, metavar="N", help="restarts from the last checkpoint when a trainer dies"
    )
    parser.add_argument("--view", action="store_true", help="show the run in a browser while it runs")
    parser.add_argument("--plain", action="store_true", help="print plain lines instead of a live display")
    parser.add_argument(
        "--mirror", metavar="URL", help="keep a copy of checkpoints and record there, such as s3://bucket/runs"
    )
    add_services(parser)
    return parser


def _flag_problems(options: argparse.Namespace, here: Path) -> list[Problem]:
    """Return the problems of the flags that say where a run is recorded, mirrored and forwarded."""
    checks: list[Callable[[], object]] = [partial(wanted_of, options)]
    if options.mirror:
        checks.append(partial(check_address, options.mirror, flag="--mirror"))
    if options.check or options.plan:  # a run makes the folder, and looks into it once nobody else can
        checks.append(partial(check_new, options.run_dir, here))
        if options.mirror and options.run_dir:
            checks.append(partial(check_apart, options.mirror, here / options.run_dir, flag="--mirror"))
    return [problem for check in checks for problem in refusals(check)]


def _runs_in(folder: str) -> Path:
    """Return the folder of --list. Raises GraphError if it does not exist, unless it is the default."""
    if folder != RUNS and not Path(folder).is_dir():
        raise GraphError(
            Problem(
                where=f"--list {folder}",
                what="there is no such folder",
                why="it lists the runs in a folder",
                fix="name a folder of runs, or leave it out for runs",
            )
        )
    return Path(folder)


def _replay(graph: Graph, folder: Path, episode: str | None, *, live: bool) -> int:
    from pipeline.executors import replay

    if episode is not None:
        lines, same = replay_episode(graph, folder, episode, live=live)
        print("\n".join(lines))
        return 0 if same else 1
    why, fix = "the failed run wrote the saved inputs completely", "replay another failure, or run the graph again"
    with readable(f"--replay {folder}", GraphError, why=why, fix=fix):
        task, columns = replay.load_inputs(folder)
    output = replay.run_again(graph, folder, task, columns)
    for name, value in sorted(output.metrics.items()):
        print(f"{name} {value:g}")
    print(f"{folder}: the task passes now; it returned {', '.join(output.columns) or 'no columns'}")
    return 0


def _run(asked: _Asked, services: Mapping[str, str], started_s: float) -> int:
    run_dir = make(asked.options.run_dir, asked.planned.name, asked.here)
    if asked.options.mirror:
        check_apart(asked.options.mirror, run_dir.path, flag="--mirror")
    near = asked.near(run_dir.path)
    with outliving(near), held(run_dir, where=f"--run-dir {shlex.quote(near)}") as warning:
        console.print_problems([warning] if warning else [])
        return _run_in(run_dir, asked, services, started_s)


def _run_in(run_dir: RunDir, asked: _Asked, services: Mapping[str, str], started_s: float) -> int:
    """Run in a directory that no other run writes. Returns the exit code."""
    asked = replace(asked, failures=frozenset(_failures(run_dir)))
    options, planned = asked.options, asked.planned
    start = _begin(asked, run_dir)
    progress = console.Progress(planned, start, plain=options.plain, metrics=run_dir.metrics)
    if start == planned.steps:
        from pipeline.record.runs import add_end

        with beside(run_dir, services), mirrored(run_dir, options.mirror, progress.warn):
            add_end(run_dir.events, start)
        print(f"{planned.name}: all {start} steps were done; the end is recorded now in {asked.near(run_dir.path)}")
        return 0
    steps = planned.steps - start
    print(
        f"{planned.name}: {steps} step{'s' * (steps != 1)} of {planned.batch} x {planned.group_size} samples; "
        f"{asked.near(run_dir.path)}",
        flush=True,
    )
    with Termination(exit_now) as termination:
        try:
            shown = view.beside(run_dir.path) if options.view else nullcontext()
            with progress, shown, beside(run_dir, services), mirrored(run_dir, options.mirror, progress.warn):
                stopped = _execute(asked, run_dir, start, progress, termination)
            code = termination.exit_code if stopped else 0
        except SystemExit:  # by a signal
            code = termination.exit_code
        except (SluiceError, OSError) as error:
            failed = error if isinstance(error, SluiceError) else exhausted(error)
            if failed is None:
                raise
            progress.end()
            console.print_problems(failed.problems)
            code = failed.exit_code
        except KeyboardInterrupt:
            progress.end()
            _print_way_on(asked, run_dir)
            raise
        termination.over()
        if code:
            if termination.asked:
                progress.end()
            _print_way_on(asked, run_dir)
            return code
    resume, near = _resume_command(asked, run_dir), asked.near(run_dir.path)
    commands = [
        ("inspect", shlex.join(["head", *map(asked.near, (run_dir.metrics, run_dir.samples(planned.steps - 1)))])),
        ("view", shlex.join([*typed("pipeline.view"), near])),
        ("continue", f"{resume} --steps {planned.steps * 2}" if "steps" in asked.values else resume),
    ]
    console.print_summary(planned, progress, run_dir=near, wall_s=time.monotonic() - started_s, commands=commands)
    return 0


def _begin(asked: _Asked, run_dir: RunDir) -> int:
    """Describe a new run on disk, or check the resumed one. Returns the number of finished steps: all of them of a run
    that was killed before it recorded its end."""
    from pipeline.record import checkpoint
    from pipeline.record.runs import state_on_disk

    seed = asked.graph.schedule.seed
    if asked.record:
        step, start = resume_step(asked.options.resume), 0
        if step is not None or run_dir.checkpoint_steps():
            _, manifest, damaged = checkpoint.read(run_dir, step)
            console.print_problems(msgspec.structs.replace(problem, warning=True) for problem in damaged)
            start = manifest.steps
        unended = step is None and start == asked.planned.steps and state_on_disk(run_dir.events) != "finished"
        check_resume(run_dir, asked.record, asked.planned, seed, start, lasts="steps" in asked.values, unended=unended)
        if start:
            console.print_problems(cut_metrics(run_dir, start))
            later, aside = run_dir.set_aside_after(start) if step is not None else ([], run_dir.path)
            console.print_problems([_left_behind(start, later, aside)] if later else [])
        else:
            console.print_problems([_from_the_start(run_dir, run_dir.set_aside())])
        return start
    check_empty(run_dir, asked.here)
    describe(run_dir, asked.file, asked.planned, asked.values, asked.options.executor, asked.argv, seed)
    return 0


def _from_the_start(run_dir: RunDir, aside: Path) -> Problem:
    return Problem(
        where=str(run_dir.checkpoints),
        what="there is no checkpoint to go on from",
        why=f"the run starts again from step 0, and its record so far is in {aside}",
        fix="Schedule(checkpoint_every=10) saves more often",
        warning=True,
    )


def _left_behind(start: int, later: Sequence[int], aside: Path) -> Problem:
    return Problem(
        where=f"--resume {start}",
        what=f"there are later checkpoints (step {', '.join(map(str, later))})",
        why=f"the run goes on from step {start} and writes its own, so they are now in {aside}",
        fix="remove that folder, unless you still want them",
        warning=True,
    )


def _resume_command(asked: _Asked, run_dir: RunDir) -> str:
    options = asked.options
    mirror = ["--mirror", options.mirror] if options.mirror else []
    command = [*typed("pipeline.run"), asked.file.named, *executor_words(options), *mirror]
    return shlex.join([*command, "--run-dir", asked.near(run_dir.path), "--resume"])


def _execute(asked: _Asked, run_dir: RunDir, start: int, progress: console.Progress, termination: Termination) -> bool:
    """Run to the end, or until SIGTERM. Returns whether SIGTERM stopped it. If only a checkpoint can restore a lost
    worker's state, restart from the last one."""
    from pipeline.engine.driver import Driver
    from pipeline.record import checkpoint

    for left in range(asked.options.restarts, -1, -1):
        executor = _executor(asked, run_dir, progress)
        driver = Driver(
            asked.graph,
            asked.planned,
            executor,
            run_dir=run_dir,
            start=start,
            on_step=progress.step,
            on_notice=progress.warn,
            deadline_s=asked.options.deadline_s,
            last_words=partial(_print_way_on, asked, run_dir),
            termination=termination,
        )
        try:
            driver.execute()
            return driver.stopped
        except WorkerLost as error:
            if not left or not run_dir.checkpoint_steps() or termination.asked or not executor.can_restart:
                raise
            progress.end()
            console.print_problems(error.problems)
            start = checkpoint.read(run_dir, None)[1].steps
            console.print_problems(cut_metrics(run_dir, start))
            print(f"restart from step {start}; restarts left: {left - 1}", file=sys.stderr, flush=True)
    raise AssertionError("the last attempt returns or raises")


def _executor(asked: _Asked, run_dir: RunDir, progress: console.Progress) -> Any:
    options = asked.options
    if options.executor == "local":
        from pipeline.executors.local import LocalExecutor

        return LocalExecutor(on_start=progress.starting)
    from pipeline.executors.ray import RayExecutor
    from pipeline.executors.sent import user_modules

    return RayExecutor(
        address=options.address,
        modules=user_modules(asked.file.module),
        trusted_network=options.trusted_network,
        storage_units=options.storage_units,
        last_words=partial(_print_way_on, asked, run_dir),
        on_start=progress.starting,
    )


def _print_way_on(asked: _Asked, run_dir: RunDir) -> None:
    """Print the commands that replay the task that has failed, if its inputs are saved, and that resume from the last
    checkpoint."""
    screen.back()  # from a log, if the run ends while its workers start
    flags = [word for name, value in asked.values.items() for word in spelled(name, value)]
    for _, folder in [each for each in _failures(run_dir) if each not in asked.failures][-1:]:
        command = [*typed("pipeline.run"), asked.file.named, *flags, "--replay", asked.near(folder)]
        print(f"replay: {shlex.join(command)}", file=sys.stderr)
    steps = run_dir.checkpoint_steps()
    at = f"from step {steps[-1]}" if steps else "from the start: no checkpoint was written yet"
    if not run_dir.checkpoints.is_dir():
        at = "once the run directory is in its place again"
    print(f"resume: {_resume_command(asked, run_dir)}   ({at})", file=sys.stderr)


def _failures(run_dir: RunDir) -> list[tuple[int, Path]]:
    """Return the saved inputs of failed tasks, each with its time, the last one last; none if the folder is gone."""
    with suppress(OSError):
        return sorted((path.stat().st_mtime_ns, path) for path in run_dir.failures.iterdir())
    return []


if __name__ == "__main__":
    end(main())
