"""Items in lots of a bounded size: tensors of a file or a block of memory, copies of a message. Knows only bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def lots(items: Iterable[T], bytes_of: Callable[[T], int], most: int, aligned: int = 1) -> Iterator[list[T]]:
    """All items in turn, as many at a time as have at most `most` bytes; one that has more is alone. Each begins at a
    multiple of `aligned` bytes. A list is the caller's to clear, where the next must not be made beside it."""
    lot: list[T] = []
    size = 0
    for item in items:
        if lot and size + bytes_of(item) > most:
            yield lot
            lot, size = [], 0
        lot.append(item)
        size += -(-bytes_of(item) // aligned) * aligned
    if lot:
        yield lot
