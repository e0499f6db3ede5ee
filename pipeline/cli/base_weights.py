"""The weights of a model's folder as plain numbers: 8-bit floats are multiplied by the scales of their blocks. Knows
files in the format of Hugging Face; loads no model.

    base = BaseWeights(Path("Qwen3-0.6B-FP8"))
    for file in base.files:
        for name, tensor, dtype in base.read(file): ...     # float32 [R, C] where it was quantized
    base.write_description(Path("merged"), names)           # config.json without quantization_config

The form is that of DeepSeek-V3 (`quant_method` "fp8"): `NAME` is float8 [R, C], and `NAME_scale_inv` has one number for
each block of `weight_block_size`, or a single one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import GraphError, Problem
from pipeline.reading import check_file

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
_SCALE = "_scale_inv"
_METHOD = "fp8"
_DTYPES = ("bfloat16", "float16", "float32")  # of a plain folder; the first, where the config names none of them


class BaseWeights:
    """A folder's tensors. Here and in `read`, raises GraphError for 8-bit weights whose numbers are not known, and
    OSError, SafetensorError, ValueError, TypeError or ArithmeticError for files that cannot be read."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._folder, self.files = folder, sorted(folder.glob("*.safetensors"))
        self._config: dict[str, Any] = {}
        if (folder / "config.json").exists():
            check_file(folder / "config.json")
            found = json.loads((folder / "config.json").read_bytes())
            self._config = found if isinstance(found, dict) else {}
        how = self._config.get("quantization_config")
        self._how: Mapping[str, Any] = how if isinstance(how, dict) else {}
        if self._how and self._how.get("quant_method") != _METHOD:
            what = f"the folder's quantization_config has quant_method={self._how.get('quant_method')!r}"
            raise self._unknown(what, f"the numbers of {_METHOD!r} are known here")
        self._scales: dict[str, Path] = {}  # the file of each scale, which may be another one than that of the weight
        for file in self.files if self._how else ():
            check_file(file)
            with safe_open(file, "pt") as opened:
                self._scales |= {name: file for name in opened.keys() if name.endswith(_SCALE)}  # noqa: SIM118

    def read(self, file: Path) -> Iterator[tuple[str, torch.Tensor, torch.dtype]]:
        """Yield the tensors of a file: name, numbers, and the dtype in which a plain folder has them."""
        import torch
        from safetensors import safe_open

        check_file(file)
        named = str(self._config.get("dtype") or self._config.get("torch_dtype"))
        plain: torch.dtype = getattr(torch, named if named in _DTYPES else _DTYPES[0])
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                if name in self._scales:
                    continue
                tensor = opened.get_tensor(name)
                if tensor.is_floating_point() and tensor.itemsize == 1:
                    yield name, self._scaled(name, tensor), plain
                else:
                    yield name, tensor, tensor.dtype

    def write_description(self, made: Path, names: Mapping[str, str]) -> None:
        """Copy configuration, tokenizer and index into an existing folder. `names` are the files of its tensors."""
        for path in self._folder.iterdir():
            if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja"):
                shutil.copyfile(path, made / path.name)
        if self._how:
            config = {name: value for name, value in self._config.items() if name != "quantization_config"}
            (made / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            if (made / INDEX).exists():
                size_bytes = sum(path.stat().st_size for path in made.glob("*.safetensors"))
                index = {"metadata": {"total_size": size_bytes}, "weight_map": dict(names)}
                (made / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))

    def _scaled(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the float32 numbers that 8-bit floats stand for."""
        from safetensors import safe_open

        if (file := self._scales.get(name + _SCALE)) is None:
            lacks = f"no {name + _SCALE}" if self._how else "its config.json has no quantization_config"
            raise self._unknown(f"the folder has {name} in 8-bit floats, and {lacks}", "8-bit floats have a scale")
        with safe_open(file, "pt") as opened:
            scale = opened.get_tensor(name + _SCALE)
        if scale.numel() == 1:
            return tensor.float() * scale.float().reshape(())
        down, across = self._how.get("weight_block_size") or (128, 128)
        rows, columns = tensor.shape[-2:]
        if tuple(scale.shape) != (*tensor.shape[:-2], -(-rows // down), -(-columns // across)):
            what = f"the folder has {name} with the shape {list(tensor.shape)}, and its scale has {list(scale.shape)}"
            raise self._unknown(what, f"a scale is of {down} x {across} numbers")
        each = scale.float().repeat_interleave(down, -2).repeat_interleave(across, -1)
        return tensor.float() * each[..., :rows, :columns]

    def _unknown(self, what: str, why: str) -> GraphError:
        fix = "name the model's folder in bfloat16, or download this one again"
        return GraphError(Problem(where=f"--merge {self._folder}", what=what, why=why, fix=fix))
