"""The flags that choose and configure what runs the workers, and which graphs and flags go with it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from types import ModuleType

from pipeline.cli.command import one_of
from pipeline.declare.graph import Graph
from pipeline.errors import Problem
from pipeline.executors.sent import sent_problems, user_modules
from pipeline.executors.storage import PER_NODE
from pipeline.plan.group_checks import one_process_problems
from pipeline.plan.planner import placed_groups


def add_executor_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser."""
    parser.add_argument("--executor", **one_of("ray", "local"), default="ray", help="what runs the workers")
    parser.add_argument("--address", metavar="ADDRESS", help="join a running Ray cluster instead of starting one")
    parser.add_argument("--trusted-network", action="store_true", help="let the data plane listen beyond this machine")
    parser.add_argument(
        "--storage-units", type=storage_units, default=1, metavar="N",
        help=f"processes that hold the columns: N on this machine, or {PER_NODE} for one per machine of the cluster",
    )  # fmt: skip


def executor_words(options: argparse.Namespace) -> list[str]:
    """Return the words of a command line that choose the same executor."""
    address = ["--address", options.address] if options.address else []
    trusted = ["--trusted-network"] if options.trusted_network else []
    units = ["--storage-units", str(options.storage_units)] if options.storage_units != 1 else []
    return ["--executor", options.executor, *address, *trusted, *units]


def storage_units(text: str) -> int | str:
    """Parse the value of --storage-units."""
    if text != PER_NODE and not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or more, or {PER_NODE}, got {text!r}")
    return text if text == PER_NODE else int(text)


def executor_problems(options: argparse.Namespace, graph: Graph, module: ModuleType) -> Iterator[Problem]:
    """Yield why the executor cannot run the graph of this module, or does not have the flags."""
    if options.executor != "local":
        yield from sent_problems(graph, user_modules(module))
        return
    yield from one_process_problems(placed_groups(graph.all_stages(), graph.host))
    for flag, value in (
        ("--storage-units", options.storage_units != 1 and options.storage_units),
        ("--address", options.address),
        ("--trusted-network", options.trusted_network and " "),
    ):
        if value:
            yield Problem(
                where=f"{flag} {value}".strip(),
                what=f"--executor local has no {flag}",
                why="it runs everything, and keeps the columns, in its own process",
                fix=f"--executor ray, or leave out {flag}",
            )
