"""Time and memory foretold before a run, compared with kept results of GPUs. Needs no GPU.

python -m benchmarks.foretold [--out FILE]

The tables of the GPUs (pipeline/foretell/gpus) were fitted to other results (benchmarks/gpu/tables.py says to which);
figures that they were fitted to are marked. Seconds per step come from the real scheduler in virtual time, with the
flags of the kept command; "in use" is what the kept run saw on a GPU when a worker group had just got its memory,
"peak" what torch had allocated at most during an update.

Aim: seconds per step within 25 %, memory within 10 %.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu import step
from benchmarks.gpu.mixture import PROMPT
from benchmarks.gpu.recipe import KL
from benchmarks.gpu.shapes import MIXTURES, SHAPES, TRUNCATED
from benchmarks.gpu.tables import RESULTS, load, rows
from benchmarks.report import report
from graphs.grpo import RECOMPUTED
from pipeline import Graph, Model, WorkerGroup
from pipeline.declare.interpreter import elsewhere
from pipeline.declare.sharding import Packed
from pipeline.declare.task import Task
from pipeline.foretell.forecast import Forecast, forecast
from pipeline.foretell.gpu import table
from pipeline.foretell.loads import Assumed
from pipeline.foretell.memory import USABLE, GroupMemory
from pipeline.plan.planner import plan
from pipeline.simulation.recording import simulated
from pipeline.simulation.whatif import Changes
from stages import ClippedLoss, LoRA, Train

STEPS = {  # kept results of whole steps: the GPU, whether Transformer Engine was there
    "gpu.step.own.h200": ("h200", "fused"),
    "gpu.step.own.4B": ("h200", "fused"),
    "gpu.step.quarter": ("h200", "fused"),
    "gpu.step.apart": ("h200", "fused"),
    "gpu.step.apart.sync": ("h200", "fused"),
    "gpu.step.apart.4B": ("h200", "fused"),
    "gpu.step.recorded": ("h200", "fused"),
    "gpu.step.lora.8B": ("h200", "fused"),
    "gpu.step.colocated.h200": ("h200", "fused"),
    "gpu.step.colocated.4B": ("h200", "fused"),
    "gpu.step.colocated.h100": ("h100", "fused"),
    "gpu.step.colocated": ("h200", "plain"),
    "gpu.step.h200": ("h200", "plain"),
    "gpu.step.4B.sync": ("h200", "plain"),
    "gpu.step.4B": ("h200", "plain"),
    "gpu.step": ("h100", "plain"),
}
FAMILIES = (  # kept results of few layers of other families, whose time is not foretold
    "gpu.step.glm-4.5-air-2-layers", "gpu.step.glm-4.5-air-2-layers.replay", "gpu.step.deepseek-v3-2-layers",
    "gpu.step.deepseek-v3-2-layers.replay", "gpu.step.nemotron-3-nano-4-layers",
    "gpu.step.nemotron-3-nano-4-layers.replay", "gpu.step.nemotron-3-super-3-layers.replay",
)  # fmt: skip
# The recipe, and what it chose, as flags of benchmarks.gpu.step.
RECIPE, CHOSEN = "gpu.recipe", "--colocated --prev own --budget 36864 --memory 0.3"
UPDATES: dict[str, tuple[str, dict[str, int]]] = {  # kept results of updates: the model, and what no row says
    "gpu.update.h200": ("0.6B", {"samples": 128, "tokens": 1024, "tokens/row": 16384}),
    "gpu.update.rows.h200": ("0.6B", {"samples": 128, "tokens": 1024, "tokens/row": 32960}),
    "gpu.update.recompute.h200": ("0.6B", {"samples": 128, "tokens": 1024, "tokens/row": 32960}),
    "gpu.update.long.h200": ("0.6B", {}),  # each sample fills a row
    "gpu.mixture": ("30B-A3B-2-layers", {"samples": 32, "tokens": 1024}),
}
CACHED = "cached by the allocator"  # a part of a trainer's memory
# Runs in turns whose trainers slept with what their allocator had cached. They give it back now if others need it,
# which the last one did not.
SLEPT_CACHED = (
    "gpu.step.colocated.h200", "gpu.step.colocated.4B", "gpu.step.colocated.h100", "gpu.step.colocated",
    "gpu.step.quarter",
)  # fmt: skip
FITTED = {  # figures that a table, or the memory of a backend, was fitted to
    "gpu.step": ("rollout s",),
    "gpu.step.colocated.h200": ("sampler in use GiB", "learner in use GiB"),
    "gpu.step.colocated.4B": ("learner in use GiB",),
    "gpu.step.apart.sync": ("most in use GiB, learner",),
    "gpu.step.apart.4B": ("most in use GiB, learner",),
}
UNTIMED = ("gpu.step.lora.8B",)  # what the kernels of adapters add to a step was not fitted to anything
ENGINES = ("rollout", "prev_logprobs", "train")


def foretold(name: str, row: int) -> tuple[Forecast, dict[str, float]]:
    """A row of a kept result: its forecast, and the foretold seconds of a step and of its stages."""
    graph, (gpu, kernels) = described(name, row), STEPS.get(name, ("h200", "fused"))
    made = forecast_of(graph, gpu, kernels)
    _, seen = simulated(made.recording, Changes(steps=12))
    stages = [name for name in ENGINES if name in made.recording.durations.stages]
    return made, {"step": seen.steps.mean} | {name: _alone_s(made, name, graph) for name in stages}


def forecast_of(graph: Graph, gpu: str = "h200", kernels: str = "fused") -> Forecast:
    """What is foretold of a graph."""
    with elsewhere():
        planned, _ = plan(graph)
    return forecast(graph, planned, table(gpu), Assumed(prompt=PROMPT, kernels=kernels))


def described(name: str, row: int) -> Graph:
    """The graph of a row of a kept result."""
    if name == RECIPE:
        options = step.flags().parse_args(CHOSEN.split())
        options.kl = KL
    else:
        commands = json.loads((RESULTS / f"{name}.json").read_text())["command"].split(";")
        command = commands[min(row, len(commands) - 1)]  # one command can make several rows
        prev = "field" if rows(name)[row]["prev_logprobs s"] else "own"
        options = step.flags().parse_args(["--prev", prev, *shlex.split(command.partition("benchmarks.gpu.step")[2])])
    lora = LoRA(rank=options.lora) if options.lora else None
    config = (SHAPES | TRUNCATED)[options.model]
    policy = Model("model", config=config, alphabet="bytes", lora=lora, router_replay=options.replay)
    return step.described(options, rows(name)[row].get("max_staleness", 0), policy)


def _alone_s(made: Forecast, stage: str, graph: Graph) -> float:
    """Seconds of a batch in one stage, if nothing else runs."""
    times, task = made.recording.durations.stages[stage], Task(stage=stage, step=0, groups=tuple(range(graph.batch)))
    if stage == "rollout":
        return max(part.work_s for part in times.stream(task, group_size=graph.group_size, seed=0).parts)
    return times.work(task, samples=0, tokens=0, seed=0).work_s


def seconds() -> Iterator[dict[str, Any]]:
    """A row per figure of whole steps."""
    for name in [name for name in STEPS if name not in UNTIMED]:
        for number, kept in enumerate(rows(name)):
            _, found = foretold(name, number)
            label = f"{name}, k = {kept['max_staleness']}"
            for part, foretold_s in found.items():
                if part == "rollout" and kept["max_staleness"]:
                    continue  # it waits for the updates
                figure = f"{part} s"
                yield _row(label, figure, foretold_s, kept[figure], figure in FITTED.get(name, ()))


def memory() -> Iterator[dict[str, Any]]:
    """A row per figure of memory."""
    for name in (*STEPS, *FAMILIES, RECIPE):
        for number, kept in enumerate(rows(name)):
            in_turns = ("sampler", "learner") if "sampler awake GiB" in kept else ()
            most_gib = [kept[column] for column in kept if column.endswith("at most GiB")]  # of sampler and learner
            if not (in_turns or most_gib):
                continue
            found = forecast_of(described(name, number), *STEPS.get(name, ())).memory
            for group in in_turns:
                figure, seen = f"{group} in use GiB", kept[f"{group} awake GiB"]
                cached = _cached_bytes(found["learner"]) if name in SLEPT_CACHED else 0.0
                in_use = min(found[group].before_bytes + cached, USABLE * found[group].gpu_bytes) / 2**30
                yield _row(name, figure, in_use, seen, figure in FITTED.get(name, ()))
            peaks = [found[group].peak_bytes / 2**30 for group in ("sampler", "learner")]
            for group, gib, seen in zip(("sampler", "learner"), peaks if len(most_gib) > 1 else [max(peaks)], most_gib):
                figure = f"most in use GiB, {group}" if len(most_gib) > 1 else "most in use GiB"
                yield _row(name, figure, gib, seen, figure in FITTED.get(name, ()))
    for name, (model, same) in UPDATES.items():
        for kept in rows(name):
            yield _row(
                f"{name}, {_named(kept)}",
                "peak GiB",
                peak_gib(model, same | kept),
                kept["peak GiB"],
                "kernels" in kept or kept.get("experts") == "grouped" or kept.get("recomputed") == "none",
            )


def _cached_bytes(learner: GroupMemory) -> float:
    return sum(part.size_bytes for part in learner.passing["train"] if part.name == CACHED)


def _named(kept: dict[str, Any]) -> str:
    """What a row is about: its kernels, its experts, or what was recomputed, in rows of how many tokens."""
    if "recomputed" not in kept:
        return str(kept.get("kernels") or kept["experts"])
    return f"recomputed {kept['recomputed']}" + (f", rows of {kept['tokens/row']}" if "tokens/row" in kept else "")


def peak_gib(model: str, kept: dict[str, Any]) -> float:
    """What torch allocates at most in an update, foretold. Without `tokens`, each sample fills a row."""
    group = WorkerGroup("learner", backend="megatron", gpus=1)
    budget = kept["tokens/row"]
    policy = Model(model, config=(SHAPES | MIXTURES)[model])
    again = RECOMPUTED[kept.get("recomputed", "none")]
    cut: Any = {"on": group, "microbatch": Packed(budget), "checkpoint_activations": again}
    stage = Train(policy, loss=ClippedLoss(), lr=1e-6, **cut)
    tokens = kept.get("tokens", budget - PROMPT)
    asked = load(group, kept["samples"], tokens, kernels="plain" if kept.get("kernels") == "none" else "fused")
    parts = [part for part in stage.memory(asked) or () if part.name not in ("CUDA", CACHED) and part.when != "spare"]
    return sum(part.size_bytes for part in parts) / 2**30


def _row(result: str, figure: str, foretold: float, measured: float, is_fitted: bool) -> dict[str, Any]:
    return {
        "result": result,
        "figure": figure,
        "foretold": round(foretold, 2),
        "measured": measured,
        "error %": round(100 * (foretold / measured - 1), 1),
        "fitted": "yes" if is_fitted else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    found = [*seconds(), *memory()]
    unseen = [row for row in found if not row["fitted"]]
    worst: dict[str, float] = {}
    for row in unseen:
        kind = row["figure"] if row["figure"] == "step s" else row["figure"].rpartition(" ")[2]
        kind = "GiB of families" if row["result"] in FAMILIES else kind
        worst[kind] = max(worst.get(kind, 0.0), abs(row["error %"]))
    notes = (
        f"Largest error of what no table was fitted to: {worst['step s']} % of a step, {worst['s']} % of a stage's "
        f"seconds, {worst['GiB']} % of memory, {worst['GiB of families']} % of that of other families. Aim: steps "
        "within 25 %, memory within 10 %."
    )
    report("foretold", found, list(found[0]), notes, options.out)


if __name__ == "__main__":
    main()
