"""The named transports. Loads no tensor library."""

from __future__ import annotations

from dataclasses import dataclass

from ops.refit.transports.base import Receiver, Sender, Transport
from ops.refit.transports.sizes import BUCKET_BYTES, BUCKETS, SLOT_BYTES, SLOTS


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
class ByMessages(Transport):
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


OURS: tuple[Transport, ...] = (Golden(), ByMessages(), Pull(), Gloo(), P2P(), Broadcast(), Tree())
TRANSPORTS: dict[str, Transport] = {transport.name: transport for transport in OURS}  # plus registered ones
