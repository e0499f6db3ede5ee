"""Refits of 8-bit weights into vLLM's own modules, in a process that can end afterwards: `refitted(FOLDER, MIXTURE)`.

The CPU build has no kernels for these weights, so the modules get one that does nothing. They are what vLLM's loader
makes of a quantized folder, and the refit writes where it does on GPUs: into their parameters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ops.refit.layout import Tensor
from ops.refit.ledger import Ledger
from ops.refit.share import Share, layout_of
from ops.refit.transports import TRANSPORTS
from pipeline import Model
from stages.backends import PULL
from stages.backends.model.cache_bounds import bounds_of
from stages.backends.model.folder import model_folder
from stages.backends.model.places import placed
from stages.backends.model.quantized_folder import quantized_folder
from stages.backends.refit.source import Source
from stages.backends.refit.target import Target, acknowledged
from tests.engines import vllm_models as tiny

DENSE = tiny.QWEN3 | {"hidden_size": 192, "intermediate_size": 256, "head_dim": 64}
MIXTURE = DENSE | {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
IN_PLACE = torch.device("meta")  # not a CPU: into the parameters themselves


class Kernel:
    """Leaves weights as they are, which those of Hopper do, too."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Do nothing."""


def refitted(root: Path, mixture: bool) -> dict[str, Any]:
    """Return what differs from vLLM's loader after it, after a refit in place, and after one through the loader."""
    from stages.backends.vllm.api import load_anew
    from stages.backends.vllm.cache_scales import folder_bounds
    from stages.backends.vllm.storage import Storage, differing, wrong_layers
    from stages.backends.vllm.table import ParameterTable
    from stages.backends.vllm.weights import expected

    config = MIXTURE if mixture else DENSE
    models = [model_folder(Model("tiny", config=config, alphabet=tiny.ALPHABET, seed=seed), root) for seed in (0, 1)]
    first, second = (quantized_folder(folder, root) for folder in models)
    assert quantized_folder(models[0], root) == first
    with modules(first) as (described, network):
        table = ParameterTable(_decoder(described), 1, torch.bfloat16, quantized=True)
        found: dict[str, Any] = {
            "loaded": differing(network, table, 0, device=IN_PLACE, folder=first),
            "other folder": differing(network, table, 0, device=IN_PLACE, folder=second),
            "wrong": wrong_layers(network),
        }
        addresses = {name: parameter.data_ptr() for name, parameter in network.named_parameters()}
        for way, ruled, folder, source in (("in place", table, second, 1), ("loader", None, first, 0)):
            share, tensors = offered(models[source])
            assert expected(folder, torch.bfloat16, weights="fp8") == tensors
            storage = Storage(
                network, ruled, by_loader=[], offered=tensors, device=IN_PLACE, ledger=Ledger(torch.device("cpu"))
            )
            target = Target(storage.tensors, [storage.places(0)], 0, storage.held)
            received = target.receive([share], 1, PULL)
            acknowledged([share], [received.summed])
            storage.finish(lambda weights: load_anew(described, network, weights))
            found[way] = differing(network, table, 0, device=IN_PLACE, folder=folder)
            found[f"{way}, by the loader"] = len(storage.loaded)
            found[f"{way}, bounds"] = bounds_of(storage.parts(0), storage.tensors, amplitude=1.0)
            found[f"{way}, bounds of the folder"] = folder_bounds(folder, 0, 1, 1.0, torch.device("cpu"))
            found[f"{way}, bytes"] = received.record["received_bytes"]
        found["moved"] = [name for name, each in network.named_parameters() if each.data_ptr() != addresses[name]]
        found["tensors"] = len(tensors)
    if mixture:
        file = first / "config.json"
        entries = json.loads(file.read_text())
        del entries["quantization_config"]["modules_to_not_convert"]
        file.write_text(json.dumps(entries))
        with modules(first, load=False) as (_, network):
            found["wrong with routers"] = wrong_layers(network)
    return found


def offered(folder: Path) -> tuple[Share, dict[str, Tensor]]:
    """Return what a trainer with this model offers, which lives as long as this process."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tensors, places, held = placed(network, torch.bfloat16)
    source = Source(torch.device("cpu"), 0, tensors, places, held, quantize=lambda tensor, how: None)
    _kept.append(source)
    share = source.share(held, TRANSPORTS["pull"])
    return share, dict(layout_of([share]).tensors)


_kept: list[Source] = []


def _decoder(described: Any) -> Any:
    from stages.backends.model.families import decoder_of

    config = described.model_config.hf_config.to_dict()
    return decoder_of({name: value for name, value in config.items() if name != "quantization_config"}, "")


@contextmanager
def modules(folder: Path, *, load: bool = True) -> Iterator[tuple[Any, nn.Module]]:
    """Yield vLLM's settings and modules of a quantized folder, loaded by its loader."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    described = EngineArgs(model=str(folder), dtype="bfloat16", enforce_eager=True).create_engine_config()
    with (
        set_current_vllm_config(described),
        patch.object(fp8, "init_fp8_linear_kernel", Kernel),
        patch.object(fp8, "select_fp8_moe_backend", lambda *_, **__: (None, None)),
        patch.object(fp8.Fp8MoEMethod, "process_weights_after_loading", lambda *_: None),
        patch.object(UnquantizedLinearMethod, "process_weights_after_loading", lambda *_: None),  # a CPU packs routers
        set_default_torch_dtype(torch.bfloat16),
    ):
        if not parallel_state.model_parallel_is_initialized():
            init_distributed_environment(1, 0, f"file://{folder.parent / 'meeting'}", 0, "gloo")
            initialize_model_parallel(1, 1)
        network = initialize_model(vllm_config=described)
        record_metadata_for_reloading(network)
        if load:
            get_model_loader(described.load_config).load_weights(network, described.model_config)
        yield described, network
