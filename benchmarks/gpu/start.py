"""Seconds from the start of a sampler's process to its first samples, cold and warm, on one GPU.

python -m benchmarks.gpu.start [--model 0.6B] [--memory 0.85] [--cpu] [--out FILE]

Two processes start one after the other, with the same model folder. The first one finds an empty cache of compiled
kernels (`VLLM_CACHE_ROOT`, in a temporary folder), the second one finds what the first one has left, as a user's second
run does. Rows: `imported`, the modules are loaded; `ready`, the engine has the weights, its cache and its CUDA graphs;
`first samples`, eight tokens of eight samples are there. What the processes print goes to stderr: with
VLLM_LOGGING_LEVEL=INFO that is how long the parts of vLLM's start took.

Aim: 60 s to the first samples of 0.6B when warm.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.shapes import SHAPES, model_of
from benchmarks.report import report

DEADLINE_S = 500.0
TOKENS, SAMPLES = 8, 8


def started(model: str, memory: float, cpu: bool, begun_s: float) -> dict[str, float]:
    """Start an engine and sample. Returns seconds since `begun_s`, on the wall clock."""
    from pipeline import Model, StageContext, WorkerGroup
    from stages.backends import Draws, Sampling, engine

    found = {"imported": time.time() - begun_s}
    group = WorkerGroup("sampler", backend="vllm", gpus=0 if cpu else 1, threads=1, memory=memory)
    context = StageContext(group=group, rank=0, seed=0, group_size=SAMPLES, run_dir=Path(model).parent, shared={})
    backend, policy = engine(context), Model(model)
    ids = backend.encode(policy, ["1+1="] * SAMPLES)
    backend.client(policy)
    found["ready"] = time.time() - begun_s
    made = backend.generate(policy, ids, Sampling(TOKENS), Draws(0, (0,) * SAMPLES, tuple(range(SAMPLES))))
    assert len(made.response_ids.lengths) == SAMPLES
    return found | {"first samples": time.time() - begun_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="0.6B")
    parser.add_argument("--memory", type=float, default=0.85, help="share of a GPU for weights and cache")
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU, to try the script")
    parser.add_argument("--out", help="write JSON here")
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)  # in a process of its own: when it was started
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        print(json.dumps(started(options.folder, options.memory, options.cpu, options.begun)), flush=True)
        return
    import torch  # noqa: F401 - so that the report names the GPU

    if options.cpu:
        options.model = "tiny"
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = model_of(options.model, Path(folder))
        environment = os.environ | {"VLLM_CACHE_ROOT": str(Path(folder) / "cache")}
        for state in ("cold", "warm"):
            command = [sys.executable, "-m", "benchmarks.gpu.start", f"--begun={time.time()}", f"--folder={model}"]
            command += [f"--memory={options.memory}", *(["--cpu"] if options.cpu else [])]
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=DEADLINE_S
            )
            print(done.stdout, file=sys.stderr, flush=True)
            seconds = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"imported')))
            rows.append({"start": state} | {f"{name} s": round(value, 1) for name, value in seconds.items()})
            notes = f"{options.model}, memory {options.memory:g}. Aim: 60 s to the first samples of 0.6B when warm."
            report("gpu.start", rows, list(rows[0]), notes, options.out)


if __name__ == "__main__":
    main()
