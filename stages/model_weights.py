"""The weights of a model folder against its config, from the headers of its safetensors files. Loads no model, no torch
and no tensor.

The format: 8 bytes with the length of the header, the header as JSON, the tensors
(https://huggingface.co/docs/safetensors/index, "Format").
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pipeline import Model, StageError
from pipeline.reading import BROKEN, check_file, decode, reason
from stages.model_shape import DENSE, FAMILIES, LATENT, OPTIONAL, FileFault, read_config, says_heads

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_LONGEST = 100_000_000  # bytes of a header, as the safetensors library has it
_LENGTH = struct.Struct("<Q")
_EIGHT_BIT = ("F8_E4M3", "F8_E5M2")  # floats that stand for numbers only together with a scale
SCALE = "_scale_inv"  # how the name of a scale ends, after that of its weight
_SCALED = {"fp8": SCALE}  # by quant_method


class _TensorHeader(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    """The part of an index that says which file has a tensor."""

    weight_map: dict[str, str]


def weight_faults(folder: Path, config: Mapping[str, Any]) -> list[FileFault]:
    """Return why the weights of a folder cannot be those of its config: files that are absent, damaged or cut, and
    tensors that are absent, have another shape, or are 8-bit floats without their scale. Knows the shapes of the
    families in `model_shape`."""
    try:
        listed = _listed(folder)
    except BROKEN as error:
        return [FileFault(folder / INDEX, f"it cannot be read: {reason(error)}", "it says which file has a tensor")]
    headers: dict[str, _TensorHeader] = {}
    places: dict[str, Path] = {}
    faults = []
    for name, wanted in listed.items():
        file = folder / name
        try:
            held = _headers(file)
        except BROKEN as error:
            faults.append(FileFault(file, f"it cannot be read: {reason(error)}", "it has weights of the model"))
            continue
        if absent := sorted(wanted - held.keys()):
            faults.append(FileFault(file, f"it has no {first_of(absent)}", f"{INDEX} says that it has"))
        headers |= held
        places |= dict.fromkeys(held, file)
    shapes = {name: header.shape for name, header in headers.items()}
    return faults or _unscaled(config, headers, places) or _differences(folder, config, shapes, places)


def refuse_weights(model: Model, folder: Path) -> None:
    """Raise StageError if the weights that a model was or will be loaded from, local or fetched from a hub, cannot be
    those of its config."""
    config, faults = read_config(folder / "config.json")
    if problems := [fault.problem(model) for fault in ([] if faults else weight_faults(folder, config))]:
        raise StageError(*problems)


def read_index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor, as the folder's index has it. Raises OSError or ValueError."""
    check_file(folder / INDEX)
    return decode((folder / INDEX).read_bytes(), _Index).weight_map


def _listed(folder: Path) -> dict[str, set[str]]:
    """Return the files of a folder's weights, each with the tensors that the index says it has."""
    if not (folder / INDEX).exists():
        return {SINGLE: set()} if (folder / SINGLE).exists() else {}  # a pickle, or files that others name
    files: dict[str, set[str]] = {}
    for tensor, file in read_index(folder).items():
        files.setdefault(file, set()).add(tensor)
    return files


def _headers(path: Path) -> dict[str, _TensorHeader]:
    """Return what a file says of its tensors. Raises OSError or ValueError if it is no whole safetensors file."""
    check_file(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH.size)
        length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else size
        if length > min(_LONGEST, size - _LENGTH.size):
            raise ValueError(f"its {size:,} bytes do not begin with a safetensors header")
        header = decode(file.read(length), dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    tensors = {name: decode(bytes(tensor), _TensorHeader) for name, tensor in header.items()}
    named = _LENGTH.size + length + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if named != size:
        raise ValueError(f"it has {size:,} bytes, and its header describes {named:,}")
    return tensors


def _unscaled(
    config: Mapping[str, Any], headers: Mapping[str, _TensorHeader], places: Mapping[str, Path]
) -> list[FileFault]:
    """Return the tensors of 8-bit floats that would be read as if these were the numbers: their scales are missing, or
    the config does not say that they have any."""
    how = config.get("quantization_config")
    ending = _SCALED.get(str(how.get("quant_method"))) if isinstance(how, Mapping) else None
    names = [name for name, header in headers.items() if header.dtype in _EIGHT_BIT]
    lacking = sorted(name for name in names if not how or (ending and name + ending not in headers))
    if not lacking:
        return []
    lacks = f"there is no {lacking[0]}{ending}" if how else "config.json has no quantization_config"
    what = f"it has {first_of(lacking)} in 8-bit floats, and {lacks}"
    return [FileFault(places[lacking[0]], what, "they would be read without their scales, as other numbers")]


def _differences(
    folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], places: Mapping[str, Path]
) -> list[FileFault]:
    """Return the tensors whose shape the config contradicts, one per file, or that it asks for and no file has."""
    if not shapes or "quantization_config" in config or config["model_type"] not in FAMILIES:
        return []
    prefix = "model." if any(name.startswith("model.") for name in shapes) else ""  # absent in a model without a head
    faults: dict[Path, FileFault] = {}
    for name, shape, said in _wanted(config):
        found = shapes.get(prefix + name)
        if found is None:
            why = "config.json asks for it, and transformers would draw it at random"
            return [*faults.values()] or [FileFault(folder, f"its weights have no {prefix}{name}", why)]
        if found != shape:
            given = ", ".join(f"{number}={config[number]}" for number in said if config.get(number) is not None)
            what = f"{prefix}{name} has the shape {list(found)}"
            file = places[prefix + name]
            faults.setdefault(file, FileFault(file, what, f"config.json asks for {list(shape)}: {given}"))
    return list(faults.values())


def _wanted(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...]]]:
    """Yield tensors that every model of a family has, but not all of them: name, shape, and which of the config's
    numbers give it."""
    hidden, heads, inner = (config[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
    groups, dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    known = says_heads(config)
    attention = {"q_proj": (heads * dim, hidden), "k_proj": (groups * dim, hidden), "v_proj": (groups * dim, hidden),
                 "o_proj": (hidden, heads * dim)}  # fmt: skip
    said: tuple[str, ...] = ("hidden_size", "num_attention_heads", *OPTIONAL)
    if config["model_type"] == "deepseek_v3":
        known, said = all(config.get(name) for name in LATENT), ("hidden_size", "num_attention_heads", *LATENT)
        attention = _latent(config) if known else {}
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    layers = config["num_hidden_layers"]
    dense = layers if config["model_type"] in DENSE else int(config.get("first_k_dense_replace") or 0)
    yield "embed_tokens.weight", (config["vocab_size"], hidden), ("vocab_size", "hidden_size")
    yield "norm.weight", (hidden,), ("hidden_size",)
    for i in range(layers):
        yield f"layers.{i}.input_layernorm.weight", (hidden,), ("hidden_size",)
        for name, shape in attention.items() if known else ():
            yield f"layers.{i}.self_attn.{name}.weight", shape, said
        yield f"layers.{i}.post_attention_layernorm.weight", (hidden,), ("hidden_size",)
        for name, shape in mlp.items() if i < dense else ():
            yield f"layers.{i}.mlp.{name}.weight", shape, ("intermediate_size", "hidden_size")


def _latent(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """The matrices of latent attention that do not depend on whether queries have a latent."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent, plain, rotary, value = (config[name] for name in LATENT)
    return {"kv_a_proj_with_mqa": (latent + rotary, hidden), "kv_b_proj": (heads * (plain + value), latent),
            "o_proj": (hidden, heads * value)}  # fmt: skip


def first_of(names: list[str]) -> str:
    """Return the first of these names, and how many more there are."""
    return names[0] + (f" and {len(names) - 1:,} more" if len(names) > 1 else "")
