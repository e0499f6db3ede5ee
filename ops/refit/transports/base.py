"""The transport interface: a class with a name, supported devices, a sender and a receiver.

    class ByMail(Transport):
        name = "mail"

        def sender(self) -> Sender: ...
        def receiver(self) -> Receiver: ...

    Refit(policy, source=learner, target=sampler, transport=ByMail())

An instance is a description that is sent to every worker. `--check` loads it, so this module loads no tensor library:
Sluice's transports import theirs in `sender` and `receiver`. docs/your-own-transport.md has an example.
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
Record = dict[str, float]  # metrics of one version, by name


class Transport(ABC):
    """Moves weights from the ranks of a trainer to the ranks of a sampler.

    name         the transport's name; the metric is `refit/path_NAME`
    devices      "cpu" if it works when both sides hold the model on CPUs, "cuda" if on GPUs
    both_carry   whether sender and receiver run at the same time. If not, the receiver needs only the sender's offer,
                 and both sides may share GPUs, which NCCL groups do not allow
    one_machine  whether all workers of both sides must be on one machine
    by_loader    whether the sampler's own loader writes the tensors, instead of a direct write into its storage
    keep_copy    whether the sender publishes a copy of its parameters. If not, `meeting.buffers` are the parameters
                 themselves, by name; this needs `both_carry`, since training continues once both have carried
    """

    name: ClassVar[str]
    devices: ClassVar[Collection[str]] = DEVICES
    both_carry: ClassVar[bool] = False
    one_machine: ClassVar[bool] = False
    by_loader: ClassVar[bool] = False
    keep_copy: bool = True

    @abstractmethod
    def sender(self) -> Sender:
        """Return the sending end, for one trainer rank. Called once per model in a worker; the result is kept."""

    @abstractmethod
    def receiver(self) -> Receiver:
        """Return the receiving end, for one sampler rank. Called once per model in a worker; the result is kept."""


class Sender:
    """The sending end, for one trainer rank."""

    def offer(self, memory: SharedMemory) -> Any:
        """Return what all receivers get for a version, as `share.memory`: anything that can be pickled. `memory.bytes`
        is this rank's part of the version, flat bytes on the rank's device.

        The default returns the memory itself, which processes on the same machine open. Not called if `both_carry`.
        """
        return memory

    def send(self, meeting: Meeting, version: int) -> Record:
        """Send this rank's part of a version from `meeting.buffers`. Called only if `both_carry`."""
        return {}

    def close(self) -> None:
        """Release open resources."""


class Receiver(ABC):
    """The receiving end, for one sampler rank."""

    @abstractmethod
    def receive(self, meeting: Meeting, shares: Sequence[Share], version: int) -> Record:
        """Write this rank's part of a version into `meeting.buffers`; `shares` are the shares of all trainer ranks.
        Returns `received_bytes` and any other metrics once the bytes are written."""

    def close(self) -> None:  # noqa: B027 - most have nothing open
        """Release open resources."""
