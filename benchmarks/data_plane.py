"""The cost of a put and a get: raw TransferQueue, the data plane without and with its cache, Ray's object store.

    python -m benchmarks.data_plane [--quick] [--out data_plane.json]

All systems carry the same columns in one process and take turns within each round, so that a ratio is the median of
ratios of measurements close in time. In each system one client both writes and reads, so all of them can reuse memory
that they have just freed.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import report
from pipeline import Field, KVBatchMeta
from pipeline.data_plane.transfer_queue import TransferQueuePlane, environment
from pipeline.declare.columns import Columns, Ragged, size_bytes
from pipeline.declare.handle import sample_key

GROUP = 8  # samples per group
FIELDS = (
    Field("response_ids", "int64", "N T", low=0), Field("token_versions", "int32", "N T", low=0),
    Field("rollout_logprobs", "float32", "N T", high=0.0), Field("prev_logprobs", "float32", "N T", high=0.0),
    Field("ref_logprobs", "float32", "N T", high=0.0), Field("truncated", "bool"), Field("reward", "float32"),
    Field("advantage", "float32"),
)  # fmt: skip
RAW = "raw, row per group"


def columns(samples: int, tokens: int, fields: int) -> Columns:
    """Random columns with response lengths of 1/2 to 3/2 of `tokens`."""
    import torch

    lengths = torch.randint(max(1, tokens // 2), tokens * 3 // 2 + 1, (samples,)).tolist()
    made: Columns = {}
    for field in FIELDS[:fields] if fields < 8 else FIELDS:
        size = sum(lengths) if field.ragged else samples
        if field.dtype == "float32":
            values = -torch.rand(size)
        else:
            values = torch.randint(0, 2 if field.dtype == "bool" else 1000, (size,)).to(getattr(torch, field.dtype))
        made[field.name] = Ragged(values, tuple(lengths)) if field.ragged else values
    return made


class Plane:
    """The data plane: `writer` puts and `reader` gets; both may be the same client."""

    def __init__(self, writer: TransferQueuePlane, reader: TransferQueuePlane) -> None:
        self.writer, self.reader = writer, reader

    def put(self, keys: list[str], made: Columns) -> KVBatchMeta:
        """Put the columns. Returns their handle."""
        return self.writer.put(keys, made, partition="plane", stage="bench")

    def get(self, handle: KVBatchMeta) -> Columns:
        """Get all fields of the handle."""
        return self.reader.get(handle, handle.fields, reader="bench")

    def clear(self, handle: KVBatchMeta) -> None:
        """Remove the rows, also from the reader's cache."""
        self.writer.clear(handle)
        self.reader.evict(handle.placements[0].rows)


class Raw:
    """TransferQueue's own key-value calls, with `per_row` samples per row."""

    def __init__(self, per_row: int) -> None:
        self.per_row = per_row

    def put(self, keys: list[str], made: Columns) -> tuple[list[str], list[str]]:
        """Put one row per sample, as a new user would, or one row per group, as the data plane does."""
        import torch
        import transfer_queue
        from tensordict import TensorDict

        rows = keys[:: self.per_row]
        fields: dict[str, Any] = {}
        for name, column in made.items():
            if isinstance(column, Ragged):
                lengths = torch.tensor(column.lengths).view(len(rows), -1).sum(1)
                offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
                fields[name] = torch.nested.nested_tensor_from_jagged(column.values, offsets)
            else:
                fields[name] = column.view(len(rows), -1)  # type: ignore[union-attr]
        partition = f"raw{self.per_row}"
        transfer_queue.kv_batch_put(rows, partition_id=partition, fields=TensorDict(fields, batch_size=len(rows)))
        return rows, list(made)

    def get(self, handle: tuple[list[str], list[str]]) -> Any:
        """Get all fields."""
        import transfer_queue

        return transfer_queue.kv_batch_get(handle[0], partition_id=f"raw{self.per_row}", select_fields=handle[1])

    def clear(self, handle: tuple[list[str], list[str]]) -> None:
        """Remove the rows."""
        import transfer_queue

        transfer_queue.kv_clear(handle[0], partition_id=f"raw{self.per_row}")


class ObjectStore:
    """Ray's shared-memory store, one object per put. A get copies, since the data plane's readers may write too."""

    def put(self, keys: list[str], made: Columns) -> Any:
        """Put the columns. Returns a reference."""
        import ray

        return ray.put({name: c.values if isinstance(c, Ragged) else c for name, c in made.items()})

    def get(self, handle: Any) -> Any:
        """Get all fields, in private memory."""
        import ray

        return {name: values.clone() for name, values in ray.get(handle).items()}

    def clear(self, handle: Any) -> None:
        """Ray frees the object when its last reference goes."""


def timed(call: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Call the function. Returns milliseconds and the result."""
    start = time.perf_counter()
    result = call(*args)
    return (time.perf_counter() - start) * 1e3, result


def measure(systems: dict[str, Any], samples: int, tokens: int, fields: int, rounds: int) -> list[dict[str, Any]]:
    """One table row per system. Systems take turns within each round; the first two rounds are a warm-up."""
    made = columns(samples, tokens, fields)
    megabytes = sum(size_bytes(column) for column in made.values()) / 1e6
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in systems}
    for turn in range(rounds + 2):
        keys = [sample_key(turn * samples + i // GROUP, i % GROUP) for i in range(samples)]
        names = list(systems)
        random.Random(turn).shuffle(names)  # no system always follows the same one
        for name in names:
            system = systems[name]
            put_ms, handle = timed(system.put, keys, made)
            get_ms = timed(system.get, handle)[0]
            clear_ms = timed(system.clear, handle)[0]
            del handle
            if turn >= 2:
                times[name].append((put_ms, get_ms, clear_ms))
    rows = []
    for name, taken in times.items():
        put_ms, get_ms, clear_ms = (statistics.median(t[i] for t in taken) for i in range(3))
        both = statistics.median((a[0] + a[1]) / (b[0] + b[1]) for a, b in zip(taken, times[RAW]))
        rows.append({
            "keys": samples, "fields": fields, "MB": megabytes, "system": name, "put_ms": put_ms, "get_ms": get_ms,
            "clear_ms": clear_ms, "put_MB_s": megabytes / put_ms * 1e3, "get_MB_s": megabytes / get_ms * 1e3,
            "put_ratio": statistics.median(a[0] / b[0] for a, b in zip(taken, times[RAW])),
            "get_ratio": statistics.median(a[1] / b[1] for a, b in zip(taken, times[RAW])), "put_get_ratio": both,
        })  # fmt: skip
    return rows


def start_ray(*, object_store_bytes: int) -> None:
    """Start a Ray for this process alone, with the environment that TransferQueue needs."""
    os.environ.update(environment(), RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0", RAY_USAGE_STATS_ENABLED="0")
    import ray
    import torch

    from pipeline.executors.placement import worker_environment

    torch.set_num_threads(1)
    ray.init(
        address="local", num_cpus=8, include_dashboard=False, logging_level="ERROR", log_to_driver=False,
        object_store_memory=object_store_bytes, _node_ip_address="127.0.0.2",
        runtime_env={"env_vars": worker_environment()},
    )  # fmt: skip


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and no cases above 10 MB")
    parser.add_argument("--rounds", type=int, default=None, help="measured rounds per case")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    args = parser.parse_args()
    start_ray(object_store_bytes=2**30)
    start_s, owner = timed(TransferQueuePlane.create)
    settings = owner.settings
    planes = [owner, *(TransferQueuePlane.attach(_with_cache(settings, size)) for size in (0, 2**30))]
    for plane in planes:
        plane.register("plane", FIELDS, ["bench"])
    systems = {
        RAW: Raw(GROUP), "plane, no cache": Plane(planes[1], planes[1]), "plane, cache": Plane(planes[2], planes[2]),
        "raw, row per sample": Raw(1), "Ray object store": ObjectStore(),
    }  # fmt: skip
    cases = [(64, 16, 8), (256, 16, 8), (256, 256, 2), (256, 256, 8)]
    if not args.quick:
        cases += [(1024, 64, 8), (256, 1024, 8), (512, 4096, 8)]
    rounds = args.rounds or (8 if args.quick else 20)
    rows = [row for case in cases for row in measure(systems, *case, rounds)]
    for plane in reversed(planes):
        plane.close()
    import ray

    ray.shutdown()
    report(
        "data_plane", rows,
        ["keys", "fields", "MB", "system", "put_ms", "get_ms", "clear_ms", "put_MB_s", "get_MB_s", "put_ratio",
         "get_ratio", "put_get_ratio"],
        f"Medians of {rounds} rounds; systems take turns in each. Ratios are to '{RAW}', medians of the rounds' "
        f"ratios. TransferQueue with 1 storage unit started in {start_s / 1e3:.1f} s.",
        args.out,
    )  # fmt: skip


def _with_cache(settings: Any, cache_bytes: int) -> Any:
    from dataclasses import replace

    return replace(settings, cache_bytes=cache_bytes)


if __name__ == "__main__":
    main()
