"""Weights in one piece of memory: what is filled in comes out by name, at the same place every time."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.backends.snapshot import ALIGNED, Entry, Handle, Snapshot

DTYPES = [torch.bfloat16, torch.float32, torch.int64, torch.bool]


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 9), max_size=3)), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_what_is_filled_in_comes_out_and_stays_in_its_place(shapes):
    snapshot, places = Snapshot(), None
    for _ in range(2):
        given_ = {f"w{i}": (torch.randn(shape) * 9).to(dtype) for i, (dtype, shape) in enumerate(shapes)}
        assert snapshot.fill(given_.items()) is snapshot
        assert list(snapshot) == list(given_) and len(snapshot) == len(given_)
        assert all(torch.equal(snapshot[name], tensor) for name, tensor in given_.items())
        found = {name: tensor.data_ptr() for name, tensor in snapshot.items()}
        assert places in (None, found)
        places = found
    ends = [entry.start + entry.size_bytes for entry in snapshot._entries]
    assert all(entry.start % ALIGNED == 0 for entry in snapshot._entries)
    assert all(end <= entry.start for end, entry in zip(ends, snapshot._entries[1:]))


def test_other_weights_than_the_first_time_are_refused():
    snapshot = Snapshot().fill([("w", torch.zeros(3))])
    with pytest.raises(KeyError):
        snapshot.fill([("v", torch.zeros(3))])
    with pytest.raises(RuntimeError):
        snapshot.fill([("w", torch.zeros(4))])


def test_a_handle_survives_plain_values():
    handle = Handle((Entry("w", "bfloat16", (2, 3), 256),), (b"memory", 512, 0, b"counter", 0, b"event", True))
    plain = msgspec.to_builtins(handle, builtin_types=(bytes,))
    again = msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(plain)), Handle)
    assert again == handle and hash(again.memory) == hash(handle.memory)
