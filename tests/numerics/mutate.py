"""Mechanical mutants of a module: one small change each, of the kinds that formulas usually get wrong.

    for name, source in mutants(inspect.getsource(ops.kl)):
        ...

Changed are arithmetic, bitwise, boolean and comparison operators, the order of a difference and of a quotient, unary
minus and not, numbers, booleans and texts, every use of a mask or of `detach` and `clamp` (replaced by the operand),
sums and means, all and any, min and max (one for the other), the branches of `torch.where` and of `if` expressions
(swapped), the first two arguments of a call (swapped), and its named arguments (dropped). Docstrings, annotations,
decorators and raised errors are left alone. A name consists of the function, the original and the replacement; equal
ones are numbered.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from types import ModuleType

_OPERATORS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_DROPPED_METHODS = {"masked_fill", "detach", "clamp", "nan_to_num"}
_SWAPPED = {"sum": "mean", "mean": "sum", "all": "any", "any": "all", "min": "max", "max": "min"}


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """Yield each mutant's name and source. Raises SyntaxError if the source is not Python."""
    tree, seen = ast.parse(source), Counter[str]()
    for place, where in _places(tree):
        for changed in _changes(place):
            name = f"{where}: {ast.unparse(place)} -> {ast.unparse(changed)}"
            seen[name] += 1
            yield name + (f" #{seen[name]}" if seen[name] > 1 else ""), ast.unparse(_replaced(tree, place, changed))


def load(source: str, original: ModuleType) -> ModuleType:
    """Return a module with that source and the original's name, not registered anywhere."""
    module = ModuleType(original.__name__)
    module.__file__ = original.__file__
    exec(compile(source, f"<mutant of {original.__name__}>", "exec"), module.__dict__)
    return module


def _places(node: ast.AST, where: str = "module") -> Iterator[tuple[ast.expr, str]]:
    for name, child in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for part in child if isinstance(child, list) else [child]:
            if not isinstance(part, ast.AST) or isinstance(part, ast.Raise | ast.JoinedStr) or _is_docstring(part):
                continue
            if isinstance(part, ast.expr):
                yield part, where
            inside = f"{where}.{part.name}" if isinstance(part, ast.FunctionDef | ast.ClassDef) else where
            yield from _places(part, inside.removeprefix("module."))


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _changes(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.BinOp(left=left, op=op, right=right):
            yield from (_with(node, op=other()) for other in _OPERATORS.get(type(op), ()))
            if isinstance(op, ast.Sub | ast.Div):
                yield _with(node, left=right, right=left)
        case ast.BoolOp(op=op):
            yield from (_with(node, op=other()) for other in _OPERATORS[type(op)])
        case ast.IfExp(body=body, orelse=orelse):
            yield _with(node, body=orelse, orelse=body)
        case ast.Compare(ops=operators):
            for i, op in enumerate(operators):
                for other in _OPERATORS[type(op)]:
                    yield _with(node, ops=[*operators[:i], other(), *operators[i + 1 :]])
        case ast.UnaryOp(operand=operand) if not isinstance(operand, ast.Constant):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
            yield ast.Constant(value / 2 if isinstance(value, float) and value else value - 1)
        case ast.Constant(value=str(value)):
            yield ast.Constant(value + "_")
        case ast.Call():
            yield from _changed_calls(node)


def _changed_calls(node: ast.Call) -> Iterator[ast.expr]:
    match node:
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in _DROPPED_METHODS:
            yield value
        case ast.Call(func=ast.Attribute(attr="where"), args=[condition, chosen, other]):
            yield _with(node, args=[condition, other, chosen])
        case ast.Call(func=ast.Name(id="blank"), args=[values, _]):
            yield values
        case ast.Call(func=ast.Name(id="masked_sum" | "masked_mean" as name), args=[values, _, *rest]):
            yield _with(node, func=ast.Name("masked_" + _SWAPPED[name.removeprefix("masked_")]))
            yield ast.Call(ast.Attribute(values, name.removeprefix("masked_")), rest, node.keywords)
        case ast.Call(func=ast.Attribute(attr=name) as function) if name in _SWAPPED:
            yield _with(node, func=_with(function, attr=_SWAPPED[name]))
        case ast.Call(func=ast.Name(id=name)) if name in _SWAPPED:
            yield _with(node, func=ast.Name(_SWAPPED[name]))
            return  # the order of these arguments does not matter
    match node.args:
        case [first, second, *rest] if not any(isinstance(arg, ast.Starred) for arg in (first, second)):
            yield _with(node, args=[second, first, *rest])
    for keyword in node.keywords:
        yield _with(node, keywords=[other for other in node.keywords if other is not keyword])


def _with(node: ast.AST, **fields: object) -> ast.AST:
    """Return a copy with other fields."""
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


def _replaced(tree: ast.Module, place: ast.expr, by: ast.expr) -> ast.Module:
    # Other nodes are copied; `place` is replaced by the new expression.
    return copy.deepcopy(tree, {id(place): copy.deepcopy(by)})
