"""Bounds of queries, keys and values against those of real networks: every family, random and much larger weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig
from transformers.masking_utils import eager_mask

from ops.cache_scale import MARGIN, power_of_two
from ops.quantize import dequantized, quantized
from stages.backends.model.blocks import SUFFIX, is_quantized
from stages.backends.model.build import auto_class
from stages.backends.model.cache_bounds import Bounds, bounds_of, largest
from stages.backends.vllm.limits import SCALED
from stages.images import is_seeing
from tests import images
from tests.engines.refit_case import CONFIGS, PLAIN

YARN = {
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 64}
}
KNOWN: Mapping[str, dict[str, Any]] = {
    **{family: CONFIGS[family] for family in SCALED if family in CONFIGS},
    **{family: config | {"model_type": family} for family, config in images.CONFIGS.items()},
    "llama": PLAIN | {"model_type": "llama", "attention_bias": True},
}
KINDS = "qkv"


def built(config: dict[str, Any], seed: int) -> Any:
    """Return a network of the family's shape, with random gains and biases."""
    small = {"vocab_size": 64} if "text_config" not in config else {}
    config = AutoConfig.for_model(**{name: value for name, value in (config | small).items() if value is not None})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = auto_class(is_seeing(config.to_dict())).from_config(
            config, dtype=torch.float32, attn_implementation="spied"
        )
        for name, parameter in network.named_parameters():
            if parameter.dim() == 1:
                parameter.data.normal_(std=1e3 if name.endswith("_proj.bias") else 2.0)
            elif ".self_attn." in name or ".mixer." in name:
                parameter.data.mul_(10.0 ** (seed + 1))
    return network.eval()


@pytest.fixture
def spied() -> Iterator[dict[int, list[torch.Tensor]]]:
    """The queries, keys and values of each layer's attention, as they go into a cache."""
    seen: dict[int, list[torch.Tensor]] = {}

    def attend(module: Any, query: Any, key: Any, value: Any, *given: Any, **named: Any) -> Any:
        seen.setdefault(module.layer_idx, [query, key, value])
        return sys.modules[type(module).__module__].eager_attention_forward(module, query, key, value, *given, **named)

    AttentionInterface.register("spied", attend)
    AttentionMaskInterface.register("spied", eager_mask)
    yield seen


def bounds(network: Any, *, amplitude: float = 0.0, read: Callable[[str], Any] | None = None) -> Bounds:
    """Return the bounds with that amplitude, or else with that of the network's rotary embedding."""
    tensors = network.state_dict()
    amplitude = amplitude or max([1.0, *(getattr(each, "attention_scaling", 0.0) for each in network.modules())])
    return bounds_of(read or tensors.get, tensors, amplitude=amplitude)


@torch.no_grad()
@pytest.mark.parametrize("family", SCALED)
@pytest.mark.parametrize("seed", [0, 2])
def test_no_query_key_or_value_is_above_its_bound(family: str, seed: int, spied: dict[int, list[torch.Tensor]]) -> None:
    network = built(KNOWN[family], seed)
    network(input_ids=torch.arange(3, 99)[None] % 40, use_cache=False)
    found = bounds(network)
    assert found.keys() == spied.keys() and len(found) > 0, "each layer with attention, and no other"
    loosest = 1.0
    for number, each in spied.items():
        for tensor, bound in zip(each, found[number]):
            loosest = max(loosest, bound / float(tensor.abs().max()))
            assert tensor.abs().max() <= bound * (1 + 1e-5)
            assert (tensor.bfloat16() / power_of_two(bound)).abs().max() <= 448
    print(f"{family}: the loosest bound is {loosest:.1f} times the largest number")
    assert loosest < 32, "of 64 hidden dimensions, the largest of which 96 tokens are not far from a bound"


@torch.no_grad()
def test_yarn_lengthens_keys(spied: dict[int, list[torch.Tensor]]) -> None:
    network = built(CONFIGS["qwen3"] | YARN, 0)
    network(input_ids=torch.arange(3, 99)[None] % 40, use_cache=False)
    factor = network.model.rotary_emb.attention_scaling
    plain, longer = bounds(network, amplitude=1.0), bounds(network)
    assert factor > 1.2 and all(longer[n][1] == pytest.approx(factor * plain[n][1]) for n in plain)
    assert all(spied[n][1].abs().max() <= longer[n][1] for n in plain)


@torch.no_grad()
def test_the_worst_token_reaches_the_bound(spied: dict[int, list[torch.Tensor]]) -> None:
    """An embedding that points where a row of v_proj does gives a value of that size; so a smaller bound would be
    wrong."""
    network = built(CONFIGS["qwen3"], 0)
    attention, norm = network.model.layers[0].self_attn, network.model.layers[0].input_layernorm
    rows = attention.v_proj.weight * norm.weight
    worst = rows[int(rows.norm(dim=1).argmax())]
    network.model.embed_tokens.weight[5] = 1e3 * worst / worst.norm()
    network(input_ids=torch.tensor([[3, 5]]), use_cache=False)
    assert float(spied[0][2].abs().max()) == pytest.approx(bounds(network)[0][2], rel=1e-3)


def test_ranks_that_divide_the_heads_find_the_bounds_of_the_model() -> None:
    """One to four ranks, each with its rows; with four, two hold the same key-value head."""
    network = built(CONFIGS["qwen2"] | {"num_attention_heads": 4, "hidden_size": 128}, 1)
    tensors, whole = network.state_dict(), bounds(network)

    def part(rank: int, ranks: int) -> Callable[[str], Any]:
        def read(name: str) -> Any:
            tensor = tensors.get(name)
            if tensor is None or "_proj" not in name:
                return tensor
            whole_heads = ranks if "q_proj" in name else min(2, ranks)
            return tensor.chunk(whole_heads)[rank * whole_heads // ranks]

        return read

    for ranks in (1, 2, 4):
        found = [bounds_of(part(rank, ranks), tensors, amplitude=1.0) for rank in range(ranks)]
        assert largest(found) == whole
        assert ranks == 1 or found[0] != whole, "a rank alone does not know"
    halves = [{n: b for n, b in whole.items() if n % 2 == rank} for rank in (0, 1)]
    assert largest([*halves, {}]) == whole


def test_quantized_matrices_are_bounded_as_what_they_stand_for() -> None:
    sizes = {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 2}
    network = built(CONFIGS["qwen2"] | sizes | {"num_hidden_layers": 1}, 0)
    tensors = dict(network.state_dict())
    plainly = {
        name: dequantized(*quantized(tensor)) if is_quantized(name) else tensor for name, tensor in tensors.items()
    }
    held: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        held[name] = tensor
        if is_quantized(name):
            held[name], held[name + SUFFIX] = quantized(tensor)
    assert prod(held["model.layers.0.self_attn.q_proj.weight"].shape) == 2048 * 256, "in two parts"
    assert bounds(network, read=held.get) == bounds(network, read=plainly.get) != bounds(network)
    (quantized_bounds,), (exact,) = bounds(network, read=held.get).values(), bounds(network).values()
    assert (
        all(here == pytest.approx(there, rel=1 / 16) for here, there in zip(quantized_bounds, exact))
        and MARGIN > 17 / 16
    )


@pytest.mark.parametrize("missing", ["input_layernorm.weight", "self_attn.v_proj.weight"])
def test_a_tensor_that_is_missing_is_named(missing: str) -> None:
    network = built(CONFIGS["qwen3"], 0)
    tensors = network.state_dict()
    name = f"model.layers.1.{missing}"
    with pytest.raises(KeyError, match=name):
        bounds_of(lambda each: None if each == name else tensors.get(each), tensors, amplitude=1.0)
    assert bounds_of(tensors.get, ["model.norm.weight"], amplitude=1.0) == {}
