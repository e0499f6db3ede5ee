"""A model without a folder is saved to one that other engines load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline import Model, StageError
from stages.backends.model.build import load_network, load_tokenizer
from stages.backends.model.folder import model_folder
from tests.unit.tiny import QWEN3

MIXTURE = QWEN3 | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
SHARED = {  # experts routed by sigmoids and a shared one, after a dense layer
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
}
GLM = QWEN3 | SHARED | {"model_type": "glm4_moe"}
DEEPSEEK = (
    {name: value for name, value in QWEN3.items() if name not in ("head_dim", "num_key_value_heads")}
    | SHARED
    | {"model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8}
    | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
)
POLICY = Model("a tiny/policy", config=QWEN3, alphabet="0123456789abc")


@pytest.mark.parametrize("policy", [POLICY, Model("a mixture", config=MIXTURE, alphabet="0123456789abc")])
def test_the_folder_loads_as_the_model(tmp_path: Path, policy: Model) -> None:
    folder = model_folder(policy, tmp_path)
    assert folder.parent == tmp_path / "models"
    with safe_open(folder / "model.safetensors", "pt") as file:
        experts = [name for name in file.keys() if "layers.0.mlp.experts." in name]  # noqa: SIM118 - it is no dict
    assert len(experts) == (12 if policy.config is MIXTURE else 0), "one tensor per expert, as in published folders"
    tokenizer = load_tokenizer(policy)
    network = load_network(policy, tokenizer, dtype=torch.float32, device=torch.device("cpu"))
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    again = AutoTokenizer.from_pretrained(folder)
    assert type(loaded) is type(network)
    for name, tensor in network.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert again("12abc").input_ids == tokenizer("12abc").input_ids
    assert loaded.generation_config.eos_token_id == network.generation_config.eos_token_id


def test_it_is_made_once_and_the_frozen_copy_shares_it(tmp_path: Path) -> None:
    folder = model_folder(POLICY, tmp_path)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert model_folder(POLICY.frozen(), tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert model_folder(Model("a tiny/policy", config=QWEN3, alphabet="0123456789abc", seed=1), tmp_path) != folder


def test_a_rank_that_is_not_the_first_writes_all_of_it(tmp_path: Path, monkeypatch: Any) -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    try:
        folder = model_folder(POLICY, tmp_path)
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}


def test_a_folder_is_itself_and_an_unknown_name_is_said(tmp_path: Path) -> None:
    assert model_folder(Model(str(tmp_path)), None) == tmp_path
    try:
        model_folder(Model("nobody/nothing-of-this-name"), tmp_path)
    except StageError as error:
        assert "the model 'nobody/nothing-of-this-name' cannot be fetched" in str(error)
    else:
        raise AssertionError("it was found")
