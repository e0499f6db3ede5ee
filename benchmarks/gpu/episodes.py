"""The cost of turns: episodes against a rollout of as many drawn tokens, with vLLM on one GPU.

python -m benchmarks.gpu.episodes [--model 0.6B] [--groups 64] [--samples 8] [--tokens 1024] [--turns 8] [--inserted 64]
python -m benchmarks.gpu.episodes --gpus 0 --model tiny --groups 4 --samples 4 --tokens 64 --inserted 4

Contenders, each in a process of its own, of which the second of two rounds counts: Rollout; Episode with one turn;
Episode with `turns`, whose environment answers at once with `inserted` tokens, so that each turn is a request of its
own that sees all earlier ones. `part` is the fraction of the episodes' time that they were sampled, from their record.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.gpu.rollout import prompts
from benchmarks.gpu.shapes import add_work, model_of
from benchmarks.report import report
from pipeline import Model, Output, StageContext, Task, WorkerGroup
from pipeline.declare.times import GENERATE
from stages import End, Environment, Episode, Messages, Reply, Rollout

CONTENDERS = ("rollout", "episodes of one turn", "episodes")


@dataclass(frozen=True)
class AtOnce(Environment):
    """Answers at once with so many characters, one token each; ends after `turns` replies."""

    turns: int
    inserted: int

    def open(self, row: Mapping[str, Any], draw: Random) -> tuple[Any, str]:
        return [self.turns], row["prompt"]

    async def turn(self, state: Any, reply: Reply) -> Messages | End:
        state[0] -= 1
        return Messages("1" * self.inserted) if state[0] else End()


def stage_of(contender: str, model: Model, group: WorkerGroup, options: argparse.Namespace) -> Rollout | Episode:
    """The stage of a contender."""
    if contender == "rollout":
        return Rollout(model, on=group, samples_per_prompt=options.samples, max_tokens=options.tokens)
    turns = options.turns if contender == "episodes" else 1
    return Episode(
        model,
        AtOnce(turns, options.inserted),
        on=group,
        samples_per_prompt=options.samples,
        turns=turns,
        tokens=options.tokens + (turns - 1) * options.inserted,
        turn_tokens=options.tokens // turns,
    )


def run(contender: str, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Seconds of a task, drawn and inserted tokens, and the fraction of the time in which episodes were sampled."""
    group = WorkerGroup("sampler", backend="vllm", gpus=options.gpus, threads=1)
    shared: dict[Any, Any] = {}
    context = StageContext(group=group, rank=0, seed=0, group_size=options.samples, run_dir=folder, shared=shared)
    stage = stage_of(contender, Model(model_of(options.model, folder)), group, options)
    runner: Any = stage.setup(context)
    columns = {"prompt": [text for text in prompts(options.groups) for _ in range(options.samples)]}

    async def outputs(number: int) -> list[Output]:
        first = number * options.groups
        task = Task(stage=stage.name, step=number, groups=tuple(range(first, first + options.groups)), number=number)
        return [output async for output in runner(columns, task) if output.columns]

    for number in range(2):
        begun_s = time.perf_counter()
        made = asyncio.run(outputs(number))
        took_s = time.perf_counter() - begun_s
        print(f"a round took {took_s:.1f} s", file=sys.stderr, flush=True)
    versions = [values for output in made for values in output.columns["token_versions"].rows()]
    drawn = sum(int((values >= 0).sum()) for values in versions)
    times = [times for output in made for times in output.times.values()]
    sampled_s = sum(each.seconds(GENERATE) for each in times)
    total_s = sum(each.end_s - each.start_s for each in times)
    for held in shared.values():
        if hasattr(held, "close"):
            held.close()
    return {
        "s": round(took_s, 2),
        "drawn": drawn,
        "inserted": sum(map(len, versions)) - drawn,
        **({"part": round(sampled_s / total_s, 3)} if times else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--inserted", type=int, default=64, help="tokens between two turns")
    parser.add_argument("--gpus", type=int, choices=(0, 1), default=1, help="0: on the CPU")
    parser.add_argument("--contender", choices=CONTENDERS, help="run only this one and print its figures")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    if options.contender:
        with tempfile.TemporaryDirectory() as folder:
            print(f"took {json.dumps(run(options.contender, options, Path(folder)))}", flush=True)
        return
    import torch  # noqa: F401 - so that the report names the GPU

    rows: list[dict[str, Any]] = []
    for contender in CONTENDERS:
        command = [sys.executable, "-m", "benchmarks.gpu.episodes", *sys.argv[1:], "--contender", contender]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=400)
        if done.returncode:
            print(done.stdout[-3000:], file=sys.stderr)
            rows.append({"contender": f"{contender}: exit code {done.returncode}"})
            continue
        found = next(json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("took "))
        rows.append({"contender": contender, **found, "tokens/s": round(found["drawn"] / found["s"])})
        rows[-1]["x rollout"] = round(rows[-1]["tokens/s"] / rows[0].get("tokens/s", 1), 3)
        print(rows[-1], file=sys.stderr, flush=True)
        notes = f"{options.groups} x {options.samples} samples of {options.tokens} drawn tokens, {options.model}; "
        notes += f"{options.turns} turns with {options.inserted} tokens between two."
        columns = ["contender", "s", "drawn", "inserted", "tokens/s", "x rollout", "part"]
        report("gpu.episodes", rows, columns, notes, options.out)


if __name__ == "__main__":
    main()
