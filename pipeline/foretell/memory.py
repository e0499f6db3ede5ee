"""Memory of each worker group on one of its GPUs, by part, before a run; and what does not fit. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from pipeline.declare.answers import fitting_of, memory_of, work_of
from pipeline.declare.graph import Graph
from pipeline.declare.group import WorkerGroup
from pipeline.declare.stage import Stage
from pipeline.declare.work import Decoding, GpuPart, Load
from pipeline.errors import Problem
from pipeline.foretell.gpu import Gpu
from pipeline.foretell.loads import AssumedLengths
from pipeline.plan.resting import resting_bytes

USABLE = 0.98  # of a GPU: the rest is lost to fragments
PASSING = ("task", "spare")


class GroupMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a worker group on one GPU. `held` stays between tasks; `passing` is by stage, while a task runs.

    gpu_bytes     of the GPU
    beside_bytes  what groups on the same GPUs keep meanwhile
    spared_bytes  what they could move to the host, and keep too because there is room
    cached_bytes  what they have dropped, and their allocator keeps because there is room
    fits          what to write so that a stage's tasks fit on the GPU, by stage
    unknown       stages whose memory is not known
    """

    group: WorkerGroup
    held: Sequence[GpuPart]
    passing: Mapping[str, Sequence[GpuPart]]
    gpu_bytes: float
    beside_bytes: float = 0.0
    spared_bytes: float = 0.0
    cached_bytes: float = 0.0
    fits: Mapping[str, str] = {}
    unknown: Sequence[str] = ()

    @property
    def movable_bytes(self) -> float:
        """What moves to the host, as far as others need the room."""
        return self._held_bytes("moved")

    @property
    def dropped_bytes(self) -> float:
        """What is freed while others have the GPU."""
        return self._held_bytes("dropped")

    @property
    def largest(self) -> str:
        """The stage whose tasks take most; "" if none takes any."""
        return max(self.passing, key=self.taken_bytes, default="")

    @property
    def before_bytes(self) -> float:
        """Bytes in use on a GPU in this group's turn, before a task runs."""
        return self.taken_bytes("") + self.spared_bytes + self.cached_bytes

    @property
    def needed_bytes(self) -> float:
        """The bytes of a GPU without which this group's tasks do not run."""
        return self.taken_bytes(self.largest)

    @property
    def peak_bytes(self) -> float:
        """The most bytes in use on a GPU in this group's turn."""
        whole = self.before_bytes + max(map(_sum, self.passing.values()), default=0.0)
        return max(self.needed_bytes, min(whole, USABLE * self.gpu_bytes))

    def _held_bytes(self, when: str) -> float:
        return _sum(part for part in self.held if part.when == when)

    def taken_bytes(self, stage: str) -> float:
        """The bytes without which the tasks of a stage do not run; of "", those between tasks."""
        return self.beside_bytes + _sum(self.held) + _sum(_needed(self.passing.get(stage, ())))


def _sum(parts: Iterable[GpuPart]) -> float:
    return sum(part.size_bytes for part in parts)


def _needed(parts: Iterable[GpuPart]) -> list[GpuPart]:
    return [part for part in parts if part.when != "spare"]


def memory(graph: Graph, lengths: AssumedLengths, gpu: Gpu) -> dict[str, GroupMemory]:
    """Return the memory of each worker group with GPUs, by name. Raises GraphError if a model's shape is not known."""
    groups = {group.name: group for stage in graph.all_stages() for group in stage.groups() if group.gpus}
    whole = {name: _group(graph, lengths.load(group, range(graph.batch), gpu)) for name, group in groups.items()}
    found = {}
    for name, group in groups.items():
        partners = [whole[other] for other in _partners(group, groups.values())]
        beside = resting_bytes(graph, [partner.group.name for partner in partners])
        load = lengths.load(group, range(graph.batch), gpu, room_bytes=gpu.memory_bytes - beside)
        one = msgspec.structs.replace(_group(graph, load), beside_bytes=beside)
        room = USABLE * gpu.memory_bytes - one.before_bytes
        fits = {stage.name: fitting_of(stage, load, room) for stage in graph.all_stages() if stage.name in one.passing}
        kept = {}
        if group.leads and len(partners) == 1:
            free = max(0.0, USABLE * gpu.memory_bytes - one.needed_bytes)
            kept["spared_bytes"] = min(partners[0].movable_bytes, free)
            kept["cached_bytes"] = min(partners[0].dropped_bytes, free - kept["spared_bytes"])
        found[name] = msgspec.structs.replace(one, fits=fits, **kept)
    return found


def _partners(group: WorkerGroup, groups: Iterable[WorkerGroup]) -> list[str]:
    """Return the other groups on the same GPUs."""
    home = (group.colocated or group).name
    return [other.name for other in groups if other.name != group.name and (other.colocated or other).name == home]


def _group(graph: Graph, load: Load) -> GroupMemory:
    held: dict[str, GpuPart] = {}
    passing: dict[str, list[GpuPart]] = {}
    unknown = []
    for stage in graph.all_stages():
        if load.group.name in {group.name for group in stage.groups()}:
            parts = memory_of(stage, load)
            if parts is None:
                unknown.append(stage.name)
                continue
            held |= {part.name: part for part in parts if part.when not in PASSING}
            if own := [part for part in parts if part.when in PASSING]:
                passing[stage.name] = own
    return GroupMemory(
        group=load.group, held=list(held.values()), passing=passing, gpu_bytes=load.gpu_bytes, unknown=unknown
    )


def memory_problems(
    graph: Graph, found: Mapping[str, GroupMemory], lengths: AssumedLengths, gpu: Gpu
) -> Iterator[Problem]:
    """Yield a problem for each worker group that does not fit on its GPUs, or whose cache holds no sample."""
    for one in found.values():
        room = gpu.memory_bytes - one.beside_bytes
        load = lengths.load(one.group, range(graph.batch), gpu, room_bytes=room)
        own = [stage for stage in graph.all_stages() if one.group.name in {group.name for group in stage.groups()}]
        if no_cache := [problem for stage in own for problem in _no_cache(stage, one, load)]:
            yield from no_cache
        elif one.needed_bytes > USABLE * gpu.memory_bytes:
            yield from _too_much(one, own, gpu)


def _too_much(one: GroupMemory, own: Iterable[Stage], gpu: Gpu) -> Iterator[Problem]:
    """Yield a problem for each stage whose tasks do not fit, the largest first; one if only more GPUs help."""
    stages, most = {stage.name: stage for stage in own}, USABLE * one.gpu_bytes
    too_large = [name for name in one.passing if one.taken_bytes(name) > most]
    too_large.sort(key=one.taken_bytes, reverse=True)
    if not all(one.fits.get(name) for name in too_large):
        too_large = too_large[:1]
    for name in too_large or [""]:
        stage, fix = stages.get(name), one.fits.get(name, "")
        parts = sorted([*one.held, *_needed(one.passing.get(name, ()))], key=lambda part: -part.size_bytes)
        listed = ", ".join(f"{part.name} {gib(part.size_bytes)}" for part in parts[:3])
        beside = f", beside {gib(one.beside_bytes)} of other worker groups" if one.beside_bytes else ""
        yield Problem(
            where=str((stage or one.group).location),
            what=f"worker group {one.group.name!r} needs {gib(one.taken_bytes(name))} of a GPU{beside}: {listed}",
            why=f"{gib(most)} of {gib(gpu.memory_bytes)} can be used",
            fix=f"{fix} in {name!r}" if fix and stage else "more GPUs, with tensor_parallel or pipeline_parallel",
        )


def _no_cache(stage: Stage, one: GroupMemory, load: Load) -> Iterator[Problem]:
    work = work_of(stage, load) if stage.shape == "stream" else None
    if isinstance(work, Decoding) and work.most_tokens < load.prompt + load.longest:
        larger = "memory= or " if _memory_binds(stage, load, work) else ""
        yield Problem(
            where=str(one.group.location),
            what=f"the cache of worker group {one.group.name!r} holds {work.most_tokens:,} tokens, and a sample has up "
            f"to {load.prompt + load.longest:,}",
            why=_why_no_cache(stage, one, load, work),
            fix=f"a larger {larger}tensor_parallel=, or GPUs of its own",
        )


def _memory_binds(stage: Stage, load: Load, work: Decoding) -> bool:
    """Return whether the cache would have room for more tokens if the group's memory= were larger."""
    most = work_of(stage, msgspec.structs.replace(load, group=replace(load.group, memory=1.0)))
    return isinstance(most, Decoding) and most.most_tokens > work.most_tokens


def _why_no_cache(stage: Stage, one: GroupMemory, load: Load, work: Decoding) -> str:
    """Say what bounds the cache. If nothing is left for it, `memory_of` the stage is the engine without a cache."""
    beside = f", beside {gib(one.beside_bytes)} of other worker groups" if one.beside_bytes else ""
    limit = f"at most {one.group.memory:g} of a GPU's {gib(load.gpu_bytes)}{beside}"
    if work.most_tokens > 0:
        return f"with its weights and buffers, the engine may have {limit}"
    taken = _sum([part for part in memory_of(stage, load) or () if part.when not in PASSING])
    alone = f"the engine's weights and buffers alone take {gib(taken)}" if taken else "the engine is too large"
    return f"{alone}, which leaves nothing of what it may have: {limit}"


def gib(size_bytes: float) -> str:
    """Format bytes as GiB."""
    return f"{size_bytes / 2**30:.1f} GiB"
