"""Which network interface a rank uses: the first one of a list that is there and up.

    StatelessGroup.join(..., interface=choose(["ib0", "eth1"]))

Linux. Knows interfaces by name; it does not know how fast they are or whom they reach.
"""

from __future__ import annotations

import fcntl
import logging
import socket
import struct
from collections.abc import Sequence
from functools import cache

_FLAGS, _UP, _RUNNING = 0x8913, 0x1, 0x40  # SIOCGIFFLAGS and two of its flags, of Linux

_log = logging.getLogger(__name__)


def choose(wanted: Sequence[str]) -> str:
    """The interface; "", which is the default of whoever is given it, where none of them is there and up. That is
    said in a warning, once for a list."""
    there = {name for _, name in socket.if_nameindex()}
    for name in wanted:
        if name in there and is_up(name):
            return name
    if wanted:
        _warn(tuple(wanted), tuple(sorted(name for name in there if is_up(name))))
    return ""


def is_up(name: str) -> bool:
    """Whether an interface is up and has a link. Raises OSError where there is none of that name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _FLAGS, struct.pack("16sH14x", name.encode(), 0))
    (flags,) = struct.unpack("16xH14x", answer)
    return flags & (_UP | _RUNNING) == _UP | _RUNNING


@cache
def _warn(wanted: tuple[str, ...], up: tuple[str, ...]) -> None:
    _log.warning(
        "none of the network interfaces %s is there and up, so the default is used; up are %s",
        list(wanted),
        list(up),
    )
