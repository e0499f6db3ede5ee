"""An adapter merged with a model whose weights are 8-bit floats with scales."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ops.quantize import dequantized
from pipeline import Model
from pipeline.cli.merged import ADAPTER, write_merged
from pipeline.errors import GraphError
from stages import LoRA
from stages.backends.model.adapters import PEFT, write_adapter_config
from stages.backends.model.folder import model_folder
from stages.backends.model.quantized_folder import quantized_folder
from tests.unit.tiny import QWEN3

INDEX = "model.safetensors.index.json"
LORA = LoRA(rank=2, alpha=6, targets=("q_proj", "down_proj"))
WIDE = {**QWEN3, "hidden_size": 160, "intermediate_size": 300}  # blocks that are cut, in both directions


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(Model("wide", config=WIDE, alphabet="0123"), tmp_path_factory.mktemp("plain"))


@pytest.fixture
def base(plain: Path, tmp_path: Path) -> Path:
    """A copy of the model in 8-bit floats, with the scales of one layer in a file of their own."""
    folder = quantized_folder(plain, tmp_path)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    names = {name: "scales.safetensors" if "1.mlp" in name and "scale" in name else file.name for name in tensors}
    for one in {*names.values()}:
        held = {name: tensor for name, tensor in tensors.items() if names[name] == one}
        save_file(held, folder / one, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


@pytest.fixture
def adapter(plain: Path, tmp_path: Path) -> Path:
    folder, tensors, random = tmp_path / "adapter", {}, torch.Generator().manual_seed(0)
    for name, weight in load_file(plain / "model.safetensors").items():
        if name.split(".")[-2] in LORA.targets:
            layer, (rows, columns) = PEFT + name.removesuffix(".weight"), weight.shape
            tensors[f"{layer}.lora_A.weight"] = torch.randn(LORA.rank, columns, generator=random)
            tensors[f"{layer}.lora_B.weight"] = torch.randn(rows, LORA.rank, generator=random)
    folder.mkdir()
    write_adapter_config(LORA, LORA.targets, str(plain), folder)
    save_file(tensors, folder / ADAPTER)
    return folder


def configured(folder: Path, **change: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_is_added_to_the_numbers_that_8_bit_weights_stand_for(
    base: Path, adapter: Path, tmp_path: Path, dtype: str
) -> None:
    configured(base, dtype=dtype)
    made = tmp_path / "made"
    made.mkdir()
    write_merged(adapter, base, made)
    assert "quantization_config" not in json.loads((made / "config.json").read_text())
    stored, added = ({k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()}
                     for folder in (base, adapter))  # fmt: skip
    found = AutoModelForCausalLM.from_pretrained(made, dtype="auto").state_dict()
    assert found.keys() == {name for name in stored if not name.endswith("_scale_inv")}
    assert json.loads((made / INDEX).read_text())["weight_map"].keys() == found.keys()
    changed = 0
    for name, tensor in found.items():
        weight, layer = stored[name], PEFT + name.removesuffix(".weight")
        exact = weight if weight.itemsize > 1 else dequantized(weight, stored[f"{name}_scale_inv"])
        if f"{layer}.lora_A.weight" in added:
            exact = exact + 3 * (added[f"{layer}.lora_B.weight"] @ added[f"{layer}.lora_A.weight"])
            changed += 1
        assert weight.itemsize > 1 or tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, exact.to(tensor.dtype))
    assert changed == 2 * WIDE["num_hidden_layers"]


def test_a_base_whose_weights_have_another_shape_is_refused(plain: Path, adapter: Path, tmp_path: Path) -> None:
    """Also if they have as many numbers."""
    base, made = tmp_path / "turned", tmp_path / "made"
    base.mkdir(), made.mkdir()
    tensors = load_file(plain / "model.safetensors")
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    save_file(tensors | {name: tensors[name].T.contiguous()}, base / "model.safetensors")
    with pytest.raises(GraphError, match=rf"has '{name}' with the shape \[300, 160\], and the adapter adds"):
        write_merged(adapter, base, made)


def lacking(folder: Path) -> None:
    file, _ = sorted(folder.glob("*.safetensors"))
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lacking, "up_proj.weight in 8-bit floats, and no model.layers.0.mlp.up_proj.weight_scale_inv"),
        (lambda base: configured(base, quantization_config=...), "and its config.json has no quantization_config"),
        (lambda base: configured(base, quantization_config={"quant_method": "awq"}), "has quant_method='awq'"),
        (lambda base: configured(base, quantization_config={"quant_method": "fp8", "weight_block_size": [64, 128]}),
         r"down_proj.weight with the shape \[160, 300\], and its scale has \[2, 3\]; a scale is of 64 x 128"),
        (lambda base: configured(base, quantization_config={"quant_method": "fp8", "weight_block_size": ["a", 0]}),
         "cannot be read"),
    ],
)  # fmt: skip
def test_8_bit_weights_whose_numbers_are_not_known_are_refused(
    base: Path, adapter: Path, tmp_path: Path, change: Callable[[Path], None], says: str
) -> None:
    change(base)
    (tmp_path / "made").mkdir()
    with pytest.raises(GraphError, match=says):
        write_merged(adapter, base, tmp_path / "made")
