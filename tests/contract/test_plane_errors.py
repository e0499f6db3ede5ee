"""Error texts of put and get: each names the stage or reader, the key and the field, and how to fix it."""

from __future__ import annotations

import pickle

import msgspec
import pytest
import torch

from pipeline import DataPlaneError, Field
from pipeline.data_plane.memory import MemoryPlane
from pipeline.declare.columns import Ragged

from .conftest import FIELDS

K = ["00000000_g000", "00000000_g001"]
F = torch.float32
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def plane() -> MemoryPlane:
    plane = MemoryPlane()
    plane.register("batch", [*FIELDS, Field("weights_of", "weights", "", "version")], ["train"])
    return plane


def ragged(values: list, lengths: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Ragged:
    return Ragged(torch.tensor(values, dtype=dtype), lengths)


PUTS = {
    "no key": ([], {"reward": torch.zeros(0)},
        "no key; an empty batch has no row. Fix: skip the put if there is nothing to write"),
    "malformed key": (["a"], {"reward": torch.zeros(1)},
        "key 'a'; a key is `{admission:08d}_g{index:03d}`. Fix: use pipeline.declare.handle.sample_key"),
    "key twice": ([K[0], K[0]], {"reward": torch.zeros(2)},
        "key 00000000_g000 is given twice; keys are distinct and in canonical (ascending) order. "
        "Fix: put in the order of the task's keys"),
    "keys out of order": (K[::-1], {"reward": torch.zeros(2)},
        "key 00000000_g000 comes after 00000000_g001; keys are distinct and in canonical (ascending) order. "
        "Fix: put in the order of the task's keys"),
    "no column": (K, {},
        "no column; a put writes at least one field. Fix: give the columns that the stage writes"),
    "undeclared field": (K, {"revard": torch.zeros(2)},
        "field 'revard' is not declared; the partition declares count, halves, logprobs, pixels, response_ids, reward, "
        "text, truncated, weights_of. Fix: write a declared field, or add it to the stage's `writes`"),
    "list for a tensor": (K, {"reward": [0.0, 1.0]},
        "field 'reward' is a list; dtype float32, dims 'N' is a tensor. Fix: return a tensor"),
    "tensor for ragged": (K, {"response_ids": torch.zeros(2, 3, dtype=torch.int64)},
        "field 'response_ids' is a Tensor; dtype int64, dims 'N T' is a Ragged. Fix: return a Ragged"),
    "ragged for dense": (K, {"reward": ragged([0, 1], (1, 1), F)},
        "field 'reward' is a Ragged; dtype float32, dims 'N' is a tensor. Fix: return a tensor"),
    "text for texts": (K, {"text": "ab"},
        "field 'text' is a str; dtype str, dims 'N' is a list of strings. Fix: return a list of strings"),
    "number in texts": (K, {"text": ["a", 1]},
        "field 'text', key 00000000_g001: an int; its dtype is str. Fix: use a string"),
    "dtype": (K, {"reward": torch.zeros(2, dtype=torch.float64)},
        "field 'reward' has dtype float64; it is declared float32. Fix: convert the column with .to(torch.float32)"),
    "shape": (K, {"count": torch.zeros(2, 3, 2, dtype=torch.int32)},
        "field 'count' has shape [2, 3, 2]; its dims are 'N 2 3'. Fix: give [samples, 2, 3]"),
    "scalar": (K, {"reward": torch.tensor(1.0)},
        "field 'reward' has shape []; its dims are 'N'. Fix: give [samples]"),
    "row count": (K, {"reward": torch.zeros(3)},
        "field 'reward' has 3 rows for 2 keys (00000000_g000 to 00000000_g001); a column has one row per key. "
        "Fix: return one row for every sample of the task"),
    "lengths do not add up": (K, {"response_ids": ragged([1, 2, 3], (1, 1))},
        "field 'response_ids' has 3 entries and lengths that sum to 2; a ragged column concatenates its rows. "
        "Fix: build the column with Ragged.of(rows)"),
    "lengths differ": (K, {"response_ids": ragged([1, 2, 3], (1, 2)), "logprobs": ragged([-1, -1, -1], (2, 1), F)},
        "field 'logprobs' has 2 entries for key 00000000_g000, field 'response_ids' has 1; fields that share the "
        "dimension T share its lengths. Fix: return both from the same responses"),
    "nan": (K, {"reward": torch.tensor([0.0, NAN])},
        "field 'reward', key 00000000_g001: value nan; NaN and infinity never pass. "
        "Fix: correct the stage"),
    "infinity": (K, {"logprobs": ragged([-1, -1, -INF], (1, 2), F)},
        "field 'logprobs', key 00000000_g001 entry 1: value -inf; NaN and infinity never pass. "
        "Fix: correct the stage"),
    "half infinity": (K, {"halves": ragged([INF], (0, 1), torch.bfloat16)},
        "field 'halves', key 00000000_g001 entry 0: value inf; NaN and infinity never pass. "
        "Fix: correct the stage"),
    "too low": (K, {"response_ids": ragged([1, -2, 3], (2, 1))},
        "field 'response_ids', key 00000000_g000 entry 1: value -2; it is at least 0. "
        "Fix: correct the stage, or widen the field's bounds"),
    "too high": (K, {"logprobs": ragged([-1, 0.5], (1, 1), F)},
        "field 'logprobs', key 00000000_g001 entry 0: value 0.5; it is at most 0. "
        "Fix: correct the stage, or widen the field's bounds"),
    "weights": (K, {"weights_of": torch.zeros(2)},
        "field 'weights_of' holds weights; weights stay in the model; handles carry version and hash. "
        "Fix: return them as Output(weights=...)"),
}  # fmt: skip


@pytest.mark.parametrize("name", PUTS)
def test_text_of_a_refused_put(plane: MemoryPlane, name: str):
    keys, columns, text = PUTS[name]
    with pytest.raises(DataPlaneError) as caught:
        plane.put(keys, columns, partition="batch", stage="rollout")
    assert str(caught.value) == f"stage 'rollout', put into 'batch': {text}"
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems
    assert plane.row_count("batch") == 0


def test_text_of_other_refused_puts(plane: MemoryPlane):
    with pytest.raises(DataPlaneError) as caught:
        plane.put(K, {"reward": torch.zeros(2)}, partition="other", stage="rollout")
    assert str(caught.value) == (
        "stage 'rollout', put into 'other': partition 'other' is not registered in this process; fields and readers "
        "are declared before use. Fix: call register(partition, fields, readers) first"
    )
    plane.put(K, {"reward": torch.zeros(2)}, partition="batch", stage="rollout")
    with pytest.raises(DataPlaneError) as caught:
        plane.put(K, {"reward": torch.ones(2)}, partition="batch", stage="rollout")
    assert str(caught.value) == (
        "stage 'rollout', put into 'batch': field 'reward' of row 00000000.0 already has different bytes; one "
        "attempt writes a field once. Fix: put them as the next attempt"
    )


def test_text_of_a_refused_get(plane: MemoryPlane):
    meta = plane.put(K, {"reward": torch.zeros(2)}, partition="batch", stage="rollout")
    refused = {
        "'eval' is not a declared reader; the partition declares train. Fix: register the partition with every reader":
            lambda: plane.get(meta, ["reward"], reader="eval"),
        "the handle does not name field 'text' for key 00000000_g000; it names reward. "
        "Fix: join the handle of the stage that writes the field": lambda: plane.get(meta, ["text"], reader="train"),
        "field 'gone' is not declared; the partition declares count, halves, logprobs, pixels, response_ids, reward, "
        "text, truncated, weights_of. Fix: read a declared field": lambda: plane.get(meta, ["gone"], reader="train"),
        f"the handle was made for schema 0, this process declares {meta.schema_hash}; writer and reader declare a "
        "partition identically. Fix: register the same fields in both processes":
            lambda: plane.get(msgspec.structs.replace(meta, schema_hash="0"), ["reward"], reader="train"),
    }  # fmt: skip
    for text, call in refused.items():
        with pytest.raises(DataPlaneError) as caught:
            call()
        reader = "eval" if "eval" in text else "train"
        assert str(caught.value) == f"reader '{reader}', get from 'batch': {text}"
    plane.clear(meta)
    with pytest.raises(DataPlaneError) as caught:
        plane.get(meta, ["reward"], reader="train")
    assert str(caught.value) == (
        "reader 'train', get from 'batch': field 'reward' of row 00000000.0 is not present; it was not written yet, or "
        "it was cleared. Fix: read after the stage that writes it, and before its last reader has acknowledged"
    )


def test_a_partition_declares_a_field_once():
    with pytest.raises(DataPlaneError, match="field 'reward' is declared twice"):
        MemoryPlane().register("p", [Field("reward", "float32"), Field("reward", "float64")], [])
