"""Adds an adapter to the weights of the model that it belongs to. Knows files in the formats of Hugging Face and PEFT.

    write_merged(Path("adapter"), Path("Qwen3-0.6B"), Path("merged"))

W + (alpha / rank) B A for each adapted weight W, computed in float32 and rounded to W's dtype; all else is copied. Of a
model with 8-bit weights, all become plain numbers (base_weights.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli.base_weights import BaseWeights
from pipeline.errors import GraphError, Problem
from pipeline.reading import BROKEN, reason

if TYPE_CHECKING:
    import torch

ADAPTER, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def write_merged(adapter: Path, base: Path, made: Path) -> None:
    """Write the model in the folder `base`, with the adapter, into the existing folder `made`. Raises GraphError if
    `base` is not the adapter's model, or has 8-bit weights whose numbers are not known."""
    from safetensors.torch import load_file, save_file

    config = json.loads((adapter / CONFIG).read_bytes())
    added = load_file(adapter / ADAPTER)
    wanted = {name.removeprefix(_PREFIX).removesuffix(_A) + ".weight": name for name in added if name.endswith(_A)}
    if not any(base.glob("*.safetensors")):
        raise _not_the_base(base, config, "has no safetensors files")
    names: dict[str, str] = {}
    with _readable(base, config):
        weights = BaseWeights(base)
    for file in weights.files:
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor, dtype in _read(weights, file, base, config):
            if name in wanted:
                a = wanted.pop(name)
                delta = config["lora_alpha"] / config["r"] * (added[a.removesuffix(_A) + _B].float() @ added[a].float())
                if delta.shape != tensor.shape:
                    sizes = f"{list(tensor.shape)}, and the adapter adds {list(delta.shape)}"
                    raise _not_the_base(base, config, f"has {name!r} with the shape {sizes}")
                tensor = tensor.float() + delta
            tensors[name] = tensor.to(dtype)
        save_file(tensors, made / file.name, metadata={"format": "pt"})
        names |= dict.fromkeys(tensors, file.name)
    if wanted:
        raise _not_the_base(base, config, f"has no {min(wanted)!r}, which the adapter changes")
    weights.write_description(made, names)


def other_base(adapter: Path, base: Path) -> Problem | None:
    """Return a warning if the folder is not named as the adapter's model: others of the same shape fit too."""
    name = str(json.loads((adapter / CONFIG).read_bytes()).get("base_model_name_or_path"))
    path = base.resolve()
    cached = path.parent.name == "snapshots" and path.parents[1].name.endswith(f"--{Path(name).name}")  # of the hub
    if Path(name).resolve() == path or Path(name).name == path.name or cached:
        return None
    return Problem(
        where=f"--merge {base}",
        what=f"the adapter belongs to {name!r}",
        why="it fits every model of the same shape, and makes sense in its own only",
        fix="name the folder of that model, unless this is a copy of it",
        warning=True,
    )


def _read(
    weights: BaseWeights, file: Path, base: Path, config: Mapping[str, object]
) -> Iterator[tuple[str, torch.Tensor, torch.dtype]]:
    with _readable(base, config, file.name):
        yield from weights.read(file)


@contextmanager
def _readable(base: Path, config: Mapping[str, object], name: str = "files") -> Iterator[None]:
    """Turn the errors of reading `base` into a GraphError that names the file."""
    from safetensors import SafetensorError

    try:
        yield
    except (*BROKEN, SafetensorError, TypeError, ArithmeticError) as error:  # the last two of a wrong block size
        raise _not_the_base(base, config, f"has {name}, which cannot be read: {reason(error)}") from error


def _not_the_base(base: Path, config: Mapping[str, object], what: str) -> GraphError:
    return GraphError(
        Problem(
            where=f"--merge {base}",
            what=f"the folder {what}",
            why=f"the adapter belongs to {config.get('base_model_name_or_path')!r}",
            fix="name the folder of that model",
        )
    )
