"""KVBatchMeta: what it preserves in every operation, how small it stays, and what it refuses."""

from __future__ import annotations

import pickle

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import KVBatchMeta
from pipeline.data_plane.rows import lay_out
from pipeline.declare.handle import SIZE_CAP_BYTES_PER_SAMPLE, Placement, sample_key
from pipeline.errors import DataPlaneError
from tests.examples import few


def handle(lengths: list[int], group: int = 2, partition: str = "p", first: int = 0, **changes) -> KVBatchMeta:
    keys = tuple(sample_key(first + i // group, i % group) for i in range(len(lengths)))
    shared = lay_out(keys, 0, {"T": tuple(lengths)}).placement
    return KVBatchMeta(
        keys=keys, partition_id=partition, fields=("ids", "reward"),
        lengths={"T": tuple(lengths), "K": tuple(map(named_by, keys))},
        placements=(shared,), placement_of={"ids": 0, "reward": 0}, **changes,
    )  # fmt: skip


def named_by(key: str) -> int:
    """A length that tells which key it belongs to."""
    return 1000 * int(key[:8]) + int(key[-3:])


lengths_lists = st.lists(st.integers(0, 40), min_size=1, max_size=24)


@given(lengths_lists, st.integers(1, 8))
def test_round_trips_under_the_size_cap(lengths, group):
    before = handle(lengths, group, extra_info={"order": [1, 2], "note": "x"}, unit="group", attempt=3)
    encoded = before.encode()
    assert len(encoded) <= SIZE_CAP_BYTES_PER_SAMPLE * max(4, len(before))
    assert KVBatchMeta.decode(encoded) == before
    assert pickle.loads(pickle.dumps(before)) == before


def test_size_does_not_depend_on_the_tokens():
    assert len(handle([30_000] * 64).encode()) - len(handle([100] * 64).encode()) < 64 * 8
    with pytest.raises(DataPlaneError, match="bytes for 1 sample, more than"):
        handle([1], extra_info={"text": "x" * 5000}).encode()


def test_holds_no_tensor():
    with pytest.raises((TypeError, msgspec.ValidationError)):
        handle([1], extra_info={"tensor": torch.zeros(1)}).encode()


def rows_agree(meta: KVBatchMeta) -> None:
    """Check that lengths and placements still belong to their keys."""
    for i, key in enumerate(meta.keys):
        assert meta.lengths["K"][i] == named_by(key)
        for field in meta.fields:
            placement = meta.placement(field)
            assert placement.rows[placement.row[i]] == f"{key[:8]}.0"
            assert placement.position[i] == int(key[-3:])
    for placement in meta.placements:
        assert set(placement.row) == set(range(len(placement.rows)))


@given(lengths_lists, st.data())
def test_reorder_slice_chunk_and_concat_carry_everything(lengths, data):
    whole = handle(lengths)
    order = data.draw(st.permutations(range(len(lengths))))
    shuffled = whole.reorder(order)
    rows_agree(shuffled)
    assert shuffled.sequence_lengths == tuple(lengths[i] for i in order)
    start, stop = sorted((data.draw(st.integers(0, len(lengths))), data.draw(st.integers(0, len(lengths)))))
    assert shuffled.slice(start, stop).keys == shuffled.keys[start:stop]
    parts = shuffled.chunk(data.draw(st.integers(1, 9)))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    back = KVBatchMeta.concat(parts)
    rows_agree(back)
    assert (back.keys, back.lengths) == (shuffled.keys, shuffled.lengths)
    restored = back.reorder([order.index(i) for i in range(len(lengths))])
    assert (restored.keys, restored.lengths) == (whole.keys, whole.lengths)
    assert [restored.placement("ids").offsets["T"]] == [whole.placement("ids").offsets["T"]]


@given(lengths_lists, st.data())
def test_join_keeps_each_fields_own_place(lengths, data):
    left = handle(lengths).select("ids")
    cut = data.draw(st.integers(0, len(lengths) - 1))
    parts = [lay_out(keys, 1, {}).placement for keys in (left.keys[:cut], left.keys[cut:]) if keys]
    right = KVBatchMeta(
        keys=left.keys, partition_id="p", fields=("reward",), placements=(Placement.chain(parts),),
        placement_of={"reward": 0}, attempt=1,
    )  # fmt: skip
    joined = KVBatchMeta.join([left, right])
    assert joined.fields == ("ids", "reward") and joined.sequence_lengths == tuple(lengths)
    assert joined.placement("ids") == left.placement("ids")
    assert joined.placement("reward") == right.placement("reward")
    assert joined.attempt == 1
    only = KVBatchMeta.join([left, right], fields=("reward",))
    assert only.fields == ("reward",) and len(only.placements) == 1


def scored(of: KVBatchMeta, attempt: int, lengths: dict[str, tuple[int, ...]]) -> KVBatchMeta:
    """Return the handle of a second put for the keys of `of`."""
    return KVBatchMeta(
        keys=of.keys, partition_id="p", fields=("reward",), lengths=lengths,
        placements=(lay_out(of.keys, attempt, lengths).placement,), placement_of={"reward": 0}, attempt=attempt,
    )  # fmt: skip


def test_concat_keeps_fields_that_lie_in_different_rows_apart():
    def joined(first):
        ids = handle([3, 2], first=first).select("ids")
        return KVBatchMeta.join([ids, scored(ids, 1, {})])

    both = KVBatchMeta.concat([joined(0), joined(5)])
    assert len(both.placements) == 2 and both.placement_of == {"ids": 0, "reward": 1}
    assert both.placement("reward").rows == ("00000000.1", "00000005.1")
    rows_agree(both.select("ids"))


def test_stages_that_put_the_same_groups_share_a_placement():
    ids = handle([3, 2, 4]).select("ids")
    both = KVBatchMeta.join([ids, scored(ids, 0, {"P": (7, 1, 1)})])
    assert both.placement_of == {"ids": 0, "reward": 0} and len(both.placements) == 1
    assert both.placements[0].offsets == {"T": ids.placement("ids").offsets["T"], "P": (0, 7, 0)}
    rows_agree(both)
    with pytest.raises(ValueError, match="key 00000000_g000 has the lengths 1 and 3 in dimension T"):
        KVBatchMeta.join([scored(ids, 0, {"T": (1, 2, 4)}), ids])


def test_concat_takes_handles_with_shared_and_with_own_placements():
    first, second = handle([3, 2]).select("ids"), handle([1, 4], first=5).select("ids")
    shared = KVBatchMeta.join([first, scored(first, 0, {})])
    own = KVBatchMeta.join([second, scored(second, 1, {})])
    for parts in ([shared, own], [own, shared]):
        both = KVBatchMeta.concat(parts)
        assert both.placement("ids").offsets["T"] == tuple(o for p in parts for o in p.placement("ids").offsets["T"])
        assert set(both.placement("reward").rows) == {"00000000.0", "00000005.1"}


@settings(max_examples=few(40))
@given(st.integers(1, 8), st.permutations(range(8)))
def test_a_handle_of_many_puts_is_no_larger_than_that_of_one(size, order):
    """For any number of puts in any order."""
    lengths = [3, 1, 4, 1, 5, 9, 2, 6]
    whole = KVBatchMeta.join([one := handle(lengths, 1), scored(one, 0, {})])
    parts = [whole.reorder(sorted(order[i : i + size])) for i in range(0, 8, size)]
    together = KVBatchMeta.concat(parts)
    at = {key: i for i, key in enumerate(together.keys)}
    restored = together.reorder([at[key] for key in whole.keys])
    assert restored == whole and len(restored.encode()) == len(whole.encode())


def test_refuses_what_does_not_belong_together():
    with pytest.raises(ValueError, match="partitions"):
        KVBatchMeta.concat([handle([1]), handle([1], partition="q", first=1)])
    with pytest.raises(ValueError, match="different fields"):
        KVBatchMeta.concat([handle([1]), handle([1], first=1).select("ids")])
    with pytest.raises(ValueError, match="not distinct"):
        KVBatchMeta.concat([handle([1]), handle([1])])
    with pytest.raises(ValueError, match="same keys"):
        KVBatchMeta.join([handle([1, 2]), handle([1, 2]).reorder([1, 0])])
    with pytest.raises(KeyError, match="handle has ids, reward; asked for gone"):
        handle([1]).select("gone")


@settings(max_examples=few(40))
@given(lengths_lists)
def test_extra_info_is_never_shared(lengths):
    before = handle(lengths, extra_info={"a": 1})
    made = [
        before.select("ids"), before.reorder(range(len(lengths))), before.slice(0, 1), *before.chunk(2),
        KVBatchMeta.concat([before]), KVBatchMeta.join([before]), KVBatchMeta.decode(before.encode()),
    ]  # fmt: skip
    for other in made:
        other.extra_info["b"] = 2
        assert before.extra_info == {"a": 1}
    first, second = (KVBatchMeta(keys=(), partition_id="p", fields=()) for _ in range(2))
    first.extra_info["b"] = 2
    assert second.extra_info == {}
