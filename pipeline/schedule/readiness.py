"""What a stage waits for in one step, and what it may start on: units of whole groups. Pure.

A *unit* is what one task gets. Which groups share a unit never depends on the order in which they became ready, except
for stages that compute every group on its own: those take whatever is there.

    Loose   whatever is ready             a stage per sample or group
    Lots    what was admitted together    a stream, whose decode batches follow from admission
    Runs    equal runs in canonical order, or the whole batch       a stage per batch
    Once    one unit without groups       a stage that reads and writes no samples
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from pipeline.plan.plan import PlannedStage
from pipeline.schedule.blockers import Blocker

Unit = tuple[int, ...]


class Units(Protocol):
    """Groups become ready; units come out."""

    def admit(self, groups: Sequence[int]) -> None:
        """These groups are to come, in ascending order."""

    def ready(self, groups: Iterable[int]) -> None:
        """The stage lacks nothing for these groups."""

    def take(self) -> Unit | None:
        """The next unit, None where there is none."""

    def give_back(self, unit: Unit) -> None:
        """A unit whose attempt was lost."""

    def remove(self, group: int) -> bool:
        """A group will not come; whether it was ready and not yet taken."""

    def __bool__(self) -> bool:
        """Whether there is a unit."""


class Loose:
    """Whatever is ready, in canonical order."""

    def __init__(self) -> None:
        self._ready: set[int] = set()
        self._again: deque[Unit] = deque()  # lost attempts, which stay apart

    def admit(self, groups: Sequence[int]) -> None:
        return None

    def ready(self, groups: Iterable[int]) -> None:
        self._ready.update(groups)

    def take(self) -> Unit | None:
        if self._again:
            return self._again.popleft()
        unit = tuple(sorted(self._ready))
        self._ready.clear()
        return unit or None

    def give_back(self, unit: Unit) -> None:
        self._again.append(unit)

    def remove(self, group: int) -> bool:
        if group in self._ready:
            self._ready.discard(group)
            return True
        return _without(self._again, group)

    def __bool__(self) -> bool:
        return bool(self._ready or self._again)


class Lots:
    """What was admitted together, once all of it is ready."""

    def __init__(self) -> None:
        self._lot_of: dict[int, dict[int, bool]] = {}  # group -> its lot: group -> whether it is ready
        self._left: dict[int, int] = {}  # id of a lot -> groups that are not ready
        self._units: deque[Unit] = deque()

    def admit(self, groups: Sequence[int]) -> None:
        lot = dict.fromkeys(groups, False)
        self._lot_of.update(dict.fromkeys(groups, lot))
        self._left[id(lot)] = len(lot)

    def ready(self, groups: Iterable[int]) -> None:
        for group in groups:
            lot = self._lot_of[group]
            lot[group] = True
            self._count(lot)

    def take(self) -> Unit | None:
        return self._units.popleft() if self._units else None

    def give_back(self, unit: Unit) -> None:
        self._units.appendleft(unit)

    def remove(self, group: int) -> bool:
        if _without(self._units, group):
            return True
        lot = self._lot_of.pop(group, None)
        if lot is None:
            return False
        was = lot.pop(group)
        if was:
            return True
        self._count(lot)
        return False

    def _count(self, lot: dict[int, bool]) -> None:
        self._left[id(lot)] -= 1
        if not self._left[id(lot)]:
            del self._left[id(lot)]
            for group in lot:
                del self._lot_of[group]
            if lot:
                self._units.append(tuple(lot))

    def __bool__(self) -> bool:
        return bool(self._units)


class Runs:
    """Runs of `size` groups in canonical order, the last one of what is left of `total`; each once all of it is ready.

    Where a gate drops groups, `admit` is told of those that were kept, in order, when every earlier one was decided.
    """

    def __init__(self, size: int, total: int) -> None:
        self._size, self._total = size, total
        self._placed = 0
        self._run_of: dict[int, int] = {}
        self._members: dict[int, list[int]] = {}
        self._missing: dict[int, int] = {}  # run -> groups that are not placed or not ready
        self._early: set[int] = set()  # ready, and not placed
        self._units: deque[Unit] = deque()

    def admit(self, groups: Sequence[int]) -> None:
        for group in groups:
            run = self._placed // self._size
            if run not in self._members:
                self._members[run] = []
                self._missing[run] = min(self._size, self._total - run * self._size)
            self._placed += 1
            self._members[run].append(group)
            self._run_of[group] = run
            if group in self._early:
                self._early.discard(group)
                self._arrived(group)

    def ready(self, groups: Iterable[int]) -> None:
        for group in groups:
            if group in self._run_of:
                self._arrived(group)
            else:
                self._early.add(group)

    def take(self) -> Unit | None:
        return self._units.popleft() if self._units else None

    def give_back(self, unit: Unit) -> None:
        self._units.appendleft(unit)

    def remove(self, group: int) -> bool:
        raise ValueError(f"group {group} belongs to a batch and stays in it")

    def _arrived(self, group: int) -> None:
        run = self._run_of.pop(group)
        self._missing[run] -= 1
        if not self._missing[run]:
            del self._missing[run]
            self._units.append(tuple(self._members.pop(run)))

    def __bool__(self) -> bool:
        return bool(self._units)


class Once:
    """One unit without groups."""

    def __init__(self) -> None:
        self._left = True

    def admit(self, groups: Sequence[int]) -> None:
        return None

    def ready(self, groups: Iterable[int]) -> None:
        return None

    def take(self) -> Unit | None:
        left, self._left = self._left, False
        return () if left else None

    def give_back(self, unit: Unit) -> None:
        self._left = True

    def remove(self, group: int) -> bool:
        return False

    def __bool__(self) -> bool:
        return self._left


def _without(units: deque[Unit], group: int) -> bool:
    """Take a group out of the unit that has it; whether one had."""
    for i, unit in enumerate(units):
        if group in unit:
            rest = tuple(other for other in unit if other != group)
            if rest:
                units[i] = rest
            else:
                del units[i]
            return True
    return False


class Reader:
    """A stage in one step, or in the pool.

    blockers   fences and weights that are still ahead
    missing    group -> sample fields that are still ahead; groups that lack none are absent
    total      groups that it will have (1 for `Once`); None in the pool, which has no end
    attempts   of the groups that were given back because their attempt was lost; None stands for a unit without groups
    """

    __slots__ = ("attempts", "blockers", "done", "missing", "stage", "step", "total", "units")

    def __init__(self, stage: PlannedStage, step: int, blockers: set[Blocker], units: Units, total: int | None) -> None:
        self.stage, self.step, self.blockers, self.units, self.total = stage, step, blockers, units, total
        self.missing: dict[int, int] = {}
        self.attempts: dict[int | None, int] = {}
        self.done = 0

    def take(self) -> tuple[Unit, int]:
        """The next unit, and which attempt at it comes. There is one."""
        unit = self.units.take()
        if unit is None:
            raise ValueError(f"stage {self.stage.name!r} has nothing to start on")
        if not self.attempts:
            return unit, 0
        return unit, max(self.attempts.pop(group, 0) for group in unit or (None,))

    def give_back(self, unit: Unit, attempt: int) -> None:
        """The attempt at what is left of a unit is lost."""
        self.attempts.update(dict.fromkeys(unit or (None,), attempt + 1))
        self.units.give_back(unit)

    @property
    def order(self) -> tuple[bool, int, int, int]:
        """Which of the stages that could have a worker gets it: the least."""
        return not self.stage.path, self.step, -self.stage.path, self.stage.layer


def units_of(stage: PlannedStage, *, holds: bool, batch: int) -> Units:
    """How a stage gets its groups. `holds` says whether it reads or writes samples."""
    if not holds:
        return Once()
    if stage.shape == "stream":
        return Lots()
    if stage.per == "batch":
        return Runs(min(stage.run_groups or batch, batch), batch)
    return Loose()
