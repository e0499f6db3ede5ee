"""The samples of a rank's batch after its first minibatch, divided as they are. Knows no model."""

from __future__ import annotations

from msgspec.structs import replace

from pipeline.declare.columns import Ragged
from pipeline.declare.sharding import Microbatch, Shard
from stages.backends import Batch, cut


def rest_of(batch: Batch, shard: Shard) -> tuple[tuple[Ragged, Ragged] | tuple[Ragged, Ragged, Ragged], Shard] | None:
    """Return the samples after the first minibatch, as prompts, responses and, if the batch has them, routes, and their
    shard, with positions among them; None if there are none. Minibatches are consecutive runs of samples."""
    first, *others = shard.updates
    start, count = sum(len(microbatch.samples) for microbatch in first.microbatches), len(batch)
    if start == count:
        return None

    def moved(microbatch: Microbatch) -> Microbatch:
        return replace(microbatch, samples=tuple(sample - start for sample in microbatch.samples))

    updates = tuple(replace(update, microbatches=tuple(map(moved, update.microbatches))) for update in others)
    samples = cut(batch.prompt_ids, start, count), cut(batch.response_ids, start, count)
    routes = () if batch.routes is None else (cut(batch.routes, start, count),)
    return (*samples, *routes), replace(shard, updates=updates)
