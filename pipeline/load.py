"""Loads a graph file and turns the signature of its `graph()` into command-line flags.

A graph file is plain Python with a function `graph(...) -> Graph`. Each parameter has a type (int, float, str, bool, a
Literal of those, or one of them | None) and a default; the flag has the parameter's name with dashes.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import types
import typing
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import GraphError, Problem
from pipeline.graph import Graph

_TYPES = {int: "INT", float: "FLOAT", str: "TEXT", bool: "BOOL"}


@dataclass(frozen=True)
class Flag:
    """One parameter of graph(). `choices` is not empty for a Literal; `optional` admits the word none."""

    name: str
    type: type
    default: Any
    choices: tuple[Any, ...] = ()
    optional: bool = False

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    def parse(self, text: str) -> Any:
        """The value of a text. Raises ArgumentTypeError that says what is expected."""
        if self.optional and text.lower() == "none":
            return None
        if self.type is bool:
            known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
            if text.lower() not in known:
                raise ArgumentTypeError(f"expected true or false, got {text!r}")
            return known[text.lower()]
        try:
            value = self.type(text)
        except ValueError:
            raise ArgumentTypeError(f"expected {_TYPES[self.type].lower()}, got {text!r}") from None
        if self.choices and value not in self.choices:
            raise ArgumentTypeError(f"expected one of {', '.join(map(str, self.choices))}, got {text!r}")
        return value


@dataclass(frozen=True)
class GraphFile:
    """A loaded graph file: its module, its function and its flags."""

    path: Path
    module: types.ModuleType
    function: Callable[..., Graph]
    flags: tuple[Flag, ...]

    def build(self, values: Mapping[str, Any]) -> Graph:
        """Call graph(). Raises GraphError where it raises ValueError or TypeError, or returns something else."""
        try:
            graph = self.function(**values)
        except (ValueError, TypeError) as error:
            raise GraphError(
                Problem(
                    where=_deepest(error, self.path),
                    what=f"graph() raised {type(error).__name__}: {error}",
                    why="the descriptions in it must be valid",
                    fix="mend that line, or the flag behind it",
                )
            ) from error
        if not isinstance(graph, Graph):
            raise GraphError(
                Problem(
                    where=str(self.path),
                    what=f"graph() returned {type(graph).__name__}",
                    why="it returns a pipeline.Graph",
                    fix="return Graph(name=..., source=..., stages=(...), schedule=...)",
                )
            )
        return graph


def load(path: Path) -> GraphFile:
    """Import a graph file. Raises GraphError where it is missing, does not import, or has no usable graph()."""
    if not path.is_file():
        near = sorted(str(p) for p in path.parent.glob("*.py"))[:5] if path.parent.is_dir() else []
        raise GraphError(
            Problem(
                where=str(path),
                what="there is no such file",
                why="a run starts from a graph file",
                fix=f"one of {', '.join(near)}" if near else "graphs/quickstart.py",
            )
        )
    module = _import(path)
    function = vars(module).get("graph")
    if not callable(function):
        raise GraphError(
            Problem(
                where=str(path),
                what="it has no function graph()",
                why="that function declares the step",
                fix="def graph(steps: int = 100) -> Graph: ...",
            )
        )
    return GraphFile(path, module, function, tuple(_flags(path, function)))


def add_flags(parser: ArgumentParser, flags: tuple[Flag, ...]) -> None:
    """Add the parameters of graph(). A flag that is not given is absent from the namespace."""
    group = parser.add_argument_group("parameters of graph()")
    for flag in flags:
        meta = "{" + ",".join(map(str, flag.choices)) + "}" if flag.choices else _TYPES[flag.type]
        group.add_argument(
            flag.option,
            dest=f"graph.{flag.name}",
            type=flag.parse,
            metavar=meta,
            default=None,
            help=f"default: {flag.default}",
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
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # a graph may import what lies beside it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        line = f"{error.filename}:{error.lineno}" if isinstance(error, SyntaxError) else _deepest(error, path)
        raise GraphError(
            Problem(
                where=line,
                what=f"the graph file does not import: {type(error).__name__}: {error}",
                why="its top level runs before anything else",
                fix="mend that line",
            )
        ) from error
    return module


def _flags(path: Path, function: Callable[..., Graph]) -> list[Flag]:
    hints = typing.get_type_hints(function)
    flags, problems = [], []
    for parameter in inspect.signature(function).parameters.values():
        where = f"{path}:{function.__code__.co_firstlineno}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            problems.append(
                Problem(
                    where=where,
                    what=f"graph() takes *{parameter.name}",
                    why="every parameter is a flag",
                    fix="name the parameters",
                )
            )
            continue
        if parameter.default is parameter.empty:
            problems.append(
                Problem(
                    where=where,
                    what=f"parameter {parameter.name!r} of graph() has no default",
                    why="a graph runs without flags",
                    fix=f"{parameter.name} = ...",
                )
            )
            continue
        kind, choices, optional = _kind(hints.get(parameter.name, type(parameter.default)))
        if kind is None:
            problems.append(
                Problem(
                    where=where,
                    what=f"parameter {parameter.name!r} of graph() has type {hints.get(parameter.name)}",
                    why="a flag is an int, float, str, bool, or a Literal of them",
                    fix="build other objects inside graph()",
                )
            )
            continue
        flags.append(Flag(parameter.name, kind, parameter.default, choices, optional))
    if problems:
        raise GraphError(*problems)
    return flags


def _kind(hint: Any) -> tuple[type | None, tuple[Any, ...], bool]:
    if hint in _TYPES:
        return hint, (), False
    if typing.get_origin(hint) is typing.Literal:
        values = typing.get_args(hint)
        kinds = {type(value) for value in values}
        return (kinds.pop(), values, False) if len(kinds) == 1 and kinds <= _TYPES.keys() else (None, (), False)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if len(inner) == 1 and len(typing.get_args(hint)) == 2:
            kind, choices, _ = _kind(inner[0])
            return kind, choices, True
    return None, (), False


def _deepest(error: Exception, path: Path) -> str:
    """The last line of the user's own file in a traceback."""
    line, traceback = None, error.__traceback__
    while traceback:
        if traceback.tb_frame.f_code.co_filename == str(path):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return f"{path}:{line}" if line else str(path)
