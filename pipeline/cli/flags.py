"""The parameters of `graph()` as command-line flags.

Each parameter has a type (int, float, str, bool, a Literal of those, or one of them | None) and a default. The flag is
the parameter's name with dashes, without an underscore at its end; a bool has `--name` and `--no-name`. Its help is the
docstring line that starts with its name followed by two spaces or a colon, plus any lines below that are indented
further. Without such a line, it is the comment at the end of the parameter's own line:

    def graph(
        steps: int = 100,  # batches to train on
    ) -> Graph:
        \"\"\"Trains.

        steps  batches to train on
        \"\"\"
"""

from __future__ import annotations

import ast
import functools
import inspect
import io
import re
import shlex
import tokenize
import types
import typing
from argparse import SUPPRESS, ArgumentError, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from pipeline.cli.command import add_switch, braces, chosen, number, truth, whole
from pipeline.declare.calls import is_async
from pipeline.declare.graph import Graph
from pipeline.errors import GraphError, Problem

_TYPES = {int: "INT", float: "FLOAT", str: "TEXT", bool: "BOOL"}
_READS: dict[type, Callable[[str], Any]] = {int: whole, float: number, str: str, bool: truth}
_ASSIGNED = re.compile(r"""(\w+)=(-?\d[\d.]*(?:e[+-]?\d+)?|'[^']*'|"[^"]*"|True|False|None)(?=[ ,]|$)""")
_QUOTED = re.compile("'([^']+)'")
_KNOWN_TYPES = "int, float, str, bool, a Literal of one of them, or one of them | None"


@dataclass(frozen=True)
class Flag:
    """One parameter of graph(). `choices` is not empty for a Literal; `optional` allows the word none.

    `where` is the file and line of graph(); `help` is the parameter's description from its docstring or comment.
    `prefix` begins the flag's name where the command has a flag with the parameter's name.
    """

    name: str
    type: type
    default: Any
    choices: tuple[Any, ...] = ()
    optional: bool = False
    where: str = ""
    help: str = ""
    prefix: str = ""

    @property
    def option(self) -> str:
        return f"--{self.prefix}{dashed(self.name)}"

    @property
    def shown(self) -> str:
        """The default, as the help shows it."""
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if self.default is None:
            return "none"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default) or '""'

    def parse(self, text: str) -> Any:
        """Parse a value. Raises ArgumentTypeError with the expected form if the text is not valid."""
        if self.optional and text.lower() == "none":
            return None
        value = _READS[self.type](text)
        return chosen(value, self.choices) if self.choices else value


def add_flags(parser: ArgumentParser, flags: tuple[Flag, ...]) -> None:
    """Add the parameters of graph() to a parser. A flag that is not given is absent from the namespace.

    Raises GraphError if the parser already has a flag of that name.
    """
    group = parser.add_argument_group("parameters of graph()")
    for flag in flags:
        settings: dict[str, Any] = {
            "dest": f"graph.{flag.name}",
            "default": SUPPRESS,
            "help": flag.help.replace("%", "%%"),
        }
        try:
            if flag.type is bool and not flag.choices:
                action = add_switch(group, flag.option, flag.parse, **settings)
            else:
                metavar = braces(flag.choices) if flag.choices else _TYPES[flag.type]
                action = group.add_argument(flag.option, type=flag.parse, metavar=metavar, **settings)
        except ArgumentError as error:
            twin = next((other.name for other in flags if other.option == flag.option and other is not flag), None)
            raise GraphError(
                Problem(
                    where=flag.where,
                    what=f"parameter {flag.name!r} of graph() would be the flag {flag.option}",
                    why="the command already has a flag of that name"
                    if twin is None
                    else f"parameter {twin!r} has a flag of that name",
                    fix="rename the parameter",
                )
            ) from error
        action.shown = flag.shown


def given_in(options: Namespace) -> dict[str, Any]:
    """Return the parameters of graph() that are given on a parsed command line."""
    return {name[6:]: value for name, value in vars(options).items() if name.startswith("graph.")}


def dashed(name: str) -> str:
    """Return the name of a parameter's flag, without an underscore at its end: `class_` is --class."""
    return (name.rstrip("_") or name).replace("_", "-")


def spelled(name: str, value: object) -> list[str]:
    """Return the command-line words that set a parameter of graph() to this value."""
    option = dashed(name)
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    return [f"--{option}", str(value)]


def as_flag(problem: Problem, flags: Iterable[Flag], given: Container[str]) -> Problem:
    """Return a problem whose fix sets a parameter of graph(), such as lr=1e-6, with the flag in its place, if that flag
    is given."""
    if not (found := _ASSIGNED.match(problem.fix)):
        return problem
    flag = next((flag for flag in flags if flag.name == found[1] and flag.name in given), None)
    value = ast.literal_eval(found[2])
    text = found[2] if isinstance(value, int | float) else "none" if value is None else value
    try:
        if flag is None or flag.parse(text) != value:
            return problem
    except ArgumentTypeError:
        return problem
    off = f"--no-{flag.option.removeprefix('--')}"
    words = (off, flag.option)[value] if isinstance(value, bool) else f"{flag.option} {shlex.quote(text)}"
    return structs.replace(problem, fix=words + problem.fix[found.end() :])


def named_by_flag(problem: Problem, flags: Iterable[Flag], values: Mapping[str, Any]) -> Problem:
    """Return a problem that says first the text of one parameter of graph(), or a path below it, with that flag."""
    said = found[1] if (found := _QUOTED.search(problem.what)) else ""
    for flag in flags:
        value = values[flag.name]
        if flag.type is str and value and not flag.choices and f"{said}/".startswith(f"{value.rstrip('/')}/"):
            return structs.replace(problem, where=f"{problem.where} ({flag.option})")
    return problem


@contextmanager
def fixed_by_flags(flags: Iterable[Flag], given: Container[str], values: Mapping[str, Any]) -> Iterator[None]:
    """Raise the GraphError of this block, which builds and checks a graph with flags, with the flags of what is wrong,
    and with fixes that are flags."""
    try:
        yield
    except GraphError as error:
        named = (named_by_flag(problem, flags, values) for problem in error.problems)
        raise type(error)(*(as_flag(problem, flags, given) for problem in named)) from error


def flags_of(path: Path, function: Callable[..., Graph]) -> tuple[Flag, ...]:
    """Return the flags of graph() in the file `path`. Raises GraphError with each parameter that cannot be a flag."""
    where = line_of(path, function)
    if is_async(plain(function)):
        raise GraphError(
            Problem(
                where=where,
                what="graph() is async",
                why="it is called without await, and must return a Graph",
                fix="write def graph(...), without async",
            )
        )
    try:
        hints = typing.get_type_hints(plain(function))
    except Exception as error:
        raise GraphError(
            Problem(
                where=where,
                what=f"the types of graph() cannot be read: {type(error).__name__}: {error}",
                why="the flags have these types",
                fix=f"use types that are {_KNOWN_TYPES}",
            )
        ) from error
    said = _comments(plain(function)) | _said(plain(function).__doc__ or "")
    found = [
        _flag(parameter, hints, where, said.get(parameter.name, ""))
        for parameter in inspect.signature(function).parameters.values()
    ]
    problems = [item for item in found if isinstance(item, Problem)]
    if problems:
        raise GraphError(*problems)
    return tuple(item for item in found if isinstance(item, Flag))


def _flag(parameter: inspect.Parameter, hints: Mapping[str, Any], where: str, said: str) -> Flag | Problem:
    """Return the flag of a parameter, or the problem that prevents one."""
    name, default = parameter.name, parameter.default
    hint = hints.get(name, type(default))
    kind, choices, optional = _kind(hint)
    if wrong := _objection(parameter, hints):
        what, why, fix = wrong
        return Problem(where=where, what=what, why=why, fix=fix)
    assert kind is not None
    return Flag(name, kind, default, choices, optional, where, said)


def _objection(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return (what, why, fix) if a parameter cannot be a flag, else None."""
    name, default, shape = parameter.name, parameter.default, parameter.kind
    if shape in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        stars: dict[Any, str] = {parameter.VAR_POSITIONAL: f"*{name}", parameter.VAR_KEYWORD: f"**{name}"}
        what = f"graph() takes {stars.get(shape) or f'{name!r} before a /'}"
        return what, "every parameter is a flag, set by name", "use ordinary parameters, such as steps: int = 100"
    says = f"parameter {name!r} of graph()"
    if default is parameter.empty:
        example = {"int": "1", "float": "1.0", "bool": "False"}.get(_shown(hints.get(name, int)), '"..."')
        typed = parameter if name in hints else parameter.replace(annotation=int)
        if isinstance(typed.annotation, str):  # of a file with `from __future__ import annotations`
            typed = typed.replace(annotation=_Verbatim(typed.annotation))
        fix = str(typed.replace(default=_Verbatim(example)))
        return (
            f"{says} has no default",
            "the graph is checked without flags, so each parameter needs one",
            f"write {fix}",
        )
    if name not in hints and type(default) not in _TYPES:
        return f"{says} has no type", "the flag needs one", f"give it a type that is {_KNOWN_TYPES}"
    hint = hints.get(name, type(default))
    kind, choices, optional = _kind(hint)
    if kind is None:
        return f"{says} has the type {_shown(hint)}", f"a flag is {_KNOWN_TYPES}", "build other objects inside graph()"
    fits = type(default) is kind or (kind is float and type(default) is int) or (optional and default is None)
    if not fits or (choices and default is not None and default not in choices):
        what = f"{says} is {_shown(hint)} and has the default {default!r}"
        fix = f"{name}: {_shown(hint)} = {choices[0]!r}" if choices else "correct the type or the default"
        return what, "a default is a value of the parameter's type", fix
    return None


class _Verbatim:
    """An object whose repr is the given text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _said(docstring: str) -> dict[str, str]:
    """Return the parameter descriptions in a docstring, by name, from lines such as `lr, eps   of the optimizer` or
    `lr: the learning rate`; lines that are indented further continue the description above."""
    said: dict[str, str] = {}
    names: list[str] = []
    open_at = -1
    for line in inspect.cleandoc(docstring).splitlines():
        indent = len(line) - len(line.lstrip())
        row = re.match(r" *(\w+(?:, \w+)*)(?: {2,}|: +)(\S.*)$", line)
        if 0 <= open_at < indent:
            said |= {name: f"{said[name]} {line.strip()}" for name in names}
        elif row:
            open_at, names = indent, row[1].split(", ")
            said |= dict.fromkeys(names, row[2])
        else:
            open_at = -1
    return said


def _comments(function: Any) -> dict[str, str]:
    """Return the end-of-line comments of a function's parameters, by name."""
    try:
        source = inspect.getsource(function)
    except OSError:  # the function has no source file
        return {}
    found: dict[str, str] = {}
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        named = re.match(r"\s+(\w+) *[:=]", lines[token.start[0] - 1]) if token.type == tokenize.COMMENT else None
        if named:
            found.setdefault(named[1], token.string.lstrip("# "))
        elif token.type == tokenize.INDENT:  # the body
            break
    return found


def _shown(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


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


def plain(function: Any) -> Any:
    """Unwrap a partial such as partial(grpo.graph, max_staleness=1), which reuses another graph with new defaults."""
    return function.func if isinstance(function, functools.partial) else function


def line_of(path: Path, function: Callable[..., Any]) -> str:
    """Return the file and line where a function of the graph file is defined."""
    code = inspect.unwrap(plain(function)).__code__
    own = Path(code.co_filename).resolve() == path.resolve()
    return f"{path if own else code.co_filename}:{code.co_firstlineno}"
