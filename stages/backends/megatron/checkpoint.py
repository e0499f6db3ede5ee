"""Saves a learner's exact state as safetensors files per rank and a small JSON. Reading them executes no code.

Each rank writes its share of the master weights and moments; one rank per model part writes the weights. The number of
data-parallel and context-parallel ranks may change between write and read: shares are ranges of a flattened parameter,
and a rank reads from all files that overlap its own. Files use the names of Megatron-core's own layers, so it does not
matter whether Transformer Engine is installed. Knows Megatron-core's distributed optimizer, not when it is called.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from safetensors import safe_open

from ops.lots import lots
from pipeline.declare.parameters import is_whole
from pipeline.declare.ranks import RankLayout
from pipeline.declare.saved_model import Piece, Pieces
from pipeline.errors import CheckpointError, Problem, shown
from stages.backends.megatron.folder import holders
from stages.backends.megatron.names import parameters, plain_names
from stages.backends.megatron.network import Network
from stages.backends.megatron.parts import Part
from stages.backends.trainer import COUNTERS, File

_FILE_BYTES = 2 << 30  # size of one file; the host holds one at a time
_MOST_RANKS = 10**6
_WEIGHT, _MASTER, _MOMENTS = "weight", "master", ("exp_avg", "exp_avg_sq")


def files(network: Network, optimizer: MegatronOptimizer) -> Iterator[File]:
    """Yield what this rank writes: the names of its files, and their tensors by name."""
    for number, lot in enumerate(lots(state(network, optimizer), lambda entry: entry[1].nbytes, _FILE_BYTES)):
        yield f"{_prefix(network.groups.ranks.rank)}-{number:03}.safetensors", lot


def described(network: Network, counters: dict[str, int]) -> dict[str, Any]:
    """Return what is no tensor: the counters, and the division of the model."""
    groups, layout = network.groups, network.groups.layout
    copies = layout.data * layout.context  # context-parallel ranks hold the same weights, like replicas
    return {
        "counters": counters,
        "layout": [copies, layout.tensor, layout.pipeline, groups.expert, groups.expert_tensor],
    }


def state(network: Network, optimizer: MegatronOptimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """What this rank writes, keyed by `kind:name:start` (the plain name), on the tensors' device."""
    groups, plain = network.groups, plain_names(network.shape, network.part)
    for name, parameter in network.weights.items():
        if groups.is_first(experts=network.table[name].expert):
            yield f"{_WEIGHT}:{plain[name]}:0", parameter.reshape(-1)
    for name, start, found in shares(network, optimizer):
        for kind, share in found.items():
            yield f"{kind}:{plain[name]}:{start}", share


def pieces(network: Network) -> dict[str, Pieces]:
    """Where the tensors of the model's Hugging Face folder lie in the files of all ranks."""
    shapes: dict[str, tuple[int, ...]] = {}
    found: dict[str, list[Piece]] = {}
    for name, held_by in holders(network.shape, network.groups, Part()):
        for rank, parameter in held_by:
            row = prod(parameter.shape[1:])
            for part in parameter.pieces:
                box = (part.rows, *([part.columns or (0, part.shape[1])] if len(part.shape) > 1 else []))
                piece = Piece(file=_prefix(rank), tensor=f"{_WEIGHT}:{name}:0", at=part.at * row, box=box)
                found.setdefault(part.name, []).append(piece)
                shapes[part.name] = part.shape
    return {name: Pieces(shape=shapes[name], pieces=tuple(held)) for name, held in found.items()}


@torch.no_grad()
def read(folder: Path, network: Network, optimizer: MegatronOptimizer) -> dict[str, int]:
    """Read the files, in place. Returns the counters. Raises CheckpointError if numbers are missing, or were
    written with another division of the model."""
    written = json.loads((folder / COUNTERS).read_text())
    _check_layout(folder, written["layout"], network)
    with ExitStack() as stack:
        found, plain = _FoundShares(folder, written["layout"], network, stack), plain_names(network.shape, network.part)
        for name, parameter in network.weights.items():
            found.fill(_WEIGHT, plain[name], 0, parameter.detach().view(-1))
        for name, start, held in shares(network, optimizer):
            for kind, share in held.items():
                found.fill(kind, plain[name], start, share)
    _set_steps(optimizer, written["counters"]["updates"] - written["counters"]["skipped"])
    return written["counters"]


def _set_steps(optimizer: Any, steps: int) -> None:
    """Set the moments' update count; Transformer Engine's optimizer keeps it per group."""
    for each in optimizer.chained_optimizers:
        if isinstance(each.optimizer, torch.optim.AdamW):
            for held in each.optimizer.state.values():
                held["step"].fill_(steps)
        else:
            for group in each.optimizer.param_groups:
                group["step"] = steps


def shares(network: Network, optimizer: Any) -> Iterator[tuple[str, int, dict[str, torch.Tensor]]]:
    """Yield, for each parameter that this rank updates a share of: its name, the share's start in the flattened
    parameter, and the share's tensors by kind."""
    names = {parameter: name for name, parameter in network.named_parameters()}
    for each in optimizer.chained_optimizers:
        for parameter, (group, position) in each.model_param_group_index_map.items():
            buffer, dtype, bucket = each.model_param_gbuf_map[parameter]
            start = each.gbuf_ranges[buffer][dtype][bucket]["param_map"][parameter]["param"].start
            master = each.optimizer.param_groups[group]["params"][position]
            held = each.optimizer.state[master]
            found = {kind: held[kind] for kind in _MOMENTS}
            if parameter.dtype != torch.float32:  # for float32 it is a view of the weight
                found[_MASTER] = master
            yield names[parameter], start, found


class _FoundShares:
    """The shares in all files written by ranks with this rank's part of the model."""

    def __init__(self, folder: Path, layout: list[int], network: Network, stack: ExitStack) -> None:
        data, tensor, pipeline, *experts = layout
        self.folder, self.places = folder, {}  # type: Path, dict[tuple[str, str], list[tuple[int, str, Any]]]
        table, mine = parameters(network.shape, network.part.plain), network.part
        then = RankLayout(data=data, tensor=tensor, pipeline=pipeline)
        for rank in range(then.size):
            part = Part.of(rank, then, *experts)
            if part.stage != mine.stage:
                continue
            alike = {
                False: part.tensor == mine.tensor,
                True: (part.expert, part.expert_tensor) == (mine.expert, mine.expert_tensor),
            }
            for path in sorted(folder.glob(f"{_prefix(rank)}*.safetensors")):
                file = stack.enter_context(safe_open(path, "pt"))
                for key in file.keys():  # noqa: SIM118 - it is no dict
                    kind, name, start = key.split(":")
                    if alike[table[name].expert]:
                        self.places.setdefault((kind, name), []).append((int(start), key, file))

    def fill(self, kind: str, name: str, start: int, share: torch.Tensor) -> None:
        """Fill `share`, which begins at `start` of the flattened parameter, from the files. Raises CheckpointError if
        part of it is missing."""
        left = len(share)
        for begin, key, file in self.places.get((kind, name), ()):
            held = file.get_slice(key)
            low, high = max(start, begin), min(start + len(share), begin + held.get_shape()[0])
            if low < high:
                share[low - start : high - start].copy_(held[low - begin : high - begin])
                left -= high - low
        if left:
            raise CheckpointError(
                _problem(self.folder, f"{left} numbers of {kind} {name!r} are missing", "all are needed")
            )


def _check_layout(folder: Path, layout: list[int], network: Network) -> None:
    part = network.part
    if len(layout) != 5 or not all(is_whole(size, 1) and size <= _MOST_RANKS for size in layout):
        raise CheckpointError(_problem(folder, f"it has the layout {shown(layout)}", "that is no division of a model"))
    now = [part.tensors, part.stages, part.experts, part.expert_tensors]
    if layout[1:] != now:
        raise CheckpointError(
            _problem(
                folder,
                "it was written with tensor_parallel, pipeline_parallel, expert_parallel, expert_tensor_parallel = "
                f"{layout[1:]}",
                f"they are now {now}, and only the data-parallel and context-parallel sizes may change",
            )
        )


def _prefix(rank: int) -> str:
    return f"shard-{rank:05}"


def _problem(folder: Path, what: str, why: str) -> Problem:
    return Problem(
        where=str(folder),
        what=f"the learner's state cannot be read: {what}",
        why=why,
        fix="resume from another checkpoint, or with the parallel sizes of the run that wrote it",
    )
