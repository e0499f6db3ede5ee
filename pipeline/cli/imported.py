"""Finds imports that cannot reach the user's own module, in a graph file and in the modules beside it.

Reads files and imports none: a function in one of them may import when a worker calls it, long after the check.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.errors import Problem, is_user_file
from pipeline.precedence import HOME, PACKAGES, hidden, hides_installed


def hidden_imports(path: Path, folders: Sequence[Path]) -> Iterator[Problem]:
    """Yield a problem for each import of a user's module that one of Sluice's packages hides.

    Reads the graph file `path`, and every module below `folders` that it imports, directly or through another one.
    """
    if theirs := hides_installed(folders):
        yield Problem(
            where=str(theirs),
            what=f"it replaces the installed package {theirs.stem!r}",
            why="Python prefers it to a package without __init__.py, wherever it lies",
            fix=f"rename {theirs}",
        )
    files = [path]
    seen = {path.resolve()}
    for file in files:
        for line, names, base in _imports(file):
            is_ours = file.resolve().parent == HOME / "graphs"  # a recipe, which means Sluice's own
            if base is None and not is_ours and (found := next(_hidden(names, folders), None)):
                yield rename(f"{file}:{line}", *found)
            for own in (own for name in names for own in _own_files(name, base, folders)):
                if own not in seen:
                    seen.add(own)
                    files.append(own)


def _imports(file: Path) -> Iterator[tuple[int, list[str], Path | None]]:
    """Yield each import of a file: its line, the names that it may import, and the folder that a relative one is
    relative to."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):  # importing the file reports it
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield node.lineno, [alias.name for alias in node.names], None
        elif isinstance(node, ast.ImportFrom):
            of = f"{node.module}." if node.module else ""
            names = [f"{of}{alias.name}" for alias in node.names] + ([of[:-1]] if of.count(".") > 1 else [])
            yield node.lineno, names, file.resolve().parents[node.level - 1] if node.level else None


def _hidden(names: Sequence[str], folders: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    for name in names:
        if name.partition(".")[0] in PACKAGES and (theirs := hidden(name, folders)):
            yield name, theirs


def _own_files(name: str, base: Path | None, folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the user's files that run when a module is imported: its own, and those of the packages around it."""
    first, *rest = name.split(".")
    for at in [base / first] if base else _places(first):
        for part in ("", *rest):
            at = at / part
            for file in (at / "__init__.py", at.with_name(f"{at.name}.py")):
                if any(file.is_relative_to(folder.resolve()) for folder in folders) and file.is_file():
                    yield file.resolve()


def _places(first: str) -> list[Path]:
    """Return where a top-level module of the user's is, without the suffix `.py`."""
    if first in PACKAGES or first in sys.stdlib_module_names:
        return []
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):  # a module without a specification
        return []
    if spec is None:
        return []
    found = spec.submodule_search_locations or [(spec.origin or "").removesuffix(".py")]
    return [Path(place) for place in found if is_user_file(str(place))]


def rename(where: str, name: str, theirs: Path) -> Problem:
    """Return the problem of an import, at `where`, of a module that the user's file or folder `theirs` has in vain."""
    first, folder = name.partition(".")[0], "folder" if theirs.is_dir() else "file"
    owner = "Sluice" if first in PACKAGES else "Python" if first in sys.stdlib_module_names else "an installed package"
    return Problem(
        where=where,
        what=f"it imports {name!r}, and the {folder} {theirs} is hidden",
        why=f"{first!r} is a module of {owner}, which takes precedence over the user's",
        fix=f"rename {theirs}, and import it by its new name",
    )
