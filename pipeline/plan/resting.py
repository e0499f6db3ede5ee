"""Memory that worker groups keep on GPUs while others compute there, as far as stages know it before they run."""

from __future__ import annotations

from collections.abc import Collection

from pipeline.declare.answers import memory_of
from pipeline.declare.graph import Graph
from pipeline.declare.stage import Stage
from pipeline.declare.work import GpuPart, Load
from pipeline.errors import SluiceError


def resting_bytes(graph: Graph, names: Collection[str]) -> float:
    """Return the bytes that these groups keep on each of their GPUs between their turns: without what moves to the host
    if others need the room, and without what is not known."""
    total = 0.0
    for group in {group.name: group for stage in graph.all_stages() for group in stage.groups()}.values():
        if group.name in names:
            load = Load(
                group=group, prompt=1, responses=[1], longest=1, group_size=1, ranks=group.data_parallel,
                gpu_bytes=0, room_bytes=0,
            )  # fmt: skip
            stages = [stage for stage in graph.all_stages() if group in stage.groups()]
            kept = {part.name: part.size_bytes for stage in stages for part in _known(stage, load)}
            total += sum(kept.values())
    return total


def _known(stage: Stage, load: Load) -> list[GpuPart]:
    """The parts of a stage that always stay; none if it does not know its memory."""
    try:
        return [part for part in memory_of(stage, load) or () if part.when == "always"]
    except SluiceError:  # such as a model whose config is not at hand
        return []
