"""The line about a start: what it waits for and for how long, although nothing else happens meanwhile.

    with StartLine(live=True) as line:
        line.says("Ray")

On a terminal it is rewritten every second, in one row; elsewhere a line is printed after every `SILENCE_S`.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

from pipeline import screen
from pipeline.cli.one_row import cut

SILENCE_S = 10.0
EVERY_S = 1.0


class StartLine:
    """Prints from a thread of its own, since the main one waits, from `says` to `over`."""

    def __init__(self, *, live: bool) -> None:
        self._live, self._what, self._over = live, "", threading.Event()
        self._over.set()
        self._lock = threading.Lock()  # of what is printed
        self._began_s = self._said_s = 0.0

    def __enter__(self) -> StartLine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.over()

    def says(self, what: str) -> None:
        """Say what is waited for from now on. The first call begins the start."""
        with self._lock:
            before, self._what = self._what, what
            if begins := self._over.is_set():
                self._began_s = self._said_s = time.monotonic()
                self._over = threading.Event()
        if begins:
            threading.Thread(target=self._run, args=(self._over,), daemon=True).start()
        if self._live and (begins or what != before):
            self.show()

    def over(self) -> None:
        """Print nothing more. Idempotent."""
        with self._lock:
            self._over.set()

    def show(self) -> None:
        """Print the line, if it is time."""
        with self._lock:
            now_s = time.monotonic()
            if self._over.is_set():
                return
            text, waited = f"starting {self._what}", f"  {now_s - self._began_s:.0f} s"
            if self._live:
                screen.say(f"\r\x1b[2K{cut(text, screen.columns() - 1 - len(waited))}{waited}")
            elif now_s - self._said_s >= SILENCE_S:
                self._said_s = now_s
                screen.say(f"{text}{waited}\n")

    def _run(self, over: threading.Event) -> None:
        while not over.wait(EVERY_S):
            self.show()
