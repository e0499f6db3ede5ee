"""A quantized copy of a model's folder, for an engine that samples with 8-bit floats. Knows files and names.

It is written once per machine: the first worker that needs it does, the others wait. One tensor at a time is in memory.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ops.quantize import quantized
from ops.refit.layout import Tensor
from pipeline.errors import as_os_error
from stages.backends.model.blocks import CONFIG, SUFFIX, is_quantized, left_out
from stages.backends.model.folder import alone, models_folder
from stages.backends.model.shards import Shards
from stages.backends.model.tensor_files import write_tensors
from stages.model_weights import INDEX

FILE_BYTES = 4 << 30  # a file is written once it has as much
_OTHERS = ("*.json", "*.txt", "*.model", "*.jinja")


def quantized_folder(folder: Path, run_dir: Path | None) -> Path:
    """Return the quantized copy of a folder with safetensors, made if it is missing: in the run directory, or without
    one in the temporary directory. A changed file of weights makes another copy."""
    files = sorted(folder.glob("*.safetensors"))
    known = [(str(folder.resolve()), str(torch.__version__))]
    known += [(file.name, f"{file.stat().st_size} {file.stat().st_mtime_ns}") for file in files]
    root = models_folder(run_dir)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name)
    made = root / f"{name}-fp8-{hashlib.sha256(repr(known).encode()).hexdigest()[:12]}"
    with alone(root / f"{made.name}.lock"):
        if not made.is_dir():
            with tempfile.TemporaryDirectory(dir=root) as own:
                _write(folder, Path(own) / "model")
                (Path(own) / "model").rename(made)
    return made


def _write(folder: Path, made: Path) -> None:
    with as_os_error(made):
        made.mkdir(0o700)
        for pattern in _OTHERS:
            for file in folder.glob(pattern):
                if file.name not in ("config.json", INDEX):
                    shutil.copyfile(file, made / file.name)
    shapes: dict[str, Tensor] = {}
    weights: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors(folder, shapes):
        if tensors and sum(each.nbytes for each in tensors.values()) + tensor.nbytes > FILE_BYTES:
            weights |= _file(made, tensors, len(set(weights.values())))
            tensors = {}
        tensors[name] = tensor
    weights |= _file(made, tensors, len(set(weights.values())))
    with as_os_error(made):
        (made / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weights}))
        config = json.loads((folder / "config.json").read_text())
        (made / "config.json").write_text(json.dumps(config | {"quantization_config": _described(shapes)}, indent=2))


def _tensors(folder: Path, shapes: dict[str, Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the quantized model, and note the shapes of the folder's."""
    files = Shards(folder).files
    for file in sorted(set(files.values())):
        with safe_open(folder / file, "pt") as opened:
            for name in sorted(name for name, own in files.items() if own == file):
                tensor = opened.get_tensor(name)
                shapes[name] = Tensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                if not is_quantized(name):
                    yield name, tensor
                    continue
                weight, scale = quantized(tensor.to(torch.bfloat16))  # of which the trainer's refits are
                yield name, weight
                yield name + SUFFIX, scale


def _file(made: Path, tensors: Mapping[str, torch.Tensor], number: int) -> dict[str, str]:
    name = f"model-{number:05d}.safetensors"
    write_tensors(tensors, made / name)
    return dict.fromkeys(tensors, name)


def _described(shapes: Mapping[str, Tensor]) -> dict[str, Any]:
    return {**CONFIG, "modules_to_not_convert": left_out(shapes)}
