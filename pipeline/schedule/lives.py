"""Who still holds a group's partitions, as sets of bits, and the bytes that groups in flight may come to take. Pure.

A group is held by each stage of its step that reads or writes samples, and by the pool until a step claims it. A
partition of a group is freed when the last of the plan's `holders` for it has let go of the group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

from pipeline.plan.plan import Partition, Plan


class Ending(NamedTuple):
    """Partitions that a group leaves, and whether nobody holds the group any more."""

    partitions: tuple[str, ...]
    last: bool


class Release(NamedTuple):
    """Who still holds a group, as bits, and what ends; None if nothing does."""

    left: int
    ending: Ending | None


class Freed(NamedTuple):
    """Groups of which nobody holds these partitions any more; with `last`, nobody holds the groups."""

    groups: tuple[int, ...]
    partitions: tuple[str, ...]
    last: bool


class Lives:
    """The holders of one plan's partitions. `holding` are the stages that read or write samples."""

    def __init__(self, plan: Plan, holding: Collection[str]) -> None:
        self.bit = {name: 1 << i for i, name in enumerate(sorted(holding))}
        self.pool_bit = 1 << len(holding)
        self.releases = defaultdict[int, dict[int, Release]](dict)  # holders that let go -> holders before; a cache
        pool = set(plan.pool)
        self._masks = {partition.name: self._mask(partition, pool) for partition in plan.partitions}
        self.budget = Budget(plan)

    def bits(self, stages: Iterable[str], *, pooled: bool) -> int:
        """Return those of these stages that hold samples, and with `pooled` the pool, as a set of bits."""
        return reduce(or_, (self.bit.get(name, 0) for name in stages), self.pool_bit if pooled else 0)

    def learn(self, before: int, holders: int) -> Release:
        """Return what changes for a group held by `before` when `holders` let go of it, and add it to `releases`."""
        left = before & ~holders
        freed = tuple(name for name, mask in self._masks.items() if mask & before and not mask & left)
        release = self.releases[holders][before] = Release(left, Ending(freed, not left) if freed or not left else None)
        return release

    def begin(self, groups: Sequence[int], bits: int) -> None:
        """Count groups that are admitted, with these holders."""
        self.budget.begin(len(groups), (name for name, mask in self._masks.items() if mask & bits))

    def _mask(self, partition: Partition, pool: Container[str]) -> int:
        """Return the bits of a partition's holders. A later holder may come to hold a pooled group."""
        if not partition.holders:
            return reduce(or_, self.bit.values(), self.pool_bit)
        return self.bits(partition.holders, pooled=any(name not in pool for name in partition.holders))


class Budget:
    """The bytes that the groups in flight may take. A field counts with the plan's most, or, if the plan cannot tell,
    with the most seen so far."""

    def __init__(self, plan: Plan) -> None:
        self._capacity_bytes = plan.capacity_bytes
        self._live = {partition.name: 0 for partition in plan.partitions}  # groups that hold it
        self._most = {partition.name: partition.most_bytes for partition in plan.partitions}
        self._unknown = {field: partition.name for partition in plan.partitions for field in partition.unknown}
        self._seen: dict[str, int] = {}
        self.unseen = set(self._unknown) if plan.capacity_bytes is not None else set()  # fields of unknown size so far

    def begin(self, groups: int, partitions: Iterable[str]) -> None:
        """Count groups that are admitted, in the partitions that they will have."""
        if self._capacity_bytes is not None:
            for name in partitions:
                self._live[name] += groups

    def end(self, freed: Iterable[Freed]) -> None:
        """Count partitions out that are freed."""
        if self._capacity_bytes is not None:
            for groups, partitions, _ in freed:
                for name in partitions:
                    self._live[name] -= len(groups)

    def measure(self, fields: Sequence[str], group_bytes: Sequence[int]) -> None:
        """Note the bytes of the largest group of fields that have landed; none if they are not known."""
        if self._capacity_bytes is None:
            return
        self.unseen.difference_update(fields)
        for field, size in zip(fields, group_bytes):
            before = self._seen.get(field, 0)
            if size > before and (name := self._unknown.get(field)):
                self._seen[field] = size
                self._most[name] += size - before

    def room(self, count: int) -> int:
        """Return how many of `count` further groups fit beside those in flight."""
        per_group = sum(self._most.values())
        if self._capacity_bytes is None or not per_group:
            return count
        held = sum(live * self._most[name] for name, live in self._live.items())
        return max(0, min(count, (self._capacity_bytes - held) // per_group))
