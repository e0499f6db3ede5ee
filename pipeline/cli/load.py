"""Loads a graph file and turns the signature of its `graph()` into command-line flags.

A graph file is plain Python with a function `graph(...) -> Graph`. Each parameter has a type (int, float, str, bool, a
Literal of those, or one of them | None) and a default; the flag has the parameter's name with dashes. A line of the
docstring that names parameters and, after two spaces, says something is their help.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import re
import sys
import types
import typing
from argparse import SUPPRESS, ArgumentError, ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.declare.graph import Graph
from pipeline.errors import GraphError, Problem, SluiceError, told

_TYPES = {int: "INT", float: "FLOAT", str: "TEXT", bool: "BOOL"}
_WRONG_CALL = re.compile(
    r"(?P<name>\w+)(?:\.__init__)?\(\) (?P<wrong>missing|takes|got an unexpected keyword argument '(?P<given>\w+)')"
)
_KNOWN_TYPES = "int, float, str, bool, a Literal of one of them, or one of them | None"


@dataclass(frozen=True)
class Flag:
    """One parameter of graph(). `choices` is not empty for a Literal; `optional` admits the word none.

    `where` is the line of graph(), `help` what its docstring says about the parameter.
    """

    name: str
    type: type
    default: Any
    choices: tuple[Any, ...] = ()
    optional: bool = False
    where: str = ""
    help: str = ""

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
            kind = "a whole number" if self.type is int else "a number"
            raise ArgumentTypeError(f"expected {kind}, got {text!r}") from None
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

    @property
    def says(self) -> str:
        """What the file says of its graph: the first paragraph of the function, or of the file."""
        own = None if isinstance(self.function, functools.partial) else self.function.__doc__
        return (own or self.module.__doc__ or "").strip().partition("\n\n")[0]

    def build(self, values: Mapping[str, Any]) -> Graph:
        """Call graph(). Raises GraphError where it raises anything, or returns something else than a Graph."""
        try:
            graph = self.function(**values)
        except SluiceError:
            raise
        except Exception as error:
            raise GraphError(
                Problem(
                    where=_deepest(error, self.path),
                    what=f"graph() raised {told(error)}",
                    why="the descriptions in it must be valid",
                    fix=_call_fix(error, self.module) or "mend that line, or the flag behind it",
                )
            ) from error
        if not isinstance(graph, Graph):
            raise GraphError(
                Problem(
                    where=_line(self.path, self.function),
                    what=f"graph() returned {type(graph).__name__}",
                    why="it returns a pipeline.Graph",
                    fix="return Graph(name=..., source=..., stages=(...), schedule=...)",
                )
            )
        return graph


def _call_fix(error: Exception, module: types.ModuleType) -> str | None:
    """The parameters of what was called with others, where the file has it by its name."""
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
        return f"give them by name; {fix}"
    if call["wrong"].startswith("missing") and not isinstance(called, type):
        return f"{fix}; where the function itself is meant, leave out the brackets"
    return fix


def load(path: Path) -> GraphFile:
    """Import a graph file. Raises GraphError where it is missing, does not import, or has no usable graph()."""
    if not path.is_file():
        raise GraphError(_no_file(path))
    module = _import(path)
    function: Any = vars(module).get("graph")
    if not isinstance(_plain(function), types.FunctionType):
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
    """Add the parameters of graph(). A flag that is not given is absent from the namespace.

    Raises GraphError where a parameter has the name of a flag that the parser has already.
    """
    group = parser.add_argument_group("parameters of graph()")
    for flag in flags:
        meta = "{" + ",".join(map(str, flag.choices)) + "}" if flag.choices else _TYPES[flag.type]
        text = f"{flag.help}; default: {flag.default}" if flag.help else f"default: {flag.default}"
        try:
            group.add_argument(
                flag.option,
                dest=f"graph.{flag.name}",
                type=flag.parse,
                metavar=meta,
                default=SUPPRESS,
                help=text.replace("%", "%%"),
            )
        except ArgumentError as error:
            raise GraphError(
                Problem(
                    where=flag.where,
                    what=f"parameter {flag.name!r} of graph() would be the flag {flag.option}",
                    why="the command has a flag of that name",
                    fix="rename the parameter",
                )
            ) from error


def _no_file(path: Path) -> Problem:
    beside = sorted(str(p) for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
    near = difflib.get_close_matches(str(path), beside, n=1)
    return Problem(
        where=str(path),
        what="this is a folder" if path.is_dir() else "there is no such file",
        why="a run starts from a graph file, which is named before all flags",
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
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # a graph may import what lies beside it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        where, text, fix = _deepest(error, path), str(error), "mend that line"
        if isinstance(error, SyntaxError):
            where, text = f"{error.filename}:{error.lineno}", error.msg
        elif isinstance(error, ModuleNotFoundError):
            fix = f"install {error.name}, or mend that line"
        raise GraphError(
            Problem(
                where=where,
                what=f"the graph file does not import: {type(error).__name__}: {text}",
                why="its top level runs before anything else",
                fix=fix,
            )
        ) from error
    return module


def _flags(path: Path, function: Callable[..., Graph]) -> list[Flag]:
    where = _line(path, function)
    try:
        hints = typing.get_type_hints(_plain(function))
    except Exception as error:
        raise GraphError(
            Problem(
                where=where,
                what=f"the types of graph() cannot be read: {type(error).__name__}: {error}",
                why="they are those of the flags",
                fix=f"types that are {_KNOWN_TYPES}",
            )
        ) from error
    said = _said(_plain(function).__doc__ or "")
    found = [
        _flag(parameter, hints, where, said.get(parameter.name, ""))
        for parameter in inspect.signature(function).parameters.values()
    ]
    problems = [item for item in found if isinstance(item, Problem)]
    if problems:
        raise GraphError(*problems)
    return [item for item in found if isinstance(item, Flag)]


def _flag(parameter: inspect.Parameter, hints: Mapping[str, Any], where: str, said: str) -> Flag | Problem:
    """The flag of a parameter, or why it has none."""
    name, default = parameter.name, parameter.default
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        return Problem(
            where=where,
            what=f"graph() takes {name!r} before a /"
            if parameter.kind is parameter.POSITIONAL_ONLY
            else f"graph() takes {'**' if parameter.kind is parameter.VAR_KEYWORD else '*'}{name}",
            why="every parameter is a flag, and is given by name",
            fix="ordinary parameters, such as steps: int = 100",
        )
    if default is parameter.empty:
        example = {"int": "1", "float": "1.0", "bool": "False"}.get(_shown(hints.get(name, str)), '"..."')
        return Problem(
            where=where,
            what=f"parameter {name!r} of graph() has no default",
            why="a graph can be checked without flags",
            fix=str(parameter.replace(default=_Verbatim(example))),
        )
    if name not in hints and type(default) not in _TYPES:
        return Problem(
            where=where,
            what=f"parameter {name!r} of graph() has no type",
            why="it is that of the flag",
            fix=f"a type that is {_KNOWN_TYPES}",
        )
    hint = hints.get(name, type(default))
    kind, choices, optional = _kind(hint)
    if kind is None:
        return Problem(
            where=where,
            what=f"parameter {name!r} of graph() has the type {_shown(hint)}",
            why=f"a flag is {_KNOWN_TYPES}",
            fix="build other objects inside graph()",
        )
    fits = type(default) is kind or (kind is float and type(default) is int) or (optional and default is None)
    if not fits or (choices and default is not None and default not in choices):
        return Problem(
            where=where,
            what=f"parameter {name!r} of graph() is {_shown(hint)} and has the default {default!r}",
            why="a default is a value of its type",
            fix=f"{name}: {_shown(hint)} = {choices[0]!r}" if choices else "mend the type or the default",
        )
    return Flag(name, kind, default, choices, optional, where, said)


class _Verbatim:
    """Prints as the text it is made of."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _said(docstring: str) -> dict[str, str]:
    """What a docstring says about parameters, in lines such as `lr, eps   of the optimizer`."""
    rows = re.findall(r"^ *(\w+(?:, \w+)*) {2,}(\S.*)$", docstring, flags=re.MULTILINE)
    return {name: text for names, text in rows for name in names.split(", ")}


def _shown(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _plain(function: Any) -> Any:
    """graph() itself, where it is another graph's with other defaults: partial(grpo.graph, max_staleness=1)."""
    return function.func if isinstance(function, functools.partial) else function


def _line(path: Path, function: Callable[..., Any]) -> str:
    """Where a function of the graph file is defined."""
    code = inspect.unwrap(_plain(function)).__code__
    own = Path(code.co_filename).resolve() == path.resolve()
    return f"{path if own else code.co_filename}:{code.co_firstlineno}"


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


def _deepest(error: BaseException, path: Path) -> str:
    """The last line of the user's own file in a traceback."""
    line, traceback, own = None, error.__traceback__, path.resolve()
    while traceback:
        if Path(traceback.tb_frame.f_code.co_filename).resolve() == own:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return f"{path}:{line}" if line else str(path)
