"""Splits items into lots of bounded size: tensors of a file or memory block, copies of a message. Knows only bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def lots(items: Iterable[T], bytes_of: Callable[[T], int], most: int, aligned: int = 1) -> Iterator[list[T]]:
    """Yield all items in order, in lists of at most `most` bytes; a larger item gets its own list. Each item starts at
    a multiple of `aligned` bytes. The caller may clear a list to free its items before the next one is built."""
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
