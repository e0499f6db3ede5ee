"""The scheduler: events in, decisions out. Pure: no clock, no I/O, no Ray; its state changes in place.

It holds which fields are present for which groups, and from that alone it decides what may start. The same code drives
real actors, the in-process executor and a simulation.

    scheduler = Scheduler(plan)
    decisions = scheduler.begin()
    decisions = scheduler.handle(Landed(step=0, groups=(0, 1), fields=("response",)))

A stage starts on a group when the last field that it reads has landed (the whole batch, where it is `per` batch) and
the fences before it are behind; each (stage, group) is handed out exactly once. A group is cleared when every stage
that reads or writes it has acknowledged it.

With a gate, each group that it drops is replaced at once by one more of the same step, and the next step is admitted
when this one has its whole batch. Admission numbers count up without a gap, so a step has the least number of groups
of which a batch is kept, whatever the order in which they were decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from pipeline.errors import Problem
from pipeline.plan import Plan, PlannedStage
from pipeline.stage import Task
from pipeline.staleness import admissible, askable


class Landed(msgspec.Struct, frozen=True):
    """Fields are present for whole groups (or, with no groups, for the step: weights)."""

    step: int
    groups: tuple[int, ...]
    fields: tuple[str, ...]


class Finished(msgspec.Struct, frozen=True):
    """A task has acknowledged: it reads no more, and all that it writes has landed."""

    task: Task


class Dropped(msgspec.Struct, frozen=True):
    """The gate has dropped groups, each for a reason: no stage behind it will see them."""

    step: int
    reasons: dict[int, str]


class Saved(msgspec.Struct, frozen=True):
    """The checkpoint after `step` is on disk."""

    step: int


class Admit(msgspec.Struct, frozen=True):
    """Groups enter; their keys are minted now."""

    step: int
    groups: tuple[int, ...]


class Run(msgspec.Struct, frozen=True):
    """Hand this task to its worker group."""

    task: Task


class Clear(msgspec.Struct, frozen=True):
    """Nobody will read these groups again."""

    step: int
    groups: tuple[int, ...]


class Save(msgspec.Struct, frozen=True):
    """Write a checkpoint: the weights are those after `step`, and `next_group` is admitted next."""

    step: int
    next_group: int


class StepDone(msgspec.Struct, frozen=True):
    """Every stage of the step has acknowledged."""

    step: int


class GiveUp(msgspec.Struct, frozen=True):
    """The run cannot go on: `stage` dropped so many groups of `step` that no more may be sampled."""

    stage: str
    step: int
    problem: Problem


Event: TypeAlias = Landed | Finished | Dropped | Saved
Decision: TypeAlias = Admit | Run | Clear | Save | StepDone | GiveUp


class _Reader:
    """What a stage waits for in one step."""

    __slots__ = ("blockers", "done", "handed", "missing", "ready", "stage", "total")

    def __init__(self, stage: PlannedStage, blockers: set[str], total: int) -> None:
        self.stage = stage
        self.blockers = blockers  # fences and weights still ahead
        self.missing: dict[int, int] = {}  # group -> sample fields still ahead; groups that lack none are absent
        self.ready: list[int] = []  # groups that lack nothing and are not handed out
        self.handed = 0
        self.done = 0
        self.total = total  # groups that it will have; 1 where the stage reads and writes no sample field


class _Step:
    """One batch in flight."""

    def __init__(self, groups: range, *, decided: bool = True) -> None:
        self.groups = groups  # admitted so far
        self.decided = decided  # the gate has kept a whole batch: no group will be added
        self.dropped: dict[int, str] = {}  # group -> why
        self.readers: dict[str, _Reader] = {}
        self.landed: dict[str, set[int]] = {}
        self.holders: dict[int, int] = {}  # group -> stages that have not acknowledged it
        self.unfinished = 0  # stages that have not acknowledged everything


class Scheduler:
    """Runs a plan from `start` (steps behind) on. One instance a run.

    `next_group` is the first admission number, where it is not `start` batches: a checkpoint of a run with a gate.
    """

    def __init__(self, plan: Plan, *, start: int = 0, next_group: int | None = None) -> None:
        self.plan = plan
        self.start = start
        self.version = start - 1
        self.stages = sorted((s for s in plan.stages if s.shape != "external"), key=lambda stage: stage.layer)
        self._by_name = {stage.name: stage for stage in self.stages}
        self._sample_fields = {field for stage in plan.stages for field in stage.writes} - set(plan.weights_fields)
        self._transfers = [stage for stage in self.stages if stage.shape == "transfer"]
        self._publishes = {field for stage in self._transfers for field in stage.writes}
        self._waits = {
            s.name: (*(field for field in s.reads if field in self._sample_fields), *s.awaits) for s in plan.stages
        }
        self._holding = {  # the stages that read or write samples
            s.name for s in self.stages if self._waits[s.name] or not self._sample_fields.isdisjoint(s.writes)
        }
        self._gate = plan.gate.field if plan.gate else ""
        self._before_gate = {name for name in self._holding if self._gate and self._gate not in self._waits[name]}
        self._readers_of: dict[str, list[str]] = {}
        for name, fields in self._waits.items():
            for field in fields:
                self._readers_of.setdefault(field, []).append(name)
        self._before: dict[str, list[tuple[str, int]]] = {stage.name: [] for stage in self.stages}
        self._after: dict[str, list[tuple[str, int]]] = {stage.name: [] for stage in self.stages}
        for fence in plan.fences:
            self._before[fence.after].append((fence.before, fence.lag))
            self._after[fence.before].append((fence.after, fence.lag))
        self._trainers = {stage.name for stage in self.stages if stage.updates}
        self._steps: dict[int, _Step] = {}
        self._saving: set[int] = set()
        self._admitted = start
        self._next_group = start * plan.batch if next_group is None else next_group
        self._starved = False  # whether capacity held the last admission back
        self.in_flight = 0  # groups that were admitted and are not yet cleared
        self._steps_done = start

    @property
    def done(self) -> bool:
        """Every step has been trained and acknowledged, and every checkpoint written."""
        return self._steps_done == self.plan.steps and not self._steps and not self._saving

    def begin(self) -> list[Decision]:
        """The first decisions: publish the weights that the run starts from, or, without a Refit, admit at once.

        What reads nothing but published weights (an evaluation) also runs once before the first step of a new run.
        """
        if not self._transfers:
            self.version = self.start
            return self._admit()
        before = self.start - 1
        step = self._steps[before] = _Step(range(0))
        opening = {stage.name for stage in self._transfers}
        if self.start == 0:
            opening |= {s.name for s in self.stages if s.reads and set(s.reads) <= self._publishes}
        for stage in self.stages:
            if stage.name in opening:
                waits = set() if stage.shape == "transfer" else set(stage.reads)
                step.readers[stage.name] = _Reader(stage, waits, 1)
                step.unfinished += 1
        return self._dispatch(before, step) + self._admit()

    def handle(self, event: Event) -> list[Decision]:
        """Take one event, return what follows from it."""
        match event:
            case Landed():
                return self._landed(event)
            case Finished():
                return self._finish(event.task)
            case Dropped():
                return self._dropped(event)
            case Saved():
                self._saving.discard(event.step)
                decisions: list[Decision] = []
                for number, step in list(self._steps.items()):
                    for reader in step.readers.values():
                        reader.blockers.discard(f"checkpoint {event.step + 1}")
                    decisions += self._dispatch(number, step)
                return decisions

    def waiting(self) -> list[tuple[int, str, tuple[str, ...]]]:
        """(step, stage, what it waits for) of every stage in flight that has not started on everything."""
        rows = []
        for number, step in self._steps.items():
            for reader in step.readers.values():
                if reader.handed < reader.total:
                    absent = [field for field in self._waits[reader.stage.name] if self.absent(number, field)]
                    rows.append((number, reader.stage.name, tuple(sorted(reader.blockers) + absent)))
        return rows

    def absent(self, step: int, field: str) -> list[int]:
        """The groups of a step, other than those that were dropped, for which a sample field has not landed."""
        state = self._steps.get(step)
        if state is None:
            return []
        landed = state.landed.get(field, ())
        return [group for group in state.groups if group not in landed and group not in state.dropped]

    def steps_in_flight(self) -> list[int]:
        """Steps with anything unfinished, ascending."""
        return sorted(self._steps)

    def _admit(self) -> list[Decision]:
        """Take in batches as far as capacity allows. Called once the sampler has work, so that prompts for later
        never run before what the sampler waits for; and when room comes free, if there was too little."""
        decisions: list[Decision] = []
        while self._admitted < self.plan.steps:
            before = self._steps.get(self._admitted - 1)
            if before and not before.decided:
                break  # its groups have not all got their numbers
            self._starved = admissible(capacity=self.plan.capacity, held=self.in_flight) < self.plan.batch
            if self._starved:
                break
            if not self._transfers and not self._may_generate(self._admitted):
                break  # with no sampler to wait for a version, the batch itself waits
            decisions += self._open(self._admitted)
            self._admitted += 1
        return decisions

    def _open(self, number: int) -> list[Decision]:
        step = self._steps[number] = _Step(range(self._next_group, self._next_group), decided=not self._gate)
        for stage in self.stages:
            if not stage.runs_at(number, self.plan.steps):
                continue
            blockers = {field for field in stage.reads if field not in self._sample_fields}
            for before, lag in self._before[stage.name]:
                if self._is_ahead(before, number, lag):
                    blockers.add(f"{before} {number - lag}")
            if stage.reads_back and not self._may_generate(number):
                blockers.add(self._version_for(number))
            if stage.name in self._trainers:
                blockers |= {f"checkpoint {saving + 1}" for saving in self._saving}
            total = 1
            if stage.name in self._holding:
                total = 0 if stage.name in self._before_gate else self.plan.batch
            step.readers[stage.name] = _Reader(stage, blockers, total)
            step.unfinished += 1
        return self._add(number, step, self.plan.batch)

    def _add(self, number: int, step: _Step, count: int) -> list[Decision]:
        """Admit groups with a step: its batch, and later what takes the place of groups that were dropped."""
        groups = tuple(range(self._next_group, self._next_group + count))
        self._next_group += count
        step.groups = range(step.groups.start, self._next_group)
        holders = [reader for name, reader in step.readers.items() if name in self._holding]
        self.in_flight += count if holders else 0
        step.holders.update(dict.fromkeys(groups, len(holders)))
        for reader in holders:
            name = reader.stage.name
            if name in self._before_gate:
                reader.total += count
            if self._waits[name]:
                reader.missing.update(dict.fromkeys(groups, len(self._waits[name])))
            else:
                reader.ready += groups
        return [Admit(number, groups), *self._dispatch(number, step)]

    def _may_generate(self, number: int) -> bool:
        batch = self.plan.batch
        more = askable(
            version=self.version,
            max_staleness=self.plan.max_staleness,
            batch=batch,
            trained=self.version * batch,
            asked=(number - self.version) * batch,
        )
        return more >= batch and self.version >= self.start

    def _has_batch_in_waiting(self) -> bool:
        """A batch is ready for the sampler as soon as its version is published: no hurry to admit another."""
        return any(
            self._version_for(number) in reader.blockers
            for number, step in self._steps.items()
            for reader in step.readers.values()
        )

    def _version_for(self, number: int) -> str:
        """What a batch waits for before it is generated: the least version that its samples may have."""
        return f"version {max(number - self.plan.max_staleness, self.start)}"

    def _is_ahead(self, stage: str, number: int, lag: int) -> bool:
        if lag == 0:
            return self._by_name[stage].runs_at(number, self.plan.steps)
        step = self._steps.get(number - lag)
        reader = step.readers.get(stage) if step else None
        return reader is not None and reader.done < reader.total

    def _landed(self, event: Landed) -> list[Decision]:
        step = self._steps.get(event.step)
        if step is None:
            return []
        touched: set[str] = set()
        for field in event.fields:
            if field not in self._sample_fields:
                touched |= self._weights_landed(event.step, step, field)
                continue
            landed = step.landed.setdefault(field, set())
            fresh = [group for group in event.groups if group not in landed]
            landed.update(fresh)
            for name in self._readers_of.get(field, ()):
                reader = step.readers.get(name)
                if reader is None:
                    continue
                touched.add(name)
                missing = reader.missing
                for group in fresh:
                    left = missing[group] - 1
                    if left:
                        missing[group] = left
                    else:
                        del missing[group]
                        reader.ready.append(group)
        decisions = self._dispatch(event.step, step, touched)
        if self._gate in event.fields and len(step.landed[self._gate]) == self.plan.batch and not step.decided:
            decisions += self._decided(event.step, step)
        if self._publishes & set(event.fields):
            decisions += self._generate()
        return decisions

    def _decided(self, number: int, step: _Step) -> list[Decision]:
        """The gate has kept a whole batch: what is before it has no more to come, and the next step has its numbers."""
        step.decided = True
        decisions: list[Decision] = []
        for name, reader in list(step.readers.items()):
            if name in self._before_gate and reader.done == reader.total:
                decisions += self._over(number, step, reader)
        return decisions + self._admit()

    def _dropped(self, event: Dropped) -> list[Decision]:
        """Let the groups go, and admit as many others in their place."""
        step = self._steps.get(event.step)
        fresh = [group for group in event.reasons if step and group not in step.dropped]
        if step is None or self.plan.gate is None or not fresh:
            return []
        step.dropped.update({group: event.reasons[group] for group in fresh})
        if len(step.groups) + len(fresh) > self.plan.gate.max_groups:
            return [GiveUp(self.plan.gate.stage, event.step, self._exhausted(event.step, step))]
        behind = sum(1 for name in step.readers if name in self._holding and name not in self._before_gate)
        return self._add(event.step, step, len(fresh)) + self._release(event.step, step, fresh, behind)

    def _exhausted(self, number: int, step: _Step) -> Problem:
        assert self.plan.gate is not None
        gate, batch = self.plan.gate, self.plan.batch
        reasons = Counter(step.dropped.values()).most_common(3)
        others = len(step.dropped) - sum(count for _, count in reasons)
        told = ", ".join(f"{count} ({reason})" for reason, count in reasons) + (f", {others} others" if others else "")
        return Problem(
            where=self._by_name[gate.stage].where,
            what=f"stage {gate.stage!r} dropped {len(step.dropped)} of {len(step.groups)} groups at step {number + 1} "
            f"and the batch of {batch} is not full: {told}",
            why=f"max_rounds={gate.max_groups // batch} allows {gate.max_groups} groups a step, so that a model which "
            "learns nothing from its prompts does not sample for ever",
            fix="prompts that are answered now rightly, now wrongly, more samples a prompt, or a larger max_rounds",
        )

    def _generate(self) -> list[Decision]:
        """A version was published: batches that waited for it may be generated."""
        decisions: list[Decision] = []
        for number, step in list(self._steps.items()):
            version = self._version_for(number)
            waiting = [name for name, reader in step.readers.items() if version in reader.blockers]
            if waiting and self._may_generate(number):
                for name in waiting:
                    step.readers[name].blockers.discard(version)
                decisions += self._dispatch(number, step, waiting)
        return decisions + self._admit()

    def _weights_landed(self, number: int, step: _Step, field: str) -> set[str]:
        """Weights are there for a step. A published version opens the gate before the sampler."""
        if field in self._publishes:
            self.version = number + 1
        touched = set()
        for name, reader in step.readers.items():
            if field in reader.blockers:
                reader.blockers.discard(field)
                touched.add(name)
        return touched

    def _finish(self, task: Task) -> list[Decision]:
        step = self._steps[task.step]
        reader = step.readers[task.stage]
        reader.done += len(task.groups) or 1
        decisions = self._release(task.step, step, task.groups, 1)
        if reader.done < reader.total or (task.stage in self._before_gate and not step.decided):
            return decisions
        return decisions + self._over(task.step, step, reader)

    def _release(self, number: int, step: _Step, groups: Sequence[int], holders: int) -> list[Decision]:
        """So many holders let go of the groups; those that nobody holds any more are cleared."""
        cleared = []
        for group in groups:
            left = step.holders[group] - holders
            if left:
                step.holders[group] = left
            else:
                del step.holders[group]
                cleared.append(group)
        if not cleared:
            return []
        self.in_flight -= len(cleared)
        decisions: list[Decision] = [Clear(number, tuple(cleared))]
        if self._starved and not self._has_batch_in_waiting():
            decisions += self._admit()
        return decisions

    def _over(self, number: int, step: _Step, reader: _Reader) -> list[Decision]:
        """A stage has acknowledged all that it will have in this step."""
        step.unfinished -= 1
        stage = reader.stage
        decisions = self._fences_passed(stage.name, number)
        settles = stage.shape == "transfer" if self._transfers else stage.name in self._trainers
        if settles and number >= self.start and self._checkpoint_due(number):
            decisions += self._save(number, step.groups.stop)
        if not step.unfinished:
            decisions += self._close(number)
        return decisions

    def _fences_passed(self, stage: str, number: int) -> list[Decision]:
        decisions: list[Decision] = []
        for after, lag in self._after[stage]:
            step = self._steps.get(number + lag)
            reader = step.readers.get(after) if step else None
            if step and reader:
                reader.blockers.discard(f"{stage} {number}")
                decisions += self._dispatch(number + lag, step, (after,))
        return decisions

    def _checkpoint_due(self, number: int) -> bool:
        every = self.plan.checkpoint_every
        last = number == self.plan.steps - 1
        return bool(self._trainers) and (last or bool(every and (number + 1) % every == 0))

    def _save(self, number: int, next_group: int) -> list[Decision]:
        self._saving.add(number)
        for later, step in self._steps.items():
            if later > number:
                for name in self._trainers & step.readers.keys():
                    step.readers[name].blockers.add(f"checkpoint {number + 1}")
        return [Save(number, next_group)]

    def _close(self, number: int) -> list[Decision]:
        del self._steps[number]
        if number < self.start:
            return [StepDone(number)] if number < 0 else []
        self._steps_done += 1
        if self._transfers:
            return [StepDone(number)]
        self.version = self._steps_done  # with no weights to publish, a finished step counts as one version
        return [StepDone(number), *self._admit()]

    def _dispatch(self, number: int, step: _Step, names: Iterable[str] | None = None) -> list[Decision]:
        decisions: list[Decision] = []
        for name in self._order(step, names):
            reader = step.readers[name]
            if reader.blockers or reader.handed == reader.total:
                continue
            if name not in self._holding:
                reader.handed = 1
                decisions.append(Run(self._task(name, number, ())))
            elif reader.ready and (reader.stage.per != "batch" or len(reader.ready) == reader.total):
                groups = tuple(sorted(reader.ready))
                reader.ready = []
                reader.handed += len(groups)
                decisions.append(Run(self._task(name, number, groups)))
        return decisions

    def _order(self, step: _Step, names: Iterable[str] | None) -> Sequence[str]:
        """Plan order, so that decisions do not depend on the order of a set."""
        if names is None:
            return list(step.readers)
        chosen = set(names)
        return [name for name in step.readers if name in chosen] if len(chosen) > 1 else list(chosen)

    def _task(self, stage: str, number: int, groups: tuple[int, ...]) -> Task:
        return Task(stage=stage, step=number, groups=groups, version=max(self.version, 0))
