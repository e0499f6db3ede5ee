"""Fits the tables of GPUs, from which time is foretold before a run, to kept results. Needs no GPU.

python -m benchmarks.gpu.tables          writes pipeline/foretell/gpus/*.json

Fitted are micro-measurements of Qwen3-0.6B's shape: an update and a scoring pass (gpu.update*.json: its kernels, its
rows of 16,384 and 32,960 tokens, and without fused kernels), a rollout (gpu.rollout.json, measured on an H200), a refit
(gpu.refit_ready*.json). Of whole steps, three figures: how long an H100 samples (gpu.step.json), and how long memory
takes to change hands (gpu.step.colocated.*.json). `python -m benchmarks.foretold` compares the rest.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu.mixture import PROMPT
from benchmarks.gpu.shapes import SHAPES
from pipeline import Model, WorkerGroup
from pipeline.declare.sharding import Packed
from pipeline.declare.work import GpuWork, Load
from pipeline.foretell.gpu import FOLDER, Gpu
from pipeline.foretell.seconds import DEVICE
from stages import ClippedLoss, PrevLogprobs, Rollout, Train
from stages.forecast.shape import HALF, divided

RESULTS = Path(__file__).parents[1] / "results"
GIB = 2**30
BANDWIDTH = {"h100": 3.35e12, "h200": 4.8e12}  # bytes/s, NVIDIA's data sheets (SXM)
NAMES = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}
MEMORY_BYTES = {"h100": int(79.1 * GIB), "h200": int(139.8 * GIB)}  # torch.cuda.get_device_properties(0).total_memory
UPDATES = {"h100": ("gpu.update", "gpu.update.rows"), "h200": ("gpu.update.h200", "gpu.update.rows.h200")}
COLOCATED = {"h100": "gpu.step.colocated.h100", "h200": "gpu.step.colocated.h200"}
SAMPLES, TOKENS = 128, 1024  # of gpu.update


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a kept result."""
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def of_kernels(name: str, kernels: str = "all") -> dict[str, Any]:
    """The row of gpu.update with these kernels."""
    return next(row for row in rows(name) if row["kernels"] == kernels)


def load(group: WorkerGroup, samples: int, tokens: int, *, kernels: str = "fused") -> Load:
    """Samples of `PROMPT` and `tokens` tokens."""
    return Load(
        group=group, prompt=PROMPT, responses=[tokens] * samples, longest=tokens, group_size=8,
        gpu_bytes=10**12, room_bytes=10**12, kernels=kernels,
    )  # fmt: skip


def update(budget: int, *, training: bool) -> GpuWork:
    """The work of gpu.update in rows of `budget` tokens."""
    group = WorkerGroup("learner", backend="megatron", gpus=1)
    model, cut = Model("0.6B", config=SHAPES["0.6B"]), Packed(budget)
    asked = load(group, SAMPLES, TOKENS)
    if not training:
        scored = PrevLogprobs(model, on=group, microbatch=cut).work(asked)
        assert scored is not None
        return scored
    (trained,) = Train(model, on=group, loss=ClippedLoss(), lr=1e-6, microbatch=cut).work(asked) or ()
    return trained


def device_s(work: GpuWork, rates: dict[str, float]) -> float:
    """Seconds of the GPU's kernels."""
    return sum(getattr(work, name) / rates[name] for name in DEVICE)


def kernels(name: str) -> dict[str, float]:
    """Rates of the kernels of an update, from the H100's profile, for a GPU with another bandwidth."""
    seen, work, faster = of_kernels("gpu.update"), update(16384, training=True), BANDWIDTH[name] / BANDWIDTH["h100"]
    moved_ms = seen["norms ms"] + seen["copies ms"] + seen["other ms"]
    return {
        "products": work.products / seen["matrix products ms"] * 1e3,
        "attention": work.attention / seen["attention ms"] * 1e3,
        "moved_bytes": work.moved_bytes / moved_ms * 1e3 * faster,
        "vocabulary_bytes": work.vocabulary_bytes / seen["vocabulary ms"] * 1e3 * faster,
        "updated_bytes": work.updated_bytes / seen["optimizer ms"] * 1e3 * faster,
    }


def fused(name: str, *, training: bool) -> dict[str, float]:
    """Rates of updates or scoring: a pass has what its longer rows leave beyond the kernels; the host, what bounds the
    shorter rows."""
    found, column = kernels(name), "ms/update" if training else "score ms"
    shorter, longer = (of_kernels(file)[column] / 1e3 for file in UPDATES[name])
    work, short = update(32960, training=training), update(16384, training=training)
    optimizer_s = work.updated_bytes / found["updated_bytes"]
    found["passes"] = work.passes / (longer - optimizer_s - device_s(work, found))
    found["layers"] = short.layers / (shorter - optimizer_s - short.passes / found["passes"])
    return found if training else {key: value for key, value in found.items() if key != "updated_bytes"}


def plain(name: str, *, training: bool) -> dict[str, float]:
    """Rates without fused kernels: attention from the H100's profile, and what else the GPU takes from the H200's row
    "none". Training moves more, scoring reads the logits more often."""
    faster = BANDWIDTH[name] / BANDWIDTH["h200"]
    work, found = update(16384, training=training), fused("h200", training=training)
    trained = update(16384, training=True)
    found["attention"] = trained.attention / of_kernels("gpu.update", "without attention")["attention ms"] * 1e3
    none, everything = of_kernels("gpu.update", "without vocabulary"), of_kernels("gpu.update")
    more_ms = sum(none[f"{kind} ms"] - everything[f"{kind} ms"] for kind in ("copies", "other"))
    found["vocabulary_bytes"] = trained.vocabulary_bytes / more_ms * 1e3 * BANDWIDTH["h200"] / BANDWIDTH["h100"]
    of, column = ("moved_bytes", "ms/update") if training else ("vocabulary_bytes", "score ms")
    if not training:
        found["moved_bytes"] = plain("h200", training=True)["moved_bytes"]
    left_s = of_kernels("gpu.update.h200", "none")[column] / 1e3 - work.passes / found["passes"]
    left_s -= work.updated_bytes / found["updated_bytes"] if training else 0.0
    left_s -= sum(getattr(work, each) / found[each] for each in DEVICE if each != of)
    found[of] = getattr(work, of) / left_s
    for each in ("moved_bytes", "vocabulary_bytes", *(("updated_bytes",) if training else ())):
        found[each] *= faster
    return found | {each: fused(name, training=training)[each] for each in ("passes", "layers")}


def sampling(name: str) -> dict[str, float]:
    """Rates of decoding. The share of the bandwidth with which the cache is read, and the host's seconds per token, are
    those of two measurements: on an H200 and, with the same host's work, on an H100."""
    group = WorkerGroup("sampler", backend="vllm", gpus=1)
    samples, tokens = 512, 1024
    work = Rollout(Model("0.6B", config=SHAPES["0.6B"]), on=group).work(load(group, samples, tokens))
    assert work is not None
    products = kernels(name)["products"]
    taken_s = {
        "h200": next(row["s"] for row in rows("gpu.rollout") if row["contender"] == "vllm backend"),
        "h100": rows("gpu.step")[0]["rollout s"],
    }
    read = samples * sum(PROMPT + step for step in range(1, tokens + 1)) * work.cache_bytes
    between_s = taken_s["h100"] - taken_s["h200"]
    share = read * (1 / BANDWIDTH["h100"] - 1 / BANDWIDTH["h200"]) / between_s
    host_s = taken_s["h200"] - samples * tokens * work.products / products - read / (share * BANDWIDTH["h200"])
    return {
        "products": products,
        "weights_bytes": BANDWIDTH[name],
        "cache_bytes": share * BANDWIDTH[name],
        "tokens": samples * tokens / host_s,
    }


def refit(file: str) -> dict[str, float]:
    """Rates of a refit of 4B: weights are published, moved and read for a checksum; the rest is the same."""
    ms = {row["part"]: row["median_ms"] for row in rows(file) if row["arm"] == "sluice"}
    moved_ms = ms["publish"] + ms["move"] + ms["check"]
    size = HALF * divided(Model("4B", config=SHAPES["4B"]), WorkerGroup("sampler", gpus=1)).weights
    return {"moved_bytes": size / moved_ms * 1e3, "passes": 1e3 / (ms["ready"] - moved_ms)}


def turns(name: str) -> dict[str, float]:
    """Rates with which a sampler's memory is mapped and freed, and its weights copied. The copies are what 4B takes
    longer to wake than 0.6B does, on an H200."""
    small, large = rows(COLOCATED["h200"])[0], rows("gpu.step.colocated.4B")[0]
    group = WorkerGroup("sampler", gpus=1)
    copied = [HALF * divided(Model(size, config=SHAPES[size]), group).weights for size in ("0.6B", "4B")]
    given = [(row["sampler awake GiB"] - row["sampler asleep GiB"]) * GIB for row in (small, large)]
    ratio = given[1] / given[0]
    copied_s = (large["sampler wakes s"] - ratio * small["sampler wakes s"]) / (copied[1] - ratio * copied[0])
    mine = rows(COLOCATED[name])[0]
    size = (mine["sampler awake GiB"] - mine["sampler asleep GiB"]) * GIB
    return {
        "copied_bytes": 1 / copied_s,
        "woken_bytes": size / (mine["sampler wakes s"] - copied[0] * copied_s),
        "slept_bytes": size / (mine["sampler sleeps s"] - copied[0] * copied_s),
    }


def table(name: str) -> Gpu:
    """The table of a GPU."""
    rates = {f"megatron.{kind}": fused(name, training=kind == "training") for kind in ("training", "scoring")}
    rates |= {f"megatron.plain.{kind}": plain(name, training=kind == "training") for kind in ("training", "scoring")}
    for each in ("megatron.scoring", "megatron.plain.scoring"):
        rates[each]["copied_bytes"] = turns(name)["copied_bytes"]
    rates |= {
        "vllm.sampling": sampling(name),
        "refit.shared": refit("gpu.refit_ready"),
        "refit.apart": refit("gpu.refit_ready.apart"),
        "turns": turns(name),
    }
    fused_from = f"{' and '.join(f'{file}.json' for file in UPDATES[name])}; kernels: gpu.update.json, by bandwidth"
    plain_from = "gpu.update.h200.json, row none; attention and logits: gpu.update.json; by bandwidth"
    sources = {
        "megatron.training": fused_from,
        "megatron.scoring": fused_from,
        "megatron.plain.training": plain_from,
        "megatron.plain.scoring": plain_from,
        "vllm.sampling": "gpu.rollout.json (H200) and rollout of gpu.step.json (H100); products as in training",
        "refit.shared": "gpu.refit_ready.json (H200)",
        "refit.apart": "gpu.refit_ready.apart.json (H200)",
        "turns": f"{COLOCATED[name]}.json; copies: gpu.step.colocated.4B.json",
    }
    short = {kind: {key: float(f"{value:.4g}") for key, value in found.items()} for kind, found in rates.items()}
    return Gpu(gpu=NAMES[name], memory_bytes=MEMORY_BYTES[name], rates=short, sources=sources)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name in NAMES:
        path = FOLDER / f"{name}.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(table(name)), indent=1) + b"\n")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
