"""Chooses what a recipe leaves open for GPUs that are named: the fastest of its choices that fits, as foretold.

A graph file may have a function beside graph(), which yields values of graph()'s parameters to try, plain ones first:

    def choices(gpus: int) -> Iterator[dict[str, object]]:
        for rows in (8192, 16384):
            yield {"microbatch": rows, "colocated": gpus == 1}

Further parameters of choices() are those of graph() with these names, and get their values: as they are given, or their
defaults. A flag that is given is never changed. A choice that cannot be faster than one before it is not simulated: it
is known to need that many seconds at least.
"""

from __future__ import annotations

import inspect
import math
import shlex
import sys
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from msgspec.structs import replace

from pipeline.cli import console
from pipeline.cli.flags import spelled
from pipeline.cli.foretold import memory_summary, unknown_times
from pipeline.cli.load import GraphFile, doing
from pipeline.errors import CALLED, GraphError, Problem, SluiceError, is_users, message_of, shown
from pipeline.foretell.bounds import least_s
from pipeline.foretell.forecast import Forecast, forecast
from pipeline.foretell.gpu import Gpus
from pipeline.foretell.loads import Assumed, check_samples
from pipeline.foretell.memory import gib
from pipeline.plan.plan import Plan
from pipeline.simulation.recording import simulated
from pipeline.simulation.whatif import Changes

MOST = 500  # choices
STEPS = 4  # simulated per choice, after the first ones, which fill the pipeline
ALIKE = 2  # simulated if no step begins before the one before it has ended, and all take equally long
SLOW_S = 5.0  # until the command says what it does
GAIN = 0.01  # by which a later choice must be faster
REASON = 60  # characters
NO_CHANGES = Changes()


class TooLargeError(GraphError):
    """A worker group does not fit on its GPUs."""


class WrongChangeError(GraphError):
    """A change that applies to no choice."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One choice: the values that it sets, and the seconds and tokens/s of a step and the bytes in use of the fullest
    GPU; or why it cannot be. `is_slower`: these are the least seconds and the most tokens/s, and enough to leave it."""

    values: Mapping[str, Any]
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    peak_bytes: float = 0.0
    why: str = ""
    is_slower: bool = False


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The values of graph()'s parameters, and what was tried; nothing if the graph file leaves nothing open."""

    values: dict[str, Any]
    tried: tuple[Tried, ...] = ()
    best: Tried | None = None


def choose(
    file: GraphFile,
    values: Mapping[str, Any],
    given: Container[str],
    gpus: Gpus,
    assumed: Assumed,
    changes: Changes = NO_CHANGES,
) -> Chosen:
    """Return the fastest choice of a graph file, of those with the parameters that are `given`; without times, the
    first one that fits. Raises GraphError if choices() is wrong, or, if none can be, with what is too large in the
    first choice of which that is all that is wrong, else with what is wrong with the one that has the least wrong."""
    tried: list[Tried] = []
    seen: set[str] = set()
    errors: list[SluiceError] = []
    best: Tried | None = None
    choices, begun_s, reported = _choices(file, gpus.count, values), time.monotonic(), False
    said = f"comparing {len(choices)} choices for {gpus.name}:{gpus.count}"
    with doing(said):
        for number, wanted in enumerate(choices):
            if not reported and time.monotonic() - begun_s > SLOW_S:
                print(f"{said}; {number} took {SLOW_S:g} s", file=sys.stderr, flush=True)
                reported = True
            open_values = {name: value for name, value in wanted.items() if name not in given}
            if (written := repr(open_values)) in seen:
                continue
            seen.add(written)
            below_s = math.inf if best is None else best.step_s
            try:
                one = _tried(file, {**values, **open_values}, open_values, gpus, assumed, changes, below_s)
            except WrongChangeError:
                raise
            except SluiceError as error:
                errors.append(error)
                one = Tried(values=open_values, why=_short(error.problems[0].what))
            tried.append(one)
            if not one.why and not one.is_slower and (best is None or one.step_s * (1 + GAIN) < best.step_s):
                best = one
    if not tried:
        return Chosen(values=dict(values))
    if best is None:
        too_large = (error for error in errors if isinstance(error, TooLargeError))
        raise next(too_large, min(errors, key=lambda error: len(error.problems)))
    return Chosen(values={**values, **best.values}, tried=tuple(tried), best=best)


def _short(text: str) -> str:
    return text if len(text) <= REASON else f"{text[: REASON - 3]}..."


def _choices(file: GraphFile, gpus: int, values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what the function choices() beside graph() yields; nothing without one."""
    function: Callable[..., Any] | None = file.beside("choices")
    if function is None:
        return []
    names = {flag.name for flag in file.flags}
    try:
        _, *further = inspect.signature(function).parameters
        yielded = function(gpus, **{name: values[name] for name in further if name in values})
        found = list(islice(yielded, MOST + 1)) if isinstance(yielded, Iterable) else None
    except CALLED as error:
        if not is_users(error):
            raise
        raise GraphError(_wrong(file, f"raised {message_of(error)}")) from error
    if found is None:
        raise GraphError(_wrong(file, f"returned {shown(yielded)}"))
    if len(found) > MOST:
        raise GraphError(_wrong(file, f"yielded more than {MOST} choices"))
    for wanted in found:
        if not isinstance(wanted, Mapping) or not names.issuperset(wanted):
            raise GraphError(_wrong(file, f"yielded {shown(wanted)}"))
    return found


def _wrong(file: GraphFile, did: str) -> Problem:
    return Problem(
        where=str(file.path),
        what=f"choices() {did}",
        why="it yields values of graph()'s parameters to try on the GPUs of --on",
        fix="def choices(gpus: int): yield {'microbatch': 8192}",
    )


def _tried(
    file: GraphFile,
    values: Mapping[str, Any],
    open_values: Mapping[str, Any],
    gpus: Gpus,
    assumed: Assumed,
    changes: Changes,
    below_s: float,
) -> Tried:
    """Return what is foretold of one choice; without a simulation if its steps cannot take less than `below_s`."""
    from pipeline.plan.planner import plan  # loads networkx, which a recorded run does not need

    graph = file.build(values)
    check_samples(graph)
    planned, _ = plan(graph, gpus=gpus.count)
    made: Forecast = forecast(graph, planned, gpus.gpu, assumed)
    if made.problems:
        raise TooLargeError(*made.problems)
    peak_bytes = max((one.peak_bytes for one in made.memory.values()), default=0.0)
    if any(unknown_times(graph, made, gpus, changes.stages)):
        return Tried(values=open_values, step_s=math.inf, peak_bytes=peak_bytes)
    try:
        changed = changes.applied(planned, made.recording.durations)
    except GraphError as error:
        raise WrongChangeError(*error.problems) from error
    step_s = least_s(*changed)
    is_slower = step_s * (1 + GAIN) >= below_s
    if not is_slower:
        steps = ALIKE if not changes.stages and _alike(changed[0]) else STEPS + planned.ahead
        step_s = simulated(made.recording, replace(changes, steps=steps))[1].steps.mean
    return Tried(
        values=open_values,
        step_s=step_s,
        tokens_per_s=made.tokens / step_s,
        peak_bytes=peak_bytes,
        is_slower=is_slower,
    )


def _alike(planned: Plan) -> bool:
    """Return whether all steps do the same, one after the other."""
    return not planned.ahead and not planned.max_staleness and all(stage.every == 1 for stage in planned.stages)


def print_choice(choice: Chosen, gpus: Gpus, *, whole: bool) -> None:
    """Print what was chosen, and as a `whole` what was tried: the flags in which it differs, and what was foretold."""
    if choice.best is None:
        return
    if whole and len(choice.tried) > 1:
        from rich.table import Table

        found = [one.values for one in choice.tried]
        names = dict.fromkeys(name for values in found for name in values)
        differ = [name for name in names if any(values.get(name) != found[0].get(name) for values in found)]
        table = Table("tried", "s/step", "tokens/s", "fullest GPU", box=None, padding=(0, 2, 0, 0))
        for one in choice.tried:
            words = worded({name: one.values[name] for name in differ if name in one.values})
            more, less = (">", "<") if one.is_slower else ("", "")
            speed = (f"{more}{one.step_s:.2f}", f"{less}{one.tokens_per_s:,.0f}") if one.tokens_per_s else ("-", "-")
            table.add_row(words, *speed, one.why or gib(one.peak_bytes), style="bold" if one is choice.best else None)
        console.console().print(table)
    print(f"chosen for {gpus.name}:{gpus.count} (flags that are given stay): {worded(choice.best.values)}", flush=True)


def worded(values: Mapping[str, Any]) -> str:
    """Return the flags that set these values."""
    return shlex.join([word for name, value in values.items() for word in spelled(name, value)])


def foretold_json(made: Forecast, choice: Chosen) -> dict[str, Any]:
    """Return a forecast, and what was chosen for it, as plain values."""
    best = {} if choice.best is None else choice.best.values
    return {"tokens_per_step": made.tokens, "memory_bytes": memory_summary(made), "chosen": best}
