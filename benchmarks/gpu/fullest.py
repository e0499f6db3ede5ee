"""Watches the memory of this machine's GPUs, all processes together.

with fullest() as most_bytes:
    ...
print(most_bytes)  # by index, of the GPUs that this process may use
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from stages.backends import is_installed

EVERY_S = 0.2


@contextmanager
def fullest() -> Iterator[dict[int, int]]:
    """Yield the most bytes in use of each GPU so far, which grow as long as the context lasts. Nothing without GPUs.
    Peaks of less than `EVERY_S` can be missed; what torch holds from them stays in use."""
    most_bytes: dict[int, int] = {}
    if not is_installed("pynvml"):
        yield most_bytes
        return
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver
        yield most_bytes
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    indices = [int(name) for name in visible if name.isdigit()] or range(pynvml.nvmlDeviceGetCount())
    devices = {index: pynvml.nvmlDeviceGetHandleByIndex(index) for index in indices}
    over = Event()

    def watch() -> None:
        while not over.wait(EVERY_S):
            for index, device in devices.items():
                used = int(pynvml.nvmlDeviceGetMemoryInfo(device).used)
                most_bytes[index] = max(most_bytes.get(index, 0), used)

    watching = Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield most_bytes
    finally:
        over.set()
        watching.join()
        pynvml.nvmlShutdown()
