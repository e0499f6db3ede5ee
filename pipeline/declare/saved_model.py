"""How the files of a saved stage make up a Hugging Face model: a stage writes it, the export of a checkpoint reads it.

    train/weights.safetensors   train/model/config.json   train/model/tokenizer.json   train/model/tensors.json

tensors.json names the pieces of each tensor, so an export needs neither the graph nor the backend. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from pipeline.errors import naming
from pipeline.reading import decode

MODEL, TENSORS = "model", "tensors.json"  # the folder inside the stage's, and the file there


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A box of a tensor, which lies in one run of a saved tensor's elements.

    file    how the name of the safetensors file in the stage's folder begins
    tensor  the saved tensor
    at      its first element of the piece
    box     first and last index, exclusive, of each dimension
    """

    file: str
    tensor: str
    at: int
    box: tuple[tuple[int, int], ...]


class Pieces(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of the Hugging Face model, which its pieces cover."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@runtime_checkable
class Describes(Protocol):
    """An engine whose saved weights can be exported."""

    def describe(self, model: Any, folder: Path) -> None:
        """Write configuration, tokenizer and `tensors.json` into the new folder; all ranks call it, rank 0 writes."""


def write_tensors_json(folder: Path, tensors: Mapping[str, Pieces]) -> None:
    """Write where each tensor of a model lies."""
    with naming(folder / TENSORS):
        (folder / TENSORS).write_bytes(msgspec.json.encode(dict(tensors)))


def read_tensors_json(folder: Path) -> dict[str, Pieces]:
    """Read what `write_tensors_json` wrote. Raises msgspec.DecodeError."""
    return decode((folder / TENSORS).read_bytes(), dict[str, Pieces])
