"""Simulated workers: everything between the submission of a task and its reports, in virtual time.

They know durations, lanes and faults, but not the scheduler. They report through three calls: `report(attempt, groups,
written)` when groups are done, with the events that a real worker would record; `lost(attempt, reason)`; and
`reached(attempt, replica)` when a replica has received a transfer before the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias
from zlib import crc32

import msgspec

from pipeline.declare.task import Task
from pipeline.plan.plan import Plan, PlannedStage
from pipeline.record import trace
from pipeline.simulation.distributions import uniform
from pipeline.simulation.durations import Durations, StreamPart, StreamWork
from pipeline.simulation.sharing import Job, Lane, Machine
from pipeline.simulation.virtual_time import VirtualClock

Written: TypeAlias = trace.Got | trace.Put | trace.Ran
LOST = ("before_put", "after_put", "mid_stream")
ALONE = "simulated"  # the machine of workers that are not placed


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of one attempt.

    before_put, after_put   its worker is lost after computing, before or after its columns were put
    mid_stream              the same for a stream, after `groups` of its groups were reported
    late                    it is declared lost `delay_s` after its start, but still reports
    twice                   each of its reports arrives again `delay_s` later
    straggles               it takes `factor` times as long
    """

    kind: Literal["before_put", "after_put", "mid_stream", "late", "twice", "straggles"]
    groups: int = 1
    delay_s: float = 0.0
    factor: float = 1.0


class Attempt:
    """A task on its workers. `samples` and `tokens` are per worker."""

    __slots__ = (
        "begun_s", "cores", "current", "done_s", "fault", "fetches", "had", "jobs", "lanes", "left", "lost", "owed",
        "pieces", "samples", "stage", "stamped", "stream", "task", "tokens", "work_s",
    )  # fmt: skip

    def __init__(self, task: Task, stage: PlannedStage, samples: int, tokens: int, fault: Fault | None) -> None:
        self.task, self.stage, self.samples, self.tokens, self.fault = task, stage, samples, tokens, fault
        self.lanes: Sequence[tuple[str, int, Lane]] = ()
        self.fetches: trace.Got | None = None  # its fetch, until it is reported
        self.begun_s = 0.0
        self.work_s, self.cores = 0.0, 0.0
        self.left = dict.fromkeys(task.groups)  # groups that the worker has not done
        self.owed = dict.fromkeys(task.groups)  # groups that the driver has not acknowledged
        self.jobs: list[tuple[Lane, Job]] = []
        self.pieces = 0  # workers that are not done
        self.had: dict[int, int] = {}  # of a transfer: replica -> workers that have received it
        self.stream: StreamWork | None = None
        self.done_s = 0.0  # of its computing, in the rounds before this one
        self.stamped = 0  # the policy version that its worker served when it began
        self.lost = False  # its worker is lost
        self.current = True  # the driver does not know yet that it has ended or was lost

    @property
    def computes(self) -> bool:
        """Whether a stream computes, or will in a later round."""
        of = self.stream
        return any(job.left for _, job in self.jobs) or bool(of and of.away_s and self.left and not self.lost)

    @property
    def factor(self) -> float:
        """The factor by which it is slowed down."""
        return self.fault.factor if self.fault and self.fault.kind == "straggles" else 1.0


class VirtualWorkers:
    """All workers of a plan."""

    def __init__(
        self,
        plan: Plan,
        durations: Durations,
        *,
        seed: int,
        cores: float | None,
        nodes: Mapping[tuple[str, int], str],
        one_process: bool,
        report: Callable[[Attempt, tuple[int, ...], Sequence[Written]], None],
        lost: Callable[[Attempt, str], None],
        reached: Callable[[Attempt, int], None],
    ) -> None:
        self._plan, self._durations, self._seed = plan, durations, seed
        self._report, self._lost, self._reached = report, lost, reached
        machines: dict[str, Machine] = {}
        self.lanes: dict[str, list[tuple[str, int, Lane]]] = {group.name: [] for group in plan.groups}
        lane: Lane | None = None
        room: Mapping[str, float] = durations.costs.room
        if one_process:
            room = dict.fromkeys((group.name for group in plan.groups), min(room.values(), default=math.inf))
        for group in plan.groups:
            for rank in range(group.workers):
                machine = machines.setdefault(nodes.get((group.name, rank), ALONE), Machine(cores))
                lane = lane if lane and one_process else Lane(machine, room.get(group.name, math.inf))
                self.lanes[group.name].append((group.name, rank, lane))
        self.clock = VirtualClock(list(machines.values()))
        self._beside = Lane(next(iter(machines.values()))) if durations.costs.beside_cpu_s else None
        self._parallel = {group.name: group.model_parallel for group in plan.groups}
        self._weights = frozenset(plan.weights_fields)
        self._served: Counter[tuple[str, int]] = Counter()  # worker group, replica -> version
        self._streams: dict[Lane, list[Attempt]] = {}  # that compute on a lane
        self._gate = plan.gate.stage if plan.gate else ""
        self._fields = {  # stage -> the fields that it fetches, the fields that it puts
            stage.name: tuple(
                tuple(field for field in fields if field not in self._weights) for fields in (stage.reads, stage.writes)
            )
            for stage in plan.stages
        }

    def begin(self, attempt: Attempt) -> None:
        """Start a task on its workers."""
        task, stage, clock = attempt.task, attempt.stage, self.clock
        attempt.lanes = self._lanes_of(task, stage)
        attempt.begun_s = clock.now_s
        if fields := self._fields[task.stage][0]:
            groups = len(task.groups) if stage.first_groups is None else min(len(task.groups), stage.first_groups)
            groups += len(task.groups) if stage.chooses else 0
            attempt.fetches = trace.Got(
                stage=task.stage, step=task.step, fields=fields, samples=groups * self._plan.group_size, size_bytes=0,
                start_s=clock.now_s, end_s=clock.now_s,
            )  # fmt: skip
        attempt.stamped = self._version_on(stage.groups[0], task)
        if attempt.fault and attempt.fault.kind == "late":
            clock.after(attempt.fault.delay_s, self._lost, attempt, "no sign of life")
        if self._beside:
            marks = [(self._durations.costs.beside_cpu_s, (_nothing, ()))]
            self._beside.start(clock.now_s, marks, parallelism=1.0)
        if stage.shape == "stream":
            return self._stream(attempt)
        times = self._durations.stages[task.stage]
        work = times.work(task, samples=attempt.samples, tokens=attempt.tokens, seed=self._seed)
        attempt.work_s, attempt.cores = work.work_s * attempt.factor, work.cores
        attempt.pieces = len(attempt.lanes)
        for group, rank, lane in attempt.lanes:
            slower = self._slower(attempt, rank) if stage.shape == "transfer" and group == stage.groups[-1] else 1.0
            if work.wait_s:
                clock.after(work.wait_s * attempt.factor * slower, self._compute, attempt, lane, group, rank, slower)
            else:
                self._compute(attempt, lane, group, rank, slower)

    def cancel(self, attempt: Attempt, groups: Sequence[int]) -> None:
        """Cancel groups of a stream."""
        given_up = tuple(group for group in groups if group in attempt.left)
        if given_up and not attempt.lost:
            for group in given_up:
                del attempt.left[group]
            if not attempt.left:
                self._stop(attempt)
            self._send(attempt, given_up, () if attempt.left else self._ran(attempt))

    def _lanes_of(self, task: Task, stage: PlannedStage) -> Sequence[tuple[str, int, Lane]]:
        if task.replica is None:
            return [lane for name in dict.fromkeys(stage.groups) for lane in self.lanes[name]]
        width = self._parallel[stage.groups[0]]
        return self.lanes[stage.groups[0]][task.replica * width : (task.replica + 1) * width]

    # Maps and transfers.

    def _compute(self, attempt: Attempt, lane: Lane, group: str, rank: int, slower: float) -> None:
        if attempt.work_s:
            marks = [(attempt.work_s * slower, (self._piece_done, (attempt, group, rank)))]
            attempt.jobs.append((lane, lane.start(self.clock.now_s, marks, parallelism=attempt.cores)))
        else:
            self.clock.after(0.0, self._piece_done, attempt, group, rank)

    def _piece_done(self, attempt: Attempt, group: str, rank: int) -> None:
        attempt.pieces -= 1
        if attempt.pieces == 0:
            self._done(attempt)
        elif self._durations.costs.spread and attempt.stage.shape == "transfer" and group == attempt.stage.groups[-1]:
            replica = rank // self._parallel[group]
            attempt.had[replica] = attempt.had.get(replica, 0) + 1
            if attempt.had[replica] == self._parallel[group]:
                self._serve(group, replica, attempt.task.step + 1)
                self._reached(attempt, replica)

    def _slower(self, attempt: Attempt, rank: int) -> float:
        """Return how many times as long as the quickest worker this one takes to receive a transfer."""
        task, spread = attempt.task, self._durations.costs.spread
        return 1.0 + spread * uniform(self._seed, crc32(b"spread"), task.number, rank) if spread else 1.0

    def _version_on(self, group: str, task: Task) -> int:
        """Return the policy version that the worker of a task serves."""
        return self._served.get((group, task.replica or 0), task.version)

    def _done(self, attempt: Attempt) -> None:
        """Finish a map or a transfer: all of its workers have computed."""
        task, stage, fault = attempt.task, attempt.stage, attempt.fault
        if fault and fault.kind in LOST:
            return self._lost(attempt, _reason(fault))
        attempt.left.clear()
        kept: Sequence[int] = task.groups
        rate = self._durations.costs.drop_rate
        if task.stage == self._gate and rate:
            kept = [group for group in task.groups if uniform(self._seed, crc32(b"gate"), group) >= rate]
        written: list[Written] = [self._put(task, stage, kept)] if kept and self._fields[task.stage][1] else []
        if stage.shape == "transfer":
            target = stage.groups[-1]
            for replica in range(len(self.lanes[target]) // self._parallel[target]):
                self._serve(target, replica, task.step + 1)
        self._send(attempt, task.groups, [*written, *self._ran(attempt)])

    def _serve(self, group: str, replica: int, version: int) -> None:
        """Switch a replica to new weights. What it has computed of running samples it computes again."""
        if self._served[group, replica] == version:
            return
        self._served[group, replica] = version
        lane = self.lanes[group][replica * self._parallel[group]][2]
        running = self._streams[lane] = [each for each in self._streams.get(lane, ()) if each.computes]
        for attempt in running if self._durations.costs.again_s else ():
            tokens = self._tokens_so_far(attempt) * self._plan.group_size
            if again_s := tokens * self._durations.costs.again_s:
                lane.start(self.clock.now_s, [(again_s, (_nothing, ()))], parallelism=attempt.cores)

    def _tokens_so_far(self, attempt: Attempt) -> float:
        """Return the tokens that a stream has made of one sample of each of its unfinished groups."""
        work, groups = attempt.stream, attempt.task.groups
        assert work is not None
        now_s = self.clock.now_s
        running_s = sum(lane.done_s(now_s, job) for lane, job in attempt.jobs if job.left)
        done_s = (attempt.done_s + running_s) / attempt.factor
        return sum(
            work.tokens[i] * min(1.0, done_s / part.work_s)
            for part in work.parts
            if part.work_s
            for i in part.positions
            if groups[i] in attempt.left
        )

    # Streams.

    def _stream(self, attempt: Attempt) -> None:
        task, now_s = attempt.task, self.clock.now_s
        times = self._durations.stages[task.stage]
        work = times.stream(task, group_size=self._plan.group_size, seed=self._seed)
        lane, factor = attempt.lanes[0][2], attempt.factor
        marks = [(part.work_s * factor, (self._computed, (attempt, part))) for part in work.parts]
        attempt.work_s, attempt.cores, attempt.stream = marks[-1][0], work.cores, work
        if attempt.work_s and work.cores:
            self._streams.setdefault(lane, []).append(attempt)
            if work.away_s:
                self._leave(attempt, 0)
                return
            job = lane.start(now_s, marks, parallelism=work.cores, first=False, samples=attempt.samples)
            attempt.jobs.append((lane, job))
            return
        for work_s, (call, arguments) in marks:
            self.clock.after(work.away_s * factor + work_s, call, *arguments)

    def _leave(self, attempt: Attempt, number: int) -> None:
        """Wait before the next round of computing."""
        work = attempt.stream
        assert work is not None
        attempt.jobs, attempt.done_s = [], attempt.work_s * number / work.rounds
        self.clock.after(work.away_s / work.rounds * attempt.factor, self._round, attempt, number)

    def _round(self, attempt: Attempt, number: int) -> None:
        """Compute a part of a stream. The last one ends with its last groups."""
        work, lane = attempt.stream, attempt.lanes[0][2]
        if attempt.lost or not attempt.left:
            return
        assert work is not None
        start_s, end_s = attempt.done_s, attempt.work_s * (number + 1) / work.rounds
        is_last = number + 1 == work.rounds
        marks: list[Any] = []
        for part in work.parts:
            at_s = part.work_s * attempt.factor
            if (at_s > start_s or not number) and (at_s <= end_s or is_last):
                marks.append((at_s - start_s, (self._computed, (attempt, part))))
        if not is_last:
            marks.append((end_s - start_s, (self._leave, (attempt, number + 1))))
        job = lane.start(self.clock.now_s, marks, parallelism=attempt.cores, first=False, samples=attempt.samples)
        attempt.jobs = [(lane, job)]

    def _computed(self, attempt: Attempt, part: StreamPart) -> None:
        """Deliver computed groups after their wait."""
        if part.wait_s:
            self.clock.after(part.wait_s * attempt.factor, self._streamed, attempt, part)
        else:
            self._streamed(attempt, part)

    def _streamed(self, attempt: Attempt, part: StreamPart) -> None:
        """Put and report groups."""
        task, fault, left = attempt.task, attempt.fault, attempt.left
        positions = [i for i in part.positions if task.groups[i] in left]
        if not positions or attempt.lost:
            return
        if fault and fault.kind in LOST:
            done = len(task.groups) - len(left) + len(positions)
            if fault.kind != "mid_stream" or done > fault.groups:
                attempt.lost = True
                self._stop(attempt)
                return self._lost(attempt, _reason(fault))
        groups = tuple(task.groups[i] for i in positions)
        for group in groups:
            del left[group]
        written: list[Written] = []
        if self._fields[task.stage][1]:
            assert attempt.stream is not None
            stage, lengths = attempt.stage, tuple(attempt.stream.tokens[i] for i in positions)
            newest = self._version_on(stage.groups[0], task)
            written.append(self._put(task, stage, groups, (attempt.stamped, newest), lengths))
        self._send(attempt, groups, written if left else [*written, *self._ran(attempt)])

    def _stop(self, attempt: Attempt) -> None:
        for lane, job in attempt.jobs:
            lane.stop(self.clock.now_s, job)

    # Recorded events.

    def _send(self, attempt: Attempt, groups: tuple[int, ...], written: Sequence[Written]) -> None:
        if attempt.fetches:
            written = [attempt.fetches, *written]
            attempt.fetches = None
        self._report(attempt, groups, written)
        if attempt.fault and attempt.fault.kind == "twice":
            self.clock.after(attempt.fault.delay_s, self._report, attempt, groups, written)

    def _put(
        self,
        task: Task,
        stage: PlannedStage,
        groups: Sequence[int],
        versions: tuple[int, int] = (0, 0),
        tokens: tuple[int, ...] = (),
    ) -> trace.Put:
        return trace.Put(
            stage=task.stage, step=task.step, attempt=task.attempt, fields=self._fields[task.stage][1],
            groups=tuple(groups), samples=len(groups) * self._plan.group_size, size_bytes=0,
            versions=(versions,) * len(groups) if stage.stamps else (), tokens=tokens if stage.stamps else (),
            start_s=self.clock.now_s, end_s=self.clock.now_s,
        )  # fmt: skip

    def _ran(self, attempt: Attempt) -> list[trace.Ran]:
        task, now_s = attempt.task, self.clock.now_s
        cpu_s = attempt.work_s * attempt.cores
        return [
            trace.Ran(
                task=task.number, stage=task.stage, step=task.step, attempt=task.attempt, groups=task.groups,
                group=group, worker=rank, start_s=attempt.begun_s, end_s=now_s, cpu_s=cpu_s, metrics={},
            )
            for group, rank, _ in attempt.lanes
        ]  # fmt: skip


def _reason(fault: Fault) -> str:
    return f"worker lost {fault.kind.replace('_', ' ')}"


def _nothing() -> None:
    """Do nothing at the end of work that nothing waits for."""
