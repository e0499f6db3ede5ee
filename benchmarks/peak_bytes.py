"""Peak bytes of samples in the data plane, with partitions that end with their last readers and without.

    python -m benchmarks.peak_bytes [--tokens 4096] [--wide 0] [--out peak_bytes.json]

Two steps of 4 groups of 4 samples on one learner: random responses of `--tokens` tokens, a reward, previous and
reference logprobs, training. `--wide N` adds a field of N float32 per token that only the reward reads, such as images
or hidden states. `peak` is what the run reports; `whole groups` is the peak of the same run's puts if a group kept all
its fields until its last reader has finished, as with a single partition.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import report
from graphs.quickstart import TINY_QWEN3
from pipeline import Field, Graph, Model, Output, Schedule, Stage, StageContext, Task, WorkerGroup
from pipeline.declare.columns import Columns, Ragged
from pipeline.engine.driver import Driver
from pipeline.executors.local import LocalExecutor
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.rundir import RunDir
from stages import Advantage, ClippedLoss, PrevLogprobs, RefLogprobs, Train
from stages import vocabulary as fields

GROUPS, SAMPLES, PROMPT, STEPS = 4, 4, 32, 2
SAMPLED = (
    fields.RESPONSE, fields.PROMPT_IDS, fields.RESPONSE_IDS, fields.ROLLOUT_LOGPROBS, fields.TOKEN_VERSIONS,
)  # fmt: skip
COLUMNS = ("partition", "peak MB", "fields")


@dataclass(frozen=True)
class Sampled(Stage):
    """Writes random samples of a fixed length, as a rollout does."""

    tokens: int
    wide: int
    name: str = "rollout"
    batch: int = GROUPS
    group_size: int = SAMPLES

    @property
    def writes(self) -> tuple[Field, ...]:  # type: ignore[override]
        """A rollout's fields, and the wide one."""
        return SAMPLED + _wide(self.wide)

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Output]:
        """Return the runner."""

        def run(columns: Columns, task: Task) -> Output:
            generator = torch.Generator().manual_seed(task.groups[0])
            rows = [
                torch.randint(2, 12, (self.tokens,), generator=generator) for _ in range(SAMPLES * len(task.groups))
            ]
            made: dict[str, Any] = {
                "response": ["".join(str(token - 2) for token in row.tolist()) for row in rows],
                "prompt_ids": Ragged.of([row[:PROMPT] for row in rows]),
                "response_ids": Ragged.of(rows),
                "rollout_logprobs": Ragged.of([torch.full((self.tokens,), -2.4) for _ in rows]),
                "token_versions": Ragged.of([torch.full((self.tokens,), task.step, dtype=torch.int32) for _ in rows]),
            }
            if self.wide:
                made["features"] = Ragged.of([torch.zeros(self.tokens, self.wide) for _ in rows])
            return Output(made)

        return run


@dataclass(frozen=True)
class Judge(Stage):
    """Writes a random reward; the only reader of the texts and of the wide field."""

    wide: int
    name: str = "reward"
    writes: tuple[Field, ...] = (fields.REWARD,)

    @property
    def reads(self) -> tuple[Field, ...]:  # type: ignore[override]
        """The text, and the wide field."""
        return (fields.RESPONSE, *_wide(self.wide))

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Output]:
        """Return the runner."""
        return lambda columns, task: Output({"reward": torch.rand(len(columns["response"]))})


def _wide(size: int) -> tuple[Field, ...]:
    return (Field("features", "float32", f"N T {size}"),) if size else ()


def described(tokens: int, wide: int) -> Graph:
    """The graph: seven fields of tokens, and a text, with different last readers."""
    config = {**TINY_QWEN3, "max_position_embeddings": tokens + PROMPT}
    policy = Model("tiny-qwen3", config=config, alphabet="0123456789")
    learner = WorkerGroup("learner", backend="torch", threads=2)
    return Graph(
        name="long",
        source=Sampled(tokens, wide),
        stages=(
            Judge(wide),
            PrevLogprobs(policy, on=learner, microbatch=2),
            RefLogprobs(policy.frozen(), on=learner, microbatch=2),
            Advantage("group_relative"),
            Train(policy, on=learner, loss=ClippedLoss(kl=0.1), lr=1e-4, microbatch=1),
        ),
        schedule=Schedule(steps=STEPS, checkpoint_every=0),
    )


def whole_groups(run_dir: RunDir) -> float:
    """The peak bytes of a run's puts if each group kept all its fields until its last partition was cleared."""
    held: dict[int, float] = {}
    peak = 0.0
    for _, event in trace.read(run_dir.events):
        if isinstance(event, trace.Put):
            for group in event.groups:
                held[group] = held.get(group, 0.0) + event.size_bytes / len(event.groups)
            peak = max(peak, sum(held.values()))
        elif isinstance(event, trace.Cleared) and event.last:
            for group in event.groups:
                held.pop(group, None)
    return peak


def main() -> None:
    """Run the graph, print the table."""
    parser = argparse.ArgumentParser(description="Peak bytes of samples in the data plane")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per response")
    parser.add_argument("--wide", type=int, default=0, help="float32 numbers per token that only the reward reads")
    parser.add_argument("--out", type=Path, help="also write the rows as JSON")
    options = parser.parse_args()
    graph = described(options.tokens, options.wide)
    planned, problems = plan(graph)
    if planned is None:
        parser.error("; ".join(map(str, problems)))
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir(Path(folder) / "run").create()
        Driver(graph, planned, LocalExecutor(), run_dir=run_dir).execute()
        metrics = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
        before = whole_groups(run_dir)
    most = {name: max(line[name] for line in metrics) for name in metrics[0] if name.startswith("stored/peak")}
    rows = [
        {
            "partition": partition.name.partition(".")[2],
            "peak MB": most[f"stored/peak_bytes_{partition.name.partition('.')[2]}"] / 1e6,
            "fields": ", ".join(partition.fields),
        }
        for partition in planned.partitions
    ]
    after = most["stored/peak_bytes"]
    rows.append({"partition": "all", "peak MB": after / 1e6, "fields": ""})
    rows.append({"partition": "whole groups", "peak MB": before / 1e6, "fields": f"x{before / after:.2f}"})
    notes = (
        f"{STEPS} steps of {GROUPS} x {SAMPLES} samples of {options.tokens} tokens; a text counts a byte per character"
    )
    report("peak_bytes", rows, COLUMNS, notes, out=options.out)


if __name__ == "__main__":
    main()
