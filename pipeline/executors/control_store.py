"""Notices that Ray's control store has died. A minute later Ray aborts every process that uses it, without a word, and
until then a call that needs it does not return.

    store = ControlStore("127.0.0.2:6379")
    store.look()                               # raises StageError once it has died
    lifeline = Lifeline(store, print_resume)   # for calls during which nobody looks
    lifeline.close()
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from pipeline.errors import Problem, StageError, leave_with
from pipeline.forks import exit_now

POLL_S = 2.0  # between two polls, and for a connection
REFUSALS = 3  # in a row, until it counts as dead
GRACE_S = 20.0  # for the run to end in order, before its process is ended


class ControlStore:
    """Ray's control store at `address`, "host:port". A stopped one still takes connections, and training goes on
    without it."""

    def __init__(self, address: str, refuses: Callable[[str, int], bool] | None = None) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._refuses = refuses or refused
        self._refusals, self._next_s = 0, 0.0

    @property
    def is_dead(self) -> bool:
        """Whether it has refused so many connections in a row that its process is gone."""
        return self._refusals >= REFUSALS

    def look(self) -> None:
        """Raise StageError if it has died. Asks it at most every `POLL_S`, from all threads together."""
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + POLL_S
            self._refusals = self._refusals + 1 if self._refuses(self._host, self._port) else 0
        if self.is_dead:
            raise StageError(
                Problem(
                    where=f"Ray's control store (gcs_server, {self._host}:{self._port})",
                    what="its process has died",
                    why="a run cannot replace a worker without it, and Ray aborts every process that uses it",
                    fix="resume the run; with --address, start that Ray cluster again first",
                )
            )


def refused(address: str, port: int) -> bool:
    """Return whether a machine that answers has no process at this port."""
    try:
        socket.create_connection((address, port), timeout=POLL_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


class Lifeline:
    """Ends this process with the error and `last_words` if the control store has died and `close` is not called within
    `GRACE_S`: then the main thread is in a call of Ray's that does not return, such as ray.init."""

    def __init__(
        self, store: ControlStore, last_words: Callable[[], None], leave: Callable[[int], object] = exit_now
    ) -> None:
        self._store, self._last_words, self._leave = store, last_words, leave
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="watches Ray's control store", daemon=True).start()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(POLL_S):
            try:
                self._store.look()
            except StageError as error:
                if not self._closed.wait(GRACE_S):
                    leave_with(error, self._last_words, self._leave)
                return
