"""Finds uses of what other packages do not document: their private members, and members of TransferQueue's classes.

By syntax only, so that nothing has to run: a private name counts as foreign if the file that uses it does not define
it. Members with public names are found on the expressions in `HOLDS`, which hold TransferQueue's objects.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("pipeline", "stages", "ops")
OURS = {*PRODUCT, "graphs"}
PRIVATE = re.compile(r"_(?!_)\w+")
CLIENT = "transfer_queue.client:AsyncTransferQueueClient"
MANAGER = "transfer_queue.storage.managers.simple_storage_manager:AsyncSimpleStorageManager"
META = "transfer_queue.metadata:BatchMeta"
POOL = "transfer_queue.utils.zmq_utils:ZMQSocketPool"
MESSAGE = "transfer_queue.utils.zmq_utils:ZMQMessage"
SERVER = "transfer_queue.utils.zmq_utils:ZMQServerInfo"
CONTROLLER = "transfer_queue.interface:TransferQueueController.__ray_metadata__.modified_class"
UNIT = "transfer_queue.storage.bootstrap.simple_storage_bootstrap:SimpleStorageUnit.__ray_metadata__.modified_class"
HOLDS = {  # file -> expression -> the class of its value
    "pipeline/data_plane/wire.py": {
        "client": CLIENT,
        "self._client": CLIENT,
        "self._client.controller_rpc_pool": POOL,
        "self._storage": MANAGER,
        "found": META,
        "answer": MESSAGE,
        "ZMQRequestType": "transfer_queue.utils.zmq_utils:ZMQRequestType",
    },
    "pipeline/data_plane/actors.py": {
        "controller": CONTROLLER,
        "found": META,
        "message": MESSAGE,
        "answer": MESSAGE,
        "common": "transfer_queue.utils:common",
    },
    "pipeline/data_plane/signed.py": {"message": MESSAGE},
    "pipeline/data_plane/transfer_queue.py": {
        "client": CLIENT,
        "self._client": CLIENT,
        "endpoint": SERVER,
        "server": SERVER,
        "Role": "transfer_queue.utils.enum_utils:Role",
    },
}
BY_NAME = ("getattr", "setattr", "hasattr", "delattr")


def product() -> dict[str, str]:
    """Return the text of every file of the product."""
    files = (path for package in PRODUCT for path in sorted((ROOT / package).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}


def uses(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """Return what these files use, and in which of them: `._name` for a private attribute, `"_name"` for a private name
    as a key, a keyword or an argument of getattr, `module:name` for an import, `module:Class.name` for a member of
    TransferQueue's classes."""
    nodes = {file: list(ast.walk(ast.parse(text))) for file, text in texts.items()}
    members = {file: set(_members(own)) for file, own in nodes.items()}
    inherited = set().union(*members.values())
    found: dict[str, set[str]] = {}
    for file, own in nodes.items():
        for use in _uses(own, HOLDS.get(file, {}), members[file], inherited):
            found.setdefault(use, set()).add(file)
    return found


def _uses(nodes: Sequence[ast.AST], holds: Mapping[str, str], own: set[str], inherited: set[str]) -> Iterator[str]:
    parameters = {node.arg for node in nodes if isinstance(node, ast.arg)} | inherited
    for node in nodes:
        match node:
            case ast.Attribute(value=value, attr=name):
                base = _dotted(value)
                known = set() if base == "super()" else inherited if base in ("self", "cls") else own
                if base in holds:
                    yield f"{holds[base]}.{name}"
                elif base == "transfer_queue":
                    yield f"transfer_queue:{name}"
                elif PRIVATE.fullmatch(name) and name not in known:
                    yield f".{name}"
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from (f"{module}:{each.name}" for each in names if _is_foreign(module, each.name))
            case ast.Import(names=names):
                yield from (f"{each.name}:" for each in names if _is_foreign(each.name, ""))
            case _:
                yield from (f'"{name}"' for name in _keys(node) if PRIVATE.fullmatch(name) and name not in parameters)


def _dotted(node: ast.expr) -> str:
    """Return names that are joined by dots, and `super()`, as they are written; empty for anything else."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{_dotted(value)}.{name}"
        case ast.Call(func=ast.Name(id="super")):
            return "super()"
    return ""


def _keys(node: ast.AST) -> Iterator[str]:
    """Yield the strings that name a parameter, a key or an attribute in this node."""
    match node:
        case ast.keyword(arg=str(name)) | ast.Subscript(slice=ast.Constant(value=str(name))):
            yield name
        case ast.Dict(keys=keys):
            yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
        case ast.Call(func=ast.Name(id=name), args=[_, ast.Constant(value=str(attribute)), *_]) if name in BY_NAME:
            yield attribute


def _is_foreign(module: str, name: str) -> bool:
    """Return whether an import is one of a private name, or of TransferQueue."""
    package, *rest = module.split(".")
    if package in OURS or package in sys.stdlib_module_names:
        return False
    return any(PRIVATE.fullmatch(part) for part in (*rest, name)) or (package == "transfer_queue" and bool(name))


def _members(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the attributes that a file defines: methods and variables of its classes, and what they set on self."""
    for node in nodes:
        match node:
            case ast.ClassDef(body=body):
                yield from (name for inner in body for name in _bound(inner))
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def _bound(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement in a class's body binds."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.Assign(targets=targets):
            yield from (target.id for target in targets if isinstance(target, ast.Name))
