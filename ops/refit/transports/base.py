"""What a transport is: one class with a name, the devices that it carries between, a sender and a receiver.

    class ByMail(Transport):
        name = "mail"

        def sender(self) -> Sender: ...
        def receiver(self) -> Receiver: ...

    Refit(policy, source=learner, target=sampler, transport=ByMail())

An object of it is a description, which is sent to every worker. Loads no tensor library, since a check reads it:
a transport of Sluice imports what moves bytes in `sender` and `receiver`. docs/your-own-transport.md has an example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from ops.refit.memory import SharedMemory
    from ops.refit.share import Share
    from ops.refit.transports.meeting import Meeting

DEVICES = ("cpu", "cuda")
Record = dict[str, float]  # numbers about one version, by name


class Transport(ABC):
    """How weights get from the ranks of a trainer to those of a sampler.

    name         of the transport; a step's metrics have `refit/path_NAME`
    devices      what it carries between: "cpu" if both sides hold the model on CPUs, "cuda" if on GPUs
    both_carry   whether sender and receiver work at the same time. If not, the receiver has all that it needs in what
                 the sender offered. Both sides may then lie on the same GPUs, which groups over NCCL cannot
    one_machine  whether all workers of both sides must be on one machine
    by_loader    whether the sampler's own loader puts the tensors in place, instead of writing them there directly

    """

    name: ClassVar[str]
    devices: ClassVar[Collection[str]] = DEVICES
    both_carry: ClassVar[bool] = False
    one_machine: ClassVar[bool] = False
    by_loader: ClassVar[bool] = False

    @abstractmethod
    def sender(self) -> Sender:
        """The end of a rank of the trainer. Called once for each model in a worker, and kept."""

    @abstractmethod
    def receiver(self) -> Receiver:
        """The end of a rank of the sampler. Called once for each model in a worker, and kept."""


class Sender:
    """A rank of the trainer."""

    def offer(self, memory: SharedMemory) -> Any:
        """What all receivers get of a version, as `share.memory`. `memory.bytes` has this rank's part of it, flat bytes
        on the rank's device. May return anything that can be pickled.

        By default it is the memory itself, which processes of the same machine open. Not called where `both_carry`.
        """
        return memory

    def send(self, meeting: Meeting, version: int) -> Record:
        """Send this rank's part of a version, which is in `meeting.buffers`. Called where `both_carry`."""
        return {}

    def close(self) -> None:
        """Give back what is open."""


class Receiver(ABC):
    """A rank of the sampler."""

    @abstractmethod
    def receive(self, meeting: Meeting, shares: Sequence[Share], version: int) -> Record:
        """Write this rank's part of a version into `meeting.buffers`; `shares` are those of all ranks of the trainer.
        When it returns, the bytes are there. Returns `received_bytes`, and what else is worth a metric."""

    def close(self) -> None:  # noqa: B027 - most have nothing open
        """Give back what is open."""
