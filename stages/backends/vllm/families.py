"""Settings of vLLM for families of models that it would otherwise compute differently. Loads no vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ops.flops import block_kinds
from stages.backends.model.experts import single
from stages.images import FAMILIES


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Settings of an engine. config: keys that vLLM reads in config.json and that transformers does not write; on_cpu:
    arguments of the CPU build."""

    config: Mapping[str, Any] = field(default_factory=dict)
    on_cpu: Mapping[str, Any] = field(default_factory=dict)


NEEDS: Mapping[str, Needs] = {
    "deepseek_v3": Needs(
        config={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},  # otherwise softmax, without the experts' bias
        # The CPU build's own rotary kernel does not turn neighboring dimensions.
        on_cpu={"compilation_config": {"custom_ops": ["none"]}},
    ),
}


_STREAMED = {  # gpt-oss: tensors of all experts of a layer, and the names under which vLLM takes those of one
    "gate_up_proj": "w13_weight",
    "gate_up_proj_bias": "w13_bias",
    "down_proj": "w2_weight",
    "down_proj_bias": "w2_bias",
}


COPIED = {".self_attn.sinks": ".attn.sinks"}  # gpt-oss: dropped at a reload, too; and what vLLM calls it


def loadable(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """Yield what vLLM's loader takes for a tensor of a model. A layer's experts are loaded one by one: vLLM 0.32 copies
    those of gpt-oss at once only at startup, and drops them at a reload, without an error."""
    layer, _, kind = name.partition("experts.")
    if kind not in _STREAMED:
        yield from single(name, tensor)
        return
    for expert in range(len(tensor)):
        yield f"{layer}experts.{expert}.{_STREAMED[kind]}", tensor[expert]


def config_of(folder: Path) -> dict[str, Any]:
    """Return the config of the model in a folder."""
    return dict(json.loads((folder / "config.json").read_text()))


def family_of(folder: Path) -> str:
    """Return the `model_type` of the model in a folder."""
    return str(config_of(folder).get("model_type"))


def may_have_experts(folder: Path) -> bool:
    """Return whether a layer of the model in a folder can have experts. The config of a NemotronH without them counts
    some all the same."""
    config = config_of(folder)
    return config.get("model_type") != "nemotron_h" or "moe" in block_kinds(config)


def architecture_of(folder: Path) -> str:
    """Return the name of the class of the model in a folder."""
    return str(next(iter(config_of(folder).get("architectures") or [""])))


SEEING = {  # of models that see images
    "limit_mm_per_prompt": {"video": 0},
    "mm_processor_cache_gb": 0,  # it is of vLLM's own processor
    "mm_device_do_normalize": False,  # patches are normalized
}


def settings(folder: Path, *, gpus: bool) -> dict[str, Any]:
    """Return arguments for an engine of the model in a folder."""
    needs = NEEDS.get(family_of(folder), Needs())
    found = {} if gpus else dict(needs.on_cpu)
    if family_of(folder) in FAMILIES:
        found |= SEEING | ({} if gpus else {"skip_mm_profiling": True})
    return found | ({"hf_overrides": dict(needs.config)} if needs.config else {})
