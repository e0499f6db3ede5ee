"""NCCL groups: one rank per GPU, two groups at the same time, and errors when ranks cannot meet."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from ops.comm.stateless_group import GroupError, StatelessGroup
from tests.gpu.processes import each

HOST = "127.0.0.1"
CUDA = torch.device("cuda", 0)


def free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return int(free.getsockname()[1])


def went_round(rank: int, ranks: int, ports: tuple[int, int]) -> list[list[float]]:
    """Return what a rank receives from its neighbor and from the last rank, through each of two groups."""
    groups = [StatelessGroup.join(HOST, port, rank=rank, ranks=ranks, device=CUDA) for port in ports]
    own = [torch.full((1 << 20,), 10.0 * number + rank, device=CUDA) for number in range(2)]
    got = [torch.full_like(tensor, -1.0) for tensor in own]
    for group, tensor, into in zip(groups, own, got):
        with group.together():
            group.send(tensor, (rank + 1) % ranks)
            group.recv(into, (rank - 1) % ranks)
    for group, tensor in zip(reversed(groups), reversed(own)):
        group.broadcast(tensor, ranks - 1)
    for group in groups:
        group.finish(60.0)
    found = [[float(tensor.min()), float(tensor.max())] for tensor in (*got, *own)]
    for group in groups:
        group.close()
    return found


def test_ranks_send_to_each_other_in_two_groups(gpus: list[str]) -> None:
    ranks = len(gpus)
    found = each(went_round, gpus, ranks, (free_port(), free_port()))
    for rank, seen in enumerate(found):
        before, last = (rank - 1) % ranks, ranks - 1
        assert seen == [[value, value] for value in (before, 10.0 + before, last, 10.0 + last)], rank


def error_of(rank: int, port: int, deadline_s: float, absent: int | None = None) -> str:
    """Return the error of one of two ranks that cannot meet. An absent rank announces itself and exits."""
    if rank == absent:
        store = dist.TCPStore(HOST, port, 2, False, timedelta(seconds=60))
        dist.PrefixStore("group ", store).set(f"rank {rank}", "")
        return "gone"
    try:
        StatelessGroup.join(HOST, port, rank=rank, ranks=2, device=CUDA, deadline_s=deadline_s)
    except GroupError as error:
        return str(error)
    return "met"


def test_what_nccl_refuses_is_told(gpus: list[str]) -> None:
    """Two ranks on one GPU."""
    told = each(error_of, [gpus[0], gpus[0]], free_port(), 60.0)
    assert all("did not meet the other 1" in error and "NCCL: " in error for error in told), told


def test_a_rank_that_is_gone_while_they_connect_is_told_at_the_deadline(gpus: list[str]) -> None:
    told, gone = each(error_of, [gpus[0], gpus[-1]], free_port(), 10.0, 1)
    assert gone == "gone" and "they did not connect within 10 s" in told
