"""A partition whose fields are divided over parts of the store: one part can be cleared before another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from pipeline import DataPlaneError, Field, KVBatchMeta
from pipeline.data_plane.memory import MemoryPlane
from pipeline.declare.columns import Ragged
from pipeline.declare.handle import sample_key

TEXT, IDS, LOGPROBS = Field("text", dtype="str"), Field("ids", "int64", "N T"), Field("logprobs", "float32", "N T")
FIELDS = (TEXT, IDS, LOGPROBS)
PARTS = {"run.samples": ("text",), "run.train": ("ids", "logprobs")}
KEYS = [sample_key(group, i) for group in (3, 4) for i in range(2)]
ROWS = {"text": ["a", "b", "c", "d"], "ids": Ragged(torch.arange(7), (1, 2, 3, 1))}


@pytest.fixture(params=["memory", "transfer_queue"])
def plane(request: pytest.FixtureRequest) -> Iterator[object]:
    made = MemoryPlane() if request.param == "memory" else request.getfixturevalue("transfer_queue")
    made.register("run", FIELDS, ["train"], PARTS)
    yield made
    made.drain()
    assert made.row_count("run") == 0


def put(plane: object, **columns: object) -> KVBatchMeta:
    return plane.put(KEYS, columns or ROWS, partition="run", stage="rollout")  # type: ignore[attr-defined]


def without_placement(handle: KVBatchMeta, *fields: str) -> KVBatchMeta:
    """Return the handle for clearing these fields."""
    return KVBatchMeta(keys=handle.keys, partition_id="run", fields=fields, placements=handle.placements)


def test_a_put_over_both_parts_is_read_as_one(plane) -> None:
    handle = put(plane)
    got = plane.get(handle, ["ids", "text"], reader="train")
    assert got["text"] == ROWS["text"] and torch.equal(got["ids"].values, ROWS["ids"].values)
    assert plane.row_count("run") == 4, "two groups in two parts"
    assert put(plane).fields == handle.fields, "a repeated put is a no-op"
    with pytest.raises(DataPlaneError, match="already has different bytes"):
        put(plane, text=["a", "b", "c", "e"])


def test_a_part_is_cleared_and_the_other_stays(plane) -> None:
    handle = put(plane)
    plane.clear(without_placement(handle, "text"))
    assert plane.row_count("run") == 2
    with pytest.raises(DataPlaneError, match=r"field 'text' of row 00000003\.0 is not present"):
        plane.get(handle, ["text"], reader="train")
    assert plane.get(handle, ["ids"], reader="train")["ids"].lengths == (1, 2, 3, 1)
    later = put(plane, logprobs=Ragged(-torch.ones(7), (1, 2, 3, 1)))
    both = KVBatchMeta.join([handle.select("ids"), later])
    assert plane.get(both, ["ids", "logprobs"], reader="train").keys() == {"ids", "logprobs"}
    plane.clear(without_placement(both, "logprobs"))
    plane.clear(without_placement(both, "logprobs"))
    assert plane.row_count("run") == 0


def test_a_handle_without_fields_clears_every_part(plane) -> None:
    plane.clear(without_placement(put(plane)))
    assert plane.row_count("run") == 0


def test_presence_is_asked_of_the_part_of_each_field(plane) -> None:
    handle = put(plane)
    assert plane.presence("run", KEYS, ["text", "ids", "logprobs"]) == {
        "text": [True] * 4, "ids": [True] * 4, "logprobs": [False] * 4,
    }  # fmt: skip
    adopted = plane.adopt("run", KEYS, ["ids"], {"T": (1, 2, 3, 1)})
    assert torch.equal(plane.get(adopted, ["ids"], reader="train")["ids"].values, ROWS["ids"].values)
    plane.clear(without_placement(handle, "ids"))
    assert plane.presence("run", KEYS, ["text", "ids"]) == {"text": [True] * 4, "ids": [False] * 4}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"run.a": ("text",)}, "field 'ids' is in 0 of its parts, and declared 1 times"),
        ({"run.a": ("text", "ids"), "run.b": ("ids", "logprobs")}, "field 'ids' is in 2 of its parts"),
        ({"run.a": ("text", "ids", "logprobs", "other")}, "field 'other' is in 1 of its parts, and declared 0 times"),
    ],
)
def test_parts_divide_the_fields(parts, message) -> None:
    with pytest.raises(DataPlaneError, match=message):
        MemoryPlane().register("run", FIELDS, ["train"], parts)


def test_processes_divide_a_partition_alike() -> None:
    made = MemoryPlane()
    made.register("run", FIELDS, ["train"], PARTS)
    made.register("run", FIELDS, ["train"], dict(reversed(PARTS.items())))
    with pytest.raises(DataPlaneError, match="already registered with a different ids"):
        made.register("run", FIELDS, ["train"], {"run.samples": ("text", "ids"), "run.train": ("logprobs",)})
    with pytest.raises(DataPlaneError, match="already registered with a different text"):
        made.register("run", (replace(TEXT, unit="char"), IDS, LOGPROBS), ["train"], PARTS)
