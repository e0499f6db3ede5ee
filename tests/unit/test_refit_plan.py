"""The refit plan: each destination byte is written once, from any rank that holds it; replicas send equal amounts."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.refit.layout import Layout, Place, Tensor, dense, intersection, size, whole, without
from ops.refit.plan import SEGMENT_BYTES, RefitPlan, build, pieces
from tests.examples import few
from tests.unit.refit_layouts import POISON, buffers, filled, sides


def carry_out(plan: RefitPlan, given: list[dict[str, np.ndarray]], taken: list[dict[str, np.ndarray]]) -> None:
    for receiver in range(len(taken)):
        for copy in plan.copies(receiver):
            assert copy.destination == receiver
            here, there = given[copy.source][copy.source_buffer], taken[receiver][copy.destination_buffer]
            for row in range(copy.rows):
                a = copy.source_offset + row * copy.source_stride
                b = copy.destination_offset + row * copy.destination_stride
                assert a + copy.run <= len(here) and b + copy.run <= len(there)
                assert (there[b : b + copy.run] == POISON).all()  # no byte is written twice
                there[b : b + copy.run] = here[a : a + copy.run]


@given(sides(), st.sampled_from([1, 16, 64, SEGMENT_BYTES]))
@settings(max_examples=few(300), deadline=None)
def test_the_destination_has_every_byte_and_no_other(pair: tuple[Layout, Layout], segment: int) -> None:
    source, destination = pair
    given_, taken = filled(source), buffers(destination)
    plan = build(source, destination, segment_bytes=segment)
    carry_out(plan, given_, taken)
    for rank, memory in enumerate(filled(destination)):
        for name, wanted in memory.items():
            assert (taken[rank][name] == wanted).all()
    moved = [copy for receiver in range(len(taken)) for copy in plan.copies(receiver)]
    for ranks, counted in ((plan.sent, "source"), (plan.received, "destination")):
        found = Counter()
        for copy in moved:
            found[getattr(copy, counted)] += copy.size
        assert ranks.tolist() == [found[rank] for rank in range(len(ranks))]
    assert plan.digest == build(source, destination, segment_bytes=segment).digest


@given(st.integers(1, 6), st.integers(1, 5), st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_replicas_send_alike_up_to_a_segment(senders: int, receivers: int, rows: list[int]) -> None:
    tensors = {str(i): Tensor((count, 4), "float32") for i, count in enumerate(rows)}
    all_of = [dense(name, whole(t.shape), 4, name) for name, t in tensors.items()]
    segment = 256
    plan = build(Layout(tensors, [all_of] * senders), Layout(tensors, [all_of] * receivers), segment_bytes=segment)
    assert plan.sent.sum() == plan.received.sum() == receivers * 16 * sum(rows)
    assert plan.sent.max() - plan.sent.min() <= segment


def test_a_rank_that_alone_has_a_tensor_sends_less_of_the_others() -> None:
    tensors = {"own": Tensor((16,), "float32"), "both": Tensor((64,), "float32")}
    own, both = (dense(name, whole(tensor.shape), 4, name) for name, tensor in tensors.items())
    plan = build(Layout(tensors, [[own, both], [both]]), Layout(tensors, [[own, both]] * 3), segment_bytes=64)
    assert plan.sent.sum() == 3 * (64 + 256) and plan.sent.max() - plan.sent.min() <= 64  # a segment


def test_a_digest_tells_plans_apart() -> None:
    tensors = {"w": Tensor((8, 4), "bfloat16")}
    halves = Layout(tensors, [[dense("w", ((0, 4), (0, 4)), 2, "w")], [dense("w", ((4, 8), (0, 4)), 2, "w")]])
    one = Layout(tensors, [[dense("w", whole((8, 4)), 2, "w")]])
    elsewhere = Layout(tensors, [[dense("w", whole((8, 4)), 2, "w", offset=2)]])
    digests = {build(*pair).digest for pair in ((halves, one), (one, halves), (halves, elsewhere), (one, one))}
    assert len(digests) == 4


def test_rows_that_lie_together_are_one_run() -> None:
    tensors = {"w": Tensor((3, 8, 4), "bfloat16")}
    one = Layout(tensors, [[dense("w", whole((3, 8, 4)), 2, "w")]])
    assert [(c.rows, c.run) for c in build(one, one).copies(0)] == [(1, 192)]
    middle = Layout(tensors, [[dense("w", ((0, 3), (2, 6), (0, 4)), 2, "w")]])
    assert [(c.rows, c.run, c.source_stride, c.destination_stride) for c in build(one, middle).copies(0)] == [
        (3, 32, 64, 32)
    ]


T = {"w": Tensor((4, 4), "bfloat16")}
WHOLE = Layout(T, [[dense("w", whole((4, 4)), 2, "w")]])


@pytest.mark.parametrize(
    ("source", "destination", "text"),
    [
        (Layout({}, [[]]), WHOLE, "the destination needs 'w', which the source does not have"),
        (
            Layout({"w": Tensor((4, 4), "float32")}, [[]]), WHOLE,
            "'w' is float32 [4, 4] at the source and bfloat16 [4, 4] at the destination: bytes are copied as they are, "
            "never cast",
        ),
        (
            Layout(T, [[dense("w", ((0, 4), (0, 3)), 2, "w")]]), WHOLE,
            "no rank of the source holds [(0, 4), (3, 4)] of 'w'",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_moved_is_refused_by_name(source: Layout, destination: Layout, text: str) -> None:
    with pytest.raises(ValueError) as refused:
        build(source, destination)
    assert str(refused.value) == text


def test_places_on_the_same_bytes_are_refused() -> None:
    side_by_side = [Place("w", ((0, 4), (2 * i, 2 * i + 2)), "w", 4 * i, (8, 2)) for i in range(2)]
    assert build(WHOLE, Layout(T, [side_by_side])).received[0] == 32
    build(WHOLE, Layout(T, [side_by_side])).copies(0)
    left, right = dense("w", ((0, 4), (0, 2)), 2, "w"), dense("w", ((0, 4), (2, 4)), 2, "w", offset=14)
    with pytest.raises(ValueError, match="rank 0 holds 'w' and 'w' on byte 14 of 'w'"):
        build(WHOLE, Layout(T, [[left, right]])).copies(0)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (dense("v", ((0, 4), (0, 4)), 2, "v"), "rank 0 holds 'v', which is no tensor of the model"),
        (dense("w", ((0, 4),), 2, "w"), "rank 0 holds 'w' of shape [4, 4] as box [(0, 4)], strides (2,)"),
        (dense("w", ((0, 5), (0, 4)), 2, "w"), "of shape [4, 4] as box [(0, 5), (0, 4)], which is not within it"),
        (dense("w", ((2, 2), (0, 4)), 2, "w"), "of shape [4, 4] as box [(2, 2), (0, 4)], which is not within it"),
        (Place("w", ((0, 4), (0, 4)), "w", 0, (8, -2)), "at offset 0 with strides (8, -2): bytes count forwards"),
        (Place("w", ((0, 4), (0, 4)), "w", 0, (6, 2)), "with strides (6, 2): its elements overlap"),
    ],
)
def test_places_that_cannot_be_are_refused(place: Place, text: str) -> None:
    with pytest.raises(ValueError) as refused:
        Layout(T, [[place]])
    assert text in str(refused.value)


@given(st.data())
def test_a_box_and_what_is_cut_out_of_it(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    box = whole(shape)
    hole = tuple(
        tuple(sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True)))) for n in shape
    )
    rest = without(box, hole)
    seen = np.zeros(shape, int)
    for part in [hole, *rest]:
        seen[tuple(slice(*pair) for pair in part)] += 1
    assert (seen == 1).all() and size(hole) + sum(map(size, rest)) == size(box)
    assert all(intersection(part, hole) is None for part in rest)
    limit = data.draw(st.integers(1, 40))
    cuts = pieces(box, limit)
    assert sum(map(size, cuts)) == size(box) and max(map(size, cuts)) <= limit


def test_a_plan_of_many_experts_is_even() -> None:
    tensors = {f"l{layer}": Tensor((128, 768, 2048), "bfloat16") for layer in range(48)}
    experts = [[dense(n, ((32 * r, 32 * r + 32), (0, 768), (0, 2048)), 2, n) for n in tensors] for r in range(4)]
    shares = [[dense(n, ((0, 128), (192 * r, 192 * r + 192), (0, 2048)), 2, n) for n in tensors] for r in range(4)]
    plan = build(Layout(tensors, experts), Layout(tensors, shares))
    assert sum(copy.size for copy in plan.copies(0)) == plan.received[0] == 48 * 128 * 192 * 2048 * 2
    assert len(set(plan.sent.tolist())) == 1
