"""A graph that was never run, ready to simulate on GPUs that were measured: durations, turns, memory.

made = forecast(graph, planned, asked("h200:2").gpu, Assumed(mean=400))
simulated(made.recording, Changes())
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from pipeline.declare.answers import work_of
from pipeline.declare.graph import Graph
from pipeline.declare.group import WorkerGroup
from pipeline.declare.stage import Stage
from pipeline.declare.task import Task
from pipeline.declare.work import Decoding, GpuWork
from pipeline.errors import GraphError, Problem
from pipeline.foretell.gpu import Gpu
from pipeline.foretell.loads import Assumed, AssumedLengths
from pipeline.foretell.memory import GroupMemory, memory, memory_problems
from pipeline.foretell.seconds import finished, lacking, seconds
from pipeline.plan.plan import Plan
from pipeline.simulation.distributions import Distribution
from pipeline.simulation.durations import Costs, Drawn, Durations, StageTimes, StreamPart, StreamWork, Work, merged
from pipeline.simulation.recording import Recording


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """A graph to simulate on GPUs of a kind.

    memory    of each worker group, by name
    problems  of groups that do not fit on their GPUs
    tokens    of all responses of a step
    """

    recording: Recording
    memory: dict[str, GroupMemory]
    problems: tuple[Problem, ...]
    tokens: int


class ForetoldTimes:
    """The durations of a stage on the GPUs of a worker group; `room_bytes` of each are not kept by groups beside it."""

    def __init__(self, stage: Stage, group: WorkerGroup, lengths: AssumedLengths, gpu: Gpu, room_bytes: float) -> None:
        self._stage, self._group, self._lengths, self._gpu, self._room_bytes = stage, group, lengths, gpu, room_bytes
        self._speed = 1.0
        self._found: dict[tuple[int, ...], Sequence[GpuWork] | Decoding | None] = {}
        self._streamed: dict[tuple[int, ...], StreamWork] = {}

    @property
    def is_known(self) -> bool:
        """Whether the stage knows its work, and the GPU has rates for it."""
        work = self._work_of(range(self._lengths.batch), self._group.data_parallel)
        if work is None:
            return False
        if isinstance(work, Decoding):
            return work.kind in self._gpu.rates
        return not any(lacking(part, self._gpu.rates.get(part.kind, {})) for part in work)

    def work(self, task: Task, *, samples: int, tokens: int, seed: int) -> Work:
        """Return the work of a map or a transfer: its GPU is busy."""
        found = self._work_of(task.groups, self._group.data_parallel if task.replica is None else 1)
        own = found.responses if isinstance(found, Decoding) else ()
        return Work(0.0, max(self._ends_s(found, [[length] for length in own]), default=0.0), 1.0)

    def stream(self, task: Task, *, group_size: int, seed: int) -> StreamWork:
        """Return the work of a stream: each group is finished with its longest response."""
        key = tuple(group % self._lengths.batch for group in task.groups)
        if key not in self._streamed:
            found, lengths = self._work_of(task.groups, 1), [self._lengths.of(group) for group in task.groups]
            longest = tuple(max(each) for each in lengths)
            parts = [StreamPart(end_s, 0.0, (i,)) for i, end_s in enumerate(self._ends_s(found, lengths))]
            self._streamed[key] = StreamWork(merged(parts), 1.0, longest)
        return self._streamed[key]

    def _ends_s(self, work: Sequence[GpuWork] | Decoding | None, groups: Sequence[Sequence[int]]) -> list[float]:
        """Return when each group of responses is finished, or the end of work that is not decoding, once per group."""
        rates = self._gpu.rates
        if isinstance(work, Decoding):
            ends_s = finished(work, rates[work.kind], self._lengths.assumed.prompt, groups)
            return [end_s / self._speed for end_s in ends_s]
        took_s = sum(seconds(part, rates.get(part.kind, {})) for part in work or ())
        return [took_s / self._speed] * max(1, len(groups))

    def faster(self, factor: float) -> ForetoldTimes:
        """Return a copy with all durations divided by `factor`."""
        made = ForetoldTimes(self._stage, self._group, self._lengths, self._gpu, self._room_bytes)
        made._speed = self._speed * factor
        return made

    def _work_of(self, groups: Sequence[int], ranks: int) -> Sequence[GpuWork] | Decoding | None:
        """Return the work of these groups, computed once per set of lengths: every step has the same."""
        key = (ranks, *(group % self._lengths.batch for group in groups))
        if key not in self._found:
            load = self._lengths.load(
                self._group, groups or range(self._lengths.batch), self._gpu, room_bytes=self._room_bytes, ranks=ranks
            )
            self._found[key] = work_of(self._stage, load)
        return self._found[key]


def forecast(graph: Graph, planned: Plan, gpu: Gpu, assumed: Assumed, *, given: Collection[str] = ()) -> Forecast:
    """Return a graph and its plan as foretold for this GPU. Stages whose time is not known have no durations; nothing
    is noted of those whose seconds are `given`. Raises GraphError if no group has GPUs, or the shape of a model or the
    length of a response is not known."""
    lengths = AssumedLengths(graph, assumed)
    found = memory(graph, lengths, gpu)
    if not found:
        raise GraphError(
            Problem(
                where=str(graph.location),
                what=f"no worker group of {graph.name!r} has GPUs",
                why="--on says which GPUs they have",
                fix="WorkerGroup(..., gpus=1), or no --on",
            )
        )
    times: dict[str, StageTimes] = {}
    idle = []
    for stage in graph.all_stages():
        if made := _times(stage, lengths, gpu, found):
            times[stage.name] = made
            idle += [stage.name] if isinstance(made, Drawn) and stage.name not in given else []
    notes = [lengths.note()]
    notes += [f"{', '.join(idle)}: taken to need no time; --stage NAME=SECONDS sets it"] if idle else []
    notes += [*_divisions(found), *_speculation(found)]
    costs = Costs(turn_s={name: _turn_s(one, found, gpu) for name, one in found.items() if one.beside_bytes})
    return Forecast(
        recording=Recording(plan=planned, durations=Durations(times, costs), notes=notes),
        memory=found,
        problems=tuple(memory_problems(graph, found, lengths, gpu)),
        tokens=sum(sum(lengths.of(group)) for group in range(graph.batch)),
    )


def _times(stage: Stage, lengths: AssumedLengths, gpu: Gpu, found: dict[str, GroupMemory]) -> StageTimes | None:
    """Return a stage's durations: none without a GPU, None if they are not known."""
    group = stage.groups()[-1] if stage.groups() else None
    if group is None or not group.gpus:
        return Drawn(Distribution(terms=())) if stage.shape != "external" else None
    made = ForetoldTimes(stage, group, lengths, gpu, gpu.memory_bytes - found[group.name].beside_bytes)
    return made if made.is_known else None


def _turn_s(one: GroupMemory, found: dict[str, GroupMemory], gpu: Gpu) -> float:
    """Return the seconds until a group has the memory of its GPUs: the others free theirs, and it takes its own. What
    a partner keeps because there is room does not move."""
    rates = gpu.rates["turns"]
    home = (one.group.colocated or one.group).name
    others = [each for each in found.values() if each is not one and (each.group.colocated or each.group).name == home]
    took_s = 0.0
    for each, rate in [(one, rates["woken_bytes"]), *((each, rates["slept_bytes"]) for each in others)]:
        partners = others if each is one else [one]
        stays = max(partner.spared_bytes for partner in partners)
        moved = max(0.0, each.movable_bytes - stays)
        dropped = sum(part.size_bytes for part in each.held if part.when == "dropped")
        took_s += (moved + dropped) / rate + moved / rates["copied_bytes"]
    return took_s


def _divisions(found: dict[str, GroupMemory]) -> list[str]:
    names = [one.group.name for one in found.values() if one.group.workers > 1]
    if not names:
        return []
    return [f"{', '.join(names)}: what the GPUs of a worker group send each other is not counted"]


def _speculation(found: dict[str, GroupMemory]) -> list[str]:
    names = [one.group.name for one in found.values() if one.group.speculate]
    return [f"{', '.join(names)}: taken to sample as fast as without drafts"] if names else []
