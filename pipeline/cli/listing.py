"""Lists the recipes that come with Sluice and the runs in a folder.

Recipes are parsed, not imported; the list shows the first sentence of each docstring.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

from pipeline.cli import console
from pipeline.record.runs import list_runs

RECIPES = Path(__file__).parents[2] / "graphs"


def recipes(folder: Path = RECIPES) -> list[tuple[Path, str]]:
    """Return the graph files in a folder, each with the first sentence of its docstring."""
    found = []
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text())
        if "graph" in _names(tree):
            says = " ".join((ast.get_docstring(tree) or "").partition("\n\n")[0].split())
            found.append((path, re.split(r"(?<=\.) ", says)[0]))
    return found


def _names(tree: ast.Module) -> set[str]:
    """Return the names of a module's top-level functions and variables."""
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    return functions | {target.id for target in targets if isinstance(target, ast.Name)}


def print_list(runs: Path) -> None:
    """Print the recipes and the runs in a folder, most recently started first."""
    from rich.table import Table

    out = console.console()
    table = Table("recipe", "", box=None, padding=(0, 2, 0, 0))
    for path, says in recipes():
        table.add_row(_shown(path), says)
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
