"""An optimizer update and scoring with Megatron-core on one GPU: the prompt of a group computed once, or per sample.

python -m benchmarks.gpu.shared_prompts [--model 0.6B] [--groups 8] [--samples 16] [--prompt 1024] [--tokens 256]
                                        [--budget 16384] [--updates 5] [--only shared plain] [--out FILE]

Random weights of a real model's shape, `--groups` prompts of `--prompt` tokens, each with `--samples` responses of
`--tokens`, in packed rows of `--budget` tokens; a row's budget counts a shared prompt once. Activations are kept unless
`--recompute`. Columns are those of benchmarks.gpu.update: tokens/s are prompt and response tokens of all samples,
computed or not; MFU counts computed operations only, so it falls where less is computed. `not computed %` is
train/shared, and `x` is the speed-up over the plain line. `without attention` is torch's attention in the place of
Transformer Engine's. The first loss and gradient norm show that all lines compute the same. Each line is a
process of its own. `--cpu` tries the script with a tiny model.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.update import add_updates, lines, switch_off, updates
from benchmarks.report import report
from pipeline.declare.columns import Columns, Ragged
from pipeline.declare.sharding import Packed

VARIANTS: dict[str, tuple[bool, tuple[str, ...]]] = {  # by name: whether prompts are shared, what is switched off
    "plain": (False, ()),
    "shared": (True, ()),
    "plain without attention": (False, ("attention",)),
    "shared without attention": (True, ("attention",)),
}
SPEEDUPS = ("ms/update", "score ms")


def columns_of(options: argparse.Namespace, vocabulary: int) -> Columns:
    """A batch of groups of random tokens, as sampled by about the policy that is trained."""
    import torch

    made = torch.Generator().manual_seed(0)
    heads = [torch.randint(0, vocabulary, (options.prompt,), generator=made) for _ in range(options.groups)]
    samples = options.groups * options.samples
    lengths, count = (options.tokens,) * samples, options.tokens * samples
    logprobs = Ragged(torch.full((count,), -12.0), lengths)
    return {
        "prompt_ids": Ragged.of([head for head in heads for _ in range(options.samples)]),
        "response_ids": Ragged(torch.randint(0, vocabulary, (count,), generator=made), lengths),
        "advantage": torch.randn(samples, generator=made),
        "prev_logprobs": logprobs,
        "rollout_logprobs": logprobs,
        "token_versions": Ragged(torch.zeros(count, dtype=torch.int32), lengths),
    }


def measured(name: str, path: str, options: argparse.Namespace) -> dict[str, Any]:
    """The line of one variant, measured in this process."""
    shared, off = VARIANTS[name]
    switch_off(off)
    columns = columns_of(options, SHAPES[options.model]["vocab_size"])
    row, _ = updates(path, Packed(options.budget, shared=shared), columns, options)
    return {"prompts": name, "not computed %": 0.0, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="0.6B")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=16, help="of each group")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=256, help="of each response")
    add_updates(parser, VARIANTS)
    options = parser.parse_args()
    if options.cpu:
        options.model, options.groups, options.samples = "tiny", 2, 4
        options.prompt, options.tokens, options.budget = 256, 64, 1024
    notes = (
        f"{options.model}; one update of {options.groups} x {options.samples} samples of {options.prompt} + "
        f"{options.tokens} tokens in rows of {options.budget}, "
        f"recomputed: {options.recompute}; medians of {options.updates}."
    )
    rows: dict[str, dict[str, Any]] = {}
    for row in lines(measured, options):
        rows[row["prompts"]] = row
        base = rows.get(row["prompts"].replace("shared", "plain"))
        row |= {f"{each} x": round(base[each] / row[each], 2) if base else None for each in SPEEDUPS}
        report("gpu.shared_prompts", list(rows.values()), list(next(iter(rows.values()))), notes, options.out)


if __name__ == "__main__":
    main()
