"""The check that an object is a transport, and the registration of a user's."""

from __future__ import annotations

import ast
import difflib
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence

from ops.refit.transports.base import DEVICES, Sender, Transport
from ops.refit.transports.listed import OURS, TRANSPORTS
from ops.refit.transports.sizes import DEFAULTS, wrong

PARTS = ("devices", "both_carry", "one_machine", "by_loader", "keep_copy", "sender", "receiver")
_CALLED_WITH = {"send": "meeting, version", "offer": "memory", "receive": "meeting, shares, version", "close": ""}


def register(transport: Transport) -> None:
    """Register a transport under its name for `Refit(..., transport=NAME)`. Raises ValueError if it is incomplete or
    the name is taken."""
    if what := missing(transport):
        raise ValueError(f"{transport!r} cannot be registered: {what}")
    TRANSPORTS[transport.name] = transport


def wrong_parameters(transport: object) -> Iterator[tuple[str, str]]:
    """Yield why a parameter of one of Sluice's transports is invalid, and what to write instead."""
    if isinstance(transport, tuple(map(type, OURS))):
        yield from wrong({name: value for name, value in vars(transport).items() if name in DEFAULTS})
        names = getattr(transport, "interfaces", ())
        if not isinstance(names, tuple) or not all(isinstance(name, str) and name for name in names):
            yield "interfaces must be a tuple of names of network interfaces", 'interfaces=("eth0",)'


def missing(transport: object) -> str:
    """Return what an object lacks to be a transport, as a sentence; "" if nothing. Creates the sender and receiver of a
    user's transport once."""
    if type(transport) in map(type, OURS):
        return ""
    if isinstance(transport, type):
        return "it is a class; a transport is an instance"
    if not hasattr(transport, "name"):
        return "it is not a transport: it has no name"
    for part in PARTS:
        try:
            getattr(transport, part)
        except AttributeError:
            return f"{type(transport).__name__} has no {part}{'()' if part in ('sender', 'receiver') else ''}"
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a property of the user's
            return f"{type(transport).__name__}.{part} raised {_raised(error)}"
    if near := _misspelt(transport, PARTS):
        return f"{type(transport).__name__} {near}"
    return _wrong(transport) or _wrong_ends(transport) or _stays(transport)  # type: ignore[arg-type]


def is_taken(transport: object) -> bool:
    """Return whether the name of a transport is that of another class."""
    name = getattr(transport, "name", None)
    return isinstance(name, str) and name in TRANSPORTS and type(TRANSPORTS[name]) is not type(transport)


def _wrong(transport: Transport) -> str:
    kind, name = type(transport).__name__, transport.name
    if not isinstance(name, str) or not name.replace("-", "_").isidentifier() or name == "auto":
        return f"{kind} has name={name!r}; a name consists of letters, digits, _ and -, and is not 'auto'"
    if is_taken(transport):
        return f"{kind} has name={name!r}, which another transport has"
    devices = transport.devices
    is_list = isinstance(devices, Collection) and not isinstance(devices, str)
    if not (is_list and devices and all(device in DEVICES for device in devices)):
        return f"{kind} has devices={devices!r}; devices are ('cpu',), ('cuda',) or ('cpu', 'cuda')"
    return ""


def _stays(transport: Transport) -> str:
    """Why a transport cannot be sent to workers; "" if it can."""
    import cloudpickle

    try:
        cloudpickle.dumps(transport)
    except Exception as error:  # noqa: BLE001 - user code
        return f"{type(transport).__name__} cannot be sent to workers: {error}"
    return ""


def _wrong_ends(transport: Transport) -> str:
    kind, ends = type(transport).__name__, []
    for part in ("sender", "receiver"):
        make = getattr(transport, part)
        if wrong := _wrong_method(make, ""):
            return f"{kind}.{part}() {wrong}"
        try:
            ends.append(make())
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code
            return f"{kind}.{part}() raised {_raised(error)}"
    works = ("send" if transport.both_carry else "offer", "receive")
    for part, end, method in zip(("sender", "receiver"), ends, works):
        own = getattr(type(end), method, None)
        if own is None or own is Sender.send:
            returns = "None" if end is None else type(end).__name__
            return f"{kind}.{part}() returns {returns}, which does not define {method}()"
        if near := _misspelt(end, ("offer", "send", "receive", "close")):
            return f"{type(end).__name__} {near}"
        for name in (method, "close"):
            if hasattr(end, name) and (wrong := _wrong_method(getattr(end, name), _CALLED_WITH[name])):
                return f"{type(end).__name__}.{name}() {wrong}"
    return ""


def _misspelt(made: object, known: Sequence[str]) -> str:
    """Say so if the class of an object defines a name that its module never uses and that is nearly one of these, and
    does not define that one; else ""."""
    defined = vars(type(made))
    for name in defined:
        alike = [each for each in known if each[0] == name[0]]
        near = difflib.get_close_matches(name, alike, n=1, cutoff=0.8)  # both_carries and both_carry: 0.82
        if name not in known and near and near[0] not in defined and not _may_be_used(name, type(made)):
            return f"defines {name}, which nothing uses; the name is {near[0]}"
    return ""


def _may_be_used(name: str, kind: type) -> bool:
    """Return whether the module of a class uses an attribute of this name, or has no source that shows it."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    except (KeyError, OSError, TypeError, SyntaxError):
        return True
    return any(isinstance(node, ast.Attribute) and node.attr == name for node in ast.walk(tree))


def _raised(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"


def _wrong_method(method: Callable[..., object], parameters: str) -> str:
    """Return why calling a method with these parameters does not return its result, and its line; "" if it does."""
    if inspect.iscoroutinefunction(method):
        wrong = "is async, and it is called without await"
    elif inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        wrong = "is a generator, and nothing iterates over it"
    elif not _takes(method, len(parameters.split(", ")) if parameters else 0):
        wrong = f"must take ({parameters})" if parameters else "must take no arguments"
    else:
        return ""
    code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)
    return f"{wrong} ({code.co_filename}:{code.co_firstlineno})" if code else wrong


def _takes(method: Callable[..., object], arguments: int) -> bool:
    """Return whether a method can be called with this number of positional arguments."""
    try:
        return bool(inspect.signature(method).bind(*[None] * arguments))
    except TypeError:
        return False
    except ValueError:  # written in C, without a signature
        return True
