"""The cost of moving a batch in many small units: 32 groups of 16 samples in 1, 8 or 32 puts, gets and clears.

    python -m benchmarks.small_units [--rounds 30] [--against BEFORE.json] [--out small_units.json]

The columns are the eight of a training step. "In turn" means one call after the other from one thread; "burst" all at
once, each from its own thread; "4 threads" a pool of four. Each round measures every operation once, one after the
other, so a ratio is the median of ratios of measurements close in time. `caller_ms` is CPU time of the calling process,
`cpu_ms` that of the caller, TransferQueue's controller and its storage unit together. `--against` adds the times of
another report of this benchmark, for example of an earlier commit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.data_plane import FIELDS, columns, start_ray, timed
from benchmarks.report import report
from pipeline import KVBatchMeta
from pipeline.data_plane.memory import MemoryPlane
from pipeline.data_plane.transfer_queue import TransferQueuePlane
from pipeline.declare.columns import Columns, take
from pipeline.declare.handle import keys_of, sample_key

GROUPS, SAMPLES = 32, 16
WARM_UP = 3
Operation = tuple[str, str, Callable[[], Any]]  # name, name of the operation that it is compared with, function


class Processes:
    """CPU time of this process and of the Ray actors that it started."""

    def __init__(self) -> None:
        self.others = [pid for pid in _descendants(os.getpid()) if "ray::" in _command(pid)]

    def others_ms(self) -> float:
        """CPU milliseconds of the Ray actors."""
        return sum(map(_cpu_ms, self.others))


def _descendants(root: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (status := _text(entry / "stat")):
            parents.setdefault(int(status.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found, queue = [], [root]
    while queue:
        children = parents.get(queue.pop(), [])
        found += children
        queue += children
    return found


def _cpu_ms(pid: int) -> float:
    return sum(int((_text(task / "schedstat") or "0").split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e6


def _command(pid: int) -> str:
    return _text(Path(f"/proc/{pid}/cmdline"))


def _text(path: Path) -> str:
    """The text of a file; empty if its process or thread has just ended."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


class Round:
    """One batch, moved in every layout. Each layout has its own groups."""

    def __init__(self, plane: Any, made: dict[int, list[Columns]], number: int, pools: dict[int, ThreadPoolExecutor]):
        self.plane, self.made, self.pools = plane, made, pools
        self.number = number
        self.handles: dict[str, list[KVBatchMeta]] = {}

    def operations(self) -> Iterator[Operation]:
        """Yield the operations in execution order."""
        for layout, parts, threads in (
            ("1 put of 32 groups", 1, 1), ("8 puts of 4, in turn", 8, 1), ("32 puts of 1, in turn", 32, 1),
            ("8 puts of 4, burst", 8, 8), ("32 puts of 1, burst", 32, 32), ("32 puts of 1, 4 threads", 32, 4),
        ):  # fmt: skip
            yield layout, "1 put of 32 groups", self._puts(layout, parts, threads)
        first, whole = "1 put of 32 groups", "1 get of 32 groups"
        yield whole, whole, self._gets(self.handles[first], 1)
        for layout in ("8 puts of 4, in turn", "32 puts of 1, in turn"):
            puts = layout.partition(",")[0]
            yield f"1 get of 32 groups from {puts}", whole, self._gets([KVBatchMeta.concat(self.handles[layout])], 1)
        batch = self.handles[first][0]
        yield "8 gets of 4, in turn", whole, self._gets(batch.chunk(8), 1)
        yield "8 gets of 4, burst", whole, self._gets(batch.chunk(8), 8)
        yield "32 gets of 1, in turn", whole, self._gets(batch.chunk(32), 1)
        yield "32 gets of 1, burst", whole, self._gets(batch.chunk(32), 32)
        yield "presence of 3 fields, 32 groups", whole, self._presence(batch)
        cleared = "1 clear of 32 groups"
        yield cleared, cleared, self._clears(self.handles[first], 1)
        yield "32 clears of 1, in turn", cleared, self._clears(self.handles["32 puts of 1, in turn"], 1)
        yield "32 clears of 1, burst", cleared, self._clears(self.handles["32 puts of 1, burst"], 32)
        for layout in ("8 puts of 4, in turn", "8 puts of 4, burst", "32 puts of 1, 4 threads"):
            self.plane.clear(KVBatchMeta.concat(self.handles[layout]))

    def _each(self, call: Callable[[Any], Any], arguments: Sequence[Any], threads: int) -> list[Any]:
        return list(map(call, arguments) if threads == 1 else self.pools[threads].map(call, arguments))

    def _puts(self, layout: str, parts: int, threads: int) -> Callable[[], None]:
        first = (self.number * 8 + len(self.handles)) * GROUPS
        size = GROUPS // parts
        keys = [
            [sample_key(first + p * size + g, i) for g in range(size) for i in range(SAMPLES)] for p in range(parts)
        ]

        def put(part: int) -> KVBatchMeta:
            return self.plane.put(keys[part], self.made[parts][part], partition="small", stage="bench")

        def do() -> None:
            self.handles[layout] = self._each(put, range(parts), threads)

        self.handles[layout] = []
        return do

    def _gets(self, handles: Sequence[KVBatchMeta], threads: int) -> Callable[[], None]:
        return lambda: void(
            self._each(lambda handle: self.plane.get(handle, handle.fields, reader="bench"), handles, threads)
        )

    def _presence(self, handle: KVBatchMeta) -> Callable[[], Any]:
        return lambda: self.plane.presence("small", handle.keys, ["response_ids", "reward", "prev_logprobs"])

    def _clears(self, handles: Sequence[KVBatchMeta], threads: int) -> Callable[[], None]:
        return lambda: void(self._each(self.plane.clear, handles, threads))


def _part(whole: Columns, number: int, parts: int) -> Columns:
    """The columns of the samples of one of `parts` equal parts."""
    size = GROUPS * SAMPLES // parts
    return {name: take(column, range(number * size, (number + 1) * size)) for name, column in whole.items()}


def void(_: Any) -> None:
    """Discard a result."""


def measure(store: str, plane: Any, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """One table row per operation."""
    whole = columns(GROUPS * SAMPLES, tokens, 8)
    made = {parts: [_part(whole, p, parts) for p in range(parts)] for parts in (1, 8, 32)}
    pools = {threads: ThreadPoolExecutor(threads) for threads in (4, 8, 32)}
    processes = Processes()
    taken: dict[str, list[tuple[float, float, float, float]]] = {}
    for number in range(rounds + WARM_UP):
        milliseconds: dict[str, float] = {}
        for name, base, do in Round(plane, made, number, pools).operations():
            others_ms, own_ms, start_s = processes.others_ms(), time.process_time() * 1e3, time.perf_counter()
            do()
            milliseconds[name] = (time.perf_counter() - start_s) * 1e3
            own_ms = time.process_time() * 1e3 - own_ms
            all_ms = own_ms + processes.others_ms() - others_ms
            if number >= WARM_UP:
                ratio = milliseconds[name] / milliseconds[base]
                taken.setdefault(name, []).append((milliseconds[name], ratio, own_ms, all_ms))
    for pool in pools.values():
        pool.shutdown()
    return [
        {"store": store, "operation": name}
        | dict(zip(("ms", "ratio", "caller_ms", "cpu_ms"), map(statistics.median, zip(*samples))))
        for name, samples in taken.items()
    ]


STAGES = (("response_ids", "token_versions", "rollout_logprobs", "truncated"), ("prev_logprobs",), ("reward",))


def handles(tokens: int, rounds: int) -> list[dict[str, Any]]:
    """The driver's work on the handles of three stages: join those of all puts, and send the result."""
    rows = []
    for parts in (1, 32):
        puts, keys = _put_by(parts, tokens)
        joined = _joined(puts, keys)
        layout = f"3 stages, {parts} put{'s' * (parts > 1)} each"
        sent = joined.encode()
        for name, call, argument in (
            (f"join {layout}", lambda of, keys=keys: _joined(of, keys), puts),
            (f"encode, decode: {layout}", lambda of: KVBatchMeta.decode(of.encode()), joined),
        ):
            taken = [timed(call, argument)[0] for _ in range(rounds)]
            rows.append({"store": "handle", "operation": name, "ms": statistics.median(taken), "bytes": len(sent)})
    return rows


def _put_by(parts: int, tokens: int) -> tuple[list[list[KVBatchMeta]], tuple[str, ...]]:
    """The handles of each stage's puts, in a random completion order, and all keys."""
    plane = MemoryPlane()
    plane.register("small", FIELDS, ["bench"])
    made = columns(GROUPS * SAMPLES, tokens, 8)
    keys = keys_of(tuple(range(GROUPS)), SAMPLES)
    size, puts = len(keys) // parts, []
    for names in STAGES:
        order = random.Random(0).sample(range(parts), parts)
        puts.append([
            plane.put(keys[p * size : (p + 1) * size], _part({name: made[name] for name in names}, p, parts),
                      partition="small", stage="bench")
            for p in order
        ])  # fmt: skip
    return puts, keys


def _joined(puts: list[list[KVBatchMeta]], keys: tuple[str, ...]) -> KVBatchMeta:
    """Join the handles into one in canonical order, as the driver does."""
    wholes = [KVBatchMeta.concat(of) if len(of) > 1 else of[0] for of in puts]
    at = [{key: i for i, key in enumerate(whole.keys)} for whole in wholes]
    return KVBatchMeta.join([
        whole if whole.keys == keys else whole.reorder([index[key] for key in keys])
        for whole, index in zip(wholes, at)
    ])  # fmt: skip


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="measured rounds")
    parser.add_argument("--tokens", type=int, default=16, help="mean tokens of a response")
    parser.add_argument("--against", type=Path, default=None, help="JSON of this benchmark, to compare with")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    args = parser.parse_args()
    start_ray(object_store_bytes=2**28)
    owner = TransferQueuePlane.create()
    uncached = TransferQueuePlane.attach(replace(owner.settings, cache_bytes=0))
    rows = handles(args.tokens, args.rounds)
    for store, plane in (("memory", MemoryPlane()), ("TransferQueue", uncached)):
        plane.register("small", FIELDS, ["bench"])
        rows += measure(store, plane, args.tokens, args.rounds)
    for plane in (uncached, owner):
        plane.close()
    import ray

    ray.shutdown()
    names = ["store", "operation", "ms", "ratio", "caller_ms", "cpu_ms", "bytes"]
    if args.against:
        before = {(row["store"], row["operation"]): row for row in json.loads(args.against.read_text())["rows"]}
        for row in rows:
            earlier = before.get((row["store"], row["operation"]), {})
            row |= {
                f"{name}_before": earlier[name] for name in ("ms", "ratio", "caller_ms", "bytes") if name in earlier
            }
        names += ["ms_before", "ratio_before", "caller_ms_before", "bytes_before"]
    report(
        "small_units", rows, names,
        f"{GROUPS} groups of {SAMPLES} samples, {args.tokens} tokens per response on average, 8 columns. Medians of "
        f"{args.rounds} rounds. Ratios are to the operation on the whole batch. No cache; 1 storage unit.",
        args.out,
    )  # fmt: skip


if __name__ == "__main__":
    main()
