"""Everything this backend uses of vLLM 0.26 to 0.32. No other file imports vLLM.

The common subset of these versions is enough: logits processors of the first model runner, `collective_rpc`, pausing
without aborting requests, and outputs that count their tokens.
"""

from __future__ import annotations

import functools
import importlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from vllm.config import VllmConfig, WeightTransferConfig, set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.models import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.third_party import pynvml
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, LogitsProcessors, MoveDirectionality

from stages.backends.model.cache_bounds import Bounds, largest
from stages.backends.refit.source import peer_lost
from stages.backends.vllm import families
from stages.backends.vllm.environment import LARGE_BYTES, RUNNING, SECOND_RUNNER, graph_sizes, passes
from stages.backends.vllm.limits import share_of
from stages.backends.vllm.processes import forks
from stages.backends.vllm.weights import RankAnswer
from stages.lora import NO_MIXTURES, LoRA, not_in_vllm

__all__ = [
    "MULTIMODAL_REGISTRY",
    "AsyncLLM",
    "BatchUpdate",
    "EngineDeadError",
    "LogitsProcessor",
    "LogitsProcessors",
    "ModelRegistry",
    "MoveDirectionality",
    "MultiModalFieldConfig",
    "MultiModalKwargsItems",
    "PlaceholderRange",
    "SamplerOutput",
    "SecondSampler",
    "WeightTransferEngine",
    "WeightTransferEngineFactory",
    "WeightTransferInitInfo",
    "WeightTransferUpdateInfo",
    "adapter_model",
    "adapters_of",
    "attention_layers",
    "bytes_in_use",
    "computes_on_cpu",
    "differing",
    "folder_bounds",
    "forget",
    "has_second_runner",
    "is_8_bit",
    "join_transfer",
    "load_anew",
    "logprobs",
    "longest",
    "not_in_place",
    "one_by_one",
    "open_llm",
    "outputs",
    "parameters",
    "pause",
    "receive",
    "receive_adapter",
    "remove_adapter",
    "refused",
    "scale_cache",
    "second_runner",
    "verify",
    "with_experts",
]

SecondSampler: Any = importlib.import_module("vllm.v1.worker.gpu.sample.sampler").Sampler  # of the second model runner
EXECUTORS = ("uniproc_executor", "multiproc_executor")
INTERVAL = 64  # tokens per request between two outputs
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM allocates slots for
ADAPTERS = 256  # that wait in memory for a slot, at most; each takes memory only when it is there
LATER = ("mm_device_do_normalize",)  # settings that vLLM 0.26 does not have
NGRAM = (2, 4)  # the fewest and the most last tokens that are looked up earlier in a request


def _meet_in_a_file() -> None:
    """Have the ranks of an engine find each other through a file that only its owner can open, as vLLM 0.32 does: 0.26
    opens a socket to all machines. Engines are forks of a process that has imported this module."""
    for name in EXECUTORS:
        executor: Any = importlib.import_module(f"vllm.v1.executor.{name}")
        if not hasattr(executor, "get_file_store_init_method"):
            executor.get_distributed_init_method = _in_a_file


def _in_a_file(ip: str, port: int) -> str:
    """A place for ranks to meet, instead of that address. Its last word names the shared memory of the CPU build."""
    folder = Path(tempfile.mkdtemp(prefix="sluice-"))
    return f"file://{folder}/ranks:{folder.name}"


_meet_in_a_file()


def computes_on_cpu() -> bool:
    """Whether this is the CPU build."""
    return bool(current_platform.is_cpu())


def open_llm(
    folder: Path, *, gpus: bool, tensor_parallel: int, memory: float, cache: str = "auto", speculate: int = 0,
    draft: Path | None = None, lora: LoRA | None = None, slots: int = 1, routes: bool = False,
    beside_bytes: float = 0.0,
) -> AsyncLLM:  # fmt: skip
    """Start an engine in the running event loop and wait until it is ready. On GPUs it takes `share_of` each, beside
    groups that keep `beside_bytes`, and `cache` is the number format of keys and values. `speculate` tokens are drafted
    per step, by the model in the folder `draft` or by n-grams; call `verify` before any request. `slots` is how many
    adapters, described by `lora`, it computes together. With `routes` it returns the experts of each token.

    Raises ValueError or RuntimeError if it cannot start.
    """
    if speculate and has_second_runner():
        raise ValueError(f"only the first model runner verifies drafts, and {SECOND_RUNNER} chooses the second one")
    if families.family_of(folder) in families.FAMILIES and has_second_runner():
        raise ValueError(f"only the first model runner computes images, and {SECOND_RUNNER} chooses the second one")
    settings = families.settings(folder, gpus=gpus)
    settings = {name: value for name, value in settings.items() if name not in LATER or _takes(name)}
    if speculate:
        settings |= _speculation(speculate, draft, tensor_parallel)
        _end_at_stop_texts()
    if lora is not None:
        for has, why, _ in not_in_vllm(lora, families.config_of(folder), gpus=gpus, tensor_parallel=tensor_parallel):
            raise ValueError(f"an engine with adapters has {has}: {why}")
        settings |= _adapters(lora, slots, families.family_of(folder))
    if routes:
        settings["enable_return_routed_experts"] = True
        _keep_experts()
    settings["kv_cache_dtype"] = cache
    if gpus:
        free_bytes, total_bytes = _gpu_memory()
        compilation: dict[str, Any] = {"pass_config": passes()}
        if total_bytes >= LARGE_BYTES:
            settings["max_num_seqs"] = RUNNING
            if not speculate:  # vLLM then counts the drafts of a sample too
                compilation["cudagraph_capture_sizes"] = graph_sizes(RUNNING)
        settings |= {
            "enable_sleep_mode": True,
            "gpu_memory_utilization": share_of(
                memory, free_bytes=free_bytes, total_bytes=total_bytes, beside_bytes=beside_bytes
            ),
            "compilation_config": compilation,
        }
    config = AsyncEngineArgs(
        model=str(folder),
        dtype="bfloat16" if gpus else "float32",
        tensor_parallel_size=tensor_parallel,
        # With ranks in separate processes, even a single one, the next step is scheduled while this one is prepared.
        distributed_executor_backend="mp" if gpus or tensor_parallel > 1 else "uni",
        enforce_eager=not gpus,
        max_model_len=-1,  # as long as the model allows and the cache can hold
        enable_prefix_caching=True,
        logits_processors=None if has_second_runner() or speculate else ["stages.backends.vllm.choice:Choice"],
        worker_extension_cls="stages.backends.vllm.loader.Loader",
        weight_transfer_config=WeightTransferConfig(backend="sluice"),
        stream_interval=INTERVAL,
        disable_log_stats=True,
        **settings,
        # it has the largest batches; time to first token does not matter here
    ).create_engine_config(UsageContext.LLM_CLASS)
    if not gpus:
        _check_head(config.model_config.get_head_size())
        if lora is not None and config.model_config.get_num_experts() and families.may_have_experts(folder):
            raise ValueError(NO_MIXTURES)
        if drafts := config.speculative_config:
            _check_head(drafts.draft_model_config.get_head_size())
    engine_utils.get_mp_context = forks
    return AsyncLLM.from_vllm_config(config, disable_log_stats=True)


def _speculation(tokens: int, draft: Path | None, tensor_parallel: int) -> dict[str, Any]:
    """Settings of an engine that drafts this many tokens per step. It knows how many tokens a request has before it
    prepares the next step: which random number is next depends on it."""
    if draft is None:
        by: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": NGRAM[0], "prompt_lookup_max": NGRAM[1]}
    else:
        by = {"method": "draft_model", "model": str(draft), "draft_tensor_parallel_size": tensor_parallel}
    return {"speculative_config": {"num_speculative_tokens": tokens, **by}, "async_scheduling": False}


def _takes(name: str) -> bool:
    """Whether this version has the setting."""
    return any(each.name == name for each in fields(AsyncEngineArgs))


def _adapters(lora: LoRA, slots: int, family: str) -> dict[str, Any]:
    """Settings of an engine with adapters. Layers without one, so experts, are left alone where vLLM can do so."""
    if has_second_runner():
        raise ValueError(f"only the first model runner has adapters, and {SECOND_RUNNER} chooses the second one")
    settings: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": slots,
        "max_cpu_loras": max(ADAPTERS, slots),
        "max_lora_rank": next(rank for rank in RANKS if rank >= lora.rank),
    }
    if _takes("lora_target_modules"):
        settings["lora_target_modules"] = [*lora.names(family)]
    return settings


@functools.cache
def _end_at_stop_texts() -> None:
    """Have this process look for stop texts after each token: vLLM 0.26 looks once per step, and keeps the tokens of
    the step that follow one."""
    BaseIncrementalDetokenizer.update = one_by_one(BaseIncrementalDetokenizer.update)  # type: ignore[assignment,method-assign]


def one_by_one(update: Callable[[Any, list[int], bool], str | None]) -> Callable[[Any, list[int], bool], str | None]:
    """Return an `update` of a detokenizer that takes one token at a time and ends at the first stop text."""

    def updated(self: Any, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        last = len(new_token_ids) - 1
        found = (update(self, [token], stop_terminated and i == last) for i, token in enumerate(new_token_ids))
        return next((stop for stop in found if stop is not None), None)

    return updated


@functools.cache
def _keep_experts() -> None:
    """Have this process keep the experts of a request: vLLM 0.26 drops them where it merges the last output with one
    that nobody has read yet."""
    RequestOutput.add = with_experts(RequestOutput.add)  # type: ignore[method-assign]


def with_experts(add: Callable[[RequestOutput, RequestOutput, bool], None]) -> Callable[..., None]:
    """Return an `add` of outputs that also adds the experts."""

    def added(self: RequestOutput, next_output: RequestOutput, aggregate: bool) -> None:
        add(self, next_output, aggregate)
        for made in next_output.outputs:
            for held in self.outputs:
                if held.index == made.index and made.routed_experts is not None:
                    held.routed_experts = made.routed_experts

    return added


def has_second_runner() -> bool:
    """Whether this process's environment chooses vLLM's second model runner."""
    return os.environ.get(SECOND_RUNNER) == "1"


def second_runner() -> Any:
    """The module of the second model runner."""
    return importlib.import_module("vllm.v1.worker.gpu.model_runner")


def _gpu_memory() -> tuple[int, int]:
    """The free and all bytes of the first GPU, read without creating a CUDA context."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    pynvml.nvmlInit()
    try:
        named = first.isdigit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(int(first)) if named else pynvml.nvmlDeviceGetHandleByUUID(first)
        memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
    finally:
        pynvml.nvmlShutdown()
    return int(memory.free), int(memory.total)


def _check_head(size: int) -> None:
    """The CPU build starts with head sizes that its attention does not support, and dies at the first step."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if size not in (sizes := CPUAttentionBackend.get_supported_head_sizes()):
        raise ValueError(f"head_dim is {size}, and attention on the CPU has {', '.join(map(str, sizes))}")


def longest(llm: AsyncLLM) -> int:
    """Maximum number of tokens of a prompt and its response."""
    return int(llm.vllm_config.model_config.max_model_len)


def parameters(
    *, max_tokens: int, closing: Sequence[int], stop: Sequence[str], choice: dict[str, Any]
) -> SamplingParams:
    """A request's parameters. `choice` goes to the logits processor, which leaves the sampler a single token."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,  # `closing` holds all ids that end a response
        stop_token_ids=list(closing),
        stop=list(stop),
        detokenize=bool(stop),
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        output_kind=RequestOutputKind.DELTA,  # vLLM heeds the interval of no other kind
        extra_args={"sluice": choice},
    )


async def outputs(
    llm: AsyncLLM, prompt: Any, params: SamplingParams, name: str, adapter: int | None = None
) -> AsyncIterator[tuple[list[int], str | None, np.ndarray | None]]:
    """Progress of a request: its tokens so far, in a list that grows, and finally the finish reason (stop, length,
    abort) and, if the engine returns them, the experts of all tokens but the last, [tokens, layers, experts chosen].
    `adapter` is the number of one that all ranks have."""
    tokens: list[int] = []
    lora = None if adapter is None else LoRARequest(f"adapter-{adapter}", adapter, "from memory")
    async for output in llm.generate(prompt, params, name, lora_request=lora):
        made: Any = output.outputs[0]
        tokens.extend(made.token_ids)
        yield tokens, made.finish_reason, made.routed_experts


async def logprobs(
    llm: AsyncLLM, lengths: Mapping[str, int], others: Sequence[str]
) -> tuple[list[np.ndarray], list[int]]:
    """`Loader.sluice_logprobs` of the first rank (all ranks hold the same): one array per request, and its passes."""
    answers = await llm.collective_rpc("sluice_logprobs", args=(dict(lengths), list(others)))
    rows, passes = answers[0]
    return [np.frombuffer(row, np.float32) for row in rows], passes


def load_anew(config: VllmConfig, model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """In a worker: load weights with Hugging Face names, as at startup."""
    copied: dict[str, torch.Tensor] = {}
    with set_current_vllm_config(config):
        initialize_layerwise_reload(model)
        model.load_weights(_loaded(weights, copied))
        finalize_layerwise_reload(model, config.model_config)
    for name, held in model.named_parameters() if copied else ():
        if name in copied:
            held.data.copy_(
                copied[name].tensor_split(config.parallel_config.tensor_parallel_size)[get_tensor_model_parallel_rank()]
            )
    if computes_on_cpu():
        _pack_embeddings(model)


def _loaded(
    weights: Iterable[tuple[str, torch.Tensor]], copied: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that vLLM's loader takes. Others are added to `copied`, by vLLM's names."""
    for name, tensor in weights:
        if theirs := next((end for end in families.COPIED if name.endswith(end)), None):
            copied[name.removesuffix(theirs) + families.COPIED[theirs]] = tensor
        else:
            yield name, tensor


def _pack_embeddings(model: Any) -> None:
    """The CPU build computes logits with a packed copy of the output embedding. If that is tied to the input embedding,
    vLLM loads the weight they share, but leaves the copy as it was."""
    for module in model.modules():
        if isinstance(method := getattr(module, "quant_method", None), UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)


def is_8_bit(config: VllmConfig) -> bool:
    """In a worker: whether keys and values are kept as 8-bit floats."""
    return str(config.cache_config.cache_dtype).startswith("fp8")


def attention_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """In a worker: the layers that write keys and values into the cache, by name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Attention))


def adapters_of(model_runner: Any) -> set[int]:
    """In a worker: the numbers of the adapters that it has."""
    return set(model_runner.lora_manager.list_adapters())


def remove_adapter(model_runner: Any, number: int) -> None:
    """In a worker: forget an adapter that no request uses."""
    model_runner.lora_manager.remove_adapter(number)


def manager_of(model_runner: Any) -> Any:
    """In a worker: what has vLLM's adapters, their slots, and the layers that use them."""
    return model_runner.lora_manager._adapter_manager


def adapter_model(
    model_runner: Any, number: int, tensors: Mapping[str, torch.Tensor], rank: int, device: torch.device
) -> Any:
    """In a worker: an adapter that computes B A x from tensors with PEFT's names, which it keeps. vLLM itself reads
    adapters only from files."""
    manager = manager_of(model_runner)
    helper = PEFTHelper(r=rank, lora_alpha=rank, target_modules="all-linear")
    return LoRAModel.from_lora_tensors(
        number, dict(tensors), helper, device=str(device), dtype=manager.lora_config.lora_dtype,
        weights_mapper=_renames(getattr(manager.model, "hf_to_vllm_mapper", None)),
    )  # fmt: skip


def _renames(mapper: Any) -> Any:
    """What a model's mapper of names changes but for joining layers, such as q_proj, k_proj and v_proj: an adapter has
    one part for each. vLLM 0.26 has another name for it."""
    for name in ("get_rename_mapper", "get_unstacked_mapper"):
        if hasattr(mapper, name):
            return getattr(mapper, name)()
    return mapper


async def bytes_in_use(llm: AsyncLLM) -> int:
    """`Loader.sluice_bytes_in_use` of the first rank."""
    return int((await llm.collective_rpc("sluice_bytes_in_use"))[0])


async def pause(llm: AsyncLLM) -> None:
    """Pause all requests between two steps. `AsyncLLM.pause_generation` does the same and then sleeps 20 ms so that
    outputs arrive first, which is not needed here."""
    core: Any = llm.engine_core
    if hasattr(core, "pause_scheduler_async"):
        await core.pause_scheduler_async(mode="keep", clear_cache=False)
    else:
        await llm.pause_generation(mode="keep", clear_cache=False)


async def forget(llm: AsyncLLM) -> None:
    """Clear the KV cache of a paused engine, running requests included, and what it computed of images. Pausing can do
    this too, but then asks all ranks twice about image caches, which most models do not have."""
    if not await llm.reset_prefix_cache(reset_running_requests=True):
        raise RuntimeError("vLLM has not cleared its cache")
    if llm.vllm_config.model_config.multimodal_config is not None:
        await llm.reset_encoder_cache()


async def verify(llm: AsyncLLM) -> None:
    """`Loader.sluice_verify` on all ranks."""
    await llm.collective_rpc("sluice_verify")


async def differing(llm: AsyncLLM) -> list[str]:
    """`Loader.sluice_differing` of all ranks."""
    return sorted({name for names in await llm.collective_rpc("sluice_differing") for name in names})


async def refused(llm: AsyncLLM) -> str:
    """`Loader.sluice_refused` of the first rank; all hold the same layers."""
    return str((await llm.collective_rpc("sluice_refused"))[0])


async def not_in_place(llm: AsyncLLM) -> str:
    """`Loader.sluice_not_in_place` of the first rank; all have the same layers."""
    return str((await llm.collective_rpc("sluice_not_in_place"))[0])


async def folder_bounds(llm: AsyncLLM) -> Bounds:
    """`Loader.sluice_folder_bounds` of all ranks."""
    said = await llm.collective_rpc("sluice_folder_bounds")
    return largest([msgspec.msgpack.decode(each, type=Bounds) for each in said])


async def scale_cache(llm: AsyncLLM, scales: Bounds) -> None:
    """`Loader.sluice_scale_cache` on all ranks."""
    await llm.collective_rpc("sluice_scale_cache", args=(msgspec.msgpack.encode(scales),))


async def join_transfer(llm: AsyncLLM, place: dict[str, Any]) -> None:
    """Tell all ranks their place in later refits (`transfer.Joined`)."""
    await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=place))


async def receive(llm: AsyncLLM, offered: dict[str, Any], names: Sequence[str]) -> list[RankAnswer]:
    """`Loader.sluice_receive` on all ranks (`transfer.Offered`). Returns every rank's answer. Raises PeerLost if a rank
    did not receive everything."""
    return _answers(await llm.collective_rpc("sluice_receive", args=(offered, list(names))))


async def receive_adapter(
    llm: AsyncLLM, offered: dict[str, Any], number: int, lora: LoRA, keep: Iterable[int]
) -> list[RankAnswer]:
    """`Loader.sluice_receive_adapter` on all ranks. Returns and raises what `receive` does."""
    args = (offered, number, lora.rank, lora.scaling, sorted(keep))
    return _answers(await llm.collective_rpc("sluice_receive_adapter", args=args))


def _answers(said: Sequence[bytes]) -> list[RankAnswer]:
    answers = [msgspec.msgpack.decode(each, type=RankAnswer) for each in said]
    for answer in answers:
        if answer.lost:
            raise peer_lost(answer.lost)
    return answers
