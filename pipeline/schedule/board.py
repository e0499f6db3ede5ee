"""Tracks which fields are present for which groups, and which stages wait for or hold them. Pure; decides nothing.

A group's home is the step of its batch, or the pool until a step claims it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import or_

from pipeline.plan.plan import Plan, PlannedStage
from pipeline.schedule.blockers import Blocker
from pipeline.schedule.lives import Ending, Freed, Lives
from pipeline.schedule.readiness import Reader, units_of
from pipeline.schedule.staleness import admissible


class Step:
    """One batch in flight, or the pool of unclaimed groups (numbered as the next batch)."""

    def __init__(self, number: int, *, decided: bool = True) -> None:
        self.number = number
        self.decided = decided  # the gate has kept a whole batch: no group will be added
        self.groups: list[int] = []  # admitted so far, ascending
        self.dropped: dict[int, str] = {}  # group -> why
        self.refused: dict[int, str] = {}  # groups of this batch that the gate dropped -> why
        self.kept = 0  # groups that the gate has kept
        self.placed = 0  # length of the decided prefix of `groups`
        self.readers: dict[str, Reader] = {}
        self.unfinished = 0  # stages that have not acknowledged everything
        self.unpublished: set[str] = set()  # weights fields that it has yet to publish


class Board:
    """All steps in flight. Calls `offer` with each stage that may have something to start on."""

    def __init__(self, plan: Plan, offer: Callable[[Reader], None]) -> None:
        self.plan, self._offer = plan, offer
        self.stages = sorted((s for s in plan.stages if s.shape != "external"), key=lambda stage: stage.layer)
        self.sample_fields = {field for stage in plan.stages for field in stage.writes} - set(plan.weights_fields)
        self.waits = {
            s.name: (*(field for field in s.reads if field in self.sample_fields), *s.awaits) for s in plan.stages
        }
        self.holding = {  # the stages that read or write samples
            s.name for s in self.stages if self.waits[s.name] or not self.sample_fields.isdisjoint(s.writes)
        }
        self._bits = {field: 1 << i for i, field in enumerate(sorted(self.sample_fields))}  # sets of fields as integers
        self._awaited = {name: self._as_bits(fields) for name, fields in self.waits.items() if fields}
        self._stamps = self._as_bits(stage.stamps for stage in self.stages if stage.stamps)
        self.gate = plan.gate.field if plan.gate else ""
        self.before_gate = {name for name in self.holding if self.gate and self.gate not in self.waits[name]}
        self._gate_bit = self._as_bits([self.gate] if self.gate else ())
        self._waiting_for: dict[int, list[tuple[str, int]]] = {}  # fields -> stages that wait for any of them; a cache
        self.steps: dict[int, Step] = {}
        self.pool: Step | None = None
        self.oldest: dict[int, int] = {}  # group -> oldest version of its tokens, or of the weights it started with
        self._pool_left: dict[int, int] = {}  # group -> pool stages that have not acknowledged it
        self._home: dict[int, Step] = {}
        self._present: dict[int, int] = {}  # group -> its present fields
        self._lives = Lives(plan, self.holding)
        self._holders: dict[int, int] = {}  # group -> who still holds it, as bits of `Lives`

    @property
    def in_flight(self) -> int:
        """The number of groups admitted and not yet cleared."""
        return len(self._holders)

    def room(self, count: int) -> int:
        """Return how many of `count` further groups there is room for: in the plan's groups and in its bytes. If only
        the pool is in flight, at least those that fill a batch: without a batch, nothing would be cleared.

        With a limit of bytes, one batch is in flight until each field whose size the plan cannot tell was seen once.
        """
        budget = self._lives.budget
        capacity = min(self.plan.capacity, self.plan.batch) if budget.unseen else self.plan.capacity
        room = budget.room(min(count, admissible(capacity=capacity, held=self.in_flight)))
        pooled = len(self.pool.groups) if self.pool else 0
        return room if len(self._holders) > pooled else max(room, min(count, self.plan.batch - pooled))

    @property
    def homes(self) -> list[Step]:
        """Every step, and the pool if there is one."""
        return [*self.steps.values(), *([self.pool] if self.pool else [])]

    def home(self, group: int) -> Step | None:
        """Return the home of a group; None before admission and after clearing."""
        return self._home.get(group)

    def decided(self, group: int) -> bool:
        """Return whether the gate has decided on this group, or it was dropped or cleared."""
        home = self._home.get(group)
        return home is None or group in home.dropped or bool(self._present.get(group, 0) & self._gate_bit)

    def absent(self, step: int, field: str) -> list[int]:
        """Return the groups of a step, except dropped ones, for which a sample field has not landed."""
        bit, present = self._bits[field], self._present
        homes = [home for home in self.homes if home.number == step]
        return [g for home in homes for g in home.groups if not present.get(g, 0) & bit and g not in home.dropped]

    def add_reader(self, step: Step, stage: PlannedStage, blockers: set[Blocker], *, opening: bool = False) -> None:
        """Add a stage to this step; with `opening`, only for the initial weights."""
        holds = stage.name in self.holding and not opening
        total: int | None = 1
        if holds:
            total = None if step is self.pool else 0 if stage.name in self.before_gate else self.plan.batch
        units = units_of(stage, holds=holds, batch=self.plan.batch)
        step.readers[stage.name] = reader = Reader(stage, step.number, blockers, units, total)
        step.unfinished += 1
        if stage.shape == "transfer":
            step.unpublished.update(stage.writes)
        self._offer(reader)

    def add(self, step: Step, groups: tuple[int, ...]) -> None:
        """Add groups to a step or the pool."""
        step.groups += groups
        holders = [reader for name, reader in step.readers.items() if name in self.holding]
        pooled = step is self.pool
        if holders:
            bits = self._lives.bits(step.readers, pooled=pooled)
            self._holders.update(dict.fromkeys(groups, bits))
            self._lives.begin(groups, bits)
        if pooled:
            self._pool_left.update(dict.fromkeys(groups, len(holders)))
        self._home.update(dict.fromkeys(groups, step))
        for reader in holders:
            waits = self._awaited.get(reader.stage.name, 0).bit_count()
            if reader.stage.name in self.before_gate and reader.total is not None:
                reader.total += len(groups)
            if reader.stage.per != "batch":  # the order of a batch is known once its groups are decided
                reader.units.admit(groups)
            if waits:
                reader.missing.update(dict.fromkeys(groups, waits))
            else:
                reader.units.ready(groups)
                self._offer(reader)

    def claim(self, step: Step, groups: tuple[int, ...]) -> list[Freed]:
        """Move groups from the pool into a step that has its stages. Returns what no stage of the step holds."""
        assert self.pool is not None
        self.steps[step.number] = step
        taken = set(groups)
        self.pool.groups = [group for group in self.pool.groups if group not in taken]
        step.groups = list(groups)
        self._home.update(dict.fromkeys(groups, step))
        holders = [reader for name, reader in step.readers.items() if name in self.holding]
        for reader in holders:
            reader.units.admit(groups)
            awaited = self._awaited.get(reader.stage.name, 0)
            for group in groups:
                if missing := (awaited & ~self._present.get(group, 0)).bit_count():
                    reader.missing[group] = missing
                else:
                    reader.units.ready((group,))
            self._offer(reader)
        bits = self._lives.bits(step.readers, pooled=False)
        for group in groups:
            self._holders[group] |= bits
            del self._pool_left[group]
        return self._let_go(groups, self._lives.pool_bit)

    def place(self, step: Step) -> None:
        """Admit the next groups, in canonical order, to the stages per batch: the kept ones, up to the first undecided
        group."""
        fresh = []
        while step.placed < len(step.groups):
            group = step.groups[step.placed]
            if group not in step.dropped:
                if self.gate and not self._present.get(group, 0) & self._gate_bit:
                    break
                fresh.append(group)
            step.placed += 1
        for name, reader in step.readers.items():
            if reader.stage.per == "batch" and name in self.holding:
                reader.units.admit(fresh)
                self._offer(reader)

    def measure(self, fields: Sequence[str], group_bytes: Sequence[int]) -> None:
        """Note the bytes per group of fields that have landed."""
        self._lives.budget.measure(fields, group_bytes)

    def land(self, groups: Sequence[int], fields: tuple[str, ...]) -> None:
        """Mark sample fields as present for groups."""
        landed, present = self._as_bits(fields), self._present
        ready: dict[int, tuple[Reader, list[int]]] = {}
        for group in groups:
            home = self._home.get(group)
            if home is None:
                continue
            before = present.get(group, 0)
            present[group] = before | landed
            if group in home.dropped:
                continue
            fresh = landed & ~before
            home.kept += bool(fresh & self._gate_bit)
            for name, count in self._waiting_for.get(fresh) or self._who_waits_for(fresh):
                reader = home.readers.get(name)
                if reader is None:
                    continue
                left = reader.missing[group] - count
                if left:
                    reader.missing[group] = left
                else:
                    del reader.missing[group]
                    ready.setdefault(id(reader), (reader, []))[1].append(group)
        for reader, of in ready.values():
            reader.units.ready(of)
            self._offer(reader)

    def _who_waits_for(self, fields: int) -> list[tuple[str, int]]:
        """Return the stages that wait for any of these fields, each with the number of fields."""
        counts = [(name, (awaited & fields).bit_count()) for name, awaited in self._awaited.items()]
        self._waiting_for[fields] = [(name, count) for name, count in counts if count]
        return self._waiting_for[fields]

    def _as_bits(self, fields: Iterable[str]) -> int:
        return reduce(or_, (self._bits[field] for field in fields), 0)

    def leave(self, step: Step, groups: Iterable[int], reason: str) -> list[Freed]:
        """Drop groups. Stages that wait for them release them at once, running tasks when they acknowledge.

        Returns what has no holder left.
        """
        waited: dict[int, list[int]] = {}  # holders that waited -> groups
        for group in groups:
            step.dropped[group] = reason
            waiting = []
            for name, reader in step.readers.items():
                if name in self.holding:
                    waits = reader.missing.pop(group, None) is not None
                    takes = reader.stage.per != "batch" and reader.units.remove(group)
                    if waits or takes:
                        waiting.append(name)
                        self.lessen(reader, 1)
                    self._offer(reader)  # the rest of the group's lot may be complete now
            if step is self.pool:
                step.groups.remove(group)
                del self._pool_left[group]
            waited.setdefault(self._lives.bits(waiting, pooled=step is self.pool), []).append(group)
        return [freed for holders, of in waited.items() for freed in self._let_go(of, holders)]

    def lessen(self, reader: Reader, groups: int) -> None:
        """Reduce the total of a stage before the gate by dropped groups that it will not acknowledge."""
        if reader.total is not None and reader.stage.name in self.before_gate:
            reader.total -= groups

    def stamp(self, groups: Iterable[int], versions: Iterable[int]) -> None:
        """Set the oldest token version of groups, except those whose tokens are present already."""
        for group, version in zip(groups, versions):
            if group in self._home and not self._present.get(group, 0) & self._stamps:
                self.oldest[group] = version

    def unstamp(self, groups: Iterable[int]) -> None:
        """Forget the version of groups whose tokens were lost with an attempt."""
        for group in groups:
            if not self._present.get(group, 0) & self._stamps:
                self.oldest.pop(group, None)

    def acknowledge(self, groups: Iterable[int]) -> list[int]:
        """Record that a pool stage has finished these groups. Returns the groups that every pool stage has finished."""
        ready = []
        for group in groups:
            if group in self._pool_left:
                self._pool_left[group] -= 1
                if not self._pool_left[group]:
                    ready.append(group)
        return ready

    def release(self, groups: Sequence[int], stage: str) -> list[Freed]:
        """Record that a stage holds these groups no longer. Returns what has no holder left."""
        return self._let_go(groups, self._lives.bit[stage]) if groups else []

    def _let_go(self, groups: Iterable[int], holders: int) -> list[Freed]:
        """Take holders from groups. Forgets groups without any. Returns the partitions that nobody holds any more, by
        the groups that they are free of."""
        held, known = self._holders, self._lives.releases[holders]
        freed: dict[int, tuple[Ending, list[int]]] = {}
        for group in groups:
            before = held[group]
            left, ending = known.get(before) or self._lives.learn(before, holders)
            if left:
                held[group] = left
            else:
                self._forget(group)
            if ending is None:
                continue
            if (of := freed.get(id(ending))) is None:
                freed[id(ending)] = (ending, [group])
            else:
                of[1].append(group)
        if not freed:
            return []
        found = [Freed(tuple(of), *ending) for ending, of in freed.values()]
        self._lives.budget.end(found)
        return found

    def _forget(self, group: int) -> None:
        del self._holders[group]
        home = self._home.pop(group)
        if home is self.pool:
            home.dropped.pop(group, None)
        self.oldest.pop(group, None)
        self._present.pop(group, None)
