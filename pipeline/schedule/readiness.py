"""What a stage waits for in one step, and what it may start on: units of whole groups. Pure.

A *unit* is the groups of one task. Which groups share a unit never depends on the order in which they became ready,
except for stages that compute every group independently: those take whatever is ready.

    Loose   whatever is ready             a stage per sample or group
    Lots    groups admitted together      a stream, so that its decode batches depend on admission only
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
    """Collects ready groups and hands out units."""

    def admit(self, groups: Sequence[int]) -> None:
        """Announce groups, in ascending order."""

    def ready(self, groups: Iterable[int]) -> None:
        """Mark groups as ready: the stage lacks none of their fields."""

    def take(self) -> Unit | None:
        """Return the next unit; None if there is none."""

    def give_back(self, unit: Unit) -> None:
        """Put back a unit whose attempt was lost."""

    def remove(self, group: int) -> bool:
        """Remove a dropped group. Returns whether it was ready and not yet taken."""

    def __bool__(self) -> bool:
        """Return whether there is a unit."""


class Loose:
    """Units of whatever is ready, in canonical order."""

    def __init__(self) -> None:
        self._ready: set[int] = set()
        self._again: deque[Unit] = deque()  # units of lost attempts, kept separate

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
    """Units of groups that were admitted together, once all of them are ready."""

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
    """Runs of `size` groups in canonical order, the last with the rest of `total`; each once all its groups are ready.

    With a gate, `admit` is called for kept groups only, in order, once every earlier group is decided.
    """

    def __init__(self, size: int, total: int) -> None:
        self._size, self._total = size, total
        self._placed = 0
        self._run_of: dict[int, int] = {}
        self._members: dict[int, list[int]] = {}
        self._missing: dict[int, int] = {}  # run -> groups that are not admitted or not ready
        self._early: set[int] = set()  # ready before they were admitted
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
        raise ValueError(f"group {group} belongs to a batch and cannot be removed")

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
    """Remove a group from the unit that contains it. Returns whether one did."""
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

    blockers   conditions that it still waits for, besides sample fields
    missing    group -> number of sample fields that it lacks; complete groups are absent
    total      number of groups that it will get (1 for `Once`); None in the pool, which has no end
    done       number of groups that it has acknowledged
    attempts   group given back after a lost attempt -> its next attempt; None stands for a unit without groups
    """

    __slots__ = ("attempts", "blockers", "done", "missing", "stage", "step", "total", "units")

    def __init__(self, stage: PlannedStage, step: int, blockers: set[Blocker], units: Units, total: int | None) -> None:
        self.stage, self.step, self.blockers, self.units, self.total = stage, step, blockers, units, total
        self.missing: dict[int, int] = {}
        self.attempts: dict[int | None, int] = {}
        self.done = 0

    def take(self) -> tuple[Unit, int]:
        """Return the next unit and the number of its attempt. Raises ValueError if there is none."""
        unit = self.units.take()
        if unit is None:
            raise ValueError(f"stage {self.stage.name!r} has nothing to start on")
        if not self.attempts:
            return unit, 0
        return unit, max(self.attempts.pop(group, 0) for group in unit or (None,))

    def give_back(self, unit: Unit, attempt: int) -> None:
        """Put back the rest of a unit whose attempt was lost."""
        self.attempts.update(dict.fromkeys(unit or (None,), attempt + 1))
        self.units.give_back(unit)

    @property
    def order(self) -> tuple[bool, int, int, int]:
        """The priority among stages that could use a worker; the smallest goes first."""
        return not self.stage.path, self.step, -self.stage.path, self.stage.layer


def units_of(stage: PlannedStage, *, holds: bool, batch: int) -> Units:
    """Return how a stage gets its groups. `holds`: whether it reads or writes samples."""
    if not holds:
        return Once()
    if stage.shape == "stream":
        return Lots()
    if stage.per == "batch":
        return Runs(min(stage.run_groups or batch, batch), batch)
    return Loose()
