"""A fake of the workers, data plane and outside processes around a scheduler.

Checks every decision against the plan and its own bookkeeping; it never asks the scheduler about what it decides.

    world = World(planned)
    while world.jobs:
        world.finish(next(iter(world.jobs.values())))
    world.check_end()
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from pipeline.plan.plan import Plan
from pipeline.schedule.events import (
    Admit,
    AttemptLost,
    Cancel,
    Claim,
    Clear,
    Drop,
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
from pipeline.schedule.scheduler import Scheduler

KEPT = "kept"


class Job:
    """A running task: unacknowledged groups, groups already written, and the version each group began with."""

    def __init__(self, task, stage):
        self.task, self.stage = task, stage
        self.left = list(task.groups)
        self.landed, self.decided = set(), set()
        self.first: dict[int, int] = {}
        self.cancelled: set[int] = set()


class World:
    """`drops` returns whether the gate drops a group. `pending` and `next_group` come from a checkpoint."""

    def __init__(
        self,
        planned: Plan,
        *,
        start: int = 0,
        next_group: int | None = None,
        pending: Sequence[int] = (),
        drops: Callable[[int], bool] = lambda group: False,
    ) -> None:
        self.plan, self.start, self.drops = planned, start, drops
        self.stages = {stage.name: stage for stage in planned.stages if stage.shape != "external"}
        self.weights = set(planned.weights_fields)
        self.written = {field for stage in planned.stages for field in stage.writes}
        self.read = {field for stage in planned.stages for field in (*stage.reads, *stage.awaits)}
        self.outside = {f for s in planned.stages if s.shape == "external" for f in s.writes} & self.read
        self.holding = {s.name for s in self.stages.values() if set(s.reads + s.writes) - self.weights}
        self.before_gate = self._ancestors(planned.gate.stage) if planned.gate else set()
        self.log = []
        self.transfers = {stage.name for stage in self.stages.values() if stage.shape == "transfer"}
        self.trainers = {stage.name for stage in self.stages.values() if stage.updates}
        self.replicas = {group.name: group.replicas for group in planned.groups}
        self.numbers = [*pending]  # to be admitted in this order, followed by the numbers from `next_group` on
        self.next_group = start * planned.batch if next_group is None else next_group
        self.version = start - 1 if self.transfers else start
        self.admitted: dict[int, int] = {}  # group -> step at its admission
        self.batches: dict[int, tuple[int, ...]] = {}
        self.step_of: dict[int, int] = {}  # claimed group -> step
        self.dropped: dict[int, str] = {}
        self.cleared: set[int] = set()
        self.freed: set[tuple[str, int]] = set()  # (partition, group)
        self.landed: set[tuple[str, int]] = set()  # (field, group), and (weights, step)
        self.age: dict[int, int] = {}  # group -> version of its oldest token, or of the weights it started with
        self.acked: set[tuple[str, int | tuple[int]]] = set()  # (stage, group), or (stage, (step,)) without groups
        self.ready: list[int] = []  # groups of the pool, in the order in which every pool stage acknowledged them
        self.attempts: dict[tuple[str, int | tuple[int]], int] = {}  # latest attempt of everything handed out
        self.lost: set[tuple[str, int | tuple[int]]] = set()  # to be handed out again
        self.jobs: dict[int, Job] = {}
        self.over: list = []  # tasks that have ended or are lost
        self.ran: list = []  # all tasks, in the order handed out
        self.saving: list[int] = []
        self.saves: dict[int, Save] = {}
        self.saved: list[int] = []
        self.done: list[int] = []
        self.gave_up: GiveUp | None = None
        self.numbered: set[int] = set()
        self.has: dict[tuple[str, int], int] = {}  # worker group, replica -> its version
        self.stopping = False
        self.scheduler = Scheduler(planned, start=start, next_group=next_group, pending=pending)
        self.take(self.scheduler.begin())

    def _ancestors(self, name):
        writer = {field: stage for stage in self.stages.values() for field in stage.writes}
        found, todo = {name}, [name]
        while todo:
            for field in self.stages[todo.pop()].reads:
                if field in writer and writer[field].name not in found:
                    found.add(writer[field].name)
                    todo.append(writer[field].name)
        return found

    # Decisions of the scheduler.

    def tell(self, event):
        """Send an event to the scheduler and apply its decisions. After GiveUp, nothing is sent."""
        if self.gave_up is None:
            decisions = self.scheduler.handle(event)
            self.log.append((event, decisions))
            self.take(decisions)
            self.check_freed(event, decisions)
            return decisions
        return []

    def take(self, decisions):
        for decision in decisions:
            getattr(self, f"take_{type(decision).__name__.lower()}")(decision)
        self.check_now()

    def take_admit(self, decision: Admit):
        assert decision.groups
        for group in decision.groups:
            if self.numbers:
                assert group == self.numbers.pop(0), "what the checkpoint left comes first, in order"
            else:
                assert group == self.next_group, "numbers count up without a gap"
                self.next_group += 1
            assert group not in self.admitted
            self.admitted[group] = decision.step
        held = [group for group in self.admitted if group not in self.cleared]
        if self.plan.pool:
            assert len(held) <= self.plan.capacity
            assert decision.step == self.next_batch
            bound = (self.plan.ahead + self.version + 1) * self.plan.batch
            assert self.start * self.plan.batch + len(self.admitted) - len(self.dropped) <= bound
        else:
            assert len([group for group in held if group not in self.dropped]) <= self.plan.capacity
            assert decision.step in (self.next_batch, self.next_batch - (not self.plan.gate))

    def take_claim(self, decision: Claim):
        step, groups = decision.step, decision.groups
        assert step == self.next_batch and step < self.plan.steps
        assert len(groups) == len(set(groups)) == self.plan.batch and list(groups) == sorted(groups)
        for group in groups:
            assert group not in self.step_of and group not in self.dropped and group in self.admitted
        if self.plan.pool:
            first = self.ready if self.plan.on_stale == "drop" else self.pooled
            assert list(groups) == sorted(first[: self.plan.batch]), "ready first, or in order"
            self.ready = [group for group in self.ready if group not in groups]
            assert all((name, group) in self.acked for name in self.plan.pool for group in groups)
            assert all(self.age[group] >= step - self.plan.max_staleness for group in groups if group in self.age)
        else:
            mine = [group for group, at in self.admitted.items() if at == step and group not in self.dropped]
            assert list(groups) == sorted(mine)
            assert not self.plan.gate or all((KEPT, group) in self.landed for group in groups)
        self.batches[step] = groups
        self.step_of |= dict.fromkeys(groups, step)

    @property
    def pooled(self):
        """Return the groups of the pool, in the order of their numbers."""
        return sorted(set(self.admitted) - set(self.step_of) - set(self.dropped))

    @property
    def next_batch(self):
        return self.start + len(self.batches)

    def take_drop(self, decision: Drop):
        assert self.plan.on_stale == "drop" and decision.groups and decision.step == self.next_batch
        for group in decision.groups:
            assert group not in self.dropped and group not in self.step_of and group not in self.cleared
            assert self.age[group] < decision.step - self.plan.max_staleness, "young enough"
            sampling = any(group in job.left for job in self.jobs.values() if job.stage.shape == "stream")
            assert decision.reason == ("cancelled" if sampling else "stale")
            self.lose(group, decision.reason)

    def lose(self, group, reason):
        self.dropped[group] = reason
        self.lost = {(name, at) for name, at in self.lost if at != group}
        if group in self.ready:
            self.ready.remove(group)

    def take_cancel(self, decision: Cancel):
        job = self.jobs[decision.task.number]
        assert job.stage.shape == "stream" and decision.task == job.task and decision.groups
        for group in decision.groups:
            assert group in job.left and self.dropped[group] == "cancelled" and group not in job.cancelled
            job.cancelled.add(group)

    def take_clear(self, decision: Clear):
        assert decision.groups
        for group in decision.groups:
            assert group in self.admitted and group not in self.cleared
            assert not decision.last or self.is_clearable(group), group
            for partition in self.plan.partitions:
                if partition.name in decision.partitions:
                    assert (partition.name, group) not in self.freed and self.is_free(partition, group)
                    self.freed.add((partition.name, group))
                assert not decision.last or not self.holders(partition, group) or (partition.name, group) in self.freed
            if decision.last:
                self.cleared.add(group)
        assert decision.last or decision.partitions

    def take_save(self, decision: Save):
        step = decision.step
        assert self.transfers <= {name for name in self.transfers if (name, (step,)) in self.acked}
        assert not any(self.stages[task.stage].updates and task.step > step for task in self.ran), "trained already"
        behind = {group for group, at in self.step_of.items() if at <= step}
        come = [group for group in self.admitted if group not in behind]
        if self.plan.pool:
            come = [group for group in come if group not in self.dropped]
        else:
            come = [group for group in come if self.admitted[group] > step]
        come = sorted([*come, *self.numbers])
        assert [*decision.pending, *range(decision.next_group, self.next_group)] == come
        self.saving.append(step)
        self.saves[step] = decision

    def take_stepdone(self, decision: StepDone):
        step = decision.step
        assert step not in self.done and not any(job.task.step == step for job in self.jobs.values() if self.steps(job))
        if step >= 0:
            for name in self.stages:
                assert self.is_complete(name, step), (name, step)
        self.done.append(step)

    def steps(self, job):
        """Return whether the job belongs to a step, not to the pool."""
        return job.task.stage not in self.plan.pool

    def take_giveup(self, decision: GiveUp):
        self.gave_up = decision

    def take_run(self, decision: Run):
        task = decision.task
        stage = self.stages[task.stage]
        assert task.number not in self.numbered
        self.numbered.add(task.number)
        assert list(task.groups) == sorted(task.groups)
        assert bool(task.groups) == (task.stage in self.holding and task.step >= self.start)
        for at in task.groups or ((task.step,),):
            key = (task.stage, at)
            assert key not in self.acked and at not in self.dropped
            assert not any(
                key[0] == job.task.stage and at in (job.left or [(job.task.step,)]) for job in self.jobs.values()
            )
            assert (key in self.attempts) == (key in self.lost), "handed out twice"
            assert task.attempt == (self.attempts[key] + 1 if key in self.lost else 0)
            self.attempts[key] = task.attempt
            self.lost.discard(key)
        self.check_fields(task, stage)
        self.check_order(task, stage)
        self.check_place(task, stage)
        self.jobs[task.number] = Job(task, stage)
        self.ran.append(task)
        if stage.stamps:
            for group in task.groups:
                if (stage.stamps, group) not in self.landed:
                    self.age[group] = task.version

    def check_fields(self, task, stage):
        opening = task.step < self.start
        wanted = [field for field in stage.reads if field not in self.weights]
        if self.plan.gate and stage.name in self.holding and stage.name not in self.before_gate:
            wanted.append(KEPT)
        if self.plan.gate and stage.name == self.plan.gate.stage:
            wanted += self.outside
        for group in task.groups:
            assert all((field, group) in self.landed for field in wanted), (task, wanted)
            if stage.name in self.plan.pool:
                assert group not in self.step_of and task.step == self.next_batch
            else:
                assert self.step_of.get(group, self.admitted[group]) == task.step
        for field in stage.reads:
            if field in self.weights:
                assert (field, task.step) in self.landed or (opening and stage.shape == "transfer")
        assert task.version == max(self.version, 0)
        if stage.reads_back:
            assert self.version >= max(self.start, task.step - self.plan.ahead)

    def check_order(self, task, stage):
        """Check fences, the order of the trainer's steps, checkpoints, and age."""
        for fence in self.plan.fences:
            if fence.after == stage.name:
                assert self.is_complete(fence.before, task.step - fence.lag), fence
        if stage.name in self.trainers:
            assert not self.saving, "the weights must not change while they are saved"
            assert self.is_complete(stage.name, task.step - 1), "batch after batch"
            for group in task.groups:
                assert self.age.get(group, task.step) >= task.step - self.plan.max_staleness, "too old"
                assert task.step == self.step_of[group]

    def version_on(self, task):
        """Return the policy version on the task's replica."""
        group = self.stages[task.stage].groups[0]
        if group not in {self.stages[name].groups[-1] for name in self.transfers}:
            return self.version
        return self.has.get((group, task.replica or 0), self.start - 1)

    def check_place(self, task, stage):
        mine = [job for job in self.jobs.values() if stage.groups[-1] in job.stage.groups]
        mine_has = self.version_on(task)
        busy = [job for job in mine if job.stage.shape != "stream"]
        if stage.shape == "transfer":
            assert task.replica is None
            assert not [
                j for j in self.jobs.values() if j.stage.shape != "stream" and set(stage.groups) & set(j.stage.groups)
            ]
            assert self.plan.refit == "in_flight" or len(mine) == len(busy), "sequences are being sampled"
        elif stage.shape == "stream":
            assert 0 <= task.replica < self.replicas[stage.groups[0]]
            swaps = [job for job in busy if job.stage.shape == "transfer"]
            assert all(mine_has == job.task.step + 1 for job in swaps), "its weights are being swapped"
            assert mine_has >= self.version, "it has older weights"
        elif stage.sharding:
            assert task.replica is None and not busy
        else:
            assert 0 <= task.replica < self.replicas[stage.groups[0]]
            assert not any(job.task.replica in (None, task.replica) for job in busy), "a replica runs one task"
            assert stage.per != "batch" or task.replica == 0

    # State.

    def is_complete(self, name, step):
        """Return whether a stage has acknowledged all of a step; also True if it does not run at that step."""
        stage = self.stages[name]
        if step < self.start:
            opens = step == self.start - 1 and name in self.transfers
            opens |= step == -1 and self.start == 0 and bool(stage.reads) and set(stage.reads) <= self.published_fields
            return not (opens and self.transfers) or (name, (step,)) in self.acked
        if not stage.runs_at(step, self.plan.steps):
            return True
        if name not in self.holding:
            return (name, (step,)) in self.acked
        if name not in self.plan.pool and self.running(name) and any(at == step for _, at, _ in self.running(name)):
            return False
        return step in self.batches and all((name, group) in self.acked for group in self.batches[step])

    @property
    def published_fields(self):
        return {field for name in self.transfers for field in self.stages[name].writes}

    def holders(self, partition, group):
        """Return the stages that hold a group's part of a partition at some time; every stage if an outside process
        writes it."""
        step = self.step_of.get(group, None if self.plan.pool else self.admitted[group])
        names = partition.holders or self.holding
        return [
            name
            for name in names
            if name in self.plan.pool or step is None or self.stages[name].runs_at(step, self.plan.steps)
        ]

    def is_free(self, partition, group):
        """Return whether every holder of a group's part of a partition has let go of it."""
        if not partition.holders:
            return self.is_clearable(group)
        holders = self.holders(partition, group)
        if any(group in job.left for job in self.jobs.values() if job.stage.name in holders):
            return False
        return group in self.dropped or all((name, group) in self.acked for name in holders)

    def is_clearable(self, group):
        if any(group in job.left for job in self.jobs.values()):
            return False
        if group in self.dropped:
            return True
        step = self.step_of.get(group)
        if step is None:
            return False
        mine = {name for name in self.holding if self.stages[name].runs_at(step, self.plan.steps)}
        return all((name, group) in self.acked for name in mine)

    def check_now(self):
        """Check the invariants that hold after every event."""
        if self.gave_up is not None:
            return
        live = set(self.admitted) - self.cleared
        assert self.scheduler.in_flight == len(live)
        assert not any(self.is_clearable(group) for group in live), "cleared in the same transaction"
        finished = len(self.batches) == self.plan.steps - self.start and not live
        assert self.scheduler.done == (finished and not self.jobs and not self.saving and self.all_done)
        if not self.scheduler.done and not self.stopping:
            waits = self.scheduler.waiting()
            assert self.jobs or self.saving or self.absent(), f"nothing will ever happen: {waits}"
        if self.plan.pool:
            too_old = self.next_batch - self.plan.max_staleness
            for group, age in self.age.items():
                assert group in self.dropped or group in self.step_of or age >= too_old, "not let go"
            claims = self.next_batch < self.plan.steps and not self.stopping
            first = self.pooled[: self.plan.batch]
            whole = set(first) <= set(self.ready) or self.plan.on_stale == "drop"
            assert len(self.ready) < self.plan.batch or not whole or not claims, "not claimed"

    def check_freed(self, event, decisions):
        """Check that what nobody holds any more is cleared in the transaction that makes it so."""
        task = getattr(event, "task", None)
        groups = {*getattr(event, "reasons", ()), *getattr(task, "groups", ())}
        for decision in decisions:
            groups |= set(decision.groups) if isinstance(decision, Claim | Drop) else set()
        for group in groups & self.admitted.keys() - self.cleared:
            for partition in self.plan.partitions:
                held = self.holders(partition, group) and (partition.name, group) not in self.freed
                assert not held or not self.is_free(partition, group), (partition.name, group)

    @property
    def all_done(self):
        return {step for step in self.done if step >= 0} == set(range(self.start, self.plan.steps))

    def absent(self):
        """Return each (field, group) that an outside process has yet to write."""
        live = [group for group in self.admitted if group not in self.cleared and group not in self.dropped]
        return [(field, group) for field in sorted(self.outside) for group in live if (field, group) not in self.landed]

    def job(self, stage: str, step: int | None = None) -> Job:
        """Return the first running task of a stage."""
        return next(
            job for job in self.jobs.values() if job.task.stage == stage and (step is None or job.task.step == step)
        )

    def running(self, *stages: str) -> list[tuple]:
        """Return (stage, step, groups) of running tasks, sorted; only of these stages if any are given."""
        tasks = [job.task for job in self.jobs.values() if not stages or job.task.stage in stages]
        return sorted((task.stage, task.step, task.groups) for task in tasks)

    # Reports of workers and outside processes.

    def land(self, job: Job, groups: Sequence[int], *, began: Callable[[int], int] | None = None):
        """Report that a job wrote all its fields for groups; a gate decides on them. `began` gives first versions."""
        task, stage = job.task, job.stage
        kept = [group for group in groups if not self.is_gate(stage) or not self.drops(group)]
        events = []
        for group in kept:
            job.first.setdefault(group, began(group) if began else self.version)
        fields = tuple(field for field in stage.writes if field not in self.weights)
        if kept and fields:
            oldest = ()
            if stage.stamps:
                oldest = tuple(job.first[group] for group in kept)
                for group, version in zip(kept, oldest):
                    if (stage.stamps, group) not in self.landed:
                        self.age[group] = version
            self.landed |= {(field, group) for field in fields for group in kept}
            events.append(Landed(task.step, tuple(kept), fields, oldest=oldest, task=task.number))
        fresh = [group for group in groups if group not in kept]
        if fresh:
            events.append(GroupsDropped(task.step, dict.fromkeys(fresh, "equal"), task=task.number))
        job.landed |= set(groups)
        for event in events:
            for group in event.reasons if isinstance(event, GroupsDropped) else ():
                if group not in self.dropped and (KEPT, group) not in self.landed:
                    self.lose(group, "equal")
            self.tell(event)

    def is_gate(self, stage):
        return self.plan.gate is not None and stage.name == self.plan.gate.stage

    def serve(self, job: Job, replica: int):
        """Report that one replica has what a transfer brings; others may not have it yet."""
        task, stage = job.task, job.stage
        missing = [field for field in self.published_fields if (field, task.step) not in self.landed]
        if set(missing) <= set(stage.writes):
            self.has[stage.groups[-1], replica] = task.step + 1
            landed = {self.stages[name].groups[-1] for name in self.transfers} - {stage.groups[-1]}
            self.has |= {(group, each): task.step + 1 for group in landed for each in range(self.replicas[group])}
            self.version = max(self.version, task.step + 1)
        return self.tell(ReplicaServed(task, replica))

    def land_weights(self, job: Job):
        task, stage = job.task, job.stage
        fields = tuple(field for field in stage.writes if field in self.weights)
        if fields:
            again = all((field, task.step) in self.landed for field in fields) or task.step < self.version
            self.landed |= {(field, task.step) for field in fields}
            whole = all((field, task.step) in self.landed for field in self.published_fields)
            if stage.name in self.transfers and whole:
                assert task.step + 1 == self.version + (not again), "published versions rise by one"
                self.version = task.step + 1
                for name in self.transfers:
                    target = self.stages[name].groups[-1]
                    self.has |= {(target, replica): self.version for replica in range(self.replicas[target])}
            self.tell(Landed(task.step, (), fields, task=task.number))

    def acknowledge(self, job: Job, groups: Sequence[int]):
        """Report that a job has finished groups; a job without remaining groups has ended."""
        task = job.task
        for group in groups:
            job.left.remove(group)
            self.acked.add((task.stage, group))
            pooled = task.stage in self.plan.pool and group not in self.dropped
            if pooled and all((name, group) in self.acked for name in self.plan.pool):
                self.ready.append(group)
        if not task.groups:
            self.acked.add((task.stage, (task.step,)))
        if not job.left:
            self.end(job)
        if not job.left:
            self.count_steps()
        return self.tell(Finished(task, tuple(groups)))

    def count_steps(self):
        """Count finished steps as versions if no weights are published."""
        if not self.transfers:
            steps = range(self.start, self.plan.steps)
            done = sum(all(self.is_complete(name, step) for name in self.stages) for step in steps)
            self.version = self.start + done

    def end(self, job: Job):
        del self.jobs[job.task.number]
        self.over.append(job.task)

    def fail(self, job: Job):
        """Report that the attempt is lost. Unacknowledged groups are handed out again unless they were dropped."""
        self.end(job)
        task = job.task
        for at in job.left or ((task.step,),):
            if at not in self.dropped:
                self.lost.add((task.stage, at))
                if job.stage.stamps and (job.stage.stamps, at) not in self.landed:
                    self.age.pop(at, None)
        group = job.stage.groups[0]
        for other in self.jobs.values():
            if job.stage.shape == "stream" and other.stage.shape == "transfer" and other.stage.groups[-1] == group:
                self.has[group, task.replica] = other.task.step  # its replacement has the previously served version
        return self.tell(AttemptLost(task))

    def finish(self, job: Job, groups: Sequence[int] | None = None):
        """Finish a job, or only `groups` of it; groups whose cancellation was requested are not written."""
        groups = tuple(job.left) if groups is None else tuple(groups)
        self.land_weights(job)
        if wanted := [group for group in groups if group not in job.cancelled]:
            self.land(job, wanted)
        if self.gave_up is None:
            self.acknowledge(job, groups)

    def save(self):
        step = self.saving.pop(0)
        self.saved.append(step)
        return self.tell(Saved(step))

    def from_outside(self, index: int):
        """Write one awaited value as an outside process would."""
        field, group = self.absent()[index]
        step = self.step_of.get(group, self.next_batch if self.plan.pool else self.admitted[group])
        assert group in self.scheduler.absent(step, field)
        self.landed.add((field, group))
        return self.tell(Landed(step, (group,), (field,)))

    def step(self, choose: Callable[[int], int], slow: Container[int] = ()) -> bool:
        """Make one report without a fault, chosen by `choose(count)`. False if there is nothing to report.

        A stream yields one group or all that remain. Neither streams nor outside processes write the groups in `slow`.
        Other tasks may write a group before they acknowledge all."""
        jobs = [
            job for job in self.jobs.values() if job.stage.shape != "stream" or self.quick(job, slow) or not job.left
        ]
        outside = [i for i, (_, group) in enumerate(self.absent()) if group not in slow]
        count = len(jobs) + len(self.saving) + len(outside)
        if not count or self.gave_up is not None:
            return False
        index = choose(count)
        if index < len(jobs):
            job = jobs[index]
            fresh = [group for group in job.left if group not in job.landed]
            if quick := self.quick(job, slow):
                self.finish(job, [quick[choose(len(quick))]] if choose(2) else quick)
            elif job.stage.shape == "map" and fresh and not choose(3):
                self.land(job, [fresh[choose(len(fresh))]])
            else:
                self.finish(job)
        elif index < len(jobs) + len(self.saving):
            self.save()
        else:
            self.from_outside(outside[index - len(jobs) - len(self.saving)])
        return True

    def quick(self, job: Job, slow: Container[int]) -> list[int]:
        """Return the groups that a stream can yield now."""
        return [group for group in job.left if group not in slow] if job.stage.shape == "stream" else []

    def run(self, choose: Callable[[int], int], limit: int = 5_000) -> World:
        """Run without faults to the end."""
        for _ in range(limit):
            if not self.step(choose):
                return self
        raise AssertionError("it does not end")

    def stop(self):
        """Ask the scheduler to stop and return the last step whose training has started."""
        self.stopping = True
        last = max((task.step for task in self.ran if self.stages[task.stage].updates), default=self.start - 1)
        decisions = self.scheduler.stop()
        self.take(decisions)
        assert self.scheduler.stop() == []
        return last

    def check_stopped(self, last: int):
        """Check that all training started before the stop is finished and saved, and nothing more was admitted."""
        assert self.scheduler.stopped, self.scheduler.waiting()
        trained = [task.step for task in self.ran if self.stages[task.stage].updates]
        assert max(trained, default=self.start - 1) == last
        if last >= self.start:
            assert self.saved[-1] == last and {*range(self.start, last + 1)} <= {*self.done}

    def check_end(self):
        """Check that every group kept was trained once and nothing is left."""
        assert self.scheduler.done and not self.jobs, self.scheduler.waiting()
        steps = range(self.start, self.plan.steps)
        assert list(self.batches) == list(steps)
        assert self.cleared == set(self.admitted) == set(self.step_of) | set(self.dropped)
        assert not set(self.step_of) & set(self.dropped)
        for name in self.holding:
            had = {group for stage, group in self.acked if stage == name}
            want = {g for step, groups in self.batches.items() for g in groups if self.runs_at(name, step)}
            assert want <= had <= set(self.admitted)
        every = self.plan.checkpoint_every
        due = [s for s in steps if self.trainers and (s + 1 == self.plan.steps or (every and (s + 1) % every == 0))]
        assert sorted(self.saved) == due
        assert self.scheduler.version == self.version == self.plan.steps
        assert self.scheduler.waiting() == [] and self.scheduler.steps_in_flight() == []

    def runs_at(self, name, step):
        return self.stages[name].runs_at(step, self.plan.steps)
