"""Ranks agree on the outcome of a wave through a key-value store. The first write wins.

Each rank of a wave reports itself. If it does not, a rank that lost it as a transfer peer reports it. The last rank to
report writes the state; if reports are missing, the first rank to time out writes it. The first state written holds for
all ranks. Knows ranks and the store, not what is transferred.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta

import msgspec
import torch.distributed as dist

from ops.comm.stateless_group import GroupError
from ops.refit.waves import RankReport, State, settled

GRACE_S = 1.0  # time for the peer of a broken connection to report that it is alive


class Agreement:
    """One rank's view; `senders` come first in the rank order. `name` separates agreements in one store."""

    def __init__(self, store: dist.Store, name: str, rank: int, senders: int) -> None:
        self._store = dist.PrefixStore(f"agreement {name}", store)
        self._rank, self._senders = rank, senders
        self._old: list[str] = []  # keys of the previous version
        self._new: list[str] = []

    def here(self, stage: str) -> None:
        """Report that this rank is alive although one of its transfers broke."""
        self._tell(f"{stage} here {self._rank}", "yes")

    def settle(
        self, stage: str, state: State, expected: Collection[int], report: RankReport | None, *,
        unheard: Collection[int] = (), wait_s: float,
    ) -> State:  # fmt: skip
        """Report this rank if it is one of the `expected`, and the peers whose transfers broke. Then wait up to
        `wait_s` for the state; a rank that has not reported by then is gone.

        Raises GroupError if the others continued without this rank or the store is lost; ValueError if ranks plan from
        different layouts or versions.
        """
        try:
            return self._settle(stage, state, expected, report, unheard, timedelta(seconds=wait_s))
        except dist.DistNetworkError as error:
            raise GroupError(
                f"refit, rank {self._rank}: lost the store that ranks agree through ({error}); without it no rank "
                "knows who has the version. Fix: serve it from a process that outlives the ranks, and restart the refit"
            ) from error

    def forget(self) -> None:
        """Delete the keys that this rank wrote for the previous version. Call it once all ranks are in the next one."""
        for key in self._old:
            self._store.delete_key(key)
        self._old, self._new = self._new, []

    def _settle(
        self, stage: str, state: State, expected: Collection[int], report: RankReport | None, unheard: Collection[int],
        wait: timedelta,
    ) -> State:  # fmt: skip
        last = report is not None and self._report(stage, self._rank, report, expected)
        for peer in unheard:
            if not self._comes(f"{stage} here {peer}", timedelta(seconds=GRACE_S)):
                last = self._report(stage, peer, RankReport(self._rank), expected) or last
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

    def _report(self, stage: str, rank: int, report: RankReport, expected: Collection[int]) -> bool:
        """Report a rank unless it is already reported. Returns whether it was the last one."""
        text = msgspec.json.encode(report).decode()
        if self._write(f"{stage} {rank}", text) != text:
            return False
        return self._store.add(f"{stage} count", 1) == len(expected)

    def _decide(self, stage: str, state: State, expected: Collection[int], heard: Collection[int]) -> None:
        said = self._store.multi_get([f"{stage} {rank}" for rank in heard])
        reports = {rank: msgspec.json.decode(text, type=RankReport) for rank, text in zip(heard, said)}
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
        """Write a key that others wait on, like `_write`: a store without libuv wakes them for `set` only."""
        found = self._write(key, text)
        if found == text:
            self._store.set(key, text)
        return found

    def _write(self, key: str, text: str) -> str:
        """Write a key unless it exists. Returns its value."""
        self._new.append(key)
        return bytes(self._store.compare_set(key, "", text)).decode()

    def _given_up(self) -> GroupError:
        return GroupError(
            f"refit, rank {self._rank}: the others continued without it because it did not answer in time; its weights "
            "may belong to no version. Fix: restart it, and refit with a new Tree"
        )
