"""`python -m pipeline.simulate RUN [flags]`: simulate a run under another schedule, in virtual time.

RUN is a run directory, whose recorded durations are used, or a graph file with the flags of its graph(); then --on
names GPUs, for which time and memory are foretold, or --stage gives the seconds of every stage. A parameter of graph()
that has the name of another flag of this command is set with the prefix --graph-, as in --graph-workers. The scheduler
is the same as in real runs. Exit codes: 0 done; 2 RUN or a flag is wrong, or a worker group does not fit on the GPUs; 3
the simulated run cannot continue.

    python -m pipeline.simulate runs/quickstart-... --max-staleness 2 --on-stale drop --workers sampler=4
    python -m pipeline.simulate graphs/grpo.py --on h200:2 --generator vllm --trainer megatron ...
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from pipeline.analysis.report import Report, analyse, summary
from pipeline.cli import console
from pipeline.cli.choice import Chosen, choose, foretold_json, print_choice
from pipeline.cli.command import Parser, exit_code, graph_named, natural, number, one_of, whole
from pipeline.cli.flags import Flag, add_flags, given_in
from pipeline.cli.foretold import (
    add_assumptions,
    add_on,
    assumed_in,
    foretold,
    gpus_of,
    misplaced,
    print_memory,
    unknown_times,
)
from pipeline.cli.listing import example
from pipeline.cli.load import GraphFile, in_time, load
from pipeline.cli.reports import print_reports
from pipeline.declare.graph import Graph
from pipeline.declare.interpreter import elsewhere
from pipeline.errors import GraphError, Problem
from pipeline.foretell.gpu import Gpus
from pipeline.plan.plan import Plan
from pipeline.precedence import typed
from pipeline.record.runs import consistent
from pipeline.simulation.distributions import GRAMMAR
from pipeline.simulation.durations import Durations
from pipeline.simulation.recording import Recording, disagreement, recorded, simulated
from pipeline.simulation.whatif import Changes, range_problems

LEAST_CORES, MOST_CORES = 0.01, 1_000_000
NUMBER = re.compile(r"\d+(\.\d*)?|\.\d+")
ON_STALE, REFIT = ("wait", "drop"), ("drain", "in_flight")
SHARED: Mapping[str, tuple[str, ...]] = {  # flags that mean the same as parameters of these names; the words they take
    "steps": (), "max_staleness": (), "pipeline_depth": (), "seed": (), "on_stale": ON_STALE, "refit": REFIT,
}  # fmt: skip
PREFIX = "graph-"  # of parameters with the name of another flag


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    return exit_code(_main, argv)


def _main(argv: list[str]) -> int:
    options, rest = _parser(add_help=False).parse_known_args(argv)
    options.run = graph_named(argv, options.run)
    path = None if options.run is None else Path(options.run)
    if rest and (path is None or path.is_dir()):
        _parser().parse_args(argv)  # prints the help, or reports what is wrong with them
    if path is None:
        raise GraphError(
            Problem(
                where="command line",
                what="no run is named",
                why="a simulation starts from a run directory or a graph file",
                fix=" ".join([*typed("pipeline.simulate"), example()]),
            )
        )
    with in_time(path):
        file, values, given = (None, {}, {}) if path.is_dir() else _loaded(path, argv, options)
    if options.cores is not None and not LEAST_CORES <= options.cores <= MOST_CORES:
        raise GraphError(
            Problem(
                where=f"--cores {options.cores:g}",
                what="it is not a number of cores",
                why=f"a machine has {LEAST_CORES} to {MOST_CORES:,} cores",
                fix="--cores 2",
            )
        )
    changes, gpus = _changes(options), gpus_of(options)
    if problems := (*range_problems(changes), *misplaced(options, of_a_graph=file is not None)):
        raise GraphError(*problems)
    if file is None:
        with consistent(path):
            return _simulate(recorded(path, cores=options.cores), changes, options)
    with in_time(path), elsewhere() if gpus else nullcontext():
        choice = choose(file, values, given, gpus, assumed_in(options), changes) if gpus else Chosen(values=values)
        graph = file.build(choice.values)
        planned = _planned(graph, gpus)
        made = foretold(graph, planned, gpus, options) if gpus else None
        if gpus and made and (problems := tuple(unknown_times(graph, made, gpus, changes.stages))):
            raise GraphError(*problems)
    if gpus is None or made is None:
        return _simulate(Recording(plan=planned, durations=Durations({}), cores=options.cores), changes, options)
    if options.json:
        return _simulate(made.recording, changes, options, foretold_json(made, choice))
    print_choice(choice, gpus, whole=True)
    print_memory(made, gpus)
    return _simulate(made.recording, changes, options, tokens=made.tokens)


def _simulate(
    recording: Recording,
    changes: Changes,
    options: argparse.Namespace,
    more: Mapping[str, Any] = MappingProxyType({}),
    *,
    tokens: int = 0,
) -> int:
    """Simulate, and print what was found: as JSON with `more`, or as a table, with the speed of a step's `tokens`."""
    seed = options.seed or 0
    changed = simulated(recording, changes, seed=seed)
    measured = analyse(recording.events, recording.plan) if recording.events else None
    same = _as_it_was(recording, changes, seed) if measured and changes else changed[1]
    notes = [*recording.notes, *(_comparison(measured, same, changed[1]) if measured else ())]
    if options.json:
        found = {**_as_json(options, recording, measured, *changed, notes), **more}
        print(msgspec.json.encode(found).decode())
        return 0
    columns: dict[str, Report] = {"simulated": changed[1]}
    if measured and changes:
        columns = {"simulated as it was": same, "changed": changed[1]}
    columns = ({"measured": measured} if measured else {}) | columns
    print_reports(changed[0].name, columns, notes, tokens=tokens)
    return 0


def _as_it_was(recording: Recording, changes: Changes, seed: int) -> Report:
    """Return the report of a record's unchanged simulation, with the given seconds of stages that did not run."""
    ran = recording.durations.stages
    stages = {name: text for name, text in changes.stages.items() if name not in ran}
    return simulated(recording, Changes(stages=stages), seed=seed)[1]


def _comparison(measured: Report, as_it_was: Report, changed: Report) -> Iterator[str]:
    """Yield which steps the means are of, and a warning if the unchanged simulation is far from the record."""
    steps = {"measured": measured, "simulated as it was": as_it_was, "changed": changed}
    if as_it_was is changed:
        steps = {"measured": measured, "simulated": changed}
    yield f"seconds per step: {', '.join(f'{name} over {each.steps.averaged}' for name, each in steps.items())}"
    if off := disagreement(as_it_was, measured):
        yield f"warning: {off}, so this record foretells no change"


def _loaded(
    path: Path, argv: list[str], options: argparse.Namespace
) -> tuple[GraphFile, dict[str, Any], dict[str, Any]]:
    """Return a graph file, the values of its parameters, and those given. A flag that means the same as a parameter is
    given to both; a parameter with the name of another flag has a flag with the prefix."""
    file, parser = load(path), _parser()
    own = parser.options
    clashing = [flag for flag in file.flags if flag.option in own and not _is_shared(flag)]
    console.print_problems(_unset(clashing, options))
    parser.graph_file, parser.description = str(path), file.says
    others = [flag for flag in file.flags if flag.option not in own]
    add_flags(parser, (*others, *(replace(flag, prefix=PREFIX) for flag in clashing)))
    given = given_in(parser.parse_args(argv))
    for flag in file.flags:
        if _is_shared(flag) and (value := getattr(options, flag.name)) is not None:
            given[flag.name] = _shared(flag, value)
    return file, {flag.name: flag.default for flag in file.flags} | given, given


def _is_shared(flag: Flag) -> bool:
    """Return whether a parameter of graph() means the same as the flag of that name."""
    words = SHARED.get(flag.name)
    if not words:
        return words is not None and flag.type is int
    return flag.type is str and {*flag.choices, flag.default} <= {*words, None}


def _shared(flag: Flag, value: object) -> Any:
    """Return the value of a flag as that of a parameter. Raises GraphError if the parameter does not take it."""
    try:
        return flag.parse(str(value))
    except argparse.ArgumentTypeError as error:
        raise GraphError(
            Problem(
                where=f"{flag.option} {value}",
                what=str(error),
                why=f"parameter {flag.name!r} of graph() gets it too",
                fix=f"give another value, or change the type of {flag.name!r}",
            )
        ) from None


def _unset(clashing: Sequence[Flag], options: argparse.Namespace) -> Iterator[Problem]:
    """Yield a warning for each given flag of this command with the name of a parameter that it does not set."""
    for flag in clashing:
        if getattr(options, flag.option.removeprefix("--").replace("-", "_"), None) not in (None, [], False):
            yield Problem(
                where=flag.option,
                what=f"it does not set the parameter {flag.name!r} of graph()",
                why="it is a flag of the simulation",
                fix=f"set the parameter with {replace(flag, prefix=PREFIX).option}",
                warning=True,
            )


def _planned(graph: Graph, gpus: Gpus | None) -> Plan:
    """Return the plan of a graph, for these GPUs."""
    from pipeline.plan.planner import plan  # loads networkx, which a recorded run does not need

    planned, warnings = plan(graph, gpus=gpus.count if gpus else None)
    console.print_problems(warnings)
    return planned


def _changes(options: argparse.Namespace) -> Changes:
    return Changes(
        steps=options.steps,
        max_staleness=options.max_staleness,
        pipeline_depth=options.pipeline_depth,
        on_stale=options.on_stale,
        refit=options.refit,
        groups=options.groups,
        refit_s=options.refit_s,
        workers={
            name: int(text)
            for name, text in _pairs("--workers", options.workers, r"\d{1,6}", "sampler=4", "a whole number to 999999")
        },
        environments={
            name: int(text)
            for name, text in _pairs(
                "--environments", options.environments, r"\d{1,6}", "episode=8", "a whole number to 999999"
            )
        },
        speed={
            name: float(text.removesuffix("x"))
            for name, text in _pairs("--speed", options.speed, rf"({NUMBER.pattern})x?", "train=2x", "a factor above 0")
        },
        stages=dict(_pairs("--stage", options.stage, r".+", '"rollout=lognormal(1.0, 0.8)"', "seconds")),
    )


def _pairs(flag: str, given: Sequence[str], pattern: str, example: str, kind: str) -> list[tuple[str, str]]:
    """Return NAME=VALUE texts as pairs. Raises GraphError with every text that is not one, or whose value is not of
    this kind."""
    pairs = [(name.strip(), value.strip(), text) for text in given for name, _, value in [text.partition("=")]]
    wrong = [text for name, value, text in pairs if not name or not re.fullmatch(pattern, value)]
    if wrong:
        raise GraphError(
            *(
                Problem(
                    where=f"{flag} {text}",
                    what="it is not of the form NAME=VALUE",
                    why=f"the flag takes a name and {kind}",
                    fix=f"{flag} {example}",
                )
                for text in wrong
            )
        )
    return [(name, value) for name, value, _ in pairs]


def _parser(*, add_help: bool = True) -> Parser:
    parser = Parser(prog=" ".join(typed("pipeline.simulate")), usage="%(prog)s RUN|GRAPH [flags]", add_help=add_help)
    parser.add_argument("run", nargs="?", help="a run directory, or a Python file with a function graph()")
    add_on(parser)
    add_assumptions(parser)
    parser.add_argument("--steps", type=whole, metavar="N", help="steps to simulate; default: as in RUN")
    parser.add_argument(
        "--max-staleness", type=whole, metavar="N", help="maximum age of a sample, in versions; default: as in RUN"
    )
    parser.add_argument(
        "--pipeline-depth", type=whole, metavar="N", help="batches that rollout may run ahead; default: as in RUN"
    )
    parser.add_argument("--on-stale", **one_of(*ON_STALE), help="what happens to older samples; default: as in RUN")
    parser.add_argument("--refit", **one_of(*REFIT), help="when weights are swapped; default: as in RUN")
    parser.add_argument("--groups", metavar="N|Nx", help="groups per batch, or a multiple of those in RUN: 64, 8x")
    parser.add_argument("--refit-s", type=number, metavar="S", help="duration of each refit, in seconds")
    parser.add_argument(
        "--workers", action="append", default=[], metavar="GROUP=N", help="workers of a group; may be repeated"
    )
    parser.add_argument(
        "--environments", action="append", default=[], metavar="STAGE=N",
        help="environment processes per worker of a stage of episodes; may be repeated",
    )  # fmt: skip
    parser.add_argument("--cores", type=number, metavar="N", help="cores per machine; default: as in RUN")
    parser.add_argument("--speed", action="append", default=[], metavar="STAGE=Nx", help="make a stage N times as fast")
    parser.add_argument(
        "--stage", action="append", default=[], metavar="STAGE=SECONDS", help=f"a number or a distribution: {GRAMMAR}"
    )
    parser.add_argument("--seed", type=natural, metavar="N", help="seed of the random durations; default: 0")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def _as_json(
    options: argparse.Namespace,
    recording: Recording,
    measured: Report | None,
    planned: Plan,
    report: Report,
    notes: Sequence[str],
) -> dict[str, Any]:
    return {
        "run": options.run,
        "steps": planned.steps,
        "groups": planned.batch,
        "max_staleness": planned.max_staleness,
        "on_stale": planned.on_stale,
        "refit": planned.refit,
        "seed": options.seed or 0,
        "cores": recording.cores,
        **summary(report),
        "measured": summary(measured) if measured else None,
        "notes": notes,
    }


if __name__ == "__main__":
    sys.exit(main())
