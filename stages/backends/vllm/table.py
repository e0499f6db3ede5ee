"""Where vLLM's ranks hold a model, with the dtypes of their parameters; plain, or quantized. Arithmetic only."""

from __future__ import annotations

import torch

from ops.refit.layout import Place
from stages.backends.model import blocks
from stages.backends.model.decoder import Decoder
from stages.backends.vllm import places as plain


class ParameterTable:
    """The parameters of each of `ranks` ranks, by vLLM's names, and the places of the model's tensors in them.
    `quantized`: matrices are 8-bit floats, and their scales are parameters beside them.

    Raises ValueError, naming the tensor, if a rank's part of a quantized matrix does not consist of whole blocks.
    """

    def __init__(self, decoder: Decoder, ranks: int, dtype: torch.dtype, *, quantized: bool) -> None:
        self._decoder, self._ranks, self._item_bytes, self._quantized = decoder, ranks, dtype.itemsize, quantized
        self._plain = plain.tensors(decoder, str(dtype).removeprefix("torch."))
        self._shapes = plain.shapes(decoder, ranks)
        self.tensors = blocks.quantized_tensors(self._plain) if quantized else self._plain
        kinds = {place.buffer: self.tensors[place.tensor].dtype for place in self.places(0)}
        self.dtypes: dict[str, torch.dtype] = {name: getattr(torch, kind) for name, kind in kinds.items()}
        scales = {name: name.removesuffix(blocks.SUFFIX) for name in kinds if name.endswith(blocks.SUFFIX)}
        self.shapes = self._shapes | {name: blocks.grid(self._shapes[matrix]) for name, matrix in scales.items()}

    def places(self, rank: int) -> list[Place]:
        """The places of a rank. Padding belongs to none."""
        made = plain.places(self._decoder, rank, self._ranks, self._item_bytes)
        return blocks.quantized_places(made, self._plain, self._shapes) if self._quantized else made
