"""Loads a graph file: plain Python with a function `graph(...) -> Graph` whose parameters are the flags."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Timer, get_ident
from typing import Any

from pipeline.cli.flags import Flag, flags_of, line_of, plain
from pipeline.cli.imported import hidden_imports, rename
from pipeline.cli.raised import meant, place_of
from pipeline.cli.recipes import graph_path, names
from pipeline.declare.graph import Graph
from pipeline.engine.watchdog import Watchdog
from pipeline.errors import CALLED, GraphError, Problem, SluiceError, is_users, kind_of, line_of_frame, message_of
from pipeline.precedence import hidden, search_last, typed

LOAD_S = 1800.0  # for a graph's file, its graph() and the checks
NOTICE_S = 20.0  # until it is said what takes so long
_doing: list[str] = []  # what is done with the graph, if not declaring it


@dataclass(frozen=True)
class GraphFile:
    """A loaded graph file: what the command line calls it, its path, its module, its function and its flags."""

    named: str
    path: Path
    module: types.ModuleType
    function: Callable[..., Graph]
    flags: tuple[Flag, ...]

    @property
    def says(self) -> str:
        """The graph's description: the first paragraph of the function's docstring, or of the module's."""
        own = None if isinstance(self.function, functools.partial) else self.function.__doc__
        return (own or self.module.__doc__ or "").strip().partition("\n\n")[0]

    def beside(self, name: str) -> Any:
        """Return what the file calls `name`, or else what the module that defines graph() does, or None."""
        own = getattr(self.module, name, None)
        return getattr(plain(self.function), "__globals__", {}).get(name) if own is None else own

    def build(self, values: Mapping[str, Any]) -> Graph:
        """Call graph(). Raises GraphError if it raises, or returns anything but a Graph."""
        try:
            graph = self.function(**values)
        except SluiceError:
            raise
        except CALLED as error:
            if not is_users(error):
                raise
            where, graph_line = place_of(error, self.path)
            raise GraphError(
                Problem(
                    where=where,
                    what=f"graph() raised {message_of(error)}",
                    why="graph() must return a Graph without an error" + _through(graph_line, "calls"),
                    fix=meant(error, _folders(self.path)) or "correct that line, or the flag that sets its value",
                )
            ) from error
        if not isinstance(graph, Graph):
            raise GraphError(
                Problem(
                    where=line_of(self.path, self.function),
                    what=f"graph() returned {kind_of(graph)}",
                    why="it must return a pipeline.Graph",
                    fix="return Graph(name=..., source=..., stages=(...), schedule=...)",
                )
            )
        return graph


@contextmanager
def in_time(path: Path) -> Iterator[None]:
    """Raise GraphError if what the context does with a graph file takes longer than LOAD_S."""

    def error_at(line: str) -> GraphError:
        return GraphError(
            Problem(
                where=line or str(path),
                what=f"the graph is not declared and checked within {LOAD_S:g} s",
                why="every wait has a deadline",
                fix="see what that line waits for; what takes long belongs in a stage's setup()",
            )
        )

    def say(main: int) -> None:
        line = line_of_frame(sys._current_frames().get(main)) or path
        said = _doing[-1] if _doing else f"declaring the graph: {line}"
        print(f"still {said}; it may take {LOAD_S:g} s", file=sys.stderr, flush=True)

    watchdog, notice = Watchdog(LOAD_S, lambda: None), Timer(NOTICE_S, say, [get_ident()])
    notice.daemon = True
    notice.start()
    try:
        with closing(watchdog), watchdog.within(error_at):
            yield
    finally:
        notice.cancel()


@contextmanager
def doing(said: str) -> Iterator[None]:
    """Let `in_time` say that this is done, where it would say that the graph is declared."""
    _doing.append(said)
    try:
        yield
    finally:
        _doing.pop()


def load(named: str | Path) -> GraphFile:
    """Import a graph file, by its path or as a recipe by its name. Raises GraphError if it is missing, does not import,
    or has no usable graph()."""
    path = graph_path(str(named))
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
    return GraphFile(str(named), path, module, function, flags_of(path, function))


def _no_file(path: Path) -> Problem:
    folder = path if path.is_dir() else path.parent
    beside = sorted(str(p) for p in folder.glob("*.py")) if folder.is_dir() else []
    near = [name for name in beside if name == f"{path}.py"]
    near = near or [name for name in names() if name == path.stem and not path.is_dir()]
    near = near or difflib.get_close_matches(str(path), [*beside, *names()], n=1)
    return Problem(
        where=str(path),
        what="this is a folder" if path.is_dir() else "there is no such file",
        why="a run starts from a graph file",
        fix=f"did you mean {near[0]}?"
        if near
        else f"one of {', '.join(beside[:5])}"
        if beside
        else f"choose a recipe: {' '.join(typed('pipeline.run'))} --list",
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
    folders = _folders(path)
    search_last(folders)  # a graph may import modules from its own folder
    if problems := list(hidden_imports(path, folders)):
        raise GraphError(*problems)
    try:
        spec.loader.exec_module(module)
    except CALLED as error:
        if not is_users(error):
            raise
        raise GraphError(_import_problem(error, path, folders)) from error
    return module


def _folders(path: Path) -> list[Path]:
    """Return the folders in which a graph finds the user's modules: its own, then the working directory."""
    here = Path.cwd()
    return [path.resolve().parent, *([here] if str(here) in map(os.path.abspath, sys.path) else [])]


def _import_problem(error: BaseException, path: Path, folders: Sequence[Path]) -> Problem:
    """Return the problem of a graph file that raised when it was imported."""
    where, graph_line = place_of(error, path)
    name = (error.name or "") if isinstance(error, ImportError) else ""
    if theirs := hidden(name, folders):
        return rename(where, name, theirs)
    what = f"{type(error).__name__}: {error}"
    fix = meant(error, folders) or "correct that line"
    if "null bytes" in str(error):  # a SyntaxError from Python 3.11.4 on, before that a ValueError
        what, fix = "it contains NUL bytes", "save it as UTF-8"
    elif isinstance(error, SyntaxError):
        what, where = f"{type(error).__name__}: {error.msg}", f"{error.filename}:{error.lineno}"
    return Problem(
        where=where,
        what=f"the graph file does not import: {what}",
        why="the file is imported before the graph is built" + _through(graph_line, "imports"),
        fix=fix,
    )


def _through(graph_line: str, verb: str) -> str:
    return f", and {graph_line} {verb} that code" if graph_line else ""
