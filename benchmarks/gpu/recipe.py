"""What a user of the recipe gets: `graphs/grpo.py` as it comes, on one GPU, beside a graph that was written for it.

python -m benchmarks.gpu.recipe [--model 0.6B] [--budget 32960] [--only "as it comes"] [--steps 3] [--on h200]
                                [--out FILE]

Both do the same work in turns on one GPU: vLLM samples, Megatron-core scores with the frozen weights and trains, with
two updates per step. The recipe gets the flags of the work and of the GPU, as in `python -m pipeline.run graphs/grpo.py
--on h200:1`, and chooses the rest itself; the other graph (benchmarks/gpu/step.py) has packed rows of `--budget`
tokens, as were measured to be the fastest that fit. `--cpu` tries the script with a tiny model.

Aim: the recipe has at least 90 % of the other graph's tokens/s.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.shapes import add_work, model_of
from benchmarks.gpu.step import described, run
from benchmarks.report import report
from graphs import grpo
from pipeline import Graph, Model
from pipeline.cli.choice import choose, print_choice
from pipeline.cli.load import load
from pipeline.declare.group import CACHES, WEIGHTS
from pipeline.foretell.gpu import asked
from pipeline.foretell.loads import Assumed

KL = 0.001
RECIPE, TUNED = "as it comes", "tuned by hand"


def recipe(options: argparse.Namespace, model: str, folder: Path) -> Graph:
    """The recipe, with the flags of the work; what it leaves open is chosen for the GPU."""
    data = folder / "train.jsonl"
    rows = ({"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(10 * options.groups))
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    given = {
        "model": model,
        "data": str(data),
        "steps": options.steps + 1,
        "prompts_per_step": options.groups,
        "samples_per_prompt": options.samples,
        "max_tokens": options.tokens,
        "minibatches": 2,
        "kl": KL,
    }
    file = load(Path(grpo.__file__))
    values = {flag.name: flag.default for flag in file.flags} | given
    if options.cpu:
        return file.build(values | {"generator": "vllm", "trainer": "megatron"})
    choice = choose(file, values, given, asked(options.on), Assumed())
    print_choice(choice, asked(options.on), whole=True)
    return file.build(choice.values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    parser.add_argument("--budget", type=int, default=32960, help="tokens per packed row of the other graph")
    parser.add_argument("--memory", type=float, default=0.85, help="share of the GPU for the other graph's sampler")
    parser.add_argument("--cache", choices=CACHES, default="auto", help="number format of that sampler's cache")
    parser.add_argument("--weights", choices=WEIGHTS, default="auto", help="number format of that sampler's matrices")
    parser.add_argument("--on", default="h200", help="the GPU that the recipe chooses for")
    parser.add_argument("--only", choices=(RECIPE, TUNED), help="run only this one")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU, to try the script")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    if options.cpu:
        options.model, options.groups, options.samples, options.tokens, options.budget = "tiny", 4, 4, 32, 512
    one = {"sampler": 1, "sampler_tensor": 1, "learner": 1, "learner_tensor": 1, "learner_pipeline": 1}
    fixed = {"colocated": not options.cpu, "transport": "auto", "prev": "own", "kl": KL, "replay": False}
    vars(options).update(one | fixed)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = model_of(options.model, Path(folder))
        for arm in (RECIPE, TUNED):
            if options.only in (None, arm):
                rows.append({})
                graph = recipe(options, model, Path(folder)) if arm == RECIPE else described(options, 0, Model(model))
                run(graph, Path(folder) / arm.replace(" ", "-"), options, rows, _write)


def _write(found: list[dict[str, Any]], options: argparse.Namespace) -> None:
    arms = [options.only] if options.only else [RECIPE, TUNED]
    rows = [{"arm": arm} | row for arm, row in zip(arms, found)]
    for row in rows[1:]:
        rows[0]["of tuned %"] = round(100 * rows[0]["tokens/s/GPU"] / row["tokens/s/GPU"], 1)
    notes = (
        f"{options.model}: {options.groups} x {options.samples} samples of {options.tokens} tokens, in turns on one "
        f"GPU, two updates per step, frozen model; by hand: rows of {options.budget}. Aim: 90 %."
    )
    report("gpu.recipe", rows, [*rows[0]], notes, options.out)


if __name__ == "__main__":
    main()
