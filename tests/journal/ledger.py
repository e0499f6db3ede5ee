"""The state of groups, tasks and versions after the events so far. It trusts every event; `rules` check them first.

A resume starts a new ledger; the outcome of earlier steps is kept in `History`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.journal.planned import Planned
from tests.journal.record import Line

WHOLE = -1  # stands for the work of a task without groups


@dataclass
class Group:
    """The samples of one prompt. `began` is the version with which sampling of the current attempt started."""

    step: int
    claimed: int | None = None
    dropped: str | None = None
    dropped_by: str = ""
    began: int | None = None
    versions: tuple[int, int] | None = None  # oldest and newest, as put in the columns
    cleared: bool = False
    freed: set[str] = field(default_factory=set)  # partitions that were cleared
    stored: bool = False
    present: dict[str, int] = field(default_factory=dict)  # field -> attempt that put it
    attempts: Counter[str] = field(default_factory=Counter)  # stage -> lost attempts
    working: dict[str, int] = field(default_factory=dict)  # stage -> task that has it
    acknowledged: set[str] = field(default_factory=set)
    trained: dict[str, dict[int, tuple[int, int, int]]] = field(default_factory=dict)
    # stage -> worker -> samples, oldest, newest

    @property
    def oldest(self) -> int | None:
        """Return the oldest version of its tokens, or the lowest they may have; None before it is sampled."""
        return self.versions[0] if self.versions else self.began


@dataclass
class Task:
    """One attempt. `left` holds groups that it has neither acknowledged nor lost."""

    line: Line
    left: set[int]
    floor: int  # no token that it samples may be older than this version
    lost: set[int] = field(default_factory=set)
    ran: set[tuple[str, int]] = field(default_factory=set)  # worker group, worker
    put: Counter[str] = field(default_factory=Counter)  # field -> samples, for a task that is divided over ranks

    @property
    def groups(self) -> list[int]:
        return self.line["groups"]


@dataclass
class History:
    """What the journal segments before a resume have achieved per step, as far as it still counts."""

    trained: dict[int, int] = field(default_factory=dict)  # group -> step
    dropped: set[int] = field(default_factory=set)
    ended: dict[int, tuple[Line, int]] = field(default_factory=dict)  # step -> its StepEnded, newest version published
    held: set[int] = field(default_factory=set)  # steps whose state was copied or written for a checkpoint
    saved: set[int] = field(default_factory=set)  # steps after which there is a checkpoint

    def cut(self, start: int, next_group: int | None) -> None:
        """Drop everything from step `start` on, where a resume continues."""
        self.trained = {group: step for group, step in self.trained.items() if step < start}
        self.ended = {step: told for step, told in self.ended.items() if step < start}
        self.saved = {step for step in self.saved if step < start}
        self.held = set(self.saved)
        if next_group is not None:
            self.dropped = {group for group in self.dropped if group < next_group}


def units(groups: Iterable[int]) -> tuple[int, ...]:
    """Return the groups, or the stand-in for a task without groups."""
    return tuple(groups) or (WHOLE,)


class Ledger:
    """One segment of a journal: from a Started to the next, or to the end."""

    def __init__(self, planned: Planned, start: int, history: History, manifest: dict[str, Any] | None) -> None:
        self.planned, self.start, self.history = planned, start, history
        self.pending = sorted(manifest.get("pending", ())) if manifest and start else []
        self.next_group: int | None = 0
        if start:
            self.next_group = manifest["next_group"] if manifest else None
        self.groups: dict[int, Group] = {}
        self.tasks: dict[int, Task] = {}
        self.held: set[int] = set()  # groups still held by a stage
        self.admitted: defaultdict[int, list[int]] = defaultdict(list)  # step -> groups
        self.claims: dict[int, list[int]] = {}
        self.version = start - 1 if planned.transfers else start
        self.published: dict[tuple[str, int], int] = {}  # stage, step -> version
        self.reached = self.version  # the newest version published, or served by a replica before it was published
        self.sending = self.version  # the newest version in transfer
        self.served: Counter[tuple[str, int | None]] = Counter()  # worker group, replica -> newest version seen
        self.single: dict[tuple[str, int], str] = {}  # stage, step of tasks without groups -> "out", "done" or "lost"
        self.lost: Counter[tuple[str, int]] = Counter()
        self.fetched: Counter[tuple[str, int]] = Counter()  # stage, step -> samples
        self.submitted: defaultdict[tuple[str, int], list[int]] = defaultdict(list)  # stage, step -> tasks
        self.clean = False
        self.stopping = False  # the run was asked to stop

    @property
    def next_claim(self) -> int:
        """Return the next batch that will be claimed."""
        return self.start + len(self.claims)

    def task_of(self, line: Line) -> Task | None:
        """Return the task that a report belongs to."""
        return self.tasks.get(line["task"])

    def released(self, number: int) -> bool:
        """Return whether no stage will read or write a group any more."""
        group = self.groups[number]
        if group.dropped is not None:
            return all(stage == group.dropped_by for stage in group.working)
        step = group.claimed if self.planned.pooled else group.step
        return step is not None and group.acknowledged >= self.planned.holders(step)

    def lets_go(self, number: int, holders: set[str]) -> bool:
        """Return whether none of these stages will read or write a group any more."""
        group = self.groups[number]
        if group.dropped is not None:
            return all(stage == group.dropped_by for stage in group.working.keys() & holders)
        step = group.claimed if self.planned.pooled else group.step
        if step is None:
            return holders <= self.planned.pool and group.acknowledged >= holders
        return group.acknowledged >= holders & self.planned.holders(step)

    def finished(self, stage: str, step: int) -> bool:
        """Return whether a stage has acknowledged all groups that it has at a step."""
        if step < self.start or stage not in self.planned.holding:
            return self.single.get((stage, step)) == "done"
        claimed = self.claims.get(step)
        if claimed is None:
            return False
        seen = claimed
        if self.planned.is_before_gate(stage) and not self.planned.pooled:
            seen = self.admitted[step]
        groups = [self.groups[number] for number in seen if number in self.groups]
        return all(stage in g.acknowledged or (g.dropped is not None and stage not in g.working) for g in groups)

    def apply(self, line: Line) -> None:
        """Update the state with an event."""
        handler = getattr(self, f"_{line.type}", None)
        if handler:
            handler(line)

    def _stopping(self, line: Line) -> None:
        self.stopping = True

    def _admitted(self, line: Line) -> None:
        for number in line["groups"]:
            self.groups[number] = Group(step=line["step"])
            self.admitted[line["step"]].append(number)
            self.held.add(number)
            if self.pending and self.pending[0] == number:
                self.pending.pop(0)
            else:
                self.next_group = number + 1

    def _claimed(self, line: Line) -> None:
        self.claims[line["step"]] = line["groups"]
        for number in line["groups"]:
            if number in self.groups:
                self.groups[number].claimed = line["step"]

    def _dropped(self, line: Line) -> None:
        for number in line["groups"]:
            if number in self.groups:
                self.groups[number].dropped = line["reason"]
                self.groups[number].dropped_by = line["stage"]
                self.history.dropped.add(number)
                self._let_go(number)

    def _submitted(self, line: Line) -> None:
        stage, step = line["stage"], line["step"]
        group, replica = line["group"], line["replica"]
        floor = max(line["version"], self.served[group, replica])
        self.tasks[line["task"]] = Task(line, set(units(line["groups"])), floor)
        self.submitted[stage, step].append(line["task"])
        if not line["groups"]:
            self.single[stage, step] = "out"
        if stage in self.planned.transfers:
            self.sending = max(self.sending, step + 1)
        for number in line["groups"]:
            if number in self.groups:
                self.groups[number].working[stage] = line["task"]
                if stage in self.planned.stamping:
                    self.groups[number].began = line["version"]

    def _got(self, line: Line) -> None:
        self.fetched[line["stage"], line["step"]] += line["samples"]

    def _put(self, line: Line) -> None:
        stage = line["stage"]
        external = stage not in self.planned.internal
        for number, versions in zip(line["groups"], line["versions"] or [None] * len(line["groups"])):
            group = self.groups.get(number)
            if group is None or (not external and line["attempt"] != group.attempts[stage]):
                continue
            group.stored = True
            if versions:
                group.versions = (versions[0], versions[1])
            task = self.tasks.get(group.working.get(stage, -1))
            if task and versions:
                where = (task.line["group"], task.line["replica"])
                self.served[where] = max(self.served[where], versions[1])
            if task and self.is_divided(line, task):
                continue
            group.present.update(dict.fromkeys(line["fields"], line["attempt"]))
        self._put_share(line)

    def is_divided(self, line: Line, task: Task) -> bool:
        """Return whether a put has one rank's share of a task, which may hold only some samples of a group."""
        whole = len(task.groups) * self.planned.group_size
        return bool(self.planned.stages[line["stage"]]["sharding"]) and line["samples"] < whole

    def _put_share(self, line: Line) -> None:
        first = next((self.groups[n] for n in line["groups"] if n in self.groups), None)
        task = self.tasks.get(first.working.get(line["stage"], -1)) if first else None
        if task is None or not self.is_divided(line, task):
            return
        for name in line["fields"]:
            task.put[name] += line["samples"]
            if task.put[name] == len(task.groups) * self.planned.group_size:
                for group in (self.groups[number] for number in task.groups if number in self.groups):
                    group.present[name] = line["attempt"]

    def _acknowledged(self, line: Line) -> None:
        task = self.task_of(line)
        if task is None:
            return
        stage = line["stage"]
        for unit in units(line["groups"]):
            if unit not in task.left:
                continue
            task.left.discard(unit)
            if unit == WHOLE:
                self._single_done(stage, line["step"])
            elif unit in self.groups:
                self.groups[unit].acknowledged.add(stage)
                self.groups[unit].working.pop(stage, None)
                self._let_go(unit)
                if stage in self.planned.trainers:
                    self.history.trained[unit] = line["step"]

    def _single_done(self, stage: str, step: int) -> None:
        self.single[stage, step] = "done"
        if stage in self.planned.transfers:
            self.published.setdefault((stage, step), step + 1)
            self.version = max(self.version, step + 1)
            self.reached = max(self.reached, step + 1)

    def _trained(self, line: Line) -> None:
        for number, *told in zip(line["groups"], line["samples"], line["oldest"], line["newest"]):
            if number in self.groups:
                self.groups[number].trained.setdefault(line["stage"], {})[line["worker"]] = tuple(told)

    def _ran(self, line: Line) -> None:
        task = self.task_of(line)
        if task:
            task.ran.add((line["group"], line["worker"]))

    def _retried(self, line: Line) -> None:
        task = self.task_of(line)
        if task is None:
            return
        stage = task.line["stage"]
        self.lost[stage, task.line["step"]] += 1
        for unit in units(line["groups"]):
            if unit not in task.left:
                continue
            task.left.discard(unit)
            task.lost.add(unit)
            if unit == WHOLE:
                self.single[stage, line["step"]] = "lost"
            elif unit in self.groups:
                self._forget_attempt(self.groups[unit], stage)
                self._let_go(unit)

    def _forget_attempt(self, group: Group, stage: str) -> None:
        group.working.pop(stage, None)
        group.attempts[stage] += 1
        for name in self.planned.sample_writes(stage):
            group.present.pop(name, None)
        if stage in self.planned.stamping:
            group.began = group.versions = None
        group.trained.pop(stage, None)

    def _served(self, line: Line) -> None:
        where = self.planned.stages[line["stage"]]["groups"][-1], line["replica"]
        self.served[where] = max(self.served[where], line["version"])
        if len(self.planned.transfers) == 1:
            self.reached = max(self.reached, line["version"])

    def _published(self, line: Line) -> None:
        version = line["step"] + 1  # checked by the rules
        self.published[line["stage"], line["step"]] = version
        self.version = max(self.version, version)
        self.reached = max(self.reached, version)

    def _cleared(self, line: Line) -> None:
        for number in line["groups"]:
            if number in self.groups:
                self.groups[number].freed |= set(line["partitions"])
                self.groups[number].cleared |= line["last"]

    def _held(self, line: Line) -> None:
        self.history.held.add(line["step"])

    def _checkpointed(self, line: Line) -> None:
        self.history.saved.add(line["step"])

    def _step_ended(self, line: Line) -> None:
        self.history.ended[line["step"]] = (line, self.version)
        if not self.planned.transfers and line["step"] >= self.start:
            self.version += 1

    def _ended(self, line: Line) -> None:
        self.clean = True

    def _let_go(self, number: int) -> None:
        if number in self.held and self.released(number):
            self.held.discard(number)
