"""Runs a plan in virtual time: the same scheduler, no engine, no data plane, no worker process.

It hands the scheduler's decisions to workers that only take time, as `Durations` says, and writes the events that a
real run writes, so that whatever reads the record of a run reads that of a simulation.

    simulation = Simulation(plan, Durations({"rollout": Drawn(parse("lognormal(1.0, 0.8)")), ...}))
    events = simulation.run()

Tasks that compute at the same time share the cores of their machine (`pipeline.simulation.sharing`). The driver takes
one report after the other. `faults` makes attempts fail; see `Fault`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pipeline.declare.task import Task
from pipeline.errors import Problem, StageError
from pipeline.plan.plan import Plan, PlannedStage
from pipeline.record import trace
from pipeline.schedule.events import (
    Admit,
    Cancel,
    Claim,
    Clear,
    Decision,
    Drop,
    Dropped,
    Event,
    Failed,
    Finished,
    GiveUp,
    Landed,
    Run,
    Save,
    Saved,
    Served,
    StepDone,
)
from pipeline.schedule.scheduler import Scheduler
from pipeline.simulation.durations import Durations, Recorded
from pipeline.simulation.workers import ALONE, Attempt, Fault, Workers, Written

__all__ = ["Fault", "Simulation"]


class Simulation:
    """One run of a plan in virtual time.

    `cores` are those of each machine, None where nothing contends; `nodes` says on which machine a worker is, by group
    and rank, and those that it leaves out share one; `one_process` has all workers take turns in one process, as the
    local executor does. `write` gets the events in place of the list that `run` returns. `watch(now_s, events,
    decisions)` sees everything that the scheduler is told and decides. At `stop_s` the run is asked to stop.
    """

    def __init__(
        self,
        plan: Plan,
        durations: Durations,
        *,
        seed: int = 0,
        cores: float | None = None,
        nodes: Mapping[tuple[str, int], str] | None = None,
        one_process: bool = False,
        faults: Callable[[Task], Fault | None] | None = None,
        write: Callable[[trace.TraceEvent], object] | None = None,
        watch: Callable[[float, tuple[Event, ...], list[Decision]], object] | None = None,
        stop_s: float | None = None,
    ) -> None:
        self.plan, self.durations, self.seed = plan, durations, seed
        self.scheduler = Scheduler(plan)
        self.events: list[trace.TraceEvent] = []
        self._write = write or self.events.append
        self._faults, self._watch = faults, watch
        self._nodes = nodes or {}
        self._pid = int(one_process)  # 0: every worker is a process of its own
        self._workers = Workers(
            plan, durations, seed=seed, cores=cores, nodes=self._nodes, one_process=one_process,
            report=self._reported, lost=self._lost, reached=self._reached,
        )  # fmt: skip
        self._clock = self._workers.clock
        self._stop_s = stop_s
        self._stages = {stage.name: stage for stage in plan.stages}
        weights = frozenset(plan.weights_fields)
        self._makes = {stage.name: tuple(f for f in stage.writes if f in weights) for stage in plan.stages}
        self._external = [stage for stage in plan.stages if stage.shape == "external"]
        self._stamps = {stage.stamps for stage in plan.stages if stage.stamps}
        ragged = {edge.ragged for edge in plan.edges if edge.field in self._stamps and edge.ragged}
        self._per_token = {  # by stage, the fields that it reads with a value a token
            stage.name: [edge.field for edge in plan.edges if edge.reader == stage.name and edge.ragged in ragged]
            for stage in plan.stages
        }
        self._replicas = {group.name: group.replicas for group in plan.groups}
        self._dispatch_s = durations.costs.dispatch_s
        self._attempts: dict[int, Attempt] = {}
        self._driver_free_s = 0.0
        self._tokens: dict[int, int] = {}
        self._versions: dict[int, tuple[int, int]] = {}
        self._published_s = 0.0
        self._took_s: dict[int, float] = {}

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self._clock.now_s

    def run(self) -> list[trace.TraceEvent]:
        """Run every step. Raises StageError where the plan cannot go on, as a real run would."""
        plan = self.plan
        self._write(
            trace.Started(graph=plan.name, start=0, steps=plan.steps, executor="simulated", monotonic_s=0.0, wall_s=0.0)
        )
        for lanes in self._workers.lanes.values():
            for name, rank, _ in lanes:
                node = self._nodes.get((name, rank), ALONE)
                self._write(trace.Placed(group=name, worker=rank, node=node, pid=self._pid))
        self._decide((), self.scheduler.begin())
        if self._stop_s is not None:
            self._clock.at(self._stop_s, self._stop)
        self._clock.run()
        if not self.scheduler.done and not self.scheduler.stopped:
            raise StageError(self._stuck())
        if self.scheduler.done:
            self._write(trace.Ended(steps=plan.steps, rows_left=self.scheduler.in_flight, at_s=self.now_s))
        else:
            self._write(trace.Failed(stage=None, step=None, error="interrupted", problems=(), at_s=self.now_s))
        return self.events

    def _stop(self) -> None:
        self._write(trace.Stopping(at_s=self.now_s))
        self._decide((), self.scheduler.stop())

    def _tell(self, *events: Event) -> None:
        self._decide(events, self.scheduler.handle(*events))

    def _decide(self, events: tuple[Event, ...], decisions: list[Decision]) -> None:
        now_s, write = self._clock.now_s, self._write
        if self._watch:
            self._watch(now_s, events, decisions)
        for decision in decisions:
            match decision:
                case Run():
                    self._submit(decision.task)
                case Clear(step=step, groups=groups):
                    write(trace.Cleared(step=step, groups=groups, start_s=now_s, end_s=now_s))
                case Admit(step=step, groups=groups):
                    write(trace.Admitted(step=step, groups=groups, version=self.scheduler.version, at_s=now_s))
                    for stage in self._external:
                        self._await(stage, decision)
                case Claim(step=step, groups=groups):
                    write(trace.Claimed(step=step, groups=groups, at_s=now_s))
                case Drop(step=step, groups=groups, reason=reason):
                    self._dropped("", step, groups, reason)
                case Cancel(task=task, groups=groups):
                    delay_s = self._dispatch_s.get(task.stage, 0.0)
                    self._clock.after(delay_s, self._workers.cancel, self._attempts[task.number], groups)
                case Save():
                    self._save(decision.step)
                case StepDone(step=step):
                    metrics = {"time/step_s": self._took_s.pop(step)} if step in self._took_s else {}
                    write(trace.StepEnded(step=step, metrics=metrics, at_s=now_s))
                case GiveUp():
                    raise StageError(decision.problem)

    def _submit(self, task: Task) -> None:
        stage, size = self._stages[task.stage], self.plan.group_size
        groups = task.groups[: stage.first_groups]
        shares = self._replicas[stage.groups[0]] if task.replica is None and stage.sharding else 1
        times = self.durations.stages[task.stage]
        tokens = 0
        if isinstance(times, Recorded) and times.line.per_token_s:
            tokens = sum(self._tokens.get(group, 0) for group in groups) * size // shares
        fault = self._faults(task) if self._faults else None
        attempt = Attempt(task, stage, -(-len(groups) * size // shares), tokens, fault)
        self._attempts[task.number] = attempt
        self._write(
            trace.Submitted(
                **attempt.told, group=stage.groups[0],
                replica=task.replica, groups=task.groups, samples=len(task.groups) * size, version=task.version,
                at_s=self._clock.now_s,
            )
        )  # fmt: skip
        if delay_s := self._dispatch_s.get(task.stage):
            self._clock.after(delay_s, self._workers.begin, attempt)
        else:
            self._workers.begin(attempt)  # which tells nothing before time has passed

    # What workers tell. It takes a while to arrive, and the driver takes one report after the other.

    def _reported(self, attempt: Attempt, groups: tuple[int, ...], written: Sequence[Written]) -> None:
        self._clock.at(self._arrives(attempt), self._take, attempt, groups, written)

    def _lost(self, attempt: Attempt, reason: str) -> None:
        self._clock.at(self._arrives(attempt), self._failed, attempt, reason)

    def _reached(self, attempt: Attempt, replica: int) -> None:
        self._clock.at(self._arrives(attempt), self._serve, attempt.task, replica)

    def _serve(self, task: Task, replica: int) -> None:
        """The driver learns that a replica has a version."""
        if self.scheduler.is_current(task):
            version, now_s = task.step + 1, self._clock.now_s
            self._write(trace.Served(**trace.of(task), replica=replica, version=version, at_s=now_s))
            self._tell(Served(task, replica))

    def _arrives(self, attempt: Attempt) -> float:
        costs = self.durations.costs
        at_s = self._clock.now_s + costs.report_s.get(attempt.task.stage, 0.0)
        if costs.driver_s:
            at_s = self._driver_free_s = max(at_s, self._driver_free_s) + costs.driver_s
        return at_s

    def _take(self, attempt: Attempt, groups: tuple[int, ...], written: Sequence[Written]) -> None:
        """The driver takes a report: the task has done `groups`, and `written` is what its worker recorded."""
        task, stage = attempt.task, attempt.stage
        fresh = self.scheduler.is_current(task) and (not groups or not attempt.owed.keys().isdisjoint(groups))
        landed: tuple[int, ...] = ()
        events: list[Event] = []
        for event in written:
            if fresh:
                self._write(event)
            if isinstance(event, trace.Put):
                landed = event.groups
                if fresh and event.versions:
                    self._versions.update(zip(landed, event.versions))
                    self._tokens.update(zip(landed, event.tokens))
                oldest = tuple(old for old, _ in event.versions) if event.versions else ()
                events.append(Landed(task.step, landed, event.fields, oldest, task.number))
        if fresh and stage.updates and not self._stamps.isdisjoint(stage.reads):
            self._write(self._trained(attempt))
        if weights := self._makes[task.stage]:
            if fresh and stage.shape == "transfer":
                self._publish(task)
            events.append(Landed(task.step, (), weights, (), task.number))
        if self.plan.gate and stage.name == self.plan.gate.stage and len(landed) < len(groups):
            gone = tuple(group for group in groups if group not in set(landed))
            reason = self.durations.costs.drop_reason
            if fresh:
                self._dropped(stage.name, task.step, gone, reason)
            events.append(Dropped(task.step, dict.fromkeys(gone, reason), task.number))
        if fresh or attempt.replaced:  # the same report for the second time says nothing
            told = trace.Acknowledged if fresh else trace.Fenced
            self._write(told(**attempt.told, groups=groups, at_s=self._clock.now_s))
        for group in groups:
            attempt.owed.pop(group, None)
        if not attempt.owed:
            self._attempts.pop(task.number, None)
        self._tell(*events, Finished(task, groups))

    def _failed(self, attempt: Attempt, reason: str) -> None:
        """The driver learns that an attempt is lost."""
        task = attempt.task
        if self.scheduler.is_current(task):
            attempt.replaced = True
            self._write(
                trace.Retried(
                    **attempt.told,
                    groups=tuple(attempt.owed), reason=reason, at_s=self._clock.now_s,
                )
            )  # fmt: skip
        self._attempts.pop(task.number, None)
        self._tell(Failed(task))

    def _dropped(self, stage: str, step: int, groups: tuple[int, ...], reason: str) -> None:
        tokens = tuple(self._tokens.get(group, 0) for group in groups)
        self._write(
            trace.Dropped(stage=stage, step=step, groups=groups, reason=reason, tokens=tokens, at_s=self._clock.now_s)
        )

    def _publish(self, task: Task) -> None:
        version, now_s = task.step + 1, self._clock.now_s
        sha256 = f"{version:064x}"
        self._write(trace.Published(stage=task.stage, step=task.step, version=version, sha256=sha256, at_s=now_s))
        if task.step >= 0:
            self._took_s[task.step] = now_s - self._published_s
        self._published_s = now_s

    def _trained(self, attempt: Attempt) -> trace.Trained:
        task, size = attempt.task, self.plan.group_size
        versions = [self._versions[group] for group in task.groups]
        tokens = sum(self._tokens.get(group, 0) for group in task.groups) * size
        return trace.Trained(
            **attempt.told, worker=0, version=task.step,
            groups=task.groups, samples=(size,) * len(task.groups), oldest=tuple(old for old, _ in versions),
            newest=tuple(new for _, new in versions),
            entries=dict.fromkeys(self._per_token[task.stage], tokens), at_s=self._clock.now_s,
        )  # fmt: skip

    def _save(self, step: int) -> None:
        start_s = max(self._clock.now_s, self._driver_free_s)
        self._driver_free_s = start_s + self.durations.costs.checkpoint_s
        self._clock.at(self._driver_free_s, self._saved, step, start_s)

    def _saved(self, step: int, start_s: float) -> None:
        folder, end_s = f"step_{step + 1:06d}", self._clock.now_s
        self._write(trace.Checkpointed(step=step, folder=folder, size_bytes=0, start_s=start_s, end_s=end_s))
        self._tell(Saved(step))

    def _await(self, stage: PlannedStage, admitted: Admit) -> None:
        """What a process outside the graph writes comes some time after the admission."""
        task = Task(stage=stage.name, step=admitted.step, groups=admitted.groups)
        samples = len(task.groups) * self.plan.group_size
        work = self.durations.stages[stage.name].work(task, samples=samples, tokens=0, seed=self.seed)
        self._clock.after(work.wait_s + work.work_s, self._came, stage, task, samples)

    def _came(self, stage: PlannedStage, task: Task, samples: int) -> None:
        now_s = self._clock.now_s
        self._write(
            trace.Put(
                stage=stage.name, step=task.step, attempt=0, fields=stage.writes, groups=task.groups, samples=samples,
                size_bytes=0, start_s=now_s, end_s=now_s,
            )
        )  # fmt: skip
        self._tell(Landed(task.step, task.groups, stage.writes))

    def _stuck(self) -> Problem:
        waits = "; ".join(
            f"step {step + 1} {stage} waits for {', '.join(what) or 'a worker'}"
            for step, stage, what in self.scheduler.waiting()
        )
        return Problem(
            where=f"simulation of {self.plan.name}",
            what=f"nothing can start: {waits or 'no stage is in flight'}",
            why="no task is running",
            fix="report this graph: the checks should have refused it",
        )
