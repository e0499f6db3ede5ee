"""The ranks of a worker group: which ones share a batch, which ones share a sample, and how they communicate.

    ranks = Ranks.join(layout, rank, address, device="cpu", deadline_s=300.0)
    ranks.sum(gradient)                      # over the data-parallel ranks, in place
    columns = ranks.share(fetch)             # one rank of a replica fetches, its siblings receive

Ranks with different samples are *data-parallel*. Ranks that split one model and need the same samples are the
*siblings* of a replica; the first of them is its leader. Knows processes and tensors, not stages. torch loads when
ranks join; a group of one process never loads it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pipeline.declare.columns import Columns, Ragged
from pipeline.errors import Problem, StageError

if TYPE_CHECKING:
    import torch

    from pipeline.declare.group import WorkerGroup

Fetch = Literal["auto", "independent", "leader"]


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """How the processes of a worker group split the work: data x pipeline x context x tensor parallel.

    Ranks count up in Megatron-core's order: tensor fastest, then context, data, pipeline (core/parallel_state.py,
    order "tp-cp-ep-dp-pp").
    """

    data: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1

    @staticmethod
    def of(group: WorkerGroup) -> RankLayout:
        """Return the layout of a checked worker group, or of its processes if each leads a replica."""
        if group.processes < group.workers:
            return RankLayout(data=group.processes)
        return RankLayout(
            data=group.data_parallel,
            tensor=group.tensor_parallel,
            context=group.context_parallel,
            pipeline=group.pipeline_parallel,
        )

    @property
    def size(self) -> int:
        """All ranks."""
        return self.data * self.tensor * self.context * self.pipeline

    def replica(self, rank: int) -> int:
        """Return the data-parallel position of a rank: its shard of a batch."""
        return rank // (self.tensor * self.context) % self.data

    def siblings(self, replica: int) -> tuple[int, ...]:
        """Return the ranks that share one shard of a batch; the first is their leader."""
        return tuple(rank for rank in range(self.size) if self.replica(rank) == replica)

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with the same part of the model as `rank`, one per replica, whose gradients are summed."""
        inside = self.tensor * self.context
        stage = rank // (inside * self.data) * (inside * self.data)
        return tuple(stage + replica * inside + rank % inside for replica in range(self.data))


@dataclass
class Ranks:
    """One rank's view of its worker group. The default is a group of one."""

    layout: RankLayout = field(default_factory=RankLayout)
    rank: int = 0
    fetch: Fetch = "auto"
    _peers: Any = None  # torch process groups
    _siblings: Any = None

    @property
    def replica(self) -> int:
        """The shard of a batch that this rank holds."""
        return self.layout.replica(self.rank)

    @property
    def leads(self) -> bool:
        """Whether this rank fetches and writes for its replica."""
        return self.layout.siblings(self.replica)[0] == self.rank

    @property
    def connected(self) -> bool:
        """Whether the ranks of the group are connected."""
        return self._peers is not None

    @staticmethod
    def join(
        layout: RankLayout, rank: int, store: Any, *, device: str, deadline_s: float, fetch: Fetch = "auto"
    ) -> Ranks:
        """Join the other ranks at `store`; gloo carries CPU tensors and NCCL GPU tensors.

        Returns when all have joined. A later exchange that takes longer than `deadline_s` raises in each waiting rank.
        """
        from datetime import timedelta

        import torch.distributed as dist

        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        deadline = timedelta(seconds=deadline_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=layout.size, timeout=deadline)
        peers = siblings = None
        for replica in range(layout.data):  # every rank creates every group in the same order
            ranks = layout.siblings(replica)
            made = dist.new_group(list(ranks), timeout=deadline)
            siblings = made if rank in ranks else siblings
        for first in layout.siblings(0):
            ranks = layout.peers(first)
            made = dist.new_group(list(ranks), timeout=deadline)
            peers = made if rank in ranks else peers
        return Ranks(layout, rank, fetch, peers, siblings)

    def leave(self) -> None:
        """Disconnect. Idempotent."""
        if self.connected:
            import torch.distributed as dist

            self._peers = self._siblings = None
            dist.destroy_process_group()

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum tensors over the data-parallel ranks, in place, in one exchange. Shapes must match on all ranks."""
        if self.layout.data == 1 or not tensors:
            return
        import torch
        import torch.distributed as dist

        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat, group=self._peers)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(part.view_as(tensor))

    def gather(self, value: Any) -> list[Any]:
        """Gather one small picklable value per data-parallel rank, in rank order, on all of them."""
        if self.layout.data == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.layout.data
        dist.all_gather_object(values, value, group=self._peers)
        return values

    def totals(self, values: dict[str, float], *, largest: Sequence[str] = ()) -> dict[str, float]:
        """Sum each value over the data-parallel ranks, in rank order; take the maximum for names in `largest`."""
        parts = self.gather(values)
        return {
            name: max(part[name] for part in parts) if name in largest else sum(part[name] for part in parts)
            for name in values
        }

    def agree(self, what: str, value: Any) -> None:
        """Raise StageError on every rank if the data-parallel ranks disagree on `value`.

        Called before a stage with collectives: with unequal counts the ranks would block forever.
        """
        values = self.gather(value)
        if any(other != values[0] for other in values):
            message = ", ".join(f"rank {rank}: {other}" for rank, other in enumerate(values))
            raise StageError(
                Problem(
                    where=what,
                    what=f"the data-parallel ranks have different work ({message})",
                    why="they communicate once per microbatch, and a rank with fewer would leave the others waiting",
                    fix="shard the batch with pipeline.declare.sharding.shard_batch(..., equal=True)",
                )
            )

    def share(self, fetch: Callable[[], Columns]) -> Columns:
        """Return the columns from `fetch` on every sibling. If they have a leader, only the leader calls `fetch`.

        The leader broadcasts a descriptor and then each tensor. If its fetch raises, its siblings raise a StageError
        instead of waiting.
        """
        if self._siblings is None or len(self.layout.siblings(0)) == 1 or self.fetch == "independent":
            return fetch()
        import torch.distributed as dist

        leader = self.layout.siblings(self.replica)[0]
        if self.rank != leader:
            described: list[Any] = [None]
            dist.broadcast_object_list(described, src=leader, group=self._siblings)
            return self._receive(described[0], leader)
        try:
            columns = fetch()
        except Exception as error:
            dist.broadcast_object_list([f"{type(error).__name__}: {error}"], src=leader, group=self._siblings)
            raise
        described = [{name: _descriptor(column) for name, column in columns.items()}]
        dist.broadcast_object_list(described, src=leader, group=self._siblings)
        for column in columns.values():
            if not isinstance(column, list):
                values = column.values if isinstance(column, Ragged) else column
                dist.broadcast(values.contiguous(), src=leader, group=self._siblings)
        return columns

    def _receive(self, described: dict[str, Any] | str, leader: int) -> Columns:
        import torch
        import torch.distributed as dist

        if isinstance(described, str):
            raise StageError(
                Problem(
                    where=f"rank {self.rank}",
                    what=f"rank {leader}, which fetches for it, failed: {described}",
                    why="one rank of a replica fetches for all",
                    fix="resolve the error of that rank",
                )
            )
        columns: Columns = {}
        for name, (dtype, shape, lengths) in described.items():
            if dtype is None:
                columns[name] = shape
                continue
            values = torch.empty(shape, dtype=dtype)
            dist.broadcast(values, src=leader, group=self._siblings)
            columns[name] = values if lengths is None else Ragged(values, lengths)
        return columns


def _descriptor(column: Any) -> tuple[Any, Any, tuple[int, ...] | None]:
    """Return (dtype, shape, lengths) of a tensor column; for a list of texts, (None, the list, None)."""
    if isinstance(column, list):
        return None, column, None
    values = column.values if isinstance(column, Ragged) else column
    return values.dtype, tuple(values.shape), column.lengths if isinstance(column, Ragged) else None


def open_store(host: str, ranks: int, *, deadline_s: float) -> Any:
    """Open the store where ranks meet, served by this process on `host` only, on a free port."""
    from datetime import timedelta

    import torch.distributed as dist

    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        ranks,
        is_master=True,
        timeout=timedelta(seconds=deadline_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=False,
    )


def reach_store(host: str, port: int, ranks: int, *, deadline_s: float) -> Any:
    """Connect to the store that another rank serves."""
    from datetime import timedelta

    import torch.distributed as dist

    return dist.TCPStore(
        host,
        port,
        ranks,
        is_master=False,
        timeout=timedelta(seconds=deadline_s),
        wait_for_workers=False,
        use_libuv=False,
    )
