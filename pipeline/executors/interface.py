"""Binds the libraries that connect ranks to the network interface of this machine's address in the cluster.

    bind("10.0.0.7")      # before gloo or NCCL connects in this process

By default gloo listens where this machine's own name leads, which on Debian and Ubuntu is 127.0.1.1, and NCCL on the
first interfaces that it finds. Linux only.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

LIST, ENTRY_BYTES, MOST = 0x8912, 40, 256  # Linux's SIOCGIFCONF, its entries, and how many interfaces we look at
LIST_V6 = Path("/proc/net/if_inet6")


def bind(address: str) -> None:
    """Set the environment variables of gloo and NCCL for this process, unless the user has set them."""
    if name := interface_of(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # exactly this one; otherwise it is a prefix


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has this address, or None: it may belong to a gateway before this machine.

    The loopback interface has all loopback addresses."""
    wanted = ipaddress.ip_address(address.strip("[]"))
    if wanted.is_loopback:
        return "lo"
    return next((name for name, held in _held() if held == wanted), None)


def _held() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Yield each interface with each of its addresses."""
    entries = array.array("B", bytes(MOST * ENTRY_BYTES))
    start, length = entries.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, LIST, struct.pack("iL", length, start))
    (used,) = struct.unpack_from("i", answer)
    for at in range(0, used, ENTRY_BYTES):
        name, found = struct.unpack_from("16s4x4s", entries, at)
        yield name.rstrip(b"\0").decode().partition(":")[0], ipaddress.IPv4Address(found)  # "eth0:1" is a label
    for line in LIST_V6.read_text().splitlines() if LIST_V6.exists() else ():
        digits, *_, name = line.split()
        yield name, ipaddress.IPv6Address(bytes.fromhex(digits))
