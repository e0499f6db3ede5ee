"""What a stage says of its work before it runs: amounts of computation per GPU, and bytes of GPU memory.

A stage has this ability if it has the methods of `Foretells`. `pipeline.foretell` divides the amounts by what a GPU was
measured to do per second; a stage knows no GPU.

    class Judge(Stage):
        def work(self, load):
            tokens = sum(load.responses) / load.ranks
            return GpuWork(kind="megatron.scoring", products=2 * 7e9 * tokens, passes=tokens / 8192)

        def memory(self, load):
            return [GpuPart(name="weights of the judge", size_bytes=14 << 30)]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import msgspec

if TYPE_CHECKING:
    from pipeline.declare.group import Model, WorkerGroup


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage has to do, and where.

    group       the worker group that is asked about: a transfer is asked once for each side
    prompt      tokens of each prompt
    responses   tokens of each response, group after group; of a stream, those of one replica
    longest     the most tokens of a response
    group_size  samples per prompt
    ranks       replicas that share the samples
    gpu_bytes   memory of a GPU
    room_bytes  of that, what other worker groups on the same GPU leave while this one computes
    kernels     "fused", with Transformer Engine and Triton, or "plain", without
    trained     models that the worker group trains
    """

    group: WorkerGroup
    prompt: int
    responses: Sequence[int]
    longest: int
    group_size: int
    ranks: int = 1
    gpu_bytes: int
    room_bytes: int
    kernels: str = "fused"
    trained: Sequence[Model] = ()


class GpuWork(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts of a task on its busiest GPU, and `kind`, the entry of a GPU's table with the rates.

    The GPU computes products, attention, moved and vocabulary bytes one after another, and meanwhile the host launches
    the layers; the rest overlaps nothing.

    products          floating point operations of matrix products
    attention         floating point operations of attention
    moved_bytes       of activations that other kernels read and write
    vocabulary_bytes  of logits
    layers            layers launched, summed over the passes
    passes            passes through the model
    updated_bytes     read and written by the optimizer
    copied_bytes      between GPU and host
    seconds           of anything else
    """

    kind: str = ""
    products: float = 0.0
    attention: float = 0.0
    moved_bytes: float = 0.0
    vocabulary_bytes: float = 0.0
    layers: float = 0.0
    passes: float = 0.0
    updated_bytes: float = 0.0
    copied_bytes: float = 0.0
    seconds: float = 0.0


class Decoding(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that samples token by token, as one of its GPUs sees it, and `kind`, the entry of a GPU's table.

    weights_bytes  read in every step
    products       floating point operations of matrix products, per token
    cache_bytes    of the key-value cache per token, read in every step of its sequence
    most_tokens    tokens for which the cache has room
    responses      tokens of each response, if they are not those of the step: one for each prompt of its own
    """

    kind: str
    weights_bytes: float
    products: float
    cache_bytes: float
    most_tokens: int
    responses: Sequence[int] = ()


class GpuPart(msgspec.Struct, frozen=True, kw_only=True):
    """Memory on each GPU of a worker group. Stages of a group that name the same part share it.

    when   "always"; "dropped" or "moved": while other groups compute on the same GPU it is freed, or on the host;
           "task": only while a task of the stage runs; "spare": an allocator holds it then, and gives it up if the
           room is needed
    """

    name: str
    size_bytes: float
    when: Literal["always", "dropped", "moved", "task", "spare"] = "always"


@runtime_checkable
class Foretells(Protocol):
    """A stage that can say what it will need."""

    def work(self, load: Load) -> GpuWork | Sequence[GpuWork] | Decoding | None:
        """Return the work of a task, or its parts in order, or None if it is not known. Raises GraphError if its model
        is not known."""

    def memory(self, load: Load) -> Sequence[GpuPart] | None:
        """Return its memory on each GPU of `load.group`, or None if it is not known. Raises as `work` does."""

    def fitting(self, load: Load, room_bytes: float) -> str:
        """Return what to write so that its parts that last for a task take at most `room_bytes`; "" if nothing
        helps."""
