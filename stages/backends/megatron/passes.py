"""Runs forward and backward passes over microbatches through all pipeline stages. Knows Megatron-core's schedules, not
losses.

Legend: R response tokens of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from ops.packing import differing
from pipeline import StageError
from pipeline.declare.columns import Ragged
from pipeline.declare.sharding import Microbatch, Shard
from pipeline.errors import Problem
from stages.backends.device import sent
from stages.backends.interface import part
from stages.backends.megatron.microbatches import PassRow, row_of, tokens_of
from stages.backends.megatron.network import Network
from stages.backends.megatron.slices import Slices
from stages.backends.model.routes import numbered, table


def run(
    model: torch.nn.Module,
    network: Network,
    rows: Sequence[Callable[[], PassRow]],
    finish: Callable[[int, PassRow, torch.Tensor], Any],
    *,
    backward: bool,
) -> list[Any]:
    """Pass each row through the model, one forward, one backward (1F1B). `rows` create the rows when they are needed.

    `finish(number, row, hidden)` runs on the last stage, which has the logits. Without `backward`, its results are
    returned; with it, it returns (loss, result), and gradients accumulate in the model. Other stages return an empty
    list.
    """
    groups = network.groups
    waiting = iter(enumerate(rows))

    def step(given: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        number, make = next(given)
        row = make()
        return model(row), partial(_finished, finish, number, row)

    pipelined = groups.layout.pipeline > 1
    schedule = get_forward_backward_func(pp_size=groups.layout.pipeline, vp_size=None)
    with torch.set_grad_enabled(backward):
        return schedule(
            forward_step_func=step,
            data_iterator=waiting,
            model=model,
            num_microbatches=len(rows),
            seq_length=1,  # each stage sends the shape of its output to the next
            micro_batch_size=1,
            forward_only=not backward,
            collect_non_loss_data=not backward,
            p2p_communicator=P2PCommunicator(groups.process.pp, network.config) if pipelined else None,
            pg_collection=groups.process,
        )


def _finished(
    finish: Callable[[int, PassRow, torch.Tensor], Any],
    number: int,
    row: PassRow,
    hidden_SNH: torch.Tensor,
    non_loss_data: bool = False,
) -> Any:
    made = finish(number, row, hidden_SNH)
    if non_loss_data:
        return made
    loss, result = made
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), result


def rows_of(
    prompt_ids: Ragged, response_ids: Ragged, routes: Ragged | None, microbatches: Sequence[Microbatch],
    network: Network, *, packed: bool,
) -> list[Callable[[], PassRow]]:  # fmt: skip
    """Functions that create each microbatch's row, with the experts of its tokens if there are `routes`. Replicas that
    share experts first agree on its tokens, collectively: one of a replica's ranks in each expert-parallel group
    suffices, since all of them have the same tokens."""
    groups = network.groups
    how: Any = {
        "packed": packed,
        "multiple": groups.layout.tensor,  # of positions: tensor-parallel ranks divide the sequence
        "slices": Slices(rank=groups.process.cp.rank(), ranks=groups.layout.context),
    }
    cuts = [(part(prompt_ids, each.samples), part(response_ids, each.samples), each) for each in microbatches]
    for prompts, _, microbatch in cuts:
        _check_shared(prompts, microbatch)
    least = [0] * len(microbatches)
    if groups.expert > 1:
        counts = [tokens_of(*cut, **how) for cut in cuts]
        largest = torch.tensor(counts, device=groups.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=groups.process.ep)
        least = largest.tolist()
    makes = [partial(row_of, **how, least=size, device=groups.device) for size in least]
    if routes is None:
        return [partial(make, *cut) for make, cut in zip(makes, cuts)]
    given = [part(routes, each.samples) for each in microbatches]
    return [partial(_replaying, network, make, each, *cut) for make, each, cut in zip(makes, given, cuts)]


def _replaying(
    network: Network, make: Callable[[Ragged, Ragged, Microbatch], PassRow], routes: Ragged,
    prompt_ids: Ragged, response_ids: Ragged, microbatch: Microbatch,
) -> PassRow:  # fmt: skip
    """A row with the experts of its tokens. A shared prompt has those of its first sample."""
    lengths, mixture = (prompt_ids.lengths, response_ids.lengths), network.shape.mixture
    assert mixture is not None, "checked when the model was loaded"
    given = table(routes, *lengths, layers=len(network.shape.sparse), chosen=mixture.chosen)
    places = make(*numbered(*lengths, microbatch.shared), microbatch)  # a row of numbers in the place of tokens
    row = make(prompt_ids, response_ids, microbatch)
    return replace(row, experts=sent(given, row.ids_NS.device)[places.ids_NS.T])


def _check_shared(prompt_ids: Ragged, microbatch: Microbatch) -> None:
    """Raise StageError if samples of a microbatch that are to share a prompt have different ones."""
    if different := differing(prompt_ids.rows(), microbatch.shared):
        one, other = (microbatch.samples[i] for i in different)
        raise StageError(
            Problem(
                where=f"samples {one} and {other} of a worker's batch",
                what="they are of one group, and their prompts have the same length and different tokens",
                why="a packed row computes the prompt of a group once",
                fix="the same prompt for all samples of a group, or microbatch=Packed(tokens, shared=False)",
            )
        )


def score(
    network: Network, prompt_ids: Ragged, response_ids: Ragged, shard: Shard, *, temperature: float,
    routes: Ragged | None = None,
) -> Ragged:  # fmt: skip
    """Logprobs of the response tokens on all ranks: float32, at most 0, on the CPU, in sample order; with `routes`,
    those with these experts."""
    groups = network.groups
    microbatches = [microbatch for update in shard.updates for microbatch in update.microbatches]

    def finish(number: int, row: PassRow, hidden_SNH: torch.Tensor) -> torch.Tensor:
        return network.logprobs(hidden_SNH, row, temperature)[0].float()

    rows = rows_of(prompt_ids, response_ids, routes, microbatches, network, packed=shard.packed)
    found = run(network, network, rows, finish, backward=False)
    values = torch.empty(sum(response_ids.lengths), device=groups.device)
    if groups.is_last:
        by_sample: dict[int, torch.Tensor] = {}
        for microbatch, logprobs_R in zip(microbatches, found):
            lengths = [response_ids.lengths[i] for i in microbatch.samples]
            by_sample |= zip(microbatch.samples, logprobs_R.split(lengths))
        values = torch.cat([by_sample[i] for i in range(len(response_ids))])
    return Ragged(groups.from_last(values.contiguous()).clamp_(max=0.0).cpu(), response_ids.lengths)
