"""The recipes that come with Sluice: graph files that a command finds by name, wherever Sluice is installed.

They are parsed, not imported; what a recipe says of itself is the first sentence of its docstring.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

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


def names() -> list[str]:
    """Return the names of the recipes."""
    return [path.stem for path, _ in recipes()]


def graph_path(named: str) -> Path:
    """Return the graph file that a command line names: a path, or the name of a recipe if no file is called that."""
    path = Path(named)
    is_name = path.name == named and not path.is_file()
    return RECIPES / f"{named}.py" if is_name and named in names() else path


def _names(tree: ast.Module) -> set[str]:
    """Return the names of a module's top-level functions and variables."""
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    return functions | {target.id for target in targets if isinstance(target, ast.Name)}
