"""Where the two sides of a transfer meet: a key-value store that the driver serves.

    meetings = Meetings(lambda: "127.0.0.1", deadline_s=600.0)
    meeting = meetings.of("refit", ["learner.0"], "sampler", [0, 1])
    meetings.lose("sampler.1", "it died")          # everyone who waits in a meeting with it is released
    meetings.fail(meeting.name, "no route")        # everyone who waits in this one

Knows worker names and how often each was restarted; no Ray.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

from pipeline.declare.ranks import open_store
from pipeline.declare.task import MeetingPlace


class Meetings:
    """The meetings of one run. The first one opens the store, on the address that `host` returns."""

    def __init__(self, host: Callable[[], str], *, deadline_s: float) -> None:
        self._host, self._deadline_s = host, deadline_s
        self._address, self._store = "", None  # type: str, Any
        self._births: Counter[str] = Counter()
        self._members: dict[str, frozenset[str]] = {}  # open meetings by name

    def of(self, stage: str, sources: Sequence[str], target: str, ranks: Sequence[int]) -> MeetingPlace:
        """Return the meeting of all current sources and these target ranks."""
        if self._store is None:
            self._address = self._host()
            self._store = open_store(self._address, 1, deadline_s=self._deadline_s)
        targets = [f"{target}.{rank}" for rank in ranks]
        born = [" ".join(f"{name}#{self._births[name]}" for name in side) for side in (sources, targets)]
        name = f"{stage} {' > '.join(born)}"
        self._members[name] = frozenset([*sources, *targets])
        return MeetingPlace(
            host=self._address, port=self._store.port, name=name, targets=tuple(ranks), deadline_s=self._deadline_s
        )

    def lose(self, worker: str, reason: str) -> None:
        """Record that a worker is gone. Its replacement counts as a different process."""
        self._births[worker] += 1
        for name, members in list(self._members.items()):
            if worker in members:
                self.end(name, reason)

    def fail(self, name: str, reason: str) -> None:
        """Release all ranks that wait in this meeting, because one of them failed. If a lost worker turns out to be the
        cause, that replaces the first reason."""
        if name in self._members:
            self._store.set(name, reason)

    def end(self, name: str, reason: str) -> None:
        """Release all ranks that wait in this meeting."""
        if self._members.pop(name, None) is not None:
            self._store.set(name, reason)

    def close(self) -> None:
        """Close the store. Idempotent."""
        self._store = None
        self._members.clear()


class TransferEnd:
    """One end of a transfer; `payloads` holds what the source offered."""

    def __init__(
        self, side: Literal["source", "carrier", "target"], is_near: bool, meeting: MeetingPlace | None,
        payloads: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        self.side, self.is_near, self.meeting, self.payloads = side, is_near, meeting, list(payloads)

    def offer(self, payload: Any) -> None:
        self.payloads = [payload]

    def take(self) -> list[Any]:
        return self.payloads
