"""A rollout with delayed groups: each is returned some time after it was sampled, as if sampling had taken longer.

    DelayedRollout(policy, on=sampler, samples_per_prompt=16, max_tokens=5, mean_s=0.5, tail=1.0)

The delay of a group is lognormal, drawn from the run's seed and the group's admission number, so it is the same under
every schedule. It models responses that are too long for this machine; while a group is held back, others are sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from pipeline import Graph, Output, StageContext, Task
from pipeline.declare.columns import Columns, take
from pipeline.errors import Problem
from pipeline.simulation.distributions import Distribution, Term
from stages import Rollout
from stages.vocabulary import RESPONSE_IDS

LOOK_S = 0.02  # between two checks of a held group for cancellation


@dataclass(frozen=True)
class DelayedRollout(Rollout):
    """`mean_s` is the mean delay, `tail` the sigma of its logarithm."""

    _: KW_ONLY
    mean_s: float = 0.1
    tail: float = 1.0

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Check what Rollout checks, and the two numbers."""
        yield from super().check(graph)
        if self.mean_s < 0 or self.tail < 0:
            yield Problem(
                where=str(self.location),
                what=f"mean_s={self.mean_s!r}, tail={self.tail!r}",
                why="both are 0 or more",
                fix="mean_s=0.1, tail=1.0",
            )

    def delay_s(self, seed: int, group: int) -> float:
        """The delay of the group with this admission number, in seconds."""
        drawn = Distribution(terms=(Term("lognormal", (self.mean_s, self.tail)),))
        return drawn.draw(groups=1, samples=1, seed=seed, counters=(group,))

    def setup(self, context: StageContext) -> Callable[[Columns, Task], AsyncIterator[Output]]:
        """Return Rollout's runner, with each group held back."""
        inner = super().setup(context)

        async def hold(output: Output, position: int, task: Task) -> Output:
            group = task.groups[position]
            clock = asyncio.get_running_loop().time
            until_s = clock() + self.delay_s(context.seed, group)
            while (left_s := until_s - clock()) > 0:
                if group in context.cancelled:
                    lengths: Any = output.columns[RESPONSE_IDS.name]
                    return Output(cancelled={position: max(lengths.lengths)})
                await asyncio.sleep(min(left_s, LOOK_S))
            return output

        async def run(columns: Columns, task: Task) -> AsyncIterator[Output]:
            ready: asyncio.Queue[asyncio.Future[Output] | None] = asyncio.Queue()
            held: set[asyncio.Future[Output]] = set()

            async def sample() -> None:
                async with aclosing(inner(columns, task)) as outputs:  # type: ignore[type-var]
                    async for output in outputs:
                        for position, part in _by_group(output, task, context.group_size):
                            waits = asyncio.ensure_future(
                                hold(part, position, task) if position >= 0 else _at_once(part)
                            )
                            held.add(waits)
                            waits.add_done_callback(ready.put_nowait)

            sampling = asyncio.ensure_future(sample())
            sampling.add_done_callback(lambda _: ready.put_nowait(None))
            try:
                while held or not sampling.done() or not ready.empty():
                    done = await ready.get()
                    if done is not None:
                        held.discard(done)
                        yield done.result()
                sampling.result()
            finally:
                for waits in (sampling, *held):
                    waits.cancel()
                await asyncio.gather(sampling, *held, return_exceptions=True)

        return run


def with_delays(graph: Graph, *, mean_s: float, tail: float) -> Graph:
    """The same graph with delayed groups and without evaluation."""
    stages = [
        DelayedRollout(
            stage.model,
            on=stage.on,
            samples_per_prompt=stage.samples_per_prompt,
            max_tokens=stage.max_tokens,
            mean_s=mean_s,
            tail=tail,
        )
        if isinstance(stage, Rollout)
        else stage
        for stage in graph.stages
        if stage.name != "evaluate"
    ]
    return replace(graph, stages=tuple(stages))


async def _at_once(output: Output) -> Output:
    return output


def _by_group(output: Output, task: Task, size: int) -> list[tuple[int, Output]]:
    """Split an output by group. Returns (position in the task, output) pairs; -1 for an output without samples."""
    parts = [(-1, Output(cancelled=output.cancelled))] if output.cancelled else []
    if not output.columns:
        return parts
    index = list(range(len(task.groups) * size) if output.index is None else output.index)
    for start in range(0, len(index), size):
        rows = range(start, start + size)
        columns = {name: take(column, rows) for name, column in output.columns.items()}
        parts.append((index[start] // size, Output(columns, output.metrics, index=index[start : start + size])))
    return parts
