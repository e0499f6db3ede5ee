"""The scheduler: events in, decisions out. Pure: no clock, no I/O, no Ray; its state changes in place.

It tracks which fields are present for which groups (`board`) and which workers are free (`grants`), and decides from
these alone what starts. The same code drives real actors, the in-process executor and a simulation.

    scheduler = Scheduler(plan)
    decisions = scheduler.begin()
    decisions = scheduler.handle(Landed(step=0, groups=(0, 1), fields=("response",), task=3))

A stage may start on a group when the last field that it reads has landed and the step's fences have been passed; a
stage per batch starts on a run of groups, or on the whole batch. Each (stage, group) is submitted exactly once per
attempt. A group's rows of a partition are cleared when every stage that reads or writes the partition has acknowledged
the group.

Batches. With on_stale="wait" they are fixed at admission: batch n has fixed admission numbers, and is sampled once the
published version is at least n - ahead. With "drop" groups belong to no step until they are claimed: the first ones
ready form the next batch, those too old for it are dropped, and others are admitted in their place.

With a gate, a batch is the first groups that it keeps, in the order of admission numbers, which have no gaps: a step
has the smallest number of groups that yields a full batch, whatever finishes first. If rollout runs ahead, groups
belong to no step until they are claimed, and each that is dropped is replaced at once, by the next number. Otherwise
replacements are admitted when every sampled group is decided, so that they are decoded together, and the next batch
after that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, KeysView, Sequence
from itertools import islice

from pipeline.declare.task import Task
from pipeline.plan.plan import Plan, PlannedStage
from pipeline.schedule.blockers import STOPPED, Blocker, Checkpoint, StageDone, Version, Weights
from pipeline.schedule.board import Board, Step
from pipeline.schedule.events import (
    CANCELLED,
    STALE,
    Admit,
    AttemptLost,
    Cancel,
    Claim,
    Clear,
    Decision,
    Drop,
    Event,
    Finished,
    GiveUp,
    GroupsDropped,
    Landed,
    ReplicaServed,
    Run,
    Save,
    Saved,
    StepDone,
)
from pipeline.schedule.gate_drops import GateDrops
from pipeline.schedule.grants import Grants, RunningTask
from pipeline.schedule.lives import Freed
from pipeline.schedule.readiness import Reader
from pipeline.schedule.staleness import askable, too_old


class Scheduler:
    """Schedules a plan after `start` finished steps. One instance per run.

    `pending` are groups that were admitted before the checkpoint and not trained; they are admitted first.
    `next_group` is the first admission number after them, by default that of batch `start`.
    """

    def __init__(
        self, plan: Plan, *, start: int = 0, next_group: int | None = None, pending: Sequence[int] = ()
    ) -> None:
        self.plan = plan
        self.start = start
        self.version = start - 1
        self._grants = Grants(plan, version=lambda: self.version, can_wait=self._can_wait)
        self._board = Board(plan, self._grants.offer)
        self._stages = {stage.name: stage for stage in self._board.stages}
        self._transfers = [stage for stage in self._stages.values() if stage.shape == "transfer"]
        self._publishes = {field for stage in self._transfers for field in stage.writes}
        self._trainers = {stage.name for stage in self._stages.values() if stage.updates}
        self._settling = {stage.name for stage in self._transfers} or self._trainers  # what a checkpoint waits for
        self._before: dict[str, list[tuple[str, int]]] = {name: [] for name in self._stages}
        self._after: dict[str, list[tuple[str, int]]] = {name: [] for name in self._stages}
        for fence in plan.fences:
            self._before[fence.after].append((fence.before, fence.lag))
            self._after[fence.before].append((fence.after, fence.lag))
        self._saving: set[int] = set()
        self._next_batch = start  # the first batch not yet admitted; with a pool, not yet claimed
        self._pending = deque(pending)
        self._next_group = start * plan.batch if next_group is None else next_group
        self._claimable: dict[int, None] = {}  # ready groups of the pool, in the order in which they became ready
        self._starved = False  # whether capacity limited the last admission
        self._steps_done = start
        self._settled = self._saved = start - 1  # the last step that can be saved, and was saved
        self._stopping = False
        self._last = plan.steps - 1  # the last step to train

    @property
    def stopped(self) -> bool:
        """Whether everything that `stop` leaves to do is done."""
        if not self._stopping or self._saving:
            return False
        return self._last < self.start or all(number > self._last for number in self._board.steps)

    @property
    def done(self) -> bool:
        """Whether every step is trained and acknowledged, every checkpoint is written, and no task runs."""
        idle = not self._board.steps and not self._saving and self._grants.idle
        return idle and self._steps_done == self.plan.steps

    @property
    def over(self) -> bool:
        """Whether the run is done or stopped."""
        if self._board.steps and not self._stopping:
            return False
        return self.done or self.stopped

    @property
    def complete(self) -> int:
        """The first step that is not behind every stage."""
        return next(iter(self._board.steps), self._steps_done)

    @property
    def in_flight(self) -> int:
        """The number of groups admitted and not yet cleared."""
        return self._board.in_flight

    @property
    def running(self) -> list[Task]:
        """The running tasks, in order of submission."""
        return self._grants.tasks

    def begin(self) -> list[Decision]:
        """Return the first decisions: publish the initial weights, or, without a Refit, admit at once.

        Stages that read only published weights (an evaluation) also run once before the first step of a new run.
        """
        decisions: list[Decision] = []
        if self._transfers:
            step = self._board.steps[self.start - 1] = Step(self.start - 1)
            for stage in self._stages.values():
                if stage.shape == "transfer":
                    self._board.add_reader(step, stage, set(), opening=True)
                elif self.start == 0 and stage.reads and set(stage.reads) <= self._publishes:
                    self._board.add_reader(step, stage, set(map(Weights, stage.reads)), opening=True)
        else:
            self.version = self.start
        if self.plan.pool:
            pool = self._board.pool = Step(self.start)
            for name in self.plan.pool:
                stage = self._stages[name]
                self._board.add_reader(pool, stage, {Version(self.start)} if stage.reads_back else set())
        self._admit(decisions)
        return self._granted(decisions)

    def handle(self, *events: Event) -> list[Decision]:
        """Handle the events of one report. Returns the decisions that follow; tasks start after all events are handled.

        Reports of tasks that have ended or were replaced are ignored.
        """
        decisions: list[Decision] = []
        for event in events:
            match event:
                case Landed() if event.task is None or self._grants.running(event.task):
                    self._land(event, decisions)
                case GroupsDropped() if event.task is None or self._grants.running(event.task):
                    self._drop(event, decisions)
                case Finished() if running := self._grants.running(event.task.number):
                    self._finish(running, event.groups, decisions)
                case ReplicaServed() if running := self._grants.running(event.task.number):
                    self._serve(running, event.replica, decisions)
                case AttemptLost() if running := self._grants.running(event.task.number):
                    self._fail(running, decisions)
                case Saved():
                    self._saving.discard(event.step)
                    for step in self._board.steps.values():
                        self._unblock(step, self._trainers, Checkpoint(event.step + 1))
        return self._granted(decisions)

    def _granted(self, decisions: list[Decision]) -> list[Decision]:
        """Return the decisions, then those that start tasks."""
        started = self._grants.granted()
        for task in started:
            if self._board.pool and self._stages[task.stage].stamps:
                self._board.stamp(task.groups, [task.version] * len(task.groups))
        return decisions + [Run(task) for task in started]

    def stop(self) -> list[Decision]:
        """Admit no more groups and start no more steps.

        Steps in training and the rest of earlier steps are finished, and a checkpoint is written. Groups admitted for
        later steps are admitted again on resume.
        """
        decisions: list[Decision] = []
        if self._stopping:
            return decisions
        self._stopping = True
        begun = {task.step for task in self._grants.tasks if task.stage in self._trainers}
        begun |= {
            number
            for number, step in self._board.steps.items()
            if any(name in step.readers and step.readers[name].done for name in self._trainers)
        }
        self._last = max(begun, default=self._settled)
        for home in self._board.homes:
            if home is self._board.pool or home.number > self._last:
                for reader in home.readers.values():
                    reader.blockers.add(STOPPED)
        if self._saved < self._settled == self._last:
            self._save(self._last, decisions)
        self._grants.look_again()
        return self._granted(decisions)

    def owed(self, task: Task) -> KeysView[int] | None:
        """Return a live view of a task's unacknowledged groups; None if the task has ended or was replaced, in which
        case its reports are ignored."""
        running = self._grants.running(task.number)
        return None if running is None else running.left.keys()

    def waiting(self) -> list[tuple[int, str, tuple[str, ...]]]:
        """Return (step, stage, what it waits for) for every stage in flight with unacknowledged work."""
        rows = []
        for step in self._board.homes:
            for name, reader in step.readers.items():
                if step.groups if reader.total is None else reader.done < reader.total:
                    absent = [field for field in self._board.waits[name] if self.absent(step.number, field)]
                    rows.append((step.number, name, (*sorted(map(str, reader.blockers)), *absent)))
        return rows

    def absent(self, step: int, field: str) -> list[int]:
        """Return the groups of a step, except dropped ones, for which a sample field has not landed."""
        return self._board.absent(step, field)

    def steps_in_flight(self) -> list[int]:
        """Return the unfinished steps, ascending. A pool with groups counts as the batch that it fills."""
        return sorted({step.number for step in self._board.homes if step.groups or step is not self._board.pool})

    # Admission.

    def _admit(self, decisions: list[Decision]) -> None:
        """Admit groups as far as staleness and capacity allow."""
        if self._stopping:
            return
        batch = self.plan.batch
        if pool := self._board.pool:
            asked = self._next_batch * batch + len(pool.groups)
            count = askable(version=self.version, ahead=self.plan.ahead, batch=batch, asked=asked)
            count = min(count, self.plan.steps * batch - asked)
            room = self._board.room(count)
            self._starved = room < count
            if count > 0 and room:
                self._add(pool, room, decisions)
            return
        while self._next_batch < self.plan.steps:
            before = self._board.steps.get(self._next_batch - 1)
            if before and not before.decided:
                return  # more of its groups may still be admitted, and numbers are consecutive
            self._starved = self._board.room(batch) < batch
            if self._starved:
                return
            if not self._transfers and not self._may_generate(self._next_batch):
                return  # without a Refit no stage waits for a version, so admission does
            self._next_batch += 1
            self._open(self._next_batch - 1, decisions)

    def _open(self, number: int, decisions: list[Decision]) -> None:
        """Admit a batch, with every stage that runs at its step."""
        step = self._board.steps[number] = Step(number, decided=not self._board.gate)
        for stage in self._stages.values():
            if stage.runs_at(number, self.plan.steps):
                self._board.add_reader(step, stage, self._blockers(stage, number))
        self._add(step, self.plan.batch, decisions)
        if step.decided:
            self._board.place(step)
            decisions.append(Claim(number, tuple(step.groups)))

    def _add(self, step: Step, count: int, decisions: list[Decision]) -> None:
        """Admit groups: a batch, replacements for dropped groups, or as many as the pool has room for."""
        groups = []
        for _ in range(count):
            if self._pending:
                groups.append(self._pending.popleft())
            else:
                groups.append(self._next_group)
                self._next_group += 1
        decisions.append(Admit(step.number, tuple(groups)))
        self._board.add(step, tuple(groups))

    def _blockers(self, stage: PlannedStage, number: int) -> set[Blocker]:
        """Return the weights, fences, version and checkpoints that a stage waits for at a step."""
        blockers: set[Blocker] = {Weights(field) for field in stage.reads if field not in self._board.sample_fields}
        for before, lag in self._before[stage.name]:
            if self._is_ahead(before, number, lag):
                blockers.add(StageDone(before, number - lag))
        if stage.name in self._trainers:
            blockers |= {Checkpoint(saving + 1) for saving in self._saving}
        if stage.reads_back and not self._may_generate(number):
            blockers.add(self._version_for(number))
        return blockers

    def _is_ahead(self, stage: str, number: int, lag: int) -> bool:
        if lag == 0:
            return self._stages[stage].runs_at(number, self.plan.steps)
        step = self._board.steps.get(number - lag)
        reader = step.readers.get(stage) if step else None
        return reader is not None and reader.total is not None and reader.done < reader.total

    def _may_generate(self, number: int) -> bool:
        """Return whether the published version is recent enough to generate a batch."""
        batch = self.plan.batch
        more = askable(version=self.version, ahead=self.plan.ahead, batch=batch, asked=number * batch)
        return more >= batch and self.version >= self.start

    def _version_for(self, number: int) -> Version:
        """Return the version that a batch waits for before it is generated: the oldest that its samples may have."""
        return Version(max(number - self.plan.ahead, self.start))

    def _has_batch_in_waiting(self) -> bool:
        """Return whether an admitted batch waits for its version, so that admitting another is not urgent."""
        return any(
            self._version_for(number) in reader.blockers
            for number, step in self._board.steps.items()
            for reader in step.readers.values()
        )

    # The claim.

    def _claim(self, pool: Step, decisions: list[Decision]) -> None:
        """Claim batches while enough groups are ready; drop groups that are too old."""
        self._let_go(pool, decisions)
        while groups := self._claimed(pool):
            number = self._next_batch
            for group in groups:
                del self._claimable[group]
            step = Step(number)
            for stage in self._stages.values():
                if stage.name not in pool.readers and stage.runs_at(number, self.plan.steps):
                    self._board.add_reader(step, stage, self._blockers(stage, number))
            freed = self._board.claim(step, groups)
            decisions.append(Claim(number, groups))
            self._next_batch = pool.number = number + 1
            self._clear(number, freed, decisions)
            later = {group: reason for group, reason in pool.refused.items() if group > groups[-1]}
            pool.refused = {} if self.plan.drops_stale else later
            for reader in pool.readers.values():
                reader.step = pool.number
            self._let_go(pool, decisions)
            if self._gives_up(pool, decisions):
                return
        self._admit(decisions)

    def _claimed(self, pool: Step) -> tuple[int, ...]:
        """Return the groups of the next batch: the first that are ready, or, if none may be dropped for its age, those
        that were admitted first. None until as many are ready."""
        batch = self.plan.batch
        if self._next_batch >= self.plan.steps or len(self._claimable) < batch or self._stopping:
            return ()
        if self.plan.drops_stale:
            return tuple(sorted(islice(self._claimable, batch)))
        first = pool.groups[:batch]
        return tuple(first) if all(group in self._claimable for group in first) else ()

    def _let_go(self, pool: Step, decisions: list[Decision]) -> None:
        """Drop ready groups, and cancel groups being sampled, that are too old for the next batch."""
        if not self.plan.drops_stale:
            return
        bound, oldest = self.plan.max_staleness, self._board.oldest
        old = [
            group
            for group in pool.groups
            if group in oldest and too_old(oldest=oldest[group], step=pool.number, max_staleness=bound)
        ]
        if not old:
            return
        gone = set(old)
        self._claimable = {group: None for group in self._claimable if group not in gone}
        cancels = [
            Cancel(running.task, groups)
            for running in self._grants.streams()
            if running.reader.stage.stamps and (groups := tuple(g for g in running.left if g in gone))
        ]
        sampling = {group for cancel in cancels for group in cancel.groups}
        for groups, reason in (
            (tuple(group for group in old if group not in sampling), STALE),
            (tuple(group for group in old if group in sampling), CANCELLED),
        ):
            if groups:
                decisions.append(Drop(pool.number, groups, reason))
                self._clear(pool.number, self._board.leave(pool, groups, reason), decisions)
        decisions += cancels

    # Presence.

    def _land(self, event: Landed, decisions: list[Decision]) -> None:
        if self._board.pool:
            self._board.stamp(event.groups, event.oldest)
        step = self._board.steps.get(event.step)
        published = False
        weights = [field for field in event.fields if field not in self._board.sample_fields]
        if event.groups:
            self._board.measure(event.fields, event.group_bytes)
        if len(weights) < len(event.fields):
            self._board.land(event.groups, tuple(field for field in event.fields if field not in weights))
        for field in weights:
            for reader in step.readers.values() if step else ():
                if (blocker := Weights(field)) in reader.blockers:
                    reader.blockers.discard(blocker)
                    self._grants.offer(reader)
            self._grants.look_again()
            if step and field in self._publishes:
                step.unpublished.discard(field)
                published = not step.unpublished
        if published:
            self._publish(event.step, decisions)
        if step and not step.decided and self._board.gate in event.fields:
            self._kept(step, decisions)

    def _serve(self, running: RunningTask, replica: int, decisions: list[Decision]) -> None:
        """Handle a replica that has a version: it may sample, unless the step has other weights to publish."""
        task, stage = running.task, running.reader.stage
        if self._board.steps[task.step].unpublished <= set(stage.writes):
            self._grants.reach(running, replica)
            self._publish(task.step, decisions)

    def _publish(self, number: int, decisions: list[Decision]) -> None:
        """Publish the version that a step makes, unless it is already published."""
        if self.version <= number:
            self.version = number + 1
            self._generate(decisions)

    def _generate(self, decisions: list[Decision]) -> None:
        """Start the generation that waited for the published version."""
        for step in self._board.homes:
            pooled = step is self._board.pool
            version = Version(self.start) if pooled else self._version_for(step.number)
            if pooled or self._may_generate(step.number):
                self._unblock(step, step.readers, version)
        self._admit(decisions)

    # The gate.

    def _kept(self, step: Step, decisions: list[Decision]) -> None:
        """Handle groups kept by the gate, in a step without a full batch."""
        self._board.place(step)
        if step.kept < self.plan.batch:
            self._refill(step, decisions)
            return
        step.decided = True
        decisions.append(Claim(step.number, tuple(group for group in step.groups if group not in step.dropped)))
        for name, reader in list(step.readers.items()):
            if name in self._board.before_gate and reader.done == reader.total:
                self._over(step, reader, decisions)
        self._admit(decisions)

    def _drop(self, event: GroupsDropped, decisions: list[Decision]) -> None:
        """Drop groups that the gate has dropped, and admit as many replacements."""
        if self.plan.gate is None:
            return
        fresh = [group for group in event.reasons if not self._board.decided(group)]
        step = self._board.home(fresh[0]) if fresh else None
        if step is None:
            return
        for group in fresh:
            step.refused[group] = event.reasons[group]
            self._clear(step.number, self._board.leave(step, (group,), event.reasons[group]), decisions)
        if self._gives_up(step, decisions):
            return
        if step is self._board.pool:
            self._claim(step, decisions)
        else:
            self._board.place(step)
            self._refill(step, decisions)

    def _gives_up(self, step: Step, decisions: list[Decision]) -> bool:
        """End the run if the gate has dropped more groups of a batch than it may."""
        gate, refused = self.plan.gate, self._refused(step)
        if gate is None or not refused:
            return False
        sampled = len(step.groups)
        if step is self._board.pool:
            sampled = len(refused) + sum(map(self._board.decided, step.groups[: self.plan.batch]))
        drops = GateDrops(gate, self.plan.batch, refused)
        problem = drops.problem(self._stages[gate.stage].where, step=step.number, sampled=sampled)
        if problem:
            decisions.append(GiveUp(gate.stage, step.number, problem))
        return problem is not None

    def _refused(self, step: Step) -> dict[int, str]:
        """Return why the gate dropped groups of a batch. Of the pool, those before the last group that the next batch
        can have."""
        if step is self._board.pool and not self.plan.drops_stale and len(step.groups) >= self.plan.batch:
            last = step.groups[self.plan.batch - 1]
            return {group: reason for group, reason in step.refused.items() if group < last}
        return step.refused

    def _refill(self, step: Step, decisions: list[Decision]) -> None:
        """Admit replacements for groups that the gate dropped."""
        if self._stopping:
            return
        undecided = len(step.groups) - len(step.dropped) - step.kept
        if self.plan.ahead == 0 and undecided:
            return  # wait for the whole round, because its replacements are decoded together
        lacking = self.plan.batch - step.kept - undecided
        if lacking > 0:
            self._add(step, lacking, decisions)

    # Results of tasks.

    def _finish(self, running: RunningTask, acknowledged: Sequence[int], decisions: list[Decision]) -> None:
        reader, task = running.reader, running.task
        groups = [group for group in acknowledged if group in running.left]
        self._grants.acknowledge(running, groups)
        reader.done += len(groups) if task.groups else 1
        self._clear(task.step, self._board.release(groups, task.stage), decisions)
        if reader.total is None:
            self._claimable |= dict.fromkeys(self._board.acknowledge(groups))
            if self._board.pool and len(self._claimable) >= self.plan.batch:
                self._claim(self._board.pool, decisions)
        self._settle(reader, task.step, decisions)

    def _settle(self, reader: Reader, number: int, decisions: list[Decision]) -> None:
        """Close a stage of a step if it has acknowledged all its groups."""
        if reader.total is not None and reader.done == reader.total:
            step = self._board.steps[number]
            if step.decided or reader.stage.name not in self._board.before_gate:
                self._over(step, reader, decisions)

    def _fail(self, running: RunningTask, decisions: list[Decision]) -> None:
        """Submit the unacknowledged groups of a lost attempt again, except groups dropped in the meantime."""
        task, reader = running.task, running.reader
        left = self._grants.lose(running)
        unwanted = [group for group in left if (home := self._board.home(group)) and group in home.dropped]
        self._clear(task.step, self._board.release(unwanted, task.stage), decisions)
        again = tuple(group for group in left if group not in unwanted)
        if reader.stage.stamps:
            self._board.unstamp(again)
        if again or not task.groups:
            reader.give_back(again, task.attempt)
            self._grants.offer(reader)
        if unwanted:
            self._board.lessen(reader, len(unwanted))
            self._settle(reader, task.step, decisions)

    def _clear(self, number: int, freed: Sequence[Freed], decisions: list[Decision]) -> None:
        """Clear what nobody holds any more, and admit groups that waited for its room."""
        decisions += [Clear(number, *each) for each in freed]
        if freed and self._starved and not self._has_batch_in_waiting():
            self._admit(decisions)

    def _over(self, step: Step, reader: Reader, decisions: list[Decision]) -> None:
        """Handle a stage that has acknowledged all its groups of a step."""
        step.unfinished -= 1
        number, stage = step.number, reader.stage
        for after, lag in self._after[stage.name]:
            if later := self._board.steps.get(number + lag):
                self._unblock(later, (after,), StageDone(stage.name, number))
        if stage.name in self._settling and number >= self.start:
            settling = [other for name, other in step.readers.items() if name in self._settling]
            if all(other.done == other.total for other in settling):
                self._settled = number
                if self._checkpoint_due(number):
                    self._save(number, decisions)
        if not step.unfinished:
            self._close(number, decisions)

    def _unblock(self, step: Step, names: Iterable[str], blocker: Blocker) -> None:
        """Remove a blocker from stages of a step."""
        for name in names:
            reader = step.readers.get(name)
            if reader and blocker in reader.blockers:
                reader.blockers.discard(blocker)
                self._grants.offer(reader)

    def _checkpoint_due(self, number: int) -> bool:
        every = self.plan.checkpoint_every
        last = number == self._last
        return bool(self._trainers) and (last or bool(every and (number + 1) % every == 0))

    def _save(self, number: int, decisions: list[Decision]) -> None:
        self._saving.add(number)
        self._saved = number
        later = [step for after, step in self._board.steps.items() if after > number]
        for step in later:
            for name in self._trainers & step.readers.keys():
                step.readers[name].blockers.add(Checkpoint(number + 1))
        if self._board.pool:
            later.append(self._board.pool)
        pending = sorted([*self._pending, *(group for step in later for group in step.groups)])
        next_group = self._next_group
        while pending and pending[-1] == next_group - 1:  # trailing groups are covered by `next_group`
            next_group = pending.pop()
        decisions.append(Save(number, next_group, tuple(pending)))

    def _close(self, number: int, decisions: list[Decision]) -> None:
        del self._board.steps[number]
        if number < self.start:
            if number < 0:
                decisions.append(StepDone(number))
            return
        self._steps_done += 1
        decisions.append(StepDone(number))
        if not self._transfers:
            self.version = self._steps_done  # with no weights to publish, a finished step counts as one version
            self._generate(decisions)

    def _can_wait(self, reader: Reader) -> bool:
        """Return whether a stage that no weights depend on may wait for streams: not if a stage waits only for it."""
        if self._stopping:
            return False
        name, number = reader.stage.name, reader.step
        if reader.total is None or self.version > number + 1:
            return False  # pool groups become claimable only after their last stage
        for after, lag in self._after[name]:
            later = self._board.steps.get(number + lag)
            waiter = later.readers.get(after) if later else None
            if waiter and waiter.units and len(waiter.blockers) == 1 and StageDone(name, number) in waiter.blockers:
                return False
        return True
