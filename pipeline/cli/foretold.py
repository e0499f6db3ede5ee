"""The flags that name GPUs and what a run is taken to do, and the table of the memory that worker groups need."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from pipeline.cli import console
from pipeline.declare.graph import Graph
from pipeline.errors import GraphError, Problem
from pipeline.foretell.forecast import Forecast, forecast
from pipeline.foretell.gpu import Gpus, asked, known
from pipeline.foretell.loads import PROMPT, Assumed
from pipeline.foretell.memory import GroupMemory, gib
from pipeline.plan.plan import Plan

WHEN = {
    "moved": "on the host in other turns", "dropped": "freed in other turns", "spare": "given up if needed",
    "always": "", "task": "",
}  # fmt: skip
TOKENS, KERNELS = r"[1-9]\d{0,8}", ("fused", "plain")
WORDS = {"prompt": TOKENS, "mean": TOKENS, "kernels": "|".join(KERNELS)}  # what may be assumed
EXAMPLES = {"prompt": str(PROMPT), "mean": "400", "kernels": KERNELS[1]}


class GivenOnce(argparse.Action):
    """A flag that is given once at most: the last of two would count, and nobody would know."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        if (before := getattr(namespace, self.dest, None)) is not None:
            raise GraphError(
                Problem(
                    where=f"{option} {values}",
                    what=f"{option} {before} is given too",
                    why="a graph is foretold for GPUs of one kind",
                    fix=f"leave out one of the two; {option} {known()[-1]}:8 names 8 GPUs",
                )
            )
        setattr(namespace, self.dest, values)


def add_on(parser: Any) -> None:
    """Add the flag that names GPUs."""
    kinds = " or ".join(known())
    parser.add_argument(
        "--on", action=GivenOnce, metavar="GPU:N", help=f"foretell memory, and check it, for N GPUs: {kinds}"
    )


def add_assumptions(parser: argparse.ArgumentParser) -> None:
    """Add the flag of what a run is taken to do."""
    parser.add_argument(
        "--assume", action="append", default=[], metavar="NAME=VALUE",
        help=f"with --on: prompt=TOKENS ({PROMPT}), mean=TOKENS of responses (the most), kernels=plain (fused)",
    )  # fmt: skip


def gpus_of(options: argparse.Namespace) -> Gpus | None:
    """Return the GPUs that the flags name. Raises GraphError if they are not known, or what is assumed is not."""
    if problems := tuple(_odd(options)):
        raise GraphError(*problems)
    return asked(options.on) if options.on else None


def _odd(options: argparse.Namespace) -> Iterator[Problem]:
    seen: dict[str, str] = {}
    for text in options.assume:
        name, _, value = text.partition("=")
        if not re.fullmatch(WORDS.get(name, "(?!)"), value):
            yield _no_assumption(text, name, value)
        elif name in seen:
            what, why = f"--assume {seen[name]} is given too", "each is assumed once"
            yield Problem(where=f"--assume {text}", what=what, why=why, fix="leave out one of the two")
        elif not options.on:
            why = "it says what a run on named GPUs is taken to do"
            fix = f"--on {known()[-1]}:1, or leave it out"
            yield Problem(where=f"--assume {text}", what="there is no --on", why=why, fix=fix)
        seen[name] = text


def _no_assumption(text: str, name: str, value: str) -> Problem:
    """Return the problem of an assumption with an unknown name, or a value that its name does not take."""
    if name not in WORDS:
        near = difflib.get_close_matches(name, WORDS, n=1)
        return Problem(
            where=f"--assume {text}",
            what=f"there is no assumption {name!r}",
            why="prompt and mean are numbers of tokens, and kernels are fused or plain",
            fix=f"--assume {near[0]}={EXAMPLES[near[0]]}"
            if near
            else " or ".join(f"--assume {known_name}={example}" for known_name, example in EXAMPLES.items()),
        )
    return Problem(
        where=f"--assume {text}",
        what=f"{value!r} is no value of {name}" if value else f"{name} has no value",
        why="kernels are fused or plain" if name == "kernels" else "it is a number of tokens, 1 to 999,999,999",
        fix=" or ".join(f"--assume {name}={word}" for word in (KERNELS if name == "kernels" else [EXAMPLES[name]])),
    )


def assumed_in(options: argparse.Namespace) -> Assumed:
    """Return what a run is taken to do."""
    given = dict(text.split("=") for text in options.assume)
    lengths = {name: int(given[name]) for name in ("prompt", "mean") if name in given}
    return Assumed(**lengths, kernels=given.get("kernels", "fused"))


def foretold(graph: Graph, planned: Plan, gpus: Gpus, options: argparse.Namespace) -> Forecast:
    """Return the forecast of a graph on these GPUs. Raises GraphError if a worker group does not fit."""
    given = {text.partition("=")[0] for text in getattr(options, "stage", None) or ()}  # of simulate
    made = forecast(graph, planned, gpus.gpu, assumed_in(options), given=given)
    if made.problems:
        raise GraphError(*made.problems)
    return made


def misplaced(options: argparse.Namespace, *, of_a_graph: bool) -> Iterator[Problem]:
    """Yield why flags of a simulation do not go with --on."""
    if options.on and not of_a_graph:
        yield Problem(
            where=f"--on {options.on}",
            what="RUN is a run directory",
            why="its durations were recorded; GPUs are named for a graph that was never run",
            fix="name the graph file, or leave out --on",
        )
    for flag, value in (("--workers", options.workers), ("--groups", options.groups)):
        if options.on and value:
            yield Problem(
                where=flag,
                what="it does not go with --on",
                why="what a stage needs follows from the graph",
                fix="set the graph's own parameters, see --help",
            )


def unknown_times(graph: Graph, made: Forecast, gpus: Gpus, given: Iterable[str]) -> Iterator[Problem]:
    """Yield a problem for each stage on GPUs whose time is not known, except the `given` ones."""
    for stage in graph.all_stages():
        if stage.name not in {*made.recording.durations.stages, *given} and stage.shape != "external":
            backend = stage.groups()[-1].backend
            yield Problem(
                where=str(stage.location),
                what=f"the time of stage {stage.name!r} on {gpus.name} is not known",
                why=f"it was not measured for its kind of model and the backend {backend!r}",
                fix=f"--stage {stage.name}=SECONDS",
            )


def print_memory(made: Forecast, gpus: Gpus) -> None:
    """Print the memory of each worker group on one of its GPUs, by part."""
    from rich.table import Table

    title = f"memory on each GPU ({gpus.name}: {gib(gpus.gpu.memory_bytes)})"
    table = Table("worker group", title, "GiB", "", box=None, padding=(0, 2, 0, 0))
    for name, one in made.memory.items():
        for number, (part, size, said) in enumerate(_parts(one)):
            table.add_row("" if number else name, part, size, said)
    console.console().print(table)


def _parts(one: GroupMemory) -> list[tuple[str, str, str]]:
    """Return the rows of a worker group: a part, its GiB, and a remark."""
    in_turns = one.beside_bytes > 0
    rows = [(part.name, part.size_bytes, WHEN[part.when] if in_turns else "") for part in one.held]
    rows += [("kept by the groups beside it", one.beside_bytes, "")] if in_turns else []
    kept = one.spared_bytes + one.cached_bytes
    rows += [("and kept because there is room", kept, "")] if kept else []
    rows += [(part.name, part.size_bytes, f"in {one.largest}") for part in one.passing.get(one.largest, ())]
    fits = one.fits.get(one.largest)
    rows += [("at most", one.peak_bytes, f"up to {fits}" if fits else "")]
    found = [(part, f"{size / 2**30:.1f}", said) for part, size, said in rows]
    unknown = [(f"{', '.join(one.unknown)}: not known for backend {one.group.backend!r}", "-", "")]
    return found + (unknown if one.unknown else [])


def memory_summary(made: Forecast) -> dict[str, Any]:
    """Return the memory of each worker group on one of its GPUs as plain values, in bytes."""
    return {
        name: {
            "held": {part.name: round(part.size_bytes) for part in one.held},
            "beside": round(one.beside_bytes),
            "spared": round(one.spared_bytes + one.cached_bytes),
            "tasks": {stage: sum(round(part.size_bytes) for part in parts) for stage, parts in one.passing.items()},
            "peak": round(one.peak_bytes),
            "unknown": list(one.unknown),
        }
        for name, one in made.memory.items()
    }
