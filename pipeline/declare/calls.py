"""Finds why a function of the user's cannot be called as it will be, without calling it.

fault(run, "columns, task")                   "is async"
import_fault("mine:open_mine", "context")     "has no open_mine in the module mine"
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def fault(function: Any, parameters: str) -> str:
    """Return why a call with these parameters, by position, does not return the function's result; "" if it does."""
    if not callable(function):
        return "is not a function"
    if is_async(function):
        return "is async"
    if is_generator(function):
        return "is a generator"
    return "" if takes(function, parameters) else f"does not take ({parameters})"


def takes(function: Any, parameters: str) -> bool:
    """Return whether a function can be called with these parameters, by position."""
    try:
        return bool(inspect.signature(function).bind(*parameters.split(", ")))
    except TypeError:
        return False
    except ValueError:  # written in C, without a signature
        return True


def required(function: Any) -> list[str]:
    """Return the parameters without which a function or class cannot be called; none if it has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C, or not callable
        return []
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in starred]


def is_async(function: Any) -> bool:
    """Return whether a function, or an object's `__call__`, is a coroutine function."""
    return any(map(inspect.iscoroutinefunction, _code_of(function)))


def is_generator(function: Any) -> bool:
    """Return whether a function, or an object's `__call__`, is a generator, async or not."""
    return any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in _code_of(function))


def _code_of(function: Any) -> tuple[Any, Any]:
    return function, getattr(type(function), "__call__", None)  # noqa: B004 - needs the function itself


def import_fault(given: str, parameters: str) -> str:
    """Return why "module:function" cannot be called with these parameters; "" if it can, as far as its file shows.

    Reads the file, and imports only the packages around the module.
    """
    module, _, name = given.partition(":")
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # a package around it
        spec = None
    if spec is None:
        return f"names the module {module}, which is not found"
    if not (spec.origin or "").endswith(".py"):
        return ""
    try:
        nodes = _top_names(Path(str(spec.origin)).read_bytes())
    except SyntaxError as error:
        return f"names the module {module}, which has a syntax error in line {error.lineno}"
    if name not in nodes:
        return "" if {"*", "__getattr__"} & nodes.keys() else f"names {name}, which the module {module} does not have"
    match nodes[name]:
        case ast.AsyncFunctionDef():
            return "names an async function"
        case ast.FunctionDef(args=taken, decorator_list=[]) if not fits(taken, len(parameters.split(", "))):
            return f"names a function that does not take ({parameters})"
    return ""


@functools.lru_cache(16)
def _top_names(source: bytes) -> dict[str, ast.stmt]:
    """Return what binds each name of a module. A plan asks for the same few modules again and again."""
    return {each: node for node in statements(ast.parse(source).body) for each in bound(node)}


def statements(body: Iterable[ast.AST]) -> Iterator[ast.stmt]:
    """Yield statements and those inside them, without the bodies of functions and classes, in order."""
    for node in body:
        if isinstance(node, ast.stmt):
            yield node
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case) and not isinstance(node, _DEFINITIONS):
            yield from statements(ast.iter_child_nodes(node))


def bound(node: ast.AST) -> list[str]:
    """Return the names that a statement gives values."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [each.asname or each.name for each in names]
        case ast.Assign() | ast.AnnAssign():
            return [
                each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            ]
    return []


def fits(taken: ast.arguments, count: int) -> bool:
    """Return whether a function that takes these can be called with this number of positional arguments."""
    most = len(taken.posonlyargs) + len(taken.args)
    enough = most - len(taken.defaults) <= count and None not in taken.kw_defaults
    return enough and (count <= most or taken.vararg is not None)
