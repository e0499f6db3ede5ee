"""The named transports, and the check that an object is a transport. Loads no tensor library."""

from __future__ import annotations

import difflib
import inspect
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from ops.refit.transports.base import DEVICES, Receiver, Sender, Transport
from ops.refit.transports.sizes import BUCKET_BYTES, BUCKETS, DEFAULTS, SLOT_BYTES, SLOTS, wrong


@dataclass(frozen=True, kw_only=True)
class Golden(Transport):
    """Whole tensors, assembled one at a time on the CPU: the reference."""

    keep_copy: bool = True

    name = "golden"
    by_loader = True

    def sender(self) -> Sender:
        from ops.refit.transports.messages import MessageSender

        return MessageSender()

    def receiver(self) -> Receiver:
        from ops.refit.transports.golden import GoldenReceiver

        return GoldenReceiver()


@dataclass(frozen=True, kw_only=True)
class Messages(Transport):
    """Each rank's part as one message through the executor."""

    keep_copy: bool = True

    name = "messages"

    def sender(self) -> Sender:
        from ops.refit.transports.messages import MessageSender

        return MessageSender()

    def receiver(self) -> Receiver:
        from ops.refit.transports.pull import PullReceiver

        return PullReceiver()


@dataclass(frozen=True, kw_only=True)
class Pull(Transport):
    """Each receiver reads the senders' memory, on one machine."""

    keep_copy: bool = True

    name = "pull"
    one_machine = True

    def sender(self) -> Sender:
        return Sender()

    def receiver(self) -> Receiver:
        from ops.refit.transports.pull import PullReceiver

        return PullReceiver()


@dataclass(frozen=True, kw_only=True)
class Gloo(Transport):
    """Each sender sends each receiver the bytes that it needs, over gloo.

    slot_bytes  memory for the messages of one round to or from all peers, on each rank
    slots       rounds whose messages are in memory, so that packing, sending and unpacking overlap
    interfaces  network interfaces by name, best first: each rank uses the first that is up, or warns and uses the
                default
    keep_copy   see `Transport`
    """

    slot_bytes: int = SLOT_BYTES
    slots: int = SLOTS
    interfaces: tuple[str, ...] = ()
    keep_copy: bool = True

    name = "gloo"
    devices = ("cpu",)
    both_carry = True

    def sender(self) -> Sender:
        from ops.refit.transports.packed import PackedSender

        return PackedSender(self.slot_bytes, self.slots, self.interfaces)

    def receiver(self) -> Receiver:
        from ops.refit.transports.packed import PackedReceiver

        return PackedReceiver(self.slot_bytes, self.slots, self.interfaces)


@dataclass(frozen=True, kw_only=True)
class P2P(Gloo):
    """The same over NCCL."""

    name = "p2p"
    devices = ("cuda",)


@dataclass(frozen=True, kw_only=True)
class Broadcast(Transport):
    """Whole tensors, gathered on one rank and broadcast to all.

    bucket_bytes  memory for the tensors that are sent at once; a larger tensor gets a bucket of its own size
    buckets       buckets in memory, so that gathering, sending and unpacking overlap
    interfaces    see `Gloo`
    keep_copy     see `Transport`
    """

    bucket_bytes: int = BUCKET_BYTES
    buckets: int = BUCKETS
    interfaces: tuple[str, ...] = ()
    keep_copy: bool = True

    name = "broadcast"
    both_carry = True

    def sender(self) -> Sender:
        from ops.refit.transports.broadcast import BroadcastSender

        return BroadcastSender(self.bucket_bytes, self.buckets, self.interfaces)

    def receiver(self) -> Receiver:
        from ops.refit.transports.broadcast import BroadcastReceiver

        return BroadcastReceiver(self.bucket_bytes, self.buckets, self.interfaces)


@dataclass(frozen=True, kw_only=True)
class Tree(Transport):
    """Fan-out in waves: a receiver that has a complete version forwards it. Parameters are those of `Gloo`."""

    slot_bytes: int = SLOT_BYTES
    slots: int = SLOTS
    interfaces: tuple[str, ...] = ()
    keep_copy: bool = True

    name = "tree"
    devices = ("cpu",)
    both_carry = True

    def sender(self) -> Sender:
        from ops.refit.transports.tree import TreeSender

        return TreeSender(self.slot_bytes, self.slots, self.interfaces)

    def receiver(self) -> Receiver:
        from ops.refit.transports.tree import TreeReceiver

        return TreeReceiver(self.slot_bytes, self.slots, self.interfaces)


OURS: tuple[Transport, ...] = (Golden(), Messages(), Pull(), Gloo(), P2P(), Broadcast(), Tree())
TRANSPORTS: dict[str, Transport] = {transport.name: transport for transport in OURS}  # plus registered ones


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


def _wrong(transport: Transport) -> str:
    kind, name = type(transport).__name__, transport.name
    if not isinstance(name, str) or not name.replace("-", "_").isidentifier() or name == "auto":
        return f"{kind} has name={name!r}; a name consists of letters, digits, _ and -, and is not 'auto'"
    if name in TRANSPORTS and type(TRANSPORTS[name]) is not type(transport):
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


PARTS = ("devices", "both_carry", "one_machine", "by_loader", "keep_copy", "sender", "receiver")
_CALLED_WITH = {"send": "meeting, version", "offer": "memory", "receive": "meeting, shares, version", "close": ""}


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
            return f"{kind}.{part}() returns {type(end).__name__}, which does not define {method}()"
        if near := _misspelt(end, ("offer", "send", "receive", "close")):
            return f"{type(end).__name__} {near}"
        for name in (method, "close"):
            if hasattr(end, name) and (wrong := _wrong_method(getattr(end, name), _CALLED_WITH[name])):
                return f"{type(end).__name__}.{name}() {wrong}"
    return ""


def _misspelt(made: object, known: Sequence[str]) -> str:
    """Say so if the class of an object defines a name that nothing uses and is nearly one of these; else ""."""
    for name in vars(type(made)):
        if name not in known and (near := difflib.get_close_matches(name, known, n=1, cutoff=0.85)):
            return f"defines {name}, which nothing uses; {near[0]} is meant"
    return ""


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
