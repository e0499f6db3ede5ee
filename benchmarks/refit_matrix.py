"""Refit between real engines: each training layout into each serving layout, over each transport.

python -m benchmarks.refit_matrix [--mappings "TP2 -> TP2" "PP2 -> TP2"] [--transport golden auto] [--no-copy gloo]
                                  [--quick] [--gpus] [--colocated] [--out FILE]

For each mapping and transport it runs a few GRPO steps on Ray: Megatron-core trains with the layout on the left, vLLM
samples with the one on the right, and Refit moves every version. Layouts consist of TP, PP, EP and DP with their sizes:
"TP2 PP2 -> TP2 DP2" has 4 training ranks, and 2 engines of 2 ranks each. A mapping with EP trains a small mixture of
experts; the others train `--model`. By default there are two ranks on each side, on CPUs. With --colocated both sides
take turns on the same GPUs. `--no-copy` names transports that also run with keep_copy=False, sending the parameters.

The table has medians over the versions after the second, when nothing is allocated anymore: `ready` from trained
weights to the first sampler that has acknowledged them, `move` on the wire, MB per engine that the transport wrote
directly (`bulk`) and that vLLM's own loader wrote; and the largest value of any step: mismatch KL, NeMo-RL's
token_mult_prob_error (the mean over tokens of exp(|trainer logprob - sampler logprob|)), and lookups. `as golden` says
whether every version's bytes have the same hash as in the run with the transport `golden`. `kept` and `peak` are the MB
that a training rank and a sampling rank hold for refits between versions, and the most during one.

Aims: no lookups, every version as in the run with `golden`, and a mismatch below 1e-5 in float32.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.gpu.shapes import SHAPES, model_of
from benchmarks.report import report
from graphs.quickstart import TINY_QWEN3
from ops.refit.transports import TRANSPORTS, Transport
from pipeline import Graph, Model, Schedule, WorkerGroup
from pipeline.engine.driver import Driver
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.rundir import RunDir
from stages import Advantage, Generated, PrevLogprobs, Prompts, Refit, Reward, Rollout, Train

MAPPINGS = ("TP2 -> TP2", "PP2 -> TP2", "TP2 -> DP2")
QUICK = MAPPINGS[:1]
WARM = 2  # versions that allocate: on CPUs the trainer alternates between two copies
MIXTURE = TINY_QWEN3 | {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}  # fmt: skip
GPU_MIXTURE = "30B-A3B-2-layers"
TASK = Generated("reverse", digits=4)
COLUMNS = (
    "mapping", "transport", "ready ms", "move ms", "bulk MB", "loader MB", "kept MB", "peak MB", "mismatch KL",
    "prob error", "lookups", "as golden",
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """How one side divides the model, and how many copies of it there are."""

    TP: int = 1
    PP: int = 1
    EP: int = 1
    DP: int = 1

    @staticmethod
    def of(text: str, allowed: Sequence[str]) -> Layout:
        """Read "TP2 PP2". Raises ValueError, naming what is wrong, if a part is not one of `allowed` with its size."""
        sizes: dict[str, int] = {}
        for part in text.split():
            found = re.fullmatch(r"([A-Z]+)([1-9]\d*)", part)
            if not found or found[1] not in allowed or found[1] in sizes:
                raise ValueError(f"{part!r} in {text.strip()!r} is not one of {', '.join(allowed)} with its size, once")
            sizes[found[1]] = int(found[2])
        if not sizes:
            raise ValueError(f"no layout in {text!r}; write {allowed[0]}1 for a single rank")
        return Layout(**sizes)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return prod(getattr(self, each.name) for each in fields(self))


@dataclass(frozen=True)
class Mapping:
    """A training layout and a serving layout."""

    trainer: Layout
    sampler: Layout

    @staticmethod
    def of(text: str) -> Mapping:
        """Read "TP2 PP2 -> TP2". Raises ValueError if it is not of this form."""
        left, arrow, right = text.partition("->")
        if not arrow:
            raise ValueError(f'{text!r} is not of the form "TP2 -> TP2"')
        return Mapping(Layout.of(left, ("TP", "PP", "EP", "DP")), Layout.of(right, ("TP", "DP")))


def even(response: str) -> float:
    """A reward that a random model receives half of the time."""
    return float(len(response) % 2 == 0)


def described(mapping: Mapping, transport: str | Transport, policy: Model, options: argparse.Namespace) -> Graph:
    """GRPO with both engines, synchronous."""
    from_, to, gpus = mapping.trainer, mapping.sampler, options.gpus
    sampler = WorkerGroup(
        "sampler", backend="vllm", workers=to.ranks, gpus=to.ranks * gpus, tensor_parallel=to.TP, threads=1
    )
    learner = WorkerGroup(
        "learner", backend="megatron", workers=from_.ranks, gpus=from_.ranks * gpus, tensor_parallel=from_.TP,
        pipeline_parallel=from_.PP, expert_parallel=from_.EP, threads=1,
        colocated=sampler if options.colocated else None,
    )  # fmt: skip
    return Graph(
        name="refit_matrix",
        source=Prompts(TASK, batch=8),
        stages=(
            Rollout(policy, on=sampler, samples_per_prompt=4, max_tokens=options.tokens),
            Reward(even),
            PrevLogprobs(policy, on=learner),
            Advantage("group_relative"),
            Train(policy, on=learner, lr=1e-3),
            Refit(policy, source=learner, target=sampler, transport=transport),
        ),
        schedule=Schedule(steps=options.steps, keep_groups=0, checkpoint_every=0),
    )


def policy_of(mapping: Mapping, options: argparse.Namespace, folder: Path) -> Model:
    """The model: a mixture of experts for EP; small on CPUs, else random weights of a true shape."""
    mixture = mapping.trainer.EP > 1
    if options.model == "quickstart" or (mixture and not options.gpus):
        return Model("tiny", config=MIXTURE if mixture else TINY_QWEN3, alphabet=TASK.alphabet)
    return Model(model_of(GPU_MIXTURE if mixture else options.model, folder))


def run(graph: Graph, folder: Path) -> RunDir:
    """Run the graph on Ray. Raises ValueError with everything that the check finds."""
    from pipeline.executors.ray import RayExecutor

    made, problems = plan(graph)
    if made is None:
        raise ValueError("; ".join(str(problem) for problem in problems if not problem.warning))
    run_dir = RunDir(folder).create()
    Driver(graph, made, RayExecutor(), run_dir=run_dir).execute()
    return run_dir


def measured(run_dir: RunDir) -> dict[str, Any]:
    """One row of the table, from the record of a run."""
    lines = [line for line in map(json.loads, run_dir.metrics.read_text().splitlines()) if line["step"] > 0]
    warm = [line for line in lines if line["step"] >= WARM]

    def refit(name: str, found: Iterable[dict[str, Any]] = warm) -> list[float]:
        return [line.get(f"refit/{name}", 0.0) for line in found]

    received, loaded = statistics.median(refit("received_bytes")), statistics.median(refit("loader_bytes"))
    parts = sorted({name for line in warm for name in line if name.startswith("refit/") and name.endswith("_ms")})
    return {
        "ready ms": round(statistics.median(ready_ms(run_dir)[WARM - 1 :]), 1),
        "move ms": round(statistics.median(refit("move_ms")), 2),
        "bulk MB": round((received - loaded) / 1e6, 3),
        "loader MB": round(loaded / 1e6, 3),
        **{f"{what} MB": sides(what, warm) for what in ("kept", "peak")},
        "mismatch KL": max(line["train/mismatch_kl"] for line in lines),
        "prob error": max(line["train/token_mult_prob_error"] for line in lines),
        "lookups": max(refit("lookups")),
        "path": next(name[len("refit/path_") :] for name in lines[0] if name.startswith("refit/path_")),
        "parts ms": {n[6:-3]: round(statistics.median(line.get(n, 0.0) for line in warm), 2) for n in parts},
        "published": published(run_dir),
    }


def sides(what: str, lines: Sequence[dict[str, Any]]) -> str:
    """The MB that a training rank and a sampling rank hold: the largest of any version."""
    found = [max(line[f"refit/{what}_bytes_{side}"] for line in lines) for side in ("source", "target")]
    return " + ".join(f"{size_bytes / 1e6:.3g}" for size_bytes in found)


def ready_ms(run_dir: RunDir) -> list[float]:
    """For each step: milliseconds from the end of its training to the first sampler that holds the new weights."""
    spans = [event for _, event in trace.read(run_dir.events) if isinstance(event, trace.Ran)]
    trained: dict[int, float] = {}
    served: dict[int, float] = {}
    for span in spans:
        if span.stage == "train":
            trained[span.step] = max(span.end_s, trained.get(span.step, 0.0))
        elif span.stage == "refit" and span.group == "sampler":
            served[span.step] = min(span.end_s, served.get(span.step, span.end_s))
    return [1e3 * (served[step] - trained[step]) for step in sorted(trained)]


def published(run_dir: RunDir) -> list[str]:
    """The hash of each version, as acknowledged by the samplers."""
    events = [event for _, event in trace.read(run_dir.events)]
    return [event.sha256 for event in events if isinstance(event, trace.Published)]


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with a verdict: whether all versions have the hashes of the mapping's run with `golden`, if any."""
    golden = {row["mapping"]: row["published"] for row in rows if row["path"] == "golden"}
    verdicts = {True: "yes", False: "NO", None: "no run with golden"}

    def same(row: dict[str, Any]) -> bool | None:
        return row["published"] == golden[row["mapping"]] if row["mapping"] in golden else None

    return [row | {"as golden": verdicts[same(row)]} for row in rows]


def rows_of(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run every mapping with every transport; prints the table after each run."""
    rows: list[dict[str, Any]] = []
    for name in options.mappings:
        mapping = Mapping.of(name)
        policy = policy_of(mapping, options, folder)
        for transport in transports(options):
            found = measured(run(described(mapping, transport, policy, options), folder / f"run {len(rows)}"))
            copies = "" if isinstance(transport, str) else ", no copy"
            rows.append({"mapping": name, **found, "transport": found["path"] + copies})
            write(rows, options)
    return rows


def transports(options: argparse.Namespace) -> list[str | Transport]:
    """The transports in the order of the table."""
    without: list[Transport] = [replace(TRANSPORTS[name], keep_copy=False) for name in options.no_copy]  # type: ignore[type-var]
    return [*options.transport, *without]


def write(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the table and write the JSON."""
    where = ("GPUs" if options.gpus else "CPUs") + (", in turns" if options.colocated else "")
    mixture = f" ({GPU_MIXTURE if options.gpus else 'a small mixture'} with EP)"
    model = options.model + (mixture if any("EP" in name for name in options.mappings) else "")
    notes = (
        f"{model} on {where}, {options.steps} steps of 32 samples of at most {options.tokens} tokens; medians "
        f"of versions {WARM} to {options.steps}. Aims: no lookups, all as golden, mismatch KL below 1e-5 in float32."
    )
    report("refit_matrix", compared(rows), COLUMNS, notes, options.out)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; ends the process with a message if a mapping, a transport or a number is invalid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mappings", nargs="+", metavar="MAPPING", help=f"default: {', '.join(MAPPINGS)}")
    parser.add_argument("--transport", nargs="+", choices=("auto", *TRANSPORTS), default=["golden", "auto"])
    parser.add_argument(
        "--no-copy", nargs="+", default=[], choices=[name for name, each in TRANSPORTS.items() if each.both_carry],
        help="run these with keep_copy=False as well",
    )  # fmt: skip
    parser.add_argument("--model", choices=("quickstart", *SHAPES), help="default: quickstart, 0.6B with --gpus")
    parser.add_argument("--tokens", type=int, default=5, help="maximum length of a response")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK[0]}, 3 steps")
    parser.add_argument("--gpus", action="store_true", help="one GPU per rank")
    parser.add_argument("--colocated", action="store_true", help="both sides share their GPUs and take turns")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args(arguments)
    options.mappings = options.mappings or list(QUICK if options.quick else MAPPINGS)
    options.model = options.model or ("0.6B" if options.gpus else "quickstart")
    options.steps = 3 if options.quick else options.steps
    if options.steps < WARM + 1:
        parser.error(f"--steps {options.steps}: the first {WARM} versions are warm-up; use at least {WARM + 1}")
    for name in options.mappings:
        try:
            Mapping.of(name)
        except ValueError as error:
            parser.error(f"--mappings: {error}")
    return options


def main() -> None:
    options = parsed()
    with tempfile.TemporaryDirectory() as folder:
        rows_of(options, Path(folder))


if __name__ == "__main__":
    main()
