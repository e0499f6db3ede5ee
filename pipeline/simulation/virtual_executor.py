"""An executor with simulated workers: hands tasks to them, and their reports to the driver, on a virtual clock.

A report takes time to arrive, and the driver handles one at a time. Reports have the form that the driver expects, but
no handles: there is no data plane, so a report itself lists the fields that have landed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from pipeline.declare.handle import KVBatchMeta
from pipeline.declare.task import Task
from pipeline.engine.reports import Notice
from pipeline.plan.plan import Plan, PlannedStage
from pipeline.record import trace
from pipeline.schedule.events import Event, Landed, Save, Saved
from pipeline.schedule.scheduler import Scheduler
from pipeline.simulation.durations import Durations, Recorded
from pipeline.simulation.workers import ALONE, Attempt, Fault, VirtualWorkers, Written


class VirtualReport:
    """A worker's report on a task, like `pipeline.executors.outputs.TaskResult`, with `landed` in place of handles."""

    events: Sequence[trace.TraceEvent] = ()
    landed: list[Event]  # only of the current attempt
    handles = ()
    weights: tuple[int, str] | None = None
    dropped: Mapping[int, str] | None = None
    cancelled: Mapping[int, int] = MappingProxyType({})
    open: Mapping[str, int] | None = None
    served: int | None = None
    lost: str | None = None
    error = None

    def __init__(self, task: Task, finished: tuple[int, ...] = ()) -> None:
        self.task, self.finished = task, finished


class VirtualExecutor:
    """All workers of a plan, as the driver sees them. `faults` makes attempts fail; see `Fault`."""

    name = "simulated"

    def __init__(
        self,
        plan: Plan,
        durations: Durations,
        *,
        seed: int,
        cores: float | None,
        nodes: Mapping[tuple[str, int], str],
        one_process: bool,
        faults: Callable[[Task], Fault | None] | None,
    ) -> None:
        self.tokens: dict[int, int] = {}  # group -> tokens of its longest response
        self._plan, self._durations, self._seed, self._faults = plan, durations, seed, faults
        self._nodes, self._pid = nodes, int(one_process)  # 0: every worker is a separate process
        self._workers = VirtualWorkers(
            plan, durations, seed=seed, cores=cores, nodes=nodes, one_process=one_process,
            report=self._reported, lost=self._lost, reached=self._reached,
        )  # fmt: skip
        self.clock = self._workers.clock
        self.idle = False  # no event is left
        self._ready: list[VirtualReport | Notice] = []  # what has arrived
        self._attempts: dict[int, Attempt] = {}
        self._driver_free_s = 0.0
        self.held: deque[tuple[int, float]] = deque()  # the step and begin of each checkpoint that has no name yet
        self._versions: dict[int, tuple[int, int]] = {}  # group -> oldest and newest policy version of its tokens
        weights = frozenset(plan.weights_fields)
        self._stages = {stage.name: stage for stage in plan.stages}
        self._makes = {stage.name for stage in plan.stages if not weights.isdisjoint(stage.writes)}
        stamps = {stage.stamps for stage in plan.stages if stage.stamps}
        self._trains = {stage.name for stage in plan.stages if stage.updates and not stamps.isdisjoint(stage.reads)}
        ragged = {edge.ragged for edge in plan.edges if edge.field in stamps and edge.ragged}
        self._per_token = {  # stage -> the fields that it reads with one value per token
            stage.name: [edge.field for edge in plan.edges if edge.reader == stage.name and edge.ragged in ragged]
            for stage in plan.stages
        }
        self._homes = {group.name: group.colocated or group.name for group in plan.groups}
        self._awake: dict[str, str] = {}  # the group that has the memory of shared GPUs, by their owner
        self._gate = plan.gate.stage if plan.gate else ""
        self._replicas = {group.name: group.replicas for group in plan.groups}

    def start(self) -> list[trace.Placed]:
        """Return the machine of each worker."""
        return [
            trace.Placed(group=name, worker=rank, node=self._nodes.get((name, rank), ALONE), pid=self._pid)
            for lanes in self._workers.lanes.values()
            for name, rank, _ in lanes
        ]

    def submit(self, task: Task, meta: KVBatchMeta | None) -> None:
        stage, size = self._stages[task.stage], self._plan.group_size
        groups = task.groups[: stage.first_groups]
        shares = self._replicas[stage.groups[0]] if task.replica is None and stage.sharding else 1
        times = self._durations.stages[task.stage]
        tokens = 0
        if isinstance(times, Recorded) and times.line.per_token_s:
            tokens = sum(self.tokens.get(group, 0) for group in groups) * size // shares
        fault = self._faults(task) if self._faults else None
        attempt = Attempt(task, stage, -(-len(groups) * size // shares), tokens, fault)
        self._attempts[task.number] = attempt
        if delay_s := self._durations.costs.dispatch_s.get(task.stage, 0.0) + self._turn_s(stage):
            self.clock.after(delay_s, self._workers.begin, attempt)
        else:
            self._workers.begin(attempt)  # reports nothing before virtual time has passed

    def _turn_s(self, stage: PlannedStage) -> float:
        """Return the seconds until the group of a stage that computes with a model has the memory of its GPUs."""
        name = stage.groups[-1]
        if not (stage.uses or stage.updates) or self._awake.get(self._homes[name]) == name:
            return 0.0
        self._awake[self._homes[name]] = name
        return self._durations.costs.turn_s.get(name, 0.0)

    def wait(self, timeout_s: float) -> list[VirtualReport | Notice]:
        if self.idle:
            self.clock.now_s += timeout_s  # nothing will arrive: let the driver see that time passes
        self.idle = not self.clock.run()
        ready, self._ready = self._ready, []
        return ready

    def cancel(self, task: Task, groups: Sequence[int]) -> None:
        delay_s = self._durations.costs.dispatch_s.get(task.stage, 0.0)
        self.clock.after(delay_s, self._workers.cancel, self._attempts[task.number], groups)

    def save(self, decision: Save) -> tuple[()]:
        """Copy the state for a checkpoint. The driver handles no report meanwhile; a notice reports the end."""
        start_s = max(self.clock.now_s, self._driver_free_s)
        self._driver_free_s = start_s + self._durations.costs.checkpoint_s
        self.clock.at(self._driver_free_s, self._saved, decision.step, start_s)
        return ()

    def admitted(self, step: int, groups: tuple[int, ...]) -> None:
        """Schedule the arrival of the fields that an external process writes for the admitted groups."""
        for stage in self._plan.stages:
            if stage.shape == "external":
                task = Task(stage=stage.name, step=step, groups=groups)
                samples = len(groups) * self._plan.group_size
                work = self._durations.stages[stage.name].work(task, samples=samples, tokens=0, seed=self._seed)
                self.clock.after(work.wait_s + work.work_s, self._came, stage.writes, task, samples)

    def came(self, scheduler: Scheduler) -> tuple[()]:
        """Return nothing: external fields arrive as notices."""
        return ()

    def close(self) -> None:
        return None

    # Calls from workers, and the arrival of their reports. A call that delivers something to the driver returns True,
    # so that the clock stops and the driver handles it at once.

    def _reported(self, attempt: Attempt, groups: tuple[int, ...], written: Sequence[Written]) -> None:
        self.clock.at(self._arrives(attempt), self._take, attempt, groups, written)

    def _lost(self, attempt: Attempt, reason: str) -> None:
        self.clock.at(self._arrives(attempt), self._take_lost, attempt, reason)

    def _reached(self, attempt: Attempt, replica: int) -> None:
        report = VirtualReport(attempt.task)
        report.served = replica
        self.clock.at(self._arrives(attempt), self._hear, report)

    def _arrives(self, attempt: Attempt) -> float:
        costs = self._durations.costs
        at_s = self.clock.now_s + costs.report_s.get(attempt.task.stage, 0.0)
        if costs.driver_s:
            at_s = self._driver_free_s = max(at_s, self._driver_free_s) + costs.driver_s
        return at_s

    def _hear(self, report: VirtualReport | Notice) -> bool:
        self._ready.append(report)
        return True

    def _take(self, attempt: Attempt, groups: tuple[int, ...], written: Sequence[Written]) -> bool:
        """Deliver the report that a task has finished `groups`; `written` holds the events that its worker recorded."""
        task, owed = attempt.task, attempt.owed
        report = VirtualReport(task, groups)
        if not attempt.current or (groups and owed.keys().isdisjoint(groups)):
            return self._hear(report)  # the driver receives it a second time, or too late
        kept: tuple[int, ...] = ()
        oldest: tuple[int, ...]
        landed: list[Event] = []
        for event in written:
            if isinstance(event, trace.Put):
                kept, oldest = event.groups, ()
                if event.versions:
                    oldest = tuple([old for old, _ in event.versions])
                    self._versions.update(zip(kept, event.versions))
                    self.tokens.update(zip(kept, event.tokens))
                landed.append(Landed(task.step, kept, event.fields, oldest, task.number))
        name, report.landed = task.stage, landed
        report.events = [*written, self._trained(attempt)] if name in self._trains else written
        if name in self._makes:
            report.weights = (task.step + 1, f"{task.step + 1:064x}")
        if name == self._gate and len(kept) < len(groups):
            reason, passed = self._durations.costs.drop_reason, set(kept)
            report.dropped = {group: reason for group in groups if group not in passed}
        for group in groups:
            owed.pop(group, None)
        if not owed:
            self._over(attempt)
        return self._hear(report)

    def _take_lost(self, attempt: Attempt, reason: str) -> bool:
        self._over(attempt)
        report = VirtualReport(attempt.task)
        report.lost = reason
        return self._hear(report)

    def _over(self, attempt: Attempt) -> None:
        attempt.current = False
        self._attempts.pop(attempt.task.number, None)

    def _trained(self, attempt: Attempt) -> trace.Trained:
        task, size = attempt.task, self._plan.group_size
        versions = [self._versions[group] for group in task.groups]
        tokens = sum(self.tokens.get(group, 0) for group in task.groups) * size
        return trace.Trained(
            **trace.of(task), worker=0, version=task.step,
            groups=task.groups, samples=(size,) * len(task.groups), oldest=tuple(old for old, _ in versions),
            newest=tuple(new for _, new in versions),
            entries=dict.fromkeys(self._per_token[task.stage], tokens), at_s=self.clock.now_s,
        )  # fmt: skip

    def _saved(self, step: int, start_s: float) -> bool:
        self.held.append((step, start_s))
        return self._hear(Notice(Saved(step), [trace.Held(step=step, start_s=start_s, end_s=self.clock.now_s)]))

    def _came(self, fields: tuple[str, ...], task: Task, samples: int) -> bool:
        now_s = self.clock.now_s
        written = trace.Put(
            stage=task.stage, step=task.step, attempt=0, fields=fields, groups=task.groups, samples=samples,
            size_bytes=0, start_s=now_s, end_s=now_s,
        )  # fmt: skip
        return self._hear(Notice(Landed(task.step, task.groups, fields), [written]))
