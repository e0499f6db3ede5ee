"""Emulates several machines on this one, for tests of runs that span machines.

    with hosts(2) as machines:
        first, second = machines
        first.start("ray", "start", "--head", "--block")

A machine has a network card, an address, a host name, processes, and a /tmp/ray, /dev/shm and /etc/hosts of its own.
All other files are shared, as on a cluster with one file system. Its own name is at 127.0.1.1, as Debian and Ubuntu
install it, and no machine knows the name of another. A switch joins the cards; nothing leads outside. When the test
process ends, all of it ends. Needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.optional import lacking

PART = "hosts"  # the name of this optional part
TOOLS = ("ip", "nsenter", "unshare", "mount", "hostname")
BOOT_S = 10.0
# Each holder of namespaces ends when the test process does, because its standard input ends then.
SWITCH = "ip link add name bridge0 type bridge && ip link set bridge0 up && touch $1 && read -r _"
MACHINE = """
set -e
mount -t proc proc /proc
hostname "$1"
mount -t tmpfs -o size=2g tmpfs /dev/shm
mkdir -p /tmp/ray
mount --bind "$2/ray" /tmp/ray
mount --bind "$2/hosts" /etc/hosts
mount --bind /dev/null /etc/resolv.conf
ip link set lo up
touch "$2/booted"
read -r _
"""


def machine_problem() -> str | None:
    """Return why this machine cannot emulate others, or None."""
    if os.geteuid() != 0:
        return "machines are emulated by root only"
    if absent := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"machines are emulated with {', '.join(TOOLS)}; missing: {', '.join(absent)}"
    tried = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "name", "tried", "type", "bridge"], capture_output=True, text=True
    )
    return f"no network of machines can be made: {tried.stderr.strip()}" if tried.returncode else None


@dataclass
class Machine:
    """An emulated machine."""

    name: str
    address: str
    holder: subprocess.Popen[bytes]
    pid: int  # of its first process, seen from outside

    def start(self, *words: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a command there; the options are Popen's."""
        return subprocess.Popen(self.command(*words), **options)

    def run(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command there to its end and return its output; the options are subprocess.run's."""
        return subprocess.run(self.command(*words), capture_output=True, text=True, check=False, **options)

    def command(self, *words: str) -> list[str]:
        """Return the command line that runs a command there."""
        here = f"--wd={os.getcwd()}"
        return ["nsenter", f"--target={self.pid}", "--mount", "--uts", "--ipc", "--net", "--pid", here, "--", *words]

    @staticmethod
    def send(number: int, started: subprocess.Popen[Any]) -> None:
        """Send a signal to a command that `start` began, which is the child of the one that entered the machine."""
        os.kill(_child(started), number)

    def unplug(self) -> None:
        """Pull the cable: from now on no packet comes in or goes out."""
        _checked(*self.command("ip", "link", "set", "eth0", "down"))

    def power_off(self) -> None:
        """End all its processes at once, behind a pulled cable: nobody is told."""
        self.unplug()
        _ended(self.holder)


@contextmanager
def hosts(count: int) -> Iterator[list[Machine]]:
    """Boot machines h0, h1 ... at 10.77.0.1, 10.77.0.2 ...; skip the test, or fail it, where that is impossible."""
    if reason := machine_problem():
        lacking(PART, f"the optional part {PART!r} is missing: {reason}")
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
        up = folder / "switch"
        switch = _held(ends, up, "unshare", "--net", "sh", "-c", SWITCH, "sh", str(up))
        yield [_booted(ends, folder / f"h{number}", number, switch.pid) for number in range(count)]


def _booted(ends: ExitStack, folder: Path, number: int, switch: int) -> Machine:
    name, address = folder.name, f"10.77.0.{number + 1}"
    (folder / "ray").mkdir(parents=True)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
    own = ["--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child"]
    holder = _held(ends, folder / "booted", "unshare", *own, "bash", "-c", MACHINE, "bash", name, str(folder))
    pid = _child(holder)
    machine = Machine(name, address, holder, pid)
    at_switch = ["nsenter", f"--target={switch}", "--net", "ip", "link"]
    _checked(*at_switch, "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    _checked(*at_switch, "set", name, "master", "bridge0", "up")
    for words in (
        ("address", "add", f"{address}/24", "dev", "eth0"),
        ("link", "set", "eth0", "up"),
        ("route", "add", "default", "dev", "eth0"),  # by which a process finds the machine's own address
    ):
        _checked(*machine.command("ip", *words))
    return machine


def _held(ends: ExitStack, up: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start a process that holds namespaces, and wait until it says by a file that they are up."""
    holder = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
    ends.callback(_ended, holder)
    deadline = time.monotonic() + BOOT_S
    while not up.exists():
        if holder.poll() is not None or time.monotonic() > deadline:
            raise OSError(f"the namespaces of {up} did not come up")
        time.sleep(0.01)
    return holder


def _child(parent: subprocess.Popen[Any]) -> int:
    return int(Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text())


def _ended(holder: subprocess.Popen[bytes]) -> None:
    holder.kill()  # its first process ends with it, and with that one all others of the namespace
    holder.communicate()


def _checked(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
