"""What a worker may ask of the things that its stages hold: their runners, and what they share, such as an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Saves(Protocol):
    """A runner with state: it is part of every checkpoint."""

    def save(self, folder: Path) -> Any:
        """Write the state into the folder."""

    def restore(self, folder: Path) -> Any:
        """Take the state that `save` wrote."""


@runtime_checkable
class Sleeps(Protocol):
    """It can give the memory of its GPUs to another worker group and take it back. Both return the bytes it held
    before and holds after."""

    def sleep(self, room: int | None = None) -> tuple[int, int]:
        """Give memory away until `room` bytes of the GPU are free; None is all that it can give."""

    def wake(self) -> tuple[int, int]:
        """Take the memory back."""


@runtime_checkable
class Closes(Protocol):
    """It has something to let go of when the worker ends."""

    def close(self) -> None:
        """Let go of it."""
