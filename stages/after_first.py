"""The samples of a rank's batch after its first minibatch, divided as they are. Knows no model."""

from __future__ import annotations

from msgspec.structs import replace

from pipeline.declare.sharding import Microbatch, Shard
from stages.backends import Batch


def rest_of(batch: Batch, shard: Shard) -> tuple[Batch, Shard] | None:
    """Return the samples after the first minibatch and their shard, with positions among them; None if there are none.
    Minibatches are consecutive runs of samples."""
    first, *others = shard.updates
    start, count = sum(len(microbatch.samples) for microbatch in first.microbatches), len(batch)
    if start == count:
        return None

    def moved(microbatch: Microbatch) -> Microbatch:
        return replace(microbatch, samples=tuple(sample - start for sample in microbatch.samples))

    updates = tuple(replace(update, microbatches=tuple(map(moved, update.microbatches))) for update in others)
    return batch.at(range(start, count)), replace(shard, updates=updates)
