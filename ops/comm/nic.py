"""Chooses a rank's network interface: the first in a list that exists and is up.

    StatelessGroup.join(..., interface=choose(["ib0", "eth1"]))

Linux only. Knows interfaces by name, not their speed or reach.
"""

from __future__ import annotations

import fcntl
import logging
import socket
import struct
from collections.abc import Sequence
from functools import cache

_FLAGS, _UP, _RUNNING = 0x8913, 0x1, 0x40  # Linux's SIOCGIFFLAGS and two of its flags

_log = logging.getLogger(__name__)


def choose(wanted: Sequence[str]) -> str:
    """Return the interface; if none exists and is up, warn once per list and return "", the caller's default."""
    there = {name for _, name in socket.if_nameindex()}
    for name in wanted:
        if name in there and is_up(name):
            return name
    if wanted:
        _warn(tuple(wanted), tuple(sorted(name for name in there if is_up(name))))
    return ""


def is_up(name: str) -> bool:
    """Return whether an interface is up and has a link. Raises OSError if it does not exist."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _FLAGS, struct.pack("16sH14x", name.encode(), 0))
    (flags,) = struct.unpack("16xH14x", answer)
    return flags & (_UP | _RUNNING) == _UP | _RUNNING


@cache
def _warn(wanted: tuple[str, ...], up: tuple[str, ...]) -> None:
    _log.warning(
        "none of the network interfaces %s exists and is up, so the default is used; interfaces that are up: %s",
        list(wanted),
        list(up),
    )
