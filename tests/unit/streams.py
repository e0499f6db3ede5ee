"""Join the outputs of a stream: the columns of all samples in the order of the task."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from pipeline import Output
from pipeline.declare.columns import Columns, concat, take


def collected(stream: AsyncIterator[Output]) -> list[Output]:
    """Return the outputs with which a stream that runs alone finishes groups."""

    async def collect() -> list[Output]:
        return [output async for output in stream if output.columns or output.cancelled]

    return asyncio.run(collect())


def whole(outputs: Sequence[Output]) -> Columns:
    """Return the columns of all samples in order. Each sample must be in exactly one output."""
    made = [output for output in outputs if not output.cancelled]
    index = [sample for output in made for sample in output.index or ()]
    assert len(set(index)) == len(index)
    order = sorted(range(len(index)), key=index.__getitem__)
    return {name: take(concat([output.columns[name] for output in made]), order) for name in made[0].columns}
