"""Waits for what another thread or process does.

until(lambda: not engines())
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
POLL_S = 0.01


def until(what: Callable[[], T], seconds: float = 30.0) -> T:
    """Return the first true value of `what`. Fails when the seconds are over."""
    ends_s = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < ends_s, f"waited for longer than {seconds:g} s"
        time.sleep(POLL_S)
    return found
