"""Loads and saves Hugging Face folders: each rank reads its own part; rank 0 writes, one tensor at a time.

Knows safetensors and the table of names, not what a model computes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from ops.lots import lots
from stages.backends.megatron.groups import Groups
from stages.backends.megatron.names import Parameter, parameters
from stages.backends.megatron.parts import Part
from stages.backends.model.decoder import Decoder
from stages.backends.model.shards import Shards
from stages.model_weights import INDEX

_FILE_BYTES = 4 << 30  # size of one output file


@torch.no_grad()
def fill(held: Mapping[str, torch.Tensor], table: Mapping[str, Parameter], folder: Path) -> None:
    """Load this rank's part into `held`, in place."""
    assert held.keys() == table.keys(), sorted(held.keys() ^ table.keys())
    shards = Shards(folder)
    for name, parameter in table.items():
        target = held[name]
        assert tuple(target.shape) == parameter.shape, (name, tuple(target.shape), parameter.shape)
        if sum(piece.rows[1] - piece.rows[0] for piece in parameter.pieces) < len(target):
            target.zero_()
        for piece in parameter.pieces:
            target[piece.inside].copy_(shards.box(piece.name, piece.shape, piece.box))


@torch.no_grad()
def gathered(
    held: Mapping[str, torch.Tensor],
    decoder: Decoder,
    groups: Groups,
    layers: Part,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole tensors by Hugging Face name on rank 0, on the CPU, parameter by parameter.

    All ranks iterate together; the other ranks send what they hold and yield nothing. `layers` is a part whose kinds of
    layers hold the tensors.
    """
    for name, held_by in holders(decoder, groups, layers):
        yield from _assembled(name, held_by, held, groups.ranks.rank)


def holders(decoder: Decoder, groups: Groups, layers: Part) -> Iterator[tuple[str, list[tuple[int, Parameter]]]]:
    """Yield each parameter of the model by its name on the ranks that hold it together, with its part on each: the
    first ranks that do, or one if it is the same on all."""
    for stage in range(groups.layout.pipeline):
        for experts in (False, True)[: 1 + bool(decoder.experts)]:
            for ranks in groups.holders(stage, experts=experts):
                parts = [groups.part(rank).in_layers_of(layers) for rank in ranks]
                tables = [parameters(decoder, part) for part in parts]
                for name, first in tables[0].items():
                    if first.copy or first.expert != experts:
                        continue
                    held_by = [(rank, table[name]) for rank, table in zip(ranks, tables)]
                    yield name, held_by[:1] if held_by[-1][1] == first else held_by


def _assembled(
    name: str,
    parts: list[tuple[int, Parameter]],
    held: Mapping[str, torch.Tensor],
    rank: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Assemble the tensors of one parameter from its parts, on rank 0."""
    whole: dict[str, torch.Tensor] = {}
    own = parts[0][1].dtype
    dtype = getattr(torch, own) if own else next(iter(held.values())).dtype
    for holder, parameter in parts:
        if rank == holder:
            part = held[name].detach().to("cpu").contiguous()
            if rank:
                dist.send(part, dst=0)
        elif rank == 0:
            part = torch.empty(parameter.shape, dtype=dtype)
            dist.recv(part, src=holder)
        if rank == 0:
            for piece in parameter.pieces:
                if piece.name not in whole:
                    whole[piece.name] = torch.empty(piece.shape, dtype=dtype)
                whole[piece.name][piece.box] = part[piece.inside]
    yield from whole.items()


def write(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, origin: Path, rank: int) -> None:
    """Write tensors as safetensors files of a few GiB with their index, and copy config and tokenizer from `origin`.

    All ranks call it; rank 0 writes and holds one file's tensors at a time.
    """
    files: list[list[str]] = []
    total = 0
    for lot in lots(tensors, lambda entry: entry[1].nbytes, _FILE_BYTES):
        save_file(dict(lot), folder / _part(len(files)), metadata={"format": "pt"})
        files.append([name for name, _ in lot])
        total += sum(tensor.nbytes for _, tensor in lot)
        lot.clear()
    if rank:
        return
    names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    for i, name in enumerate(names):
        (folder / _part(i)).rename(folder / name)
    index = {tensor: name for name, tensors_of in zip(names, files) for tensor in tensors_of}
    (folder / INDEX).write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2, sort_keys=True)
    )
    copy_description(origin, folder)


def copy_description(origin: Path, folder: Path) -> None:
    """Copy configuration and tokenizer."""
    for path in origin.iterdir():
        if path.is_file() and path.suffix in (".json", ".txt", ".jinja", ".model") and path.name != INDEX:
            shutil.copy(path, folder / path.name)


def _part(number: int) -> str:
    return f"part-{number}.safetensors"
