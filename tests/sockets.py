"""The TCP sockets that processes listen on, and what a stranger gets who asks there without a token."""

from __future__ import annotations

import ipaddress
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

LISTEN = "0A"
METHODS = (  # one of each service of Ray's: control store, worker, raylet, object manager, agent
    "NodeInfoGcsService/GetAllNodeInfo",
    "CoreWorkerService/GetCoreWorkerStats",
    "NodeManagerService/GetNodeStats",
    "ObjectManagerService/Push",
    "ReporterService/GetTraceback",
)


@dataclass(frozen=True)
class Listening:
    """A socket that accepts connections, and the command of the process that has it."""

    address: str
    port: int
    command: str

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return ipaddress.ip_address(self.address).is_loopback

    @property
    def host(self) -> str:
        """An address of this machine under which it is reached."""
        return self.address if self.is_loopback else "127.0.0.1"


def listening(pids: Iterable[int]) -> Iterator[Listening]:
    """Yield the listening TCP sockets of these processes."""
    owners = _owners(pids)
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            pid = owners.get(f"socket:[{fields[9]}]")
            if fields[3] == LISTEN and pid is not None:
                number, _, port = fields[1].partition(":")
                with suppress(OSError):
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                    yield Listening(_address(number), int(port, 16), command)


def files(pids: Iterable[int]) -> list[Path]:
    """Return the Unix sockets of these processes that have a place in the file system."""
    owners, found = _owners(pids), set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and f"socket:[{fields[6]}]" in owners and Path(fields[7]).is_socket():
            found.add(Path(fields[7]))
    return sorted(found)


def _owners(pids: Iterable[int]) -> dict[str, int]:
    """Return the process that has each open file, by what the kernel calls it: "socket:[12345]"."""
    owners: dict[str, int] = {}
    for pid in pids:
        with suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    owners[os.readlink(descriptor)] = pid
    return owners


def _address(number: str) -> str:
    """The address that the kernel prints as words of four bytes, each in the machine's order."""
    words = [bytes.fromhex(number[at : at + 8])[::-1] for at in range(0, len(number), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words))


def called(one: Listening, within_s: float = 5.0) -> dict[str, str]:
    """Call Ray's methods without a token; return the status of each."""
    answers = {}
    with grpc.insecure_channel(f"{one.host}:{one.port}") as channel:
        for method in METHODS:
            try:
                channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=within_s)
                answers[method] = "OK"
            except grpc.RpcError as error:
                answers[method] = error.code().name
    return answers


def status(one: Listening, within_s: float = 5.0) -> int:
    """Ask for the first page without a token; return the HTTP status."""
    try:
        with urllib.request.urlopen(f"http://{one.host}:{one.port}/", timeout=within_s) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
