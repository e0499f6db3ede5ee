"""Sizes of the memory in which transports pack weights: the defaults, and their check. Loads no tensor library."""

from __future__ import annotations

from collections.abc import Iterator

SLOT_BYTES, SLOTS = 192 << 20, 3  # of the messages of one rank
BUCKET_BYTES, BUCKETS = 512 << 20, 2  # of whole tensors
DEFAULTS = {"slot_bytes": SLOT_BYTES, "slots": SLOTS, "bucket_bytes": BUCKET_BYTES, "buckets": BUCKETS}


def wrong(sizes: dict[str, object]) -> Iterator[tuple[str, str]]:
    """Yield why a size is invalid, and what to write instead."""
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            unit = " of bytes" if name.endswith("_bytes") else ""
            yield f"{name} must be a whole number{unit}, 1 or more", f"{name}={DEFAULTS[name]}"
