"""Says where a user's graph file raised, and what a mistyped name in it was meant to be."""

from __future__ import annotations

import ast
import builtins
import difflib
import inspect
import linecache
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import TracebackType
from typing import Any

from pipeline.declare.stage import Stage
from pipeline.errors import is_user_file
from pipeline.precedence import HOME, PACKAGES

_WRONG_CALL = re.compile(
    r"(?:.*\.)?(?P<name>(?!__init__)\w+)(?:\.__init__)?\(\) "
    r"(?P<wrong>missing(?: \d+ required \S+ arguments?: (?P<lacks>.+))?|takes|"
    r"got an unexpected keyword argument '(?P<given>\w+)')"
)
_ABSTRACT = re.compile(r"Can't instantiate abstract class (?P<name>\w+) .*abstract methods? (?P<lacks>.+)")
_WRONG_NAME = re.compile(r"cannot import name '(?P<name>\w+)' from '(?P<module>[\w.]+)'")


def place_of(error: BaseException, path: Path) -> tuple[str, str]:
    """Return the last line of the user's code in a traceback, and, if that is in another file than the graph file
    `path`, the line of the graph file that led there, or else ""."""
    where = graph = str(path)
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename)
        if file.resolve() == path.resolve():
            where = graph = f"{path}:{frame.lineno}"
        elif is_user_file(frame.filename) and not file.is_relative_to(HOME / "graphs"):
            where = f"{file}:{frame.lineno}"
    return where, "" if where == graph else graph


def meant(error: BaseException, folders: Sequence[Path]) -> str | None:
    """Return the fix of a mistyped name or a wrong call; None if the error is another one, or no known name is near.

    `folders` are the user's, in which a graph finds its modules.
    """
    last = error.__traceback__
    while last and last.tb_next:
        last = last.tb_next
    match error:
        case FrozenInstanceError():
            return "make a changed copy, with replace() of dataclasses"
        case TypeError() if last and (call := _WRONG_CALL.match(str(error))):
            return _call_fix(call, _called(last, call["name"]))
        case TypeError() if wrong := _ABSTRACT.match(str(error)):
            return f"define {wrong['lacks'].replace(chr(39), '')} in class {wrong['name']}"
        case AttributeError(name=str(name), obj=owner) if owner is not None:
            return _near(name, dir(owner))
        case NameError(name=str(name)) if last:
            return _near(name, [*last.tb_frame.f_globals, *last.tb_frame.f_locals, *dir(builtins)])
        case ModuleNotFoundError(name=str(name)):
            return _module_fix(name, folders)
        case ImportError() if str(error).startswith("attempted relative import"):
            return "leave out the dot: write import x, not from . import x, and from x import y, not from .x import y"
        case ImportError() if wrong := _WRONG_NAME.match(str(error)):
            module = sys.modules.get(wrong["module"])
            return _near(wrong["name"], getattr(module, "__all__", dir(module)))
    return None


def _near(name: str, known: Iterable[str], prefix: str = "") -> str | None:
    near = difflib.get_close_matches(name, [each for each in known if not each.startswith("_")], n=1)
    return f"did you mean {prefix}{near[0]}?" if near else None


def _module_fix(name: str, folders: Sequence[Path]) -> str | None:
    package, _, last = name.rpartition(".")
    searched = getattr(sys.modules.get(package), "__path__", []) if package else map(str, folders)
    known = [module.name for module in pkgutil.iter_modules(searched)] + [*PACKAGES] * (not package)
    if name.partition(".")[0] == "sluice":
        return "write pipeline: Sluice's packages are pipeline, stages, ops and graphs"
    near = _near(last, known, f"{package}." if package else "")
    if package:
        return near
    return f"{near} Otherwise, install {name}" if near else f"install {name}, or correct that line"


def _called(last: TracebackType, name: str) -> Any:
    """Return what the last line of a traceback calls, by a name or by attributes; or else what has this name there."""
    frame = last.tb_frame
    names = frame.f_globals | frame.f_locals
    positions = [*frame.f_code.co_positions()][last.tb_lasti // 2]
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except SyntaxError:  # the file has changed
        return names.get(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _positions(node) == positions:
            return _value(node.func, names) or names.get(name)
    return names.get(name)


def _positions(node: ast.expr) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _value(expression: ast.expr, names: dict[str, Any]) -> Any:
    """Return the value of a name or a chain of attributes; None if it is another expression."""
    if isinstance(expression, ast.Attribute):
        return getattr(_value(expression.value, names), expression.attr, None)
    return names.get(expression.id) if isinstance(expression, ast.Name) else None


def _is_users_class(called: Any) -> bool:
    """Return whether this is a class of the user's own file."""
    try:
        return isinstance(called, type) and is_user_file(inspect.getfile(called))
    except (TypeError, OSError):  # written in C, or without a file
        return False


def _call_fix(call: re.Match[str], called: Any) -> str | None:
    """Return a fix that lists the parameters of a wrongly called function; None if they are unknown."""
    try:
        names = [*inspect.signature(called).parameters]
    except (TypeError, ValueError):  # not found, or written in C
        return None
    given = call["given"]
    if _is_users_class(called) and issubclass(called, Stage) and given in inspect.get_annotations(Stage):
        return f"give class {called.__name__} @dataclass(frozen=True, kw_only=True), and in it {given} with a type"
    if not names:
        return f"{call['name']} takes no parameters: write {call['name']}()"
    own = {*vars(called), *inspect.get_annotations(called)} - {*names} if _is_users_class(called) else ()
    if given in own:
        return f"write @dataclass(frozen=True, kw_only=True) above class {called.__name__}, and give {given} a type"
    if given in names and f"{given}s" not in names:
        return f"pass {given} by position: write {call['name']}(*{given})"
    near = difflib.get_close_matches(given or "", [name for name in names if name != given], n=1)
    many = len(names) != 1
    fix = f"the parameter{'s' * many} of {call['name']} {'are' if many else 'is'} {', '.join(names)}"
    if near:
        return f"did you mean {near[0]}? Otherwise, {fix}"
    if call["wrong"].startswith("takes") and isinstance(called, type):
        return f"pass them by name; {fix}"
    if call["lacks"] and isinstance(called, type):
        lacks = re.sub(r"'(\w+)'", r"\1=...", call["lacks"])
        return f"add {lacks}; {fix}"
    if call["wrong"].startswith("missing") and not isinstance(called, type):
        return f"{fix}; to pass the function itself, leave out the parentheses"
    return fix
