"""Loads a graph file: plain Python with a function `graph(...) -> Graph` whose parameters are the flags."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import inspect
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.cli.flags import Flag, flags_of, line_of, plain
from pipeline.declare.graph import Graph
from pipeline.errors import GraphError, Problem, SluiceError, message_of
from pipeline.precedence import PACKAGES, hidden

_WRONG_CALL = re.compile(
    r"(?P<name>\w+)(?:\.__init__)?\(\) (?P<wrong>missing|takes|got an unexpected keyword argument '(?P<given>\w+)')"
)


@dataclass(frozen=True)
class GraphFile:
    """A loaded graph file: its module, its function and its flags."""

    path: Path
    module: types.ModuleType
    function: Callable[..., Graph]
    flags: tuple[Flag, ...]

    @property
    def says(self) -> str:
        """The graph's description: the first paragraph of the function's docstring, or of the module's."""
        own = None if isinstance(self.function, functools.partial) else self.function.__doc__
        return (own or self.module.__doc__ or "").strip().partition("\n\n")[0]

    def build(self, values: Mapping[str, Any]) -> Graph:
        """Call graph(). Raises GraphError if it raises, or returns anything but a Graph."""
        try:
            graph = self.function(**values)
        except SluiceError:
            raise
        except (Exception, SystemExit) as error:
            raise GraphError(
                Problem(
                    where=_deepest(error, self.path),
                    what=f"graph() raised {message_of(error)}",
                    why="graph() must return a Graph without an error",
                    fix=_call_fix(error, self.module) or "correct that line, or the flag that sets its value",
                )
            ) from error
        if not isinstance(graph, Graph):
            raise GraphError(
                Problem(
                    where=line_of(self.path, self.function),
                    what=f"graph() returned {type(graph).__name__}",
                    why="it must return a pipeline.Graph",
                    fix="return Graph(name=..., source=..., stages=(...), schedule=...)",
                )
            )
        return graph


def _call_fix(error: BaseException, module: types.ModuleType) -> str | None:
    """Return a fix that lists the parameters of a wrongly called function; None if the file does not have its name."""
    call = _WRONG_CALL.match(str(error)) if isinstance(error, TypeError) else None
    called = vars(module).get(call["name"]) if call else None
    if call is None or not callable(called):
        return None
    names = [name for name in inspect.signature(called).parameters if name != "location"]
    near = difflib.get_close_matches(call["given"] or "", names, n=1)
    many = len(names) != 1
    fix = f"the parameter{'s' * many} of {call['name']} {'are' if many else 'is'} {', '.join(names)}"
    if near:
        return f"did you mean {near[0]}? Otherwise, {fix}"
    if call["wrong"].startswith("takes") and isinstance(called, type):
        return f"pass them by name; {fix}"
    if call["wrong"].startswith("missing") and not isinstance(called, type):
        return f"{fix}; to pass the function itself, leave out the parentheses"
    return fix


def load(path: Path) -> GraphFile:
    """Import a graph file. Raises GraphError if it is missing, does not import, or has no usable graph()."""
    if not path.is_file():
        raise GraphError(_no_file(path))
    module = _import(path)
    function: Any = vars(module).get("graph")
    if not isinstance(plain(function), types.FunctionType):
        raise GraphError(
            Problem(
                where=str(path),
                what="it has no function graph()",
                why="that function declares the step",
                fix="def graph(steps: int = 100) -> Graph: ...",
            )
        )
    return GraphFile(path, module, function, flags_of(path, function))


def _no_file(path: Path) -> Problem:
    beside = sorted(str(p) for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
    near = difflib.get_close_matches(str(path), beside, n=1)
    return Problem(
        where=str(path),
        what="this is a folder" if path.is_dir() else "there is no such file",
        why="a run starts from a graph file",
        fix=f"did you mean {near[0]}?" if near else f"one of {', '.join(beside[:5] or ['graphs/quickstart.py'])}",
    )


def _import(path: Path) -> types.ModuleType:
    name = f"sluice_graph_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise GraphError(
            Problem(where=str(path), what="it is not a Python file", why="a graph is Python", fix="name a .py file")
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folders = [path.resolve().parent, *([Path.cwd()] if str(Path.cwd()) in map(os.path.abspath, sys.path) else [])]
    if problems := list(_hidden(path, folders)):
        raise GraphError(*problems)
    if str(folders[0]) not in sys.path:
        sys.path.append(str(folders[0]))  # a graph may import modules from its own folder
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        where, text, fix = _deepest(error, path), str(error), "correct that line"
        name = (error.name or "") if isinstance(error, ImportError) else ""
        if theirs := hidden(name, folders):
            raise GraphError(_rename(where, name, theirs)) from error
        if isinstance(error, SyntaxError):
            where, text = f"{error.filename}:{error.lineno}", error.msg
        elif isinstance(error, ModuleNotFoundError):
            fix = f"install {error.name}, or correct that line"
        raise GraphError(
            Problem(
                where=where,
                what=f"the graph file does not import: {type(error).__name__}: {text}",
                why="the file is imported before the graph is built",
                fix=fix,
            )
        ) from error
    return module


def _hidden(path: Path, folders: Sequence[Path]) -> Iterator[Problem]:
    """Yield a problem for each import of a user's package that one of Sluice's packages would hide."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:  # importing the file reports it
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.ImportFrom) and node.level):
            continue
        of = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        names = [f"{of}{alias.name}" for alias in node.names] + ([of[:-1]] if of.count(".") > 1 else [])
        for name in names:
            if name.partition(".")[0] in PACKAGES and (theirs := hidden(name, folders)):
                yield _rename(f"{path}:{node.lineno}", name, theirs)
                break


def _rename(where: str, name: str, theirs: Path) -> Problem:
    first, folder = name.partition(".")[0], "folder" if theirs.is_dir() else "file"
    owner = "Sluice" if first in PACKAGES else "Python" if first in sys.stdlib_module_names else "an installed package"
    return Problem(
        where=where,
        what=f"{name!r} is imported, and the {folder} {theirs} would be hidden",
        why=f"{first!r} is a module of {owner}, which takes precedence over the user's",
        fix=f"rename {theirs}, and import it by its new name",
    )


def _deepest(error: BaseException, path: Path) -> str:
    """Return the last line of the user's own file in a traceback."""
    line, traceback, own = None, error.__traceback__, path.resolve()
    while traceback:
        if Path(traceback.tb_frame.f_code.co_filename).resolve() == own:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return f"{path}:{line}" if line else str(path)
