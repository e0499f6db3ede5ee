"""What a worker may call on the runners of its stages, and on shared objects such as an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Saves(Protocol):
    """A runner with state: it is part of every checkpoint."""

    def save(self, folder: Path) -> Any:
        """Write the state into the folder."""

    def restore(self, folder: Path) -> Any:
        """Restore the state that `save` wrote."""


@runtime_checkable
class Weighs(Protocol):
    """A runner with state that knows its size."""

    def saved_bytes(self) -> int:
        """Return how many bytes `save` writes on this worker, about."""


@runtime_checkable
class Copies(Weighs, Protocol):
    """A runner with state that can be written while its stage goes on."""

    def copied(self) -> Callable[[Path], None] | None:
        """Copy the state to memory of the host, and return a function that writes the copy into a folder, as `save`
        would have written the state. It is called once, in a thread. None if it cannot."""


@runtime_checkable
class Sleeps(Protocol):
    """It can free its GPU memory for another worker group and reclaim it. Both return bytes in use before and after."""

    def sleep(self, room: int | None = None) -> tuple[int, int]:
        """Free memory until `room` bytes of the GPU are free; None frees as much as possible."""

    def wake(self) -> tuple[int, int]:
        """Reclaim the memory."""


@runtime_checkable
class Closes(Protocol):
    """It has something to release when the worker ends."""

    def close(self) -> None:
        """Release it."""
