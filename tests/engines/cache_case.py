"""Scales of an 8-bit cache in vLLM on the CPU, whose build has one: `attention(FOLDER)` looks at the attention layers
of each family, and `sampled(FOLDER)` at an engine of two ranks that is refitted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM

from ops.refit.transports import TRANSPORTS
from stages.backends import Route
from stages.backends.model.cache_bounds import Bounds, bounds_of
from stages.backends.model.folder import model_folder
from stages.backends.model.places import placed
from stages.backends.refit.source import Source
from tests import images
from tests.engines import vllm_models as tiny
from tests.engines.refit_case import CONFIGS, PLAIN, TOKENS, made

READ = ("_q_scale", "_k_scale", "_v_scale", "_k_scale_cpu", "_v_scale_cpu")  # tensors of a layer that vLLM reads
NUMBERS = ("_q_scale_float", "_k_scale_float", "_v_scale_float")
LARGE = 3000.0


def state(layers: Mapping[int, Any]) -> dict[int, list[float]]:
    """Return all that vLLM reads of the layers' scales."""
    return {n: [*(float(getattr(layer, name)) for name in (*READ, *NUMBERS))] for n, layer in layers.items()}


def addresses(layers: Mapping[int, Any]) -> list[int]:
    """Return where what CUDA graphs read lies; what is on the host is made again by vLLM's loader."""
    return [getattr(layer, name).data_ptr() for layer in layers.values() for name in READ[:3]]


def folder_of(family: str, root: Path) -> Path:
    """Return the folder of a tiny model of a family."""
    if family in images.CONFIGS:
        return model_folder(images.tiny(family), root)
    if family == "llama":
        with patch.dict(CONFIGS, llama=PLAIN | {"model_type": "llama"}):
            return Path(made(root, family, 0).source)
    return Path(made(root, family, 0).source)


def attention(root: Path, families: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Give scales to vLLM's own attention layers of each family, with a cache of 8-bit floats, without an engine."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales
    from vllm.model_executor.model_loader.utils import initialize_model

    from stages.backends.vllm import api, cache_scales, vision
    from stages.backends.vllm import families as known

    found: dict[str, dict[str, Any]] = {}
    for family in sorted(families, key=lambda family: "moe" not in family):  # mixtures have one more group of ranks
        folder = folder_of(family, root)
        vision.register(known.architecture_of(folder))
        settings = {name: value for name, value in known.settings(folder, gpus=False).items() if name not in api.LATER}
        described = EngineArgs(
            model=str(folder), dtype="float32", enforce_eager=True, kv_cache_dtype="fp8", **settings
        ).create_engine_config()
        with set_current_vllm_config(described):
            if not found:
                init_distributed_environment(1, 0, f"file://{root / 'meeting'}", 0, "gloo")
                initialize_model_parallel(1, 1)
            network = initialize_model(vllm_config=described)
        own: dict[str, Any] = {"is 8 bit": api.is_8_bit(described), "amplitude": cache_scales.amplitude(network)}
        layers = cache_scales.cached_layers(api.attention_layers(network))
        bounds = cache_scales.folder_bounds(folder, 0, 1, own["amplitude"], torch.device("cpu"))
        halves = [cache_scales.folder_bounds(folder, i, 2, own["amplitude"], torch.device("cpu")) for i in (0, 1)]
        own |= {"layers": sorted(layers), "bounds": bounds, "halves": halves, "before": state(layers)}
        own["not in place"] = cache_scales.not_in_place(layers)
        before, scales = addresses(layers), {n: (2.0 ** (n + 1), 2.0 ** (n + 5), 2.0 ** (n - 9)) for n in layers}
        cache_scales.install(layers, scales)
        own |= {"after": state(layers), "scales": scales, "moved": addresses(layers) != before}
        for layer in layers.values():
            set_default_quant_scales(layer)  # as at a reload
            layer.query_quant = object()  # as on Hopper
        cache_scales.install(layers, scales)
        own["with queries"] = state(layers)
        first = next(iter(layers.values()))
        with patch.object(first.attn_backend, "get_name", lambda: "FLASHINFER"):
            own["elsewhere"] = cache_scales.not_in_place(layers)
        try:
            cache_scales.install({**layers, 99: first}, scales | {number: (1.0, 1.0, 1.0) for number in layers})
        except ValueError as error:
            own["refused"], own["kept"] = str(error), state(layers)
        found[family] = own
    return found


def layers_of(worker: Any) -> tuple[dict[int, list[float]], list[int]]:
    """Return, in a worker, what its attention layers read, and where that is."""
    layers = worker.weight_transfer_engine.layers()
    return state(layers), addresses(layers)


def spread(network: Any, factor: float) -> None:
    """Make values and normalized keys larger by a factor, and what multiplies them smaller: the distributions stay. The
    values of the second half of the heads, which the last rank has, grow by 16 times as much."""
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "v_proj" in name:
                parameter[len(parameter) // 2 :].mul_(16)
            elif "o_proj" in name:
                parameter[:, parameter.shape[1] // 2 :].div_(16)
            if any(part in name for part in ("v_proj", "k_norm")):
                parameter.mul_(factor)
            elif any(part in name for part in ("o_proj", "q_norm")):
                parameter.div_(factor)


@patch.dict(os.environ, {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"})  # its workers then run `layers_of`
def sampled(root: Path, ranks: int) -> dict[str, Any]:
    """Sample with an 8-bit cache: from the folder, from refits with much larger keys and values, of which one layer's
    go through vLLM's loader, then with scales of 1, and after the engine woke up as that of vLLM 0.26 does."""
    from stages.backends.vllm import api, client
    from stages.backends.vllm.engine import open_engine

    model = made(root, "qwen3", 0)
    network = AutoModelForCausalLM.from_pretrained(model.source, dtype=torch.float32).eval()
    tensors, places, held = placed(network)
    source, setup = Source(torch.device("cpu"), 0, tensors, places, held), client.Setup
    backend = open_engine(tiny.context(root, replace(tiny.GROUP, workers=ranks, tensor_parallel=ranks)))
    differing = api.differing

    async def elsewhere(llm: Any) -> list[str]:
        return [*await differing(llm), "model.layers.1.self_attn.qkv_proj.weight"]

    with (
        patch.object(client, "Setup", lambda **given: setup(**given | {"cache": "fp8"})),
        patch.object(api, "differing", elsewhere),
    ):
        own = backend.client(model)
    prompt_ids = backend.encode(model, tiny.texts((0, 1)))
    found: dict[str, Any] = {"records": [], "far": {}, "bounds": {}, "layers": {}}

    async def asked(calls: Any) -> Any:
        return await calls(await own._alive())

    def look(name: str) -> None:
        if name != "ones":
            found["bounds"][name] = bounds(network)
        found["layers"][name] = own.call(asked(lambda llm: llm.collective_rpc(layers_of)))
        got = backend.generate(model, prompt_ids, TOKENS, tiny.draws((0, 1)))
        rows = tiny.logprobs(network, prompt_ids, got, 1.0)
        found["far"][name] = float((got.logprobs.values - torch.cat(rows)).abs().mean())

    async def ones(llm: Any) -> None:
        await llm.reset_prefix_cache()
        await api.scale_cache(llm, {number: (1.0, 1.0, 1.0) for number in own._scales})

    async def woken(llm: Any) -> None:
        async def wake_up() -> None:
            await ones(llm)

        with patch.object(llm, "wake_up", wake_up):
            await own._rouse(llm)

    look("folder")
    for version, (way, factor) in enumerate((("pull", LARGE), ("messages", 0.25)), start=1):
        spread(network, factor)
        served = backend.serve(model, [source.share(held, TRANSPORTS[way])], version, Route(TRANSPORTS[way]))
        found["records"].append(dict(served.record))
        look(way)
    own.call(asked(ones))
    look("ones")
    own.call(asked(woken))
    look("woken")
    backend.close()
    return found


def bounds(network: Any) -> Bounds:
    held = network.state_dict()
    return bounds_of(held.get, held, amplitude=1.0)
