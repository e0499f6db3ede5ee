"""vLLM's environment variables, and the thread that ends its processes with their owner. Does not import vLLM.

The worker process sets them before importing vLLM; vLLM's child processes inherit them. Variables that the user has set
are left alone.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading

OWNER = "SLUICE_VLLM_OWNER"  # the process that owns the engine's processes
SECOND_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"  # how vLLM starts processes
COMMON = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    METHOD: "spawn",  # the owner has threads, and forking them may deadlock
    "NUMBA_NUM_THREADS": "1",  # vLLM looks up n-grams with one thread; others would only wait, and keep cores busy
    SECOND_RUNNER: "0",  # the first one is the tested one; the second one, as of vLLM 0.26, samples by `sampler`
}
ON_CPU = {
    "TORCH_COMPILE_DISABLE": "1",  # otherwise the sampler compiles for half a minute
    "VLLM_CPU_CI_ENV": "1",  # no warm-up
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_MLA_DISABLE": "1",  # its kernels for latent attention take the sizes of a few published models only
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # replicas, trainer and data plane share the machine
}
ON_GPU = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # its kernels compile for minutes
    "VLLM_USE_DEEP_GEMM": "0",  # for 8-bit weights; it compiles at the start and needs nvcc, CUTLASS's kernels do not
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",  # the same
    # It takes all CUDA graphs to be as large as the second largest (profile_cudagraph_memory of gpu_model_runner.py).
    # Engines of 0.6B and 4B then had 12 and 25 GiB less in use than their share.
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0",
}
MULTICAST = (
    "NCCL_NVLS_ENABLE",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    "NVSHMEM_DISABLE_NVLS",
)  # NCCL's, torch's, NVSHMEM's
NO_MULTICAST = {  # vLLM heeds none of them, and prefers all-reduces that use multicast: a start was seen to hang
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
LARGE_BYTES = 70 * 2**30  # of a GPU's memory: from here on,
RUNNING = 1024  # samples run at once in an engine, as vLLM has it by itself for an H100
FLASHINFER = "VLLM_FLASHINFER_ALLREDUCE_BACKEND"  # which of FlashInfer's all-reduces vLLM fuses with the norm after it


def multicast_is_off() -> bool:
    """Return whether the machine's environment turns NVLink multicast off for another library."""
    nccl, torch, nvshmem = map(os.environ.get, MULTICAST)
    return nccl == "0" or torch == "1" or nvshmem == "1"


def passes() -> dict[str, bool]:
    """Return vLLM's compilation passes that differ from its defaults. Without multicast, FlashInfer's fused all-reduce
    compiles for minutes at every first start; it stays if the environment chooses it."""
    return {"fuse_allreduce_rms": False} if multicast_is_off() and FLASHINFER not in os.environ else {}


def graph_sizes(running: int) -> list[int]:
    """Return the batch sizes for which vLLM records CUDA graphs: its own up to 512 (`_set_cudagraph_sizes` of
    vllm/config/vllm.py), and every 64th above. vLLM 0.26 launches larger batches kernel by kernel."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), *range(576, running, 64), running]
    return sorted({size for size in sizes if size <= running})


def prepare(*, gpus: bool, threads: int, tensor_parallel: int) -> None:
    """Set the missing variables. Call before importing vLLM."""
    wanted = COMMON | (ON_GPU if gpus else ON_CPU) | (NO_MULTICAST if gpus and multicast_is_off() else {})
    if not gpus and tensor_parallel == 1:
        wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the CPU platform then keeps the model in the engine's process
    if threads > 0:
        wanted["OMP_NUM_THREADS"] = str(threads)
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    os.environ[OWNER] = str(os.getpid())


def end_with_owner() -> None:
    """End this process and the engine that started it as soon as their owner is gone, for whatever reason."""
    owner = int(os.environ[OWNER])
    creator = multiprocessing.parent_process()
    engine = os.getpid() if creator is None or creator.pid in (None, owner) else creator.pid

    def end() -> None:
        for process in {engine, os.getpid()}:
            os.kill(process, signal.SIGKILL)

    def watch(handle: int) -> None:
        select.select([handle], [], [])
        end()

    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:  # the owner ended while this process was starting
        end()
        return
    threading.Thread(target=watch, args=(handle,), name="end-with-owner", daemon=True).start()
