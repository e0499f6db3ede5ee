"""A whole GRPO step on GPUs: vLLM samples, Megatron-core trains; random weights of a real model's shape.

python -m benchmarks.gpu.step [--model 0.6B] [--sampler 1] [--learner 1] [--staleness 0 2] [--colocated] [--peer]
                              [--transport auto] [--steps 4] [--record FOLDER] [--out FILE]

Responses have the maximum length, since a random model hardly ever ends one. The table has means over the steps after
the first: seconds per step and per stage, tokens/s per GPU in rollout (response tokens) and in training (prompt and
response tokens, previous-policy logprobs included), model FLOP utilization of training (no padding, no recomputation;
dense bfloat16 peak), the share of time in which neither engine works, and the mismatch of rollout and trainer logprobs.
`--colocated` runs sampler and learner on the same GPUs, in turns, and adds the seconds per step in which memory changes
hands, and the memory in use on a GPU in each turn. These and that share leave out the last step, which ends before its
refit. The last columns have the most memory that was in use on each GPU. `--record` keeps plan.json and events.jsonl of
each run, for benchmarks/gpu/replay.py. `--peer` then runs TRL's GRPOTrainer with vLLM on the same work and one GPU
(benchmarks/gpu/trl_step.py). `--cpu` tries the script with a tiny model.

Aim: neither engine works in under 2 % of a synchronous step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu.fullest import fullest
from benchmarks.gpu.shapes import MIXTURES, SHAPES, TRUNCATED, add_work, model_of
from benchmarks.report import report
from ops.refit.transports import TRANSPORTS
from pipeline import Graph, Model, Schedule, WorkerGroup
from pipeline.declare.group import CACHES, WEIGHTS
from pipeline.declare.sharding import Packed
from pipeline.engine.driver import Driver
from pipeline.errors import SluiceError
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.record.history import covered_s
from pipeline.rundir import RunDir
from stages import (
    Advantage,
    ClippedLoss,
    LoRA,
    PrevLogprobs,
    Prompts,
    Refit,
    RefLogprobs,
    Reward,
    Rollout,
    Train,
    TruncatedIS,
)
from stages.tasks import Generated
from stages.train import PREVS

LOG_LINES = 400  # of each worker, if a run fails
ENGINES = ("rollout", "prev_logprobs", "ref_logprobs", "train")


def even(response: str) -> float:
    """A reward that a random model receives half of the time."""
    return float(len(response) % 2 == 0)


def described(options: argparse.Namespace, staleness: int, policy: Model) -> Graph:
    """GRPO, with a reference model if `options.kl` is above 0."""
    gpus = 0 if options.cpu else 1
    sampler = WorkerGroup(
        "sampler", backend="vllm", workers=options.sampler, gpus=options.sampler * gpus,
        tensor_parallel=options.sampler_tensor, threads=1,
        memory=options.memory, cache=options.cache, weights=options.weights,
    )  # fmt: skip
    learner = WorkerGroup(
        "learner", backend="megatron", workers=options.learner, gpus=options.learner * gpus,
        tensor_parallel=options.learner_tensor, pipeline_parallel=options.learner_pipeline, threads=1,
        colocated=sampler if options.colocated else None,
    )  # fmt: skip
    cut = Packed(options.budget)
    return Graph(
        name="step",
        source=Prompts(Generated("reverse"), batch=options.groups),
        stages=(
            Rollout(policy, on=sampler, samples_per_prompt=options.samples, max_tokens=options.tokens),
            Reward(even),
            *([PrevLogprobs(policy, on=learner, microbatch=cut)] if options.prev == "field" else []),
            *([RefLogprobs(policy.frozen(), on=learner, microbatch=cut)] if options.kl else []),
            Advantage("group_relative"),
            Train(
                policy, on=learner, loss=ClippedLoss(correction=TruncatedIS(cap=2.0), kl=options.kl), lr=1e-6,
                minibatches=2, microbatch=cut, prev=options.prev,
            ),
            Refit(policy, source=learner, target=sampler, transport=options.transport),
        ),
        schedule=Schedule(
            steps=options.steps + 1, max_staleness=staleness, refit="in_flight" if staleness else "drain", keep_groups=0
        ),
    )  # fmt: skip


def measured(run_dir: RunDir, options: argparse.Namespace, begun_s: float) -> dict[str, Any]:
    """Means over the steps after the first, from the record of a run that began then: its workers are set up after
    "setup s", and the sampler has its weights after "start s". In turns its engine starts in between."""
    lines = [line for line in map(json.loads, run_dir.metrics.read_text().splitlines()) if line["step"] > 1]
    events = [event for _, event in trace.read(run_dir.events)]
    published = [event.at_s for event in events if isinstance(event, trace.Published)]
    set_up_s = next(event.at_s for event in events if isinstance(event, trace.Submitted))
    spans = [(e.start_s, e.end_s) for e in events if isinstance(e, trace.Ran) and e.stage in ENGINES]
    lo, hi = published[1], published[-1]
    busy_s = covered_s((max(lo, a), min(hi, b)) for a, b in spans if b > lo and a < hi)
    turns = [event for event in events if isinstance(event, trace.Turned) and lo <= event.start_s < hi]

    def mean(name: str) -> float:
        return statistics.fmean(line.get(name, 0.0) for line in lines)

    response = options.groups * options.samples * mean("rollout/length_mean")
    step_s = statistics.fmean(line["time/step_s"] for line in lines)
    seconds = {stage: mean(f"time/{stage}_s") for stage in (*ENGINES, "refit", "reward", "advantage")}
    trained_s = seconds["train"] + seconds["prev_logprobs"] + seconds["ref_logprobs"]
    learner_gpus = 0 if options.colocated else options.learner
    return {
        "setup s": round(set_up_s - begun_s, 1),
        "start s": round(published[0] - begun_s, 1),
        "step s": round(step_s, 2),
        **{f"{stage} s": round(took_s, 2) for stage, took_s in seconds.items()},
        **(turned(turns, len(published) - 2) if options.colocated else {}),
        "tokens/s/GPU": round(response / step_s / (options.sampler + learner_gpus)),
        "rollout tokens/s/GPU": round(response / seconds["rollout"] / options.sampler),
        "training tokens/s/GPU": round((response + options.groups * options.samples * 6) / trained_s / options.learner),
        "TFLOP/s/GPU": round(mean("train/tflops_per_s"), 1),
        "MFU %": round(100 * mean("train/utilization"), 1),
        "outside the engines %": round(100 * (1 - busy_s / (hi - lo)), 1),
        "refit ms": round(1e3 * seconds["refit"], 1),
        "quant error": round(mean("refit/quant_error"), 4),
        "mismatch KL": mean("train/mismatch_kl"),
        "mismatch ratio": round(mean("train/mismatch_ratio_max"), 3),
        **({"other experts %": round(100 * mean("train/router_disagreement"), 1)} if options.replay else {}),
        "age": round(mean("train/staleness_mean"), 2),
    }


def turned(turns: list[trace.Turned], steps: int) -> dict[str, Any]:
    """Seconds per step in which memory changes hands, and GiB in use on a GPU by all processes in each turn."""
    made: dict[str, Any] = {"turns s": round(covered_s((turn.start_s, turn.end_s) for turn in turns) / steps, 2)}
    for awake, state, changes in ((True, "awake", "wakes"), (False, "asleep", "sleeps")):
        for group in ("sampler", "learner"):
            of = [turn for turn in turns if (turn.group, turn.awake) == (group, awake)]
            made[f"{group} {changes} s"] = round(sum(turn.end_s - turn.start_s for turn in of) / steps, 2)
            made[f"{group} {state} GiB"] = round(max((turn.memory_bytes for turn in of), default=0) / 2**30, 1)
    return made


def flags() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser, SHAPES | MIXTURES | TRUNCATED)
    parser.add_argument("--sampler", type=int, default=1, help="number of sampling GPUs")
    parser.add_argument("--sampler-tensor", type=int, default=1, help="number of sampling GPUs that share one model")
    parser.add_argument("--learner", type=int, default=1, help="number of training GPUs")
    parser.add_argument("--learner-tensor", type=int, default=1)
    parser.add_argument("--learner-pipeline", type=int, default=1)
    parser.add_argument("--memory", type=float, default=0.85, help="share of a GPU for the sampler's weights and cache")
    parser.add_argument("--cache", choices=CACHES, default="auto", help="number format of the sampler's cache")
    parser.add_argument("--weights", choices=WEIGHTS, default="auto", help="number format of the sampler's matrices")
    parser.add_argument("--colocated", action="store_true", help="sampler and learner share GPUs; synchronous only")
    parser.add_argument("--transport", choices=("auto", *TRANSPORTS), default="auto", help="transport of the refit")
    parser.add_argument("--peer", action="store_true", help="also run TRL with vLLM on one GPU, on the same work")
    parser.add_argument("--budget", type=int, default=16384, help="tokens per packed row")
    parser.add_argument("--prev", choices=PREVS, default="own", help="old logprobs: of a stage, or of the updates")
    parser.add_argument("--replay", action="store_true", help="train a mixture with the experts of the rollout")
    parser.add_argument("--lora", type=int, default=0, help="rank of the adapter that is trained; 0: the whole model")
    parser.add_argument("--kl", type=float, default=0.0, help="above 0: score with the frozen model too")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU, to try the script")
    parser.add_argument("--record", type=Path, help="keep the record of each run here, in a folder per staleness")
    parser.add_argument("--out", help="write JSON here")
    return parser


def main() -> None:
    parser = flags()
    options = parser.parse_args()
    if options.steps < 3:
        parser.error(
            f"--steps {options.steps}: the first is a warm-up and the last ends before its refit; use at least 3"
        )
    if options.cpu:
        options.model, options.groups, options.samples, options.tokens, options.budget = "tiny", 4, 4, 32, 512
    rows: list[dict[str, Any]] = []
    if options.colocated:
        options.staleness = [0]
    with tempfile.TemporaryDirectory() as folder:
        lora = LoRA(rank=options.lora) if options.lora else None
        policy = Model(model_of(options.model, Path(folder)), router_replay=options.replay, lora=lora)
        for staleness in options.staleness:
            rows.append({})
            kept = (options.record or Path(folder)) / str(staleness)
            run(described(options, staleness, policy), kept, options, rows, _write)
        if options.peer:
            rows.append(peer(options, Path(folder)))
            _write(rows, options)


def run(
    graph: Graph,
    folder: Path,
    options: argparse.Namespace,
    rows: list[dict[str, Any]],
    write: Callable[[list[dict[str, Any]], argparse.Namespace], None],
) -> None:
    """Run a graph once, into the last of the rows, which are written after each step. The run has an extra step, during
    which it is stopped, since the final checkpoint of a large model takes minutes."""
    from pipeline.executors.ray import RayExecutor

    planned = plan(graph)[0]
    run_dir, begun_s = RunDir(folder).create(), time.monotonic()
    run_dir.plan.write_bytes(msgspec.json.encode(planned))

    def note(step: int, metrics: dict[str, float]) -> None:
        print(f"step {step + 1}: {metrics.get('time/step_s', 0.0):.2f} s", flush=True)
        published = [event.at_s for _, event in trace.read(run_dir.events) if isinstance(event, trace.Published)]
        if step > 0 and len(published) > 2:
            row = {"model": options.model, "max_staleness": graph.schedule.max_staleness}
            gib = {f"GPU {index} at most GiB": round(most / 2**30, 1) for index, most in enumerate(most_bytes.values())}
            rows[-1] = row | measured(run_dir, options, begun_s) | gib
            write(rows, options)
        if step + 1 == options.steps:
            raise EnoughError

    try:
        with fullest() as most_bytes:
            Driver(graph, planned, RayExecutor(), run_dir=run_dir, on_step=note).execute()
    except EnoughError:
        return
    except SluiceError:  # the folder goes with this process
        for log in sorted((folder / "logs").glob("*.log")):
            lines = [line for line in log.read_text(errors="replace").splitlines() if not line.endswith("it/s]")]
            print(f"-- {log.name}", *lines[-LOG_LINES:], sep="\n", file=sys.stderr)
        raise


class EnoughError(Exception):
    """All measured steps are done."""


def peer(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the same work with TRL, in a separate process on one GPU."""
    out = folder / "peer.json"
    work = [f"--{name}={getattr(options, name)}" for name in ("model", "groups", "samples", "tokens", "steps")]
    command = [sys.executable, "-m", "benchmarks.gpu.trl_step", *work, "--out", str(out)]
    done = subprocess.run(command, stdout=sys.stderr, check=False, timeout=540)
    if done.returncode or not out.exists():
        return {"model": options.model, "max_staleness": f"TRL: exit code {done.returncode}"}
    return json.loads(out.read_text())["rows"][0]


def _write(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    where = "on the same GPUs, in turns" if options.colocated else "on others"
    notes = (
        f"{options.sampler} GPUs sample (tensor parallel {options.sampler_tensor}), {options.learner} train {where} "
        f"(tensor {options.learner_tensor}, pipeline {options.learner_pipeline}); {options.groups} x {options.samples} "
        f"samples of {options.tokens} tokens, rows of {options.budget}, {options.steps} steps, old logprobs of "
        f"{'the updates' if options.prev == 'own' else 'a stage'}; the sampler may take "
        f"{options.memory:g} of a GPU, its cache is {options.cache}, its weights are {options.weights}. "
        f"Aim: under 2 % of a synchronous step outside the engines."
    )
    report("gpu.step", rows, list(rows[0]), notes, options.out)


if __name__ == "__main__":
    main()
