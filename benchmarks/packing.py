"""How well a batch is divided into microbatches and over ranks, compared with common simple methods.

python -m benchmarks.packing [--quick] [--out FILE]

Lengths are random: prompts uniform, one per 8 samples; responses uniform, lognormal with sigma 1.0, or short with a
long minority. All methods have the same budget of tokens per microbatch.

    runs           one run of consecutive samples per rank, padded to the longest sample of a microbatch
    sorted         sorted by length and dealt to ranks in turn, padded to the longest sample of a microbatch
    first fit      packed rows in canonical order, dealt to ranks in turn
    ffd            packed rows by first fit decreasing, dealt to ranks in turn
    Plain, Dynamic, Packed     `pipeline.declare.sharding`

"microbatches" is the number per rank, from minimum to maximum: if it differs, ranks that synchronize in each microbatch
would hang. "padding" is a fraction of the computed tokens; "balance" is tokens of the busiest rank over the mean;
"waiting" is the share of rank time spent at a barrier after every microbatch, and "useful" the share spent on sample
tokens, with time proportional to computed tokens. "time" is CPU time of planning, on the driver.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from benchmarks.report import report
from pipeline.declare.sharding import Dynamic, Microbatching, Packed, Plain, Shard, shard_batch

BUDGET = 8192  # tokens
LONGEST_PROMPT, LONGEST_RESPONSE = 512, 2048
Parts = list[list[list[int]]]  # [rank][microbatch][sample]
Lengths = tuple[list[int], list[int]]


def lengths(kind: str, samples: int) -> Lengths:
    """Random lengths of prompts and responses, in tokens."""
    rng = random.Random(f"{kind} {samples}")
    prompts = [length for _ in range(samples // 8) for length in [rng.randint(64, LONGEST_PROMPT)] * 8]
    draw: Callable[[], float] = {
        "uniform": lambda: rng.randint(1, LONGEST_RESPONSE),
        "lognormal": lambda: rng.lognormvariate(5.9, 1.0),
        "bimodal": lambda: rng.gauss(250, 60) if rng.random() < 0.75 else rng.gauss(1900, 150),
    }[kind]
    return prompts, [min(max(int(draw()), 1), LONGEST_RESPONSE) for _ in range(samples)]


def cut(order: Sequence[int], prompts: Sequence[int], responses: Sequence[int]) -> list[list[int]]:
    """Divide `order` into runs within the budget, padding included."""
    parts: list[list[int]] = []
    for i in order:
        wider = [*parts[-1], i] if parts else []
        if wider and len(wider) * max(prompts[j] + responses[j] for j in wider) <= BUDGET:
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts


def runs(prompts: Sequence[int], responses: Sequence[int], ranks: int) -> Parts:
    """Microbatches in canonical order."""
    share = len(prompts) // ranks
    return [cut(range(rank * share, (rank + 1) * share), prompts, responses) for rank in range(ranks)]


def sorted_runs(prompts: Sequence[int], responses: Sequence[int], ranks: int) -> Parts:
    """Microbatches of samples sorted by length."""
    order = sorted(range(len(prompts)), key=lambda i: prompts[i] + responses[i], reverse=True)
    return [cut(order[rank::ranks], prompts, responses) for rank in range(ranks)]


def first_fit(order: Sequence[int], prompts: Sequence[int], responses: Sequence[int], ranks: int) -> Parts:
    """Packed rows; each sample goes into the first row with room."""
    rows: list[list[int]] = []
    left: list[int] = []
    for i in order:
        length = prompts[i] + responses[i]
        row = next((row for row, room in enumerate(left) if room >= length), len(rows))
        if row == len(rows):
            rows.append([])
            left.append(BUDGET)
        rows[row].append(i)
        left[row] -= length
    return [rows[rank::ranks] for rank in range(ranks)]


def fit(prompts: Sequence[int], responses: Sequence[int], ranks: int) -> Parts:
    """Packed rows by first fit."""
    return first_fit(range(len(prompts)), prompts, responses, ranks)


def fit_decreasing(prompts: Sequence[int], responses: Sequence[int], ranks: int) -> Parts:
    """Packed rows by first fit decreasing."""
    order = sorted(range(len(prompts)), key=lambda i: prompts[i] + responses[i], reverse=True)
    return first_fit(order, prompts, responses, ranks)


def ours(microbatching: Microbatching) -> Callable[[Sequence[int], Sequence[int], int], list[Shard]]:
    """`shard_batch` in one mode."""
    return lambda prompts, responses, ranks: shard_batch(prompts, responses, ranks=ranks, microbatching=microbatching)


WAYS: dict[str, tuple[str, Callable[[Sequence[int], Sequence[int], int], Any]]] = {
    "runs": ("padded", runs),
    "Plain": ("padded", ours(Plain(BUDGET // (LONGEST_PROMPT + LONGEST_RESPONSE)))),
    "sorted": ("padded", sorted_runs),
    "Dynamic": ("padded", ours(Dynamic(BUDGET))),
    "first fit": ("packed", fit),
    "ffd": ("packed", fit_decreasing),
    "Packed": ("packed", ours(Packed(BUDGET))),
}


def work(made: Parts | list[Shard], kind: str, prompts: Sequence[int], responses: Sequence[int]) -> list[list[int]]:
    """Computed tokens, [rank][microbatch]."""
    if isinstance(made[0], Shard):
        return [
            [
                sum(prompts[shard.index[i]] + responses[shard.index[i]] for i in part.samples)
                if shard.packed
                else len(part.samples) * (part.prompt + part.response)
                for part in shard.updates[0].microbatches
            ]
            for shard in made
        ]
    if kind == "packed":
        return [[sum(prompts[i] + responses[i] for i in part) for part in rank] for rank in made]
    return [[len(part) * max(prompts[i] + responses[i] for i in part) for part in rank] for rank in made]


def members(made: Parts | list[Shard]) -> list[list[int]]:
    """The samples of each rank."""
    if isinstance(made[0], Shard):
        return [list(shard.index) for shard in made]
    return [[i for part in rank for i in part] for rank in made]


def measure(way: str, drawn: Lengths, ranks: int, repeats: int) -> dict[str, Any]:
    """Measure one row of the table."""
    prompts, responses = drawn
    kind, make = WAYS[way]
    times_ms = []
    for _ in range(repeats):
        began_s = time.process_time()
        made = make(prompts, responses, ranks)
        times_ms.append(1e3 * (time.process_time() - began_s))
    shares = members(made)
    assert sorted(i for share in shares for i in share) == list(range(len(prompts)))
    tokens = [sum(prompts[i] + responses[i] for i in share) for share in shares]
    computed = work(made, kind, prompts, responses)
    assert max(map(max, computed)) <= BUDGET
    elapsed = ranks * sum(max(together) for together in zip_longest(*computed, fillvalue=0))
    counts = [len(parts) for parts in computed]
    return {
        "way": way,
        "microbatches": str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}",
        "padding %": round(100 * (1 - sum(tokens) / sum(map(sum, computed))), 2),
        "balance": round(max(tokens) * ranks / sum(tokens), 5),
        "waiting %": round(100 * (1 - sum(map(sum, computed)) / elapsed), 2),
        "useful %": round(100 * sum(tokens) / elapsed, 2),
        "time ms": round(statistics.median(times_ms), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1,024 samples on 8 ranks, planned once")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    rows = []
    for kind in ("uniform", "lognormal", "bimodal"):
        for samples in (1024,) if options.quick else (1024, 8192):
            drawn = lengths(kind, samples)
            bound = -(-sum(map(sum, drawn)) // BUDGET)
            for ranks in (8,) if options.quick else (1, 2, 4, 8):
                common = {"lengths": kind, "samples": samples, "ranks": ranks, "least": -(-bound // ranks)}
                rows += [common | measure(way, drawn, ranks, 1 if options.quick else 3) for way in WAYS]
    notes = (
        f"{BUDGET:,} tokens per microbatch; prompts up to {LONGEST_PROMPT}, responses up to {LONGEST_RESPONSE}. "
        "'least' is tokens / budget / ranks, rounded up: with equal counts, no method has fewer microbatches per rank."
    )
    report("packing", rows, list(rows[0]), notes, options.out)


if __name__ == "__main__":
    main()
