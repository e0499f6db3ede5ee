"""Notices that a machine of the run is gone: without power, without network, or without its Ray node.

    machines = Machines()
    machines.watch({"10.0.0.2": 40123}, {"10.0.0.2": ["learner.0"]})   # the ports of Ray's nodes, and who runs there
    machines.look()                      # raises WorkerLost once a machine counts as lost; a warning came before

Ray takes half a minute or more to declare a node dead, and a connection to a machine that is gone stays silent. Knows
addresses and ports, not Ray. Silence is counted in polls that got no connection, so a driver that was itself suspended
finds nobody late.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from pipeline.errors import Problem, WorkerLost

POLL_S = 2.0  # between two polls, and for a connection
SAID = 3  # polls without a connection, in a row, until a warning
LOST = 10  # until the machine counts as lost


class Machines:
    """The machines that a run's workers and columns are on, each polled in a thread."""

    def __init__(self, reaches: Callable[[str, int], bool] | None = None) -> None:
        self._reaches = reaches or reached
        self._ports: dict[str, int] = {}
        self._there: dict[str, list[str]] = {}
        self._missed: Counter[str] = Counter()
        self._closed = threading.Event()

    def watch(self, ports: Mapping[str, int], there: Mapping[str, Sequence[str]]) -> None:
        """Watch these machines too. `ports` has a port by address, `there` the workers by address."""
        self._there |= {address: list(names) for address, names in there.items()}
        for address in ports.keys() - self._ports.keys():
            self._ports[address] = ports[address]
            threading.Thread(target=self._poll, args=(address,), name=f"polls {address}", daemon=True).start()

    def look(self) -> None:
        """Raise WorkerLost if a machine counts as lost."""
        for address, missed in list(self._missed.items()):
            if missed >= LOST:
                raise WorkerLost(self._problem(address, missed, "resume the run"))

    def close(self) -> None:
        """Stop polling. Idempotent."""
        self._closed.set()

    def _problem(self, address: str, missed: int, fix: str, *, is_warning: bool = False) -> Problem:
        names = ", ".join(self._there.get(address, [])) or "no worker"
        return Problem(
            where=f"machine {address}",
            what=f"it has not answered for {missed * POLL_S:g} s; there: {names}",
            why="it lost its power or its network, or Ray's process there has ended",
            fix=fix,
            warning=is_warning,
        )

    def _poll(self, address: str) -> None:
        """Poll a machine, and say at once when it stops answering, whatever the run waits for."""
        while not self._closed.wait(0.0 if self._missed[address] else POLL_S):
            if self._reaches(address, self._ports[address]):
                if self._missed[address] >= SAID:
                    print(f"machine {address} answers again", file=sys.stderr, flush=True)
                self._missed[address] = 0
                continue
            self._missed[address] += 1
            if self._missed[address] == SAID and not self._closed.is_set():
                wait = f"the run waits {(LOST - SAID) * POLL_S:g} s more, or until Ray gives the machine up"
                print(self._problem(address, SAID, wait, is_warning=True), file=sys.stderr, flush=True)


def reached(address: str, port: int) -> bool:
    """Return whether a connection comes about within `POLL_S`; if it does not, that time has passed."""
    begun_s = time.monotonic()
    try:
        socket.create_connection((address, port), timeout=POLL_S).close()
    except OSError:
        time.sleep(max(0.0, begun_s + POLL_S - time.monotonic()))  # it may be refused at once
        return False
    return True
