"""Tells when the process at the other end of standard input is gone."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable


def ended_input(then: Callable[[], object] = lambda: None) -> threading.Event:
    """Return an event that is set when standard input ends: it does, however the process at its other end exits. A
    thread calls `then` just before."""
    ended = threading.Event()

    def read() -> None:
        while os.read(sys.stdin.fileno(), 1 << 10):
            pass
        then()
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    return ended
