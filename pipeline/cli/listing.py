"""Lists the recipes that come with Sluice and the runs in a folder."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.cli import console
from pipeline.cli.recipes import recipes
from pipeline.record.runs import list_runs


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
        steps = f"{run.step}" if run.steps is None else f"{run.step} of {run.steps}"
        table.add_row(_shown(run.path), run.graph, run.state, steps, run.started)
    out.print(table)


def _shown(path: Path) -> str:
    """Return the path relative to the working directory if it is below it, else unchanged."""
    shown = os.path.relpath(path)
    return str(path) if shown.startswith(os.pardir) else shown
