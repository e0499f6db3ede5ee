"""vLLM's own weight transfer engines, for comparison in `benchmarks.gpu.refit_ready`: one GPU holds all weights.

A round is start, update and finish of vLLM's `LLM`, while a trainer process sends. `nccl` sends packed messages to
other GPUs; `ipc` opens the trainer's memory, which must be on the same GPU. Consecutive versions have different values,
and every parameter is checked at the end.
"""

from __future__ import annotations

import base64
import itertools
import multiprocessing
import os
import pickle
import socket
import time
from argparse import Namespace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PARTS = ("ready", "start", "update", "finish")
LOOPBACK = "127.0.0.1"


def value_of(version: int) -> float:
    """The value of all parameters of a version."""
    return 0.01 * (version % 7)


def trainer(wire: Connection, gpu: str, folder: str, engine: str, port: int, world: int) -> None:
    """A process that holds the whole model, and sends it on request."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    from stages.backends.vllm.weights import expected

    torch.cuda.set_device(0)
    shapes = {name: list(tensor.shape) for name, tensor in expected(Path(folder), torch.bfloat16).items()}
    held = {name: torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for name, shape in shapes.items()}
    wire.send(shapes)
    if engine == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine

        meeting = {"master_address": LOOPBACK, "master_port": port, "world_size": world}
        sent = NCCLTrainerSendWeightsArgs(group=NCCLWeightTransferEngine.trainer_init(meeting), packed=True)
    while (version := wire.recv()) is not None:
        for parameter in held.values():
            parameter.fill_(value_of(version))
        torch.cuda.synchronize()
        wire.send(None)
        wire.recv()
        if engine == "nccl":
            NCCLWeightTransferEngine.trainer_send_weights(iter(held.items()), sent)
            torch.cuda.synchronize()
            wire.send(None)
        else:
            gpu_name = str(torch.cuda.get_device_properties(0).uuid)
            wire.send(base64.b64encode(pickle.dumps([{gpu_name: reduce_tensor(p)[1]} for p in held.values()])).decode())


def extremes(worker: Any) -> dict[str, tuple[float, float]]:
    """The minimum and maximum of each parameter; runs in vLLM's worker."""
    return {name: (float(p.min()), float(p.max())) for name, p in worker.model_runner.model.named_parameters()}


def measured(engine: str, options: Namespace, path: str, gpus: list[str], rounds: int) -> list[dict[str, float]]:
    """Run all rounds. Returns the parts of each in milliseconds. Raises RuntimeError if the final values are wrong."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for ipc handles, and to send functions to workers
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    context, world = multiprocessing.get_context("spawn"), 1 + options.tensor
    wire, theirs = context.Pipe()
    process = context.Process(target=trainer, args=(theirs, gpus[0], path, engine, port, world), daemon=True)
    process.start()
    first = 0 if engine == "ipc" else 1
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first : first + options.tensor])
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    llm = LLM(
        model=path, weight_transfer_config=WeightTransferConfig(backend=engine), dtype="bfloat16", max_model_len=2048,
        tensor_parallel_size=options.tensor, gpu_memory_utilization=options.memory,
    )  # fmt: skip
    shapes = wire.recv()
    message: dict[str, Any] = {
        "names": list(shapes), "shapes": list(shapes.values()), "dtype_names": ["bfloat16"] * len(shapes)
    }  # fmt: skip
    meeting: dict[str, Any] = {}
    if engine == "nccl":
        message["packed"] = True
        meeting = {"master_address": LOOPBACK, "master_port": port, "rank_offset": 1, "world_size": world}
    llm.init_weight_transfer_engine({"init_info": meeting})
    found = []
    for version in range(rounds):
        wire.send(version)
        wire.recv()
        times = [time.perf_counter()]
        llm.start_weight_update()
        times.append(time.perf_counter())
        wire.send("now")
        if engine == "ipc":
            llm.update_weights({"update_info": message | {"ipc_handles_pickled": wire.recv()}})
        else:
            llm.update_weights({"update_info": dict(message)})
            wire.recv()
        times.append(time.perf_counter())
        llm.finish_weight_update()
        times.append(time.perf_counter())
        took = [times[-1] - times[0], *(end - begin for begin, end in itertools.pairwise(times))]
        found.append({part: 1e3 * took_s for part, took_s in zip(PARTS, took)})
    import torch

    wanted = float(torch.tensor(value_of(rounds - 1), dtype=torch.bfloat16))
    seen = llm.llm_engine.collective_rpc(extremes)[0]
    wire.send(None)
    process.join(30)
    llm.llm_engine.engine_core.shutdown()
    if wrong := [name for name, pair in seen.items() if pair != (wanted, wanted)]:
        raise RuntimeError(f"vLLM's {engine} engine: {len(wrong)} parameters are not {wanted}, such as {wrong[0]}")
    return found
