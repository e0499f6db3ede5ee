"""How ranks agree on what became of a wave, through a key-value store: what is written there first is what counts.

Each rank of a wave reports itself. If it does not, a rank that lost it as the other end of a transfer reports it. The
last to report writes the state; if reports stay out, a rank that has waited long enough does. The state that was
written first holds for all. Knows ranks and the store; it does not know what travels.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta

import msgspec
import torch.distributed as dist

from ops.comm.stateless_group import GroupError
from ops.refit.waves import Report, State, settled

GRACE_S = 1.0  # in which the other end of a broken connection can say that it is there


class Agreement:
    """One rank's view; `senders` come first among the ranks. `name` tells apart those that agree at one store."""

    def __init__(self, store: dist.Store, name: str, rank: int, senders: int) -> None:
        self._store = dist.PrefixStore(f"agreement {name}", store)
        self._rank, self._senders = rank, senders
        self._old: list[str] = []  # keys of the version before
        self._new: list[str] = []

    def here(self, stage: str) -> None:
        """Say that this rank is there, though one of its transfers broke."""
        self._tell(f"{stage} here {self._rank}", "yes")

    def settle(
        self, stage: str, state: State, expected: Collection[int], report: Report | None, *,
        unheard: Collection[int] = (), wait_s: float,
    ) -> State:  # fmt: skip
        """Report, of itself if it is one of the `expected`, and of those whose transfers with it broke; and wait for
        what is written, for `wait_s`; who has not reported then is gone.

        Raises GroupError where the others went on without this rank, or the store is lost; ValueError where they do
        not plan from the same.
        """
        try:
            return self._settle(stage, state, expected, report, unheard, timedelta(seconds=wait_s))
        except dist.DistNetworkError as error:
            raise GroupError(
                f"refit, rank {self._rank}: lost the store at which ranks agree ({error}); without it nobody knows who "
                "has the version. Fix: serve it from a process that outlives the ranks, and start the refit again"
            ) from error

    def forget(self) -> None:
        """Delete what this rank wrote in the version before. To be called when all ranks are in the next one."""
        for key in self._old:
            self._store.delete_key(key)
        self._old, self._new = self._new, []

    def _settle(
        self, stage: str, state: State, expected: Collection[int], report: Report | None, unheard: Collection[int],
        wait: timedelta,
    ) -> State:  # fmt: skip
        last = report is not None and self._report(stage, self._rank, report, expected)
        for peer in unheard:
            if not self._comes(f"{stage} here {peer}", timedelta(seconds=GRACE_S)):
                last = self._report(stage, peer, Report(self._rank), expected) or last
        if last:
            self._decide(stage, state, expected, expected)
        elif not self._comes(f"{stage} state", wait):
            if self._store.check([f"gone {self._rank}"]):
                raise self._given_up()
            heard = [rank for rank in expected if self._store.check([f"{stage} {rank}"])]
            self._decide(stage, state, expected, heard)
        found = msgspec.json.decode(self._store.get(f"{stage} state"), type=State)
        if self._rank in found.gone:
            raise self._given_up()
        if found.refused:
            raise ValueError(found.refused)
        return found

    def _report(self, stage: str, rank: int, report: Report, expected: Collection[int]) -> bool:
        """Report a rank, if nobody has; whether it was the last one."""
        text = msgspec.json.encode(report).decode()
        if self._write(f"{stage} {rank}", text) != text:
            return False
        return self._store.add(f"{stage} count", 1) == len(expected)

    def _decide(self, stage: str, state: State, expected: Collection[int], heard: Collection[int]) -> None:
        said = self._store.multi_get([f"{stage} {rank}" for rank in heard])
        reports = {rank: msgspec.json.decode(text, type=Report) for rank, text in zip(heard, said)}
        mine = settled(state, expected, reports, self._senders)
        text = msgspec.json.encode(mine).decode()
        if self._tell(f"{stage} state", text) == text:
            self._new.append(f"{stage} count")
            for rank in set(mine.gone) - set(state.gone):
                self._store.set(f"gone {rank}", "")

    def _comes(self, key: str, wait: timedelta) -> bool:
        try:
            self._store.wait([key], wait)
        except dist.DistStoreError:
            return False
        return True

    def _tell(self, key: str, text: str) -> str:
        """The same, of a key that others wait for: a store that is served without libuv wakes them for `set` only."""
        found = self._write(key, text)
        if found == text:
            self._store.set(key, text)
        return found

    def _write(self, key: str, text: str) -> str:
        """Write what nobody has written; what is there then."""
        self._new.append(key)
        return bytes(self._store.compare_set(key, "", text)).decode()

    def _given_up(self) -> GroupError:
        return GroupError(
            f"refit, rank {self._rank}: the others go on without it, for it did not answer in time; what it holds may "
            "be of no version. Fix: start it again, and refit from a new Tree"
        )
