"""What a run is taken to do: lengths of prompts and responses, and the kernels that it finds. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pipeline.declare.abilities import bounds_of, stamps_of
from pipeline.declare.graph import Graph
from pipeline.declare.group import WorkerGroup
from pipeline.declare.work import Load
from pipeline.errors import GraphError, Problem
from pipeline.foretell.gpu import Gpu
from pipeline.simulation.durations import GOLDEN

PROMPT = 256  # tokens
MOST_SAMPLES = 100_000  # per step: each one is divided over GPUs, and simulated


class Assumed(msgspec.Struct, frozen=True, kw_only=True):
    """prompt   tokens of each prompt
    mean     tokens of a response in the mean; None: every response is as long as it may become
    kernels  "fused", with Transformer Engine and Triton, or "plain", without
    """

    prompt: int = PROMPT
    mean: int | None = None
    kernels: str = "fused"


def check_samples(graph: Graph) -> None:
    """Raise GraphError if a step has more samples than can be foretold in a reasonable time."""
    samples = graph.batch * graph.group_size
    if samples > MOST_SAMPLES:
        raise GraphError(
            Problem(
                where=str(graph.source.location),
                what=f"a step has {samples:,} samples: {graph.batch:,} groups of {graph.group_size}",
                why=f"time and memory are foretold for at most {MOST_SAMPLES:,}",
                fix="fewer groups per batch or samples per group, or no --on",
            )
        )


class AssumedLengths:
    """The lengths of a graph's responses, the same in every step. Raises GraphError if a step has too many samples, no
    stage says how long a response may become, or the mean is longer.

    With a mean they are spread evenly around it, as far as 1 and the longest allow.
    """

    def __init__(self, graph: Graph, assumed: Assumed) -> None:
        check_samples(graph)
        self._stages = stages = graph.all_stages()
        field = stamps_of(stages)
        bounds = {dim: most for stage in stages for dim, most in bounds_of(stage).items()}
        self.longest = bounds.get(str(field.ragged), 0) if field else 0
        self.assumed, self.batch, self.group_size = assumed, graph.batch, graph.group_size
        mean = assumed.mean or self.longest
        if not 1 <= mean <= self.longest:
            raise GraphError(
                Problem(
                    where=f"--assume mean={assumed.mean}" if self.longest else str(graph.location),
                    what=f"responses have at most {self.longest:,} tokens"
                    if self.longest
                    else "no stage says how many tokens a response may have",
                    why="time and memory follow from the lengths",
                    fix=f"--assume mean={self.longest // 2 or 1}" if self.longest else "a Rollout with max_tokens",
                )
            )
        self._low = max(1, 2 * mean - self.longest)
        self._range = 2 * (mean - self._low)
        self._found: dict[int, list[int]] = {}

    def of(self, group: int) -> list[int]:
        """Return the tokens of each response of a group."""
        number = group % self.batch
        if number not in self._found:
            places = range(number * self.group_size, (number + 1) * self.group_size)
            self._found[number] = [self._low + round(self._range * (GOLDEN * place % 1.0)) for place in places]
        return self._found[number]

    def load(
        self, group: WorkerGroup, groups: Sequence[int], gpu: Gpu, *, room_bytes: float | None = None, ranks: int = 0
    ) -> Load:
        """Return what a stage on `group` has to do for these groups of samples. `ranks` is data_parallel if 0."""
        return Load(
            group=group,
            prompt=self.assumed.prompt,
            responses=[length for number in groups for length in self.of(number)],
            longest=self.longest,
            group_size=self.group_size,
            ranks=ranks or group.data_parallel,
            gpu_bytes=int(gpu.memory_bytes),
            room_bytes=int(gpu.memory_bytes if room_bytes is None else room_bytes),
            kernels=self.assumed.kernels,
            trained=[stage.updates for stage in self._stages if stage.updates and group in stage.groups()],
        )

    def note(self) -> str:
        """Say what was assumed."""
        mean = self.assumed.mean
        responses = f"{self.longest:,} tokens, the most" if mean is None else f"{mean:,} tokens in the mean"
        return (
            f"assumed (--assume): prompts of {self.assumed.prompt:,} tokens, responses of {responses}, "
            f"{self.assumed.kernels} kernels"
        )
