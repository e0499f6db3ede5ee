"""Adds an adapter to the weights of the model that it belongs to. Knows files in the formats of Hugging Face and PEFT.

    write_merged(Path("adapter"), Path("Qwen3-0.6B"), Path("merged"))

W + (alpha / rank) B A for each adapted weight W, computed in float32 and rounded to W's dtype; all else is copied.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import GraphError, Problem
from pipeline.reading import BROKEN, check_file, reason

if TYPE_CHECKING:
    import torch

ADAPTER, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def write_merged(adapter: Path, base: Path, made: Path) -> None:
    """Write the model in the folder `base`, with the adapter, into the existing folder `made`. Raises GraphError if
    `base` is not the adapter's model."""
    from safetensors.torch import load_file, save_file

    config = json.loads((adapter / CONFIG).read_bytes())
    added = load_file(adapter / ADAPTER)
    wanted = {name.removeprefix(_PREFIX).removesuffix(_A) + ".weight": name for name in added if name.endswith(_A)}
    files = sorted(base.glob("*.safetensors"))
    if not files:
        raise _not_the_base(base, config, "has no safetensors files")
    for file in files:
        weights = dict(_read(file, base, config))
        for name in weights.keys() & wanted.keys():
            a = wanted.pop(name)
            delta = config["lora_alpha"] / config["r"] * (added[a.removesuffix(_A) + _B].float() @ added[a].float())
            if delta.shape != weights[name].shape:
                sizes = f"{list(weights[name].shape)}, and the adapter adds {list(delta.shape)}"
                raise _not_the_base(base, config, f"has {name!r} with the shape {sizes}")
            weights[name] = (weights[name].float() + delta).to(weights[name].dtype)
        save_file(weights, made / file.name, metadata={"format": "pt"})
    if wanted:
        raise _not_the_base(base, config, f"has no {min(wanted)!r}, which the adapter changes")
    for path in base.iterdir():
        if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja"):
            shutil.copyfile(path, made / path.name)


def _read(file: Path, base: Path, config: Mapping[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        check_file(file)
        with safe_open(file, "pt") as opened:
            yield from ((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118 - it is no dict
    except (*BROKEN, SafetensorError) as error:
        raise _not_the_base(base, config, f"has {file.name}, which cannot be read: {reason(error)}") from error


def _not_the_base(base: Path, config: Mapping[str, object], what: str) -> GraphError:
    return GraphError(
        Problem(
            where=f"--merge {base}",
            what=f"the folder {what}",
            why=f"the adapter belongs to {config.get('base_model_name_or_path')!r}",
            fix="name the folder of that model",
        )
    )
