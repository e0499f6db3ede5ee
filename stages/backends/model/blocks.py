"""Which tensors of a model a sampler holds as 8-bit floats with scales, and where. Names and arithmetic only.

    offered = quantized_tensors(tensors)      # NAME.weight as float8_e4m3fn, and NAME.weight_scale_inv as float32

The form is that of a Hugging Face folder whose `quantization_config` is CONFIG (DeepSeek-V3's, which vLLM loads). The
matrices of attention, of MLPs and of experts are quantized. Embeddings, output embeddings, norms, routers and biases
never are: they are small or looked up, and their errors go into every token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ops.refit.layout import Box, Place, Tensor
from stages.model_weights import SCALE

BLOCK = 128  # rows and columns of a block, which has one scale
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # modules, by their own names
STACKED = ("qkv_proj", "gate_up_proj", "experts")  # what engines make of them
SUFFIX = SCALE
CONFIG: Mapping[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
}  # fmt: skip
_WEIGHT, _SCALE = "float8_e4m3fn", "float32"
_SCALE_BYTES = 4


def is_quantized(name: str) -> bool:
    """Whether the tensor of a model with this name is quantized."""
    module, _, own = name.rpartition(".")
    return own == "weight" and module.rpartition(".")[2] in LAYERS


def quantized_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the quantized model. Raises ValueError if none is quantized."""
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if is_quantized(name):
            made[name] = Tensor(tensor.shape, _WEIGHT)
            made[name + SUFFIX] = Tensor(grid(tensor.shape), _SCALE)
        else:
            made[name] = tensor
    if len(made) == len(tensors):
        raise ValueError(f"no tensor is the weight of a {', '.join(LAYERS)}; there is {next(iter(tensors), 'none')!r}")
    return made


def left_out(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the modules with a matrix that is not quantized, for `modules_to_not_convert`."""
    plain = (name for name, tensor in tensors.items() if len(tensor.shape) == 2 and not is_quantized(name))
    return sorted(name.removesuffix(".weight") for name in plain if name.endswith(".weight"))


def refused(quantized: Iterable[str], others: Iterable[str]) -> str:
    """Why an engine's choice of layers is wrong: it holds the parameters `quantized` as 8-bit floats, and not `others`,
    by its own names. Empty if it is right."""
    for name in quantized:
        if not _may(name):
            return f"{name!r} is an 8-bit float, and only the matrices of {', '.join(LAYERS)} may be"
    for name in sorted(others):
        if _may(name) and name.endswith("weight"):
            return f"{name!r} is not an 8-bit float, and the matrices of {', '.join(LAYERS)} are"
    return ""


def _may(name: str) -> bool:
    module, _, own = name.rpartition(".")
    return own != "bias" and module.rpartition(".")[2] in (*LAYERS, *STACKED)


def grid(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor, whose last two dimensions are rows and columns."""
    return (*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:]))


def touched(box: Box) -> Box:
    """Return the box of the blocks that a box touches."""
    return (*box[:-2], *((start // BLOCK, -(-stop // BLOCK)) for start, stop in box[-2:]))


def begun(box: Box) -> Box:
    """Return the box of the blocks whose first element is in a box; empty in a dimension if there is none. Disjoint
    boxes that cover a tensor so give disjoint boxes that cover its scales."""
    return (*box[:-2], *((-(-start // BLOCK), -(-stop // BLOCK)) for start, stop in box[-2:]))


def cuts(box: Box, shape: Sequence[int]) -> bool:
    """Whether an edge of the box lies inside a block."""
    edges = zip(box[-2:], shape[-2:])
    return any(start % BLOCK or (stop % BLOCK and stop < size) for (start, stop), size in edges)


def quantized_places(
    places: Iterable[Place], tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]
) -> list[Place]:
    """Return where an engine holds a quantized model, from where it would hold the same `tensors` as they are. `shapes`
    are those of its buffers. The scales of a buffer NAME are in NAME_scale_inv, arranged like its blocks.

    Raises ValueError, naming the tensor, if a rank's part does not consist of whole blocks.
    """
    made: list[Place] = []
    for place in places:
        if not is_quantized(place.tensor):
            made.append(place)
            continue
        tensor, shape = tensors[place.tensor], shapes[place.buffer]
        at = _coordinates(place.offset // tensor.item_bytes, shape)
        if cuts(place.box, tensor.shape) or any(start % BLOCK for start in at[-2:]):
            part = " x ".join(f"{start} to {stop}" for start, stop in place.box[-2:])
            raise ValueError(f"a rank has rows and columns {part} of {place.tensor!r}, which are not whole blocks")
        here = tuple(stride // tensor.item_bytes for stride in place.strides)
        made.append(replace(place, offset=place.offset // tensor.item_bytes, strides=here))
        scales = grid(shape)
        first = (*at[:-2], *(start // BLOCK for start in at[-2:]))
        strides = tuple(_SCALE_BYTES * prod(scales[i + 1 :]) for i in range(len(scales)))
        offset = sum(start * stride for start, stride in zip(first, strides))
        made.append(
            Place(place.tensor + SUFFIX, touched(place.box), place.buffer + SUFFIX, offset, strides[-len(place.box) :])
        )
    return made


def _coordinates(element: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of an element of a contiguous buffer in each dimension."""
    found: list[int] = []
    for size in reversed(shape):
        element, index = divmod(element, size)
        found.insert(0, index)
    return tuple(found)
