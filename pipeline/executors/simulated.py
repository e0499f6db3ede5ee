"""Runs a plan in virtual time: the same scheduler, no engine, no data plane, no worker process.

It hands the scheduler's decisions to workers that only take time, as `Durations` says, and writes the events that a real
run writes, so that whatever reads the record of a run reads that of a simulation.

    simulation = Simulation(plan, Durations({"rollout": Drawn(parse("lognormal(1.0, 0.8)")), ...}))
    events = simulation.run()

Tasks that compute at the same time share the cores of their machine (`pipeline.sharing`). The driver takes one report
after the other. `faults` makes attempts fail; see `Fault`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Literal, TypeAlias
from zlib import crc32

import msgspec

from pipeline import trace
from pipeline.distributions import uniform
from pipeline.durations import Durations, Part, Recorded
from pipeline.errors import Problem, StageError
from pipeline.events import (
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
    StepDone,
)
from pipeline.plan import Plan, PlannedStage
from pipeline.scheduler import Scheduler
from pipeline.sharing import Job, Lane, Machine
from pipeline.stage import Task

_Written: TypeAlias = trace.Got | trace.Put | trace.Ran


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What befalls one attempt.

    before_put, after_put   its worker is lost when it has computed, before or after its columns were put
    mid_stream              the same for a stream, when `groups` of its groups were reported
    late                    it is taken for lost `delay_s` after its start, and reports nevertheless
    twice                   each of its reports comes again `delay_s` later
    straggles               it takes `factor` times as long
    """

    kind: Literal["before_put", "after_put", "mid_stream", "late", "twice", "straggles"]
    groups: int = 1
    delay_s: float = 0.0
    factor: float = 1.0


class _Attempt:
    """A task on its workers."""

    __slots__ = (
        "begun_s", "cores", "fault", "fetches", "jobs", "lanes", "left", "lost", "owed", "pieces", "replaced", "samples",
        "stage", "stamped", "task", "tokens", "work_s",
    )  # fmt: skip

    def __init__(self, task: Task, stage: PlannedStage, lanes: Sequence[tuple[str, int, Lane]], samples: int) -> None:
        self.task, self.stage, self.lanes, self.samples = task, stage, lanes, samples
        self.fault: Fault | None = None
        self.fetches: trace.Got | None = None  # until it is told
        self.begun_s = 0.0
        self.work_s, self.cores = 0.0, 0.0
        self.left = dict.fromkeys(task.groups)  # groups that the worker has not done
        self.owed = dict.fromkeys(task.groups)  # groups that the driver has not acknowledged
        self.jobs: list[tuple[Lane, Job]] = []
        self.pieces = 0  # workers that are not done
        self.stamped = 0  # the version that its worker served when it began
        self.tokens: tuple[int, ...] = ()  # of a stream, by position
        self.lost = False  # its worker is gone
        self.replaced = False  # the driver has heard so


class Simulation:
    """One run of a plan in virtual time.

    `cores` are those of each machine, None where nothing contends; `nodes` says on which machine a worker is, by group
    and rank, and one that it leaves out is on the first; `one_process` has all workers take turns in one process, as the
    local executor does. `write` gets the events in place of the list that `run` returns.
    `watch(now_s, event, decisions)` sees everything that the scheduler is told and decides.
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
        watch: Callable[[float, Event | None, list[Decision]], object] | None = None,
    ) -> None:
        self.plan, self.durations, self.seed = plan, durations, seed
        self.scheduler = Scheduler(plan)
        self.events: list[trace.TraceEvent] = []
        self.now_s = 0.0
        self._write = write or self.events.append
        self._faults, self._watch = faults, watch
        self._stages = {stage.name: stage for stage in plan.stages}
        self._weights = frozenset(plan.weights_fields)
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._driver_free_s = 0.0
        self._machines: dict[str, Machine] = {}
        self._nodes = nodes or {}
        self._lanes: dict[str, list[tuple[str, int, Lane]]] = {group.name: [] for group in plan.groups}
        lane: Lane | None = None
        for group in plan.groups:
            for rank in range(group.workers):
                lane = lane if lane and one_process else Lane(self._machine(group.name, rank, cores))
                self._lanes[group.name].append((group.name, rank, lane))
        self._parallel = {group.name: group.model_parallel for group in plan.groups}
        self._beside = Lane(next(iter(self._machines.values()))) if durations.costs.beside_cpu_s else None
        self._attempts: dict[int, _Attempt] = {}
        self._served = dict.fromkeys((group.name for group in plan.groups), 0)
        self._targets = {stage.groups[-1] for stage in plan.stages if stage.shape == "transfer"}
        self._stamps = {stage.stamps for stage in plan.stages if stage.stamps}
        ragged = {edge.ragged for edge in plan.edges if edge.field in self._stamps and edge.ragged}
        self._per_token = {  # by stage, the fields that it reads with a value a token
            stage.name: [edge.field for edge in plan.edges if edge.reader == stage.name and edge.ragged in ragged]
            for stage in plan.stages
        }
        self._fetched = {
            stage.name: tuple(field for field in stage.reads if field not in self._weights) for stage in plan.stages
        }
        self._tokens: dict[int, int] = {}
        self._versions: dict[int, tuple[int, int]] = {}
        self._published_s = 0.0
        self._took_s: dict[int, float] = {}

    def run(self) -> list[trace.TraceEvent]:
        """Run every step. Raises StageError where the plan cannot go on, as a real run would."""
        plan = self.plan
        self._write(
            trace.Started(graph=plan.name, start=0, steps=plan.steps, executor="simulated", monotonic_s=0.0, wall_s=0.0)
        )
        for lanes in self._lanes.values():
            for name, rank, _ in lanes:
                node = self._nodes.get((name, rank), "simulated")
                self._write(trace.Placed(group=name, worker=rank, node=node, pid=0))
        self._decide(None, self.scheduler.begin())
        machines, queue = tuple(self._machines.values()), self._queue
        while True:
            timer_s = queue[0][0] if queue else math.inf
            machine = min(machines, key=Machine.next_s) if len(machines) > 1 else machines[0]
            mark_s = machine.next_s()
            if mark_s < timer_s:
                self.now_s = mark_s
                call, arguments = machine.pop(mark_s)
            elif queue:
                self.now_s, _, call, arguments = heapq.heappop(queue)
            else:
                break
            call(*arguments)
        if not self.scheduler.done:
            raise StageError(self._stuck())
        self._write(trace.Ended(steps=plan.steps, rows_left=self.scheduler.in_flight, at_s=self.now_s))
        return self.events

    def _machine(self, group: str, rank: int, cores: float | None) -> Machine:
        node = self._nodes.get((group, rank), "simulated")
        return self._machines.setdefault(node, Machine(cores))

    def _at(self, at_s: float, call: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._queue, (at_s, next(self._order), call, arguments))

    # The driver.

    def _tell(self, event: Event) -> None:
        self._decide(event, self.scheduler.handle(event))

    def _decide(self, event: Event | None, decisions: list[Decision]) -> None:
        if self._watch:
            self._watch(self.now_s, event, decisions)
        now_s, write = self.now_s, self._write
        for decision in decisions:
            match decision:
                case Run():
                    self._submit(decision.task)
                case Clear():
                    write(trace.Cleared(step=decision.step, groups=decision.groups, start_s=now_s, end_s=now_s))
                case Admit():
                    version = self.scheduler.version
                    write(trace.Admitted(step=decision.step, groups=decision.groups, version=version, at_s=now_s))
                    self._come_from_outside(decision)
                case Claim():
                    write(trace.Claimed(step=decision.step, groups=decision.groups, at_s=now_s))
                case Drop():
                    tokens = tuple(self._tokens.get(group, 0) for group in decision.groups)
                    write(
                        trace.Dropped(
                            stage="", step=decision.step, groups=decision.groups, reason=decision.reason,
                            tokens=tokens, at_s=now_s,
                        )
                    )  # fmt: skip
                case Cancel():
                    delay_s = self.durations.costs.dispatch_s.get(decision.task.stage, 0.0)
                    self._at(now_s + delay_s, self._cancelled, decision.task.number, decision.groups)
                case Save():
                    self._save(decision.step)
                case StepDone():
                    metrics = {"time/step_s": self._took_s.pop(decision.step)} if decision.step in self._took_s else {}
                    write(trace.StepEnded(step=decision.step, metrics=metrics, at_s=now_s))
                case GiveUp():
                    raise StageError(decision.problem)

    def _submit(self, task: Task) -> None:
        stage = self._stages[task.stage]
        plan = self.plan
        if task.replica is None:
            lanes = [lane for name in dict.fromkeys(stage.groups) for lane in self._lanes[name]]
        else:
            width = self._parallel[stage.groups[0]]
            lanes = self._lanes[stage.groups[0]][task.replica * width : (task.replica + 1) * width]
        groups = len(task.groups) if stage.first_groups is None else min(len(task.groups), stage.first_groups)
        samples = groups * plan.group_size
        self._write(
            trace.Submitted(
                task=task.number, stage=task.stage, step=task.step, attempt=task.attempt, group=stage.groups[0],
                replica=task.replica, groups=task.groups, samples=len(task.groups) * plan.group_size, version=task.version, at_s=self.now_s,
            )
        )  # fmt: skip
        if task.replica is None and stage.sharding:
            samples = -(-samples * self._parallel[stage.groups[0]] // len(lanes))
        attempt = self._attempts[task.number] = _Attempt(task, stage, lanes, samples)
        if self._faults:
            attempt.fault = self._faults(task)
        delay_s = self.durations.costs.dispatch_s.get(task.stage, 0.0)
        self._at(self.now_s + delay_s, self._begin, attempt)

    def _report(self, call: Callable[..., None], attempt: _Attempt, *arguments: Any) -> None:
        """Have the driver take something that a worker tells now."""
        costs = self.durations.costs
        arrives_s = self.now_s + costs.report_s.get(attempt.task.stage, 0.0)
        if costs.driver_s:
            arrives_s = self._driver_free_s = max(arrives_s, self._driver_free_s) + costs.driver_s
        self._at(arrives_s, call, attempt, *arguments)

    def _take(self, attempt: _Attempt, groups: tuple[int, ...], written: Sequence[_Written]) -> None:
        """The driver takes a report: the task has done `groups`, and `written` is what its worker recorded."""
        task, stage = attempt.task, attempt.stage
        fresh = self.scheduler.is_current(task) and (not groups or any(group in attempt.owed for group in groups))
        landed: tuple[int, ...] = ()
        if fresh:
            for event in written:
                self._write(event)
        for event in written:
            if isinstance(event, trace.Put):
                landed = event.groups
                oldest = tuple(old for old, _ in event.versions)
                if fresh:
                    self._versions.update(zip(landed, event.versions))
                    self._tokens.update(zip(landed, event.tokens))
                self._tell(Landed(task.step, landed, event.fields, oldest, task.number))
        weights = tuple(field for field in stage.writes if field in self._weights)
        if fresh and stage.updates and not self._stamps.isdisjoint(stage.reads):
            self._write(self._trained(attempt))
        if weights:
            if fresh and stage.shape == "transfer":
                self._publish(task)
            self._tell(Landed(task.step, (), weights, (), task.number))
        if stage.name == self._gate_stage and len(landed) < len(groups):
            self._drop(task, tuple(group for group in groups if group not in set(landed)), fresh)
        if fresh or attempt.replaced:  # the same report for the second time says nothing
            told = trace.Acknowledged if fresh else trace.Fenced
            self._write(
                told(
                    task=task.number, stage=task.stage, step=task.step, attempt=task.attempt, groups=groups,
                    at_s=self.now_s,
                )
            )  # fmt: skip
        for group in groups:
            attempt.owed.pop(group, None)
        self._tell(Finished(task, groups))
        if not attempt.owed:
            self._attempts.pop(task.number, None)

    def _drop(self, task: Task, groups: tuple[int, ...], fresh: bool) -> None:
        """The gate has dropped groups."""
        reason = self.durations.costs.drop_reason
        if fresh:
            tokens = tuple(self._tokens.get(group, 0) for group in groups)
            self._write(
                trace.Dropped(
                    stage=task.stage, step=task.step, groups=groups, reason=reason, tokens=tokens, at_s=self.now_s
                )
            )
        self._tell(Dropped(task.step, dict.fromkeys(groups, reason), task.number))

    @property
    def _gate_stage(self) -> str:
        return self.plan.gate.stage if self.plan.gate else ""

    def _publish(self, task: Task) -> None:
        version = task.step + 1
        sha256 = f"{version:064x}"
        self._write(trace.Published(stage=task.stage, step=task.step, version=version, sha256=sha256, at_s=self.now_s))
        if task.step >= 0:
            self._took_s[task.step] = self.now_s - self._published_s
        self._published_s = self.now_s

    def _trained(self, attempt: _Attempt) -> trace.Trained:
        task, size = attempt.task, self.plan.group_size
        versions = [self._versions.get(group, (task.step, task.step)) for group in task.groups]
        tokens = sum(self._tokens.get(group, 0) for group in task.groups) * size
        return trace.Trained(
            task=task.number, stage=task.stage, step=task.step, attempt=task.attempt, worker=0, version=task.step,
            groups=task.groups, samples=(size,) * len(task.groups), oldest=tuple(old for old, _ in versions),
            newest=tuple(new for _, new in versions), entries=dict.fromkeys(self._per_token[task.stage], tokens), at_s=self.now_s,
        )  # fmt: skip

    def _failed(self, attempt: _Attempt, reason: str) -> None:
        """The driver learns that an attempt is lost."""
        task = attempt.task
        if self.scheduler.is_current(task):
            self._write(
                trace.Retried(
                    task=task.number, stage=task.stage, step=task.step, attempt=task.attempt,
                    groups=tuple(attempt.owed), reason=reason, at_s=self.now_s,
                )
            )  # fmt: skip
        attempt.replaced = True
        self._attempts.pop(task.number, None)
        self._tell(Failed(task))

    def _save(self, step: int) -> None:
        start_s = max(self.now_s, self._driver_free_s)
        end_s = self._driver_free_s = start_s + self.durations.costs.checkpoint_s
        self._at(end_s, self._saved, step, start_s)

    def _saved(self, step: int, start_s: float) -> None:
        self._write(
            trace.Checkpointed(
                step=step, folder=f"step_{step + 1:06d}", size_bytes=0, start_s=start_s, end_s=self.now_s
            )
        )
        self._tell(Saved(step))

    def _come_from_outside(self, admitted: Admit) -> None:
        for stage in self.plan.stages:
            if stage.shape == "external":
                task = Task(stage=stage.name, step=admitted.step, groups=admitted.groups)
                samples = len(task.groups) * self.plan.group_size
                work = self.durations.stages[stage.name].work(task, samples=samples, tokens=0, seed=self.seed)
                self._at(self.now_s + work.wait_s + work.work_s, self._came, stage, task)

    def _came(self, stage: PlannedStage, task: Task) -> None:
        self._write(self._put(task, stage, task.groups))
        self._tell(Landed(task.step, task.groups, stage.writes))

    # The workers.

    def _begin(self, attempt: _Attempt) -> None:
        task, stage = attempt.task, attempt.stage
        attempt.begun_s = self.now_s
        if fields := self._fetched[task.stage]:
            groups = len(task.groups) if stage.first_groups is None else min(len(task.groups), stage.first_groups)
            attempt.fetches = trace.Got(
                stage=task.stage, step=task.step, fields=fields, samples=groups * self.plan.group_size, size_bytes=0,
                start_s=self.now_s, end_s=self.now_s,
            )  # fmt: skip
        served = stage.groups[0] in self._targets
        attempt.stamped = self._served[stage.groups[0]] if served else task.version
        times, fault = self.durations.stages[task.stage], attempt.fault
        factor = fault.factor if fault and fault.kind == "straggles" else 1.0
        if fault and fault.kind == "late":
            self._at(self.now_s + fault.delay_s, self._report, self._failed, attempt, "no sign of life")
        if self._beside:
            self._beside.start(self.now_s, [(self.durations.costs.beside_cpu_s, (_nothing, ()))], parallelism=1.0)
        if stage.shape == "stream":
            return self._stream(attempt, factor)
        tokens = 0
        if isinstance(times, Recorded) and times.line.per_token_s:
            tokens = sum(self._tokens.get(group, 0) for group in task.groups) * self.plan.group_size
            tokens = tokens * attempt.samples // max(1, len(task.groups) * self.plan.group_size)
        work = times.work(task, samples=attempt.samples, tokens=tokens, seed=self.seed)
        attempt.work_s, attempt.cores = work.work_s * factor, work.cores
        attempt.pieces = len(attempt.lanes)
        for lane in attempt.lanes:
            if work.wait_s:
                self._at(self.now_s + work.wait_s * factor, self._compute, attempt, lane[2])
            else:
                self._compute(attempt, lane[2])

    def _compute(self, attempt: _Attempt, lane: Lane) -> None:
        if attempt.work_s:
            marks = [(attempt.work_s, (self._piece_done, (attempt,)))]
            attempt.jobs.append((lane, lane.start(self.now_s, marks, parallelism=attempt.cores)))
        else:
            self._at(self.now_s, self._piece_done, attempt)

    def _piece_done(self, attempt: _Attempt) -> None:
        attempt.pieces -= 1
        if attempt.pieces == 0:
            self._map_done(attempt)

    def _map_done(self, attempt: _Attempt) -> None:
        task, stage, fault = attempt.task, attempt.stage, attempt.fault
        if fault and fault.kind in ("before_put", "after_put", "mid_stream"):
            return self._report(self._failed, attempt, f"worker lost {fault.kind.replace('_', ' ')}")
        attempt.left.clear()
        kept: Sequence[int] = task.groups
        if task.stage == self._gate_stage and self.durations.costs.drop_rate:
            rate, name = self.durations.costs.drop_rate, crc32(b"gate")
            kept = [group for group in task.groups if uniform(self.seed, name, group) >= rate]
        written: list[_Written] = [self._put(task, stage, kept)] if kept and self._has_columns(stage) else []
        written += self._ran(attempt)
        if stage.shape == "transfer":
            self._served[stage.groups[-1]] = task.step + 1
        self._send(attempt, task.groups, written)

    def _send(self, attempt: _Attempt, groups: tuple[int, ...], written: Sequence[_Written]) -> None:
        if attempt.fetches:
            written = [attempt.fetches, *written]
            attempt.fetches = None
        self._report(self._take, attempt, groups, written)
        if attempt.fault and attempt.fault.kind == "twice":
            again_s = self.now_s + attempt.fault.delay_s
            self._at(again_s, self._report, self._take, attempt, groups, written)

    def _stream(self, attempt: _Attempt, factor: float) -> None:
        task = attempt.task
        work = self.durations.stages[task.stage].stream(task, group_size=self.plan.group_size, seed=self.seed)
        attempt.tokens, attempt.cores = work.tokens, work.cores
        lane = attempt.lanes[0][2]
        marks = [(part.work_s * factor, (self._computed, (attempt, part, factor))) for part in work.parts]
        attempt.work_s = marks[-1][0]
        if attempt.work_s and work.cores:
            attempt.jobs.append((lane, lane.start(self.now_s, marks, parallelism=work.cores, first=False)))
            return
        for work_s, (call, arguments) in marks:
            self._at(self.now_s + work_s, call, *arguments)

    def _computed(self, attempt: _Attempt, part: Part, factor: float) -> None:
        """Groups of a stream are sampled; what is left of them is waiting."""
        if part.wait_s:
            self._at(self.now_s + part.wait_s * factor, self._streamed, attempt, part)
        else:
            self._streamed(attempt, part)

    def _streamed(self, attempt: _Attempt, part: Part) -> None:
        """Groups of a stream are put."""
        task, fault, left = attempt.task, attempt.fault, attempt.left
        groups = tuple(group for i in part.positions if (group := task.groups[i]) in left)
        if not groups or attempt.lost:
            return
        if fault and fault.kind in ("before_put", "after_put", "mid_stream"):
            done = len(task.groups) - len(left)
            if fault.kind != "mid_stream" or done + len(groups) > fault.groups:
                return self._lose(attempt, f"worker lost {fault.kind.replace('_', ' ')}")
        stage = attempt.stage
        newest = self._served[stage.groups[0]] if stage.groups[0] in self._targets else task.version
        versions, tokens = (), ()
        if stage.stamps:
            versions = ((attempt.stamped, newest),) * len(groups)
            tokens = tuple(attempt.tokens[i] for i in part.positions if task.groups[i] in left)
        for group in groups:
            del left[group]
        written: list[_Written] = []
        if self._has_columns(stage):
            written.append(self._put(task, stage, groups, versions, tokens))
        self._send(attempt, groups, written if left else [*written, *self._ran(attempt)])

    def _cancelled(self, number: int, groups: tuple[int, ...]) -> None:
        """Groups of a stream are given up by its worker."""
        attempt = self._attempts.get(number)
        if attempt is None or attempt.lost:
            return
        given_up = tuple(group for group in groups if group in attempt.left)
        for group in given_up:
            del attempt.left[group]
        if given_up:
            if not attempt.left:
                self._stop(attempt)
            self._send(attempt, given_up, () if attempt.left else self._ran(attempt))

    def _lose(self, attempt: _Attempt, reason: str) -> None:
        attempt.lost = True
        self._stop(attempt)
        self._report(self._failed, attempt, reason)

    def _stop(self, attempt: _Attempt) -> None:
        for lane, job in attempt.jobs:
            lane.stop(self.now_s, job)

    # What is written down.

    def _has_columns(self, stage: PlannedStage) -> bool:
        return not self._weights.issuperset(stage.writes)

    def _put(
        self,
        task: Task,
        stage: PlannedStage,
        groups: Sequence[int],
        versions: tuple[tuple[int, int], ...] = (),
        tokens: tuple[int, ...] = (),
    ) -> trace.Put:
        return trace.Put(
            stage=task.stage, step=task.step, attempt=task.attempt,
            fields=tuple(field for field in stage.writes if field not in self._weights), groups=tuple(groups),
            samples=len(groups) * self.plan.group_size, size_bytes=0, versions=versions, tokens=tokens,
            start_s=self.now_s, end_s=self.now_s,
        )  # fmt: skip

    def _ran(self, attempt: _Attempt) -> list[trace.Ran]:
        task = attempt.task
        cpu_s = attempt.work_s * attempt.cores
        return [
            trace.Ran(
                task=task.number, stage=task.stage, step=task.step, attempt=task.attempt, group=group, worker=rank,
                groups=task.groups, start_s=attempt.begun_s, end_s=self.now_s, cpu_s=cpu_s, metrics={},
            )
            for group, rank, _ in attempt.lanes
        ]  # fmt: skip

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


def _nothing() -> None:
    """What follows from work that nobody waits for."""
