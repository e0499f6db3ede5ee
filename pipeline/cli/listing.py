"""Lists the recipes that come with Sluice and the runs in a folder, and names a run for an example."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from pathlib import Path

from pipeline.cli import console
from pipeline.cli.recipes import recipes
from pipeline.errors import GraphError
from pipeline.record.runs import UNREADABLE, list_runs
from pipeline.rundir import RUNS


def print_list(runs: Path) -> None:
    """Print the recipes and the runs in a folder, most recently started first."""
    from rich.table import Table

    out = console.console()
    table = Table("recipe", "", box=None, padding=(0, 2, 0, 0))
    for path, says in recipes():
        table.add_row(path.stem, says)
    out.print(table)
    out.print()
    found = list_runs(runs)
    if not found:
        out.print(f"no run in {_shown(runs)}", markup=False)
        return
    table = Table("run", "graph", "state", "steps", "started", box=None, padding=(0, 2, 0, 0))
    for run in found:
        steps = "" if run.state == UNREADABLE else f"{run.step}" if run.steps is None else f"{run.step} of {run.steps}"
        table.add_row(_shown(run.path), run.graph, run.state, steps, run.started)
    out.print(table)


def example(given: str | None = None, here: Path = Path()) -> str:
    """Return a run for an example, as typed: the given one, the newest in runs/, or else such a name."""
    runs = []
    with suppress(GraphError):
        runs = [run for run in list_runs(here / RUNS) if run.state != UNREADABLE]
    found = given or next((str(run.path.relative_to(here)) for run in runs), None)
    return shlex.quote(found) if found else f"{RUNS}/quickstart-..."


def _shown(path: Path) -> str:
    """Return the path relative to the working directory if it is below it, else unchanged."""
    shown = os.path.relpath(path)
    return str(path) if shown.startswith(os.pardir) else shown
