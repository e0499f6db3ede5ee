"""What can be wrong with the runner of a stage: in the source of `setup`, and in what `setup` returned."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from types import MethodType
from typing import Any

from pipeline.declare.calls import bound, fault, fits, is_async, statements, takes

PARAMETERS = {"map": "columns, task", "stream": "columns, task", "transfer": "rendezvous, task"}
MEANT = {
    "map": "a worker calls the runner, and writes the columns that it returns",
    "stream": "a worker iterates over the runner's Outputs with `async for`",
    "transfer": "a worker of each side calls the runner once per transfer",
}


def example(shape: str) -> str:
    """Return how to write the runner of a stage."""
    if shape == "stream":
        return "write async def run(columns, task), which yields Outputs, and return run from setup()"
    return f"write def run({PARAMETERS[shape]}), and return run from setup()"


def runner_fault(runner: Any, shape: str) -> str:
    """Return why this is not a runner; "" if it can be one."""
    if isinstance(runner, type):
        return f"is the class {runner.__name__}, not an instance"
    if shape != "stream":
        return fault(runner, PARAMETERS[shape])
    if not callable(runner):
        return "is not a function"
    if is_async(runner):
        return "is async and yields nothing"
    if inspect.isgeneratorfunction(runner):
        return "is a generator that is not async"
    return "" if takes(runner, PARAMETERS[shape]) else f"does not take ({PARAMETERS[shape]})"


def written_fault(setup: Any, shape: str) -> str:
    """Return why `setup` will not return a runner, as far as its source shows; "" if it may.

    It shows if that is a constant, a lambda, a function defined in `setup` or in its module, or an instance of a class
    of its module.
    """
    try:
        (made,) = ast.parse(textwrap.dedent(inspect.getsource(setup))).body
    except (OSError, TypeError, ValueError, SyntaxError):  # no source, or a part of a line
        return ""
    if not isinstance(made, ast.FunctionDef) or made.decorator_list:
        return ""
    body = list(statements(made.body))
    if not any(isinstance(each, ast.Return | ast.Raise) for each in body):
        return "" if _may_raise(made.body[-1]) else "is missing: setup() has no return statement"
    inner = {name: each for each in body for name in bound(each)}
    function = inspect.unwrap(setup)
    local = {*function.__code__.co_varnames, *function.__code__.co_cellvars, *function.__code__.co_freevars}
    outer = {name: value for name, value in function.__globals__.items() if name not in local}
    for each in body:
        if isinstance(each, ast.Return):
            wrong = _outer_fault(each.value, outer, shape) or _fault(each.value, inner, shape)
            if wrong:
                return wrong
    return ""


def _may_raise(last: ast.stmt) -> bool:
    """Return whether the last statement of a function may be what ends it, such as sys.exit() or an assert."""
    return isinstance(last, ast.Assert) or (isinstance(last, ast.Expr) and isinstance(last.value, ast.Call))


def _outer_fault(value: ast.expr | None, outer: Mapping[str, Any], shape: str) -> str:
    """Return why something of the module, or an instance of its class, is not a runner; `outer` has their names."""
    name = value.func if isinstance(value, ast.Call) else value
    if not isinstance(name, ast.Name) or name.id not in outer:
        return ""
    found = outer[name.id]
    if isinstance(value, ast.Name):
        return runner_fault(found, shape)
    if not isinstance(found, type):
        return ""
    call = next((vars(each)["__call__"] for each in found.__mro__ if "__call__" in vars(each)), None)
    return runner_fault(MethodType(call, found), shape) if call else f"is a {found.__name__}, which has no __call__()"


def _fault(value: ast.expr | None, inner: Mapping[str, ast.stmt], shape: str) -> str:
    """Return why an expression that `setup` returns is not a runner; `inner` has what is defined in `setup`."""
    count = len(PARAMETERS[shape].split(", "))
    runner = inner.get(value.id) if isinstance(value, ast.Name) else value
    match runner:
        case None if not isinstance(value, ast.Name):
            return "is missing: setup() returns None"
        case ast.Constant() | ast.Dict() | ast.List() | ast.Tuple():
            return f"is missing: setup() returns {ast.unparse(runner)}"
        case ast.AsyncFunctionDef(decorator_list=[]) if shape != "stream":
            return "is async"
        case ast.AsyncFunctionDef(decorator_list=[]) if not _yields(runner):
            return "is async and yields nothing"
        case ast.FunctionDef(decorator_list=[]) if _yields(runner):
            return "is a generator" if shape != "stream" else "is a generator that is not async"
        case ast.Lambda(args=taken) | ast.FunctionDef(args=taken) | ast.AsyncFunctionDef(args=taken):
            wrapped = getattr(runner, "decorator_list", [])
            return "" if wrapped or fits(taken, count) else f"does not take ({PARAMETERS[shape]})"
    return ""


def _yields(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is a generator."""
    nodes: list[ast.AST] = list(function.body)
    for node in nodes:
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            nodes.extend(ast.iter_child_nodes(node))
    return False
