"""What is read from a config, against transformers: the numbers of rotary embeddings, and which weights a model has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from pipeline import Model, StageError
from stages.backends.megatron.names import parameters
from stages.backends.megatron.parts import Part
from stages.backends.megatron.rotary import frequencies
from stages.backends.model.decoder import Yarn
from stages.backends.model.families import decoder_of, padding_token
from stages.backends.model.folder import model_folder
from tests.unit.test_folder import DEEPSEEK, GLM
from tests.unit.test_torch_families import NEMOTRON
from tests.unit.tiny import QWEN3

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"mscale": 0.7, "mscale_all_dim": 1.2},
        {"mscale": 0.7},  # which alone does not count
        {"attention_factor": 1.3},
        {"beta_fast": 20.0},
        {"beta_slow": 3.0},
        {"truncate": False},
    ],
)
def test_yarn_has_the_numbers_of_transformers(change: dict[str, Any]) -> None:
    """Heads are so wide that each setting changes a frequency or the amplitude."""
    given = {name: value for name, value in DEEPSEEK.items() if name != "model_type"}
    given |= {"qk_rope_head_dim": 32, "rope_parameters": YARN | change}
    config = AutoConfig.for_model("deepseek_v3", **given)
    wanted, rope = DeepseekV3RotaryEmbedding(config), decoder_of(config.to_dict(), "here").rope
    assert rope is not None and isinstance(rope.scaling, Yarn)
    torch.testing.assert_close(frequencies(rope), wanted.inv_freq, rtol=1e-6, atol=0)
    assert rope.scaling.amplitude == pytest.approx(wanted.attention_scaling, rel=1e-6)


@pytest.mark.parametrize(
    ("family", "change", "differs"),
    [
        (GLM, {"use_qk_norm": False}, "_norm.weight"),
        (GLM, {"use_qk_norm": True}, "_norm.weight"),
        (GLM, {"attention_bias": True}, "_proj.bias"),
        (NEMOTRON, {"use_conv_bias": True}, "conv1d.bias"),
        (NEMOTRON, {"use_conv_bias": False}, "conv1d.bias"),
    ],
)
def test_a_decoder_has_the_weights_that_transformers_saves(
    tmp_path: Path, family: dict[str, Any], change: dict[str, bool], differs: str
) -> None:
    folder = model_folder(Model("a", config=family | change, alphabet="0123"), tmp_path)
    with safe_open(folder / "model.safetensors", "pt") as file:
        saved = set(file.keys())
    table = parameters(decoder_of(json.loads((folder / "config.json").read_text()), "here"), Part())
    assert {piece.name for parameter in table.values() for piece in parameter.pieces} == saved
    assert any(name.endswith(differs) for name in saved) == all(change.values())


@pytest.mark.parametrize(
    ("pad", "found"), [(None, None), (3, 3), (15, 15), (16, None), (-1, 15), (-16, 0), (-17, None)]
)
def test_the_token_that_pads_is_that_of_transformers(pad: int | None, found: int | None) -> None:
    """A vocabulary of 16: torch refuses numbers outside it, which are none here."""
    assert padding_token({"vocab_size": 16, "pad_token_id": pad}) == found
    if found is not None:
        assert torch.nn.Embedding(16, 2, padding_idx=pad).padding_idx == found


def test_no_shared_expert_is_none() -> None:
    config = AutoConfig.for_model(**GLM | {"n_shared_experts": 0}).to_dict()
    (sparse, *_) = [layer.mlp for layer in decoder_of(config, "here").layers if getattr(layer.mlp, "experts", 0)]
    assert sparse.shared == 0


def test_biases_of_feed_forward_parts_are_refused() -> None:
    config = AutoConfig.for_model(**QWEN3 | {"model_type": "llama", "mlp_bias": True}).to_dict()
    with pytest.raises(StageError, match=r"mlp_bias=True; feed-forward parts have no bias here"):
        decoder_of(config, "here")
