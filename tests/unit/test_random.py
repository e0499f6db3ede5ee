"""Random numbers follow Philox4x32-10, and each value depends on its own counter only."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.random import permutation, philox4x32, shuffled, uniform
from tests.examples import few

# Random123 1.14.0, tests/kat_vectors, lines "philox4x32 10": counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(line):
    return [int(word, 16) for word in line.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter, key, result):
    blocks = [np.full(3, word, dtype=np.uint64) for word in words(counter)]
    out = philox4x32(blocks, tuple(words(key)))
    assert [int(word[1]) for word in out] == words(result)


def test_uniform_takes_two_numbers_from_each_block():
    seed, stream, admission, index = 0x299F31D0A4093822, 0x03707344, 0x13198A2E, 0x85A308D3
    start = 2 * 0x243F6A88
    w0, w1, w2, w3 = words(KNOWN[2][2])
    expected = [(((high << 32 | low) >> 12) + 0.5) / 2**52 for low, high in ((w0, w1), (w2, w3))]
    assert uniform(seed, stream, [admission], [index], 2, start).tolist() == [expected]


@settings(max_examples=few(50), deadline=None, derandomize=True, database=None)
@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 998)), min_size=1, max_size=5),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_a_value_does_not_depend_on_its_neighbours(seed, stream, samples, tokens, start):
    admission, index = [list(column) for column in zip(*samples)]
    together = uniform(seed, stream, admission, index, tokens, start)
    assert together.shape == (len(samples), tokens)
    whole = uniform(seed, stream, admission, index, start + tokens)
    assert np.array_equal(together, whole[:, start:])
    for i, (a, g) in enumerate(samples):
        assert np.array_equal(uniform(seed, stream, [a], [g], tokens, start), together[i : i + 1])
    starts = [start + 3 * i for i in range(len(samples))]
    apart = uniform(seed, stream, admission, index, tokens, starts)
    whole = uniform(seed, stream, admission, index, starts[-1] + tokens)
    assert np.array_equal(apart, np.stack([row[at : at + tokens] for row, at in zip(whole, starts)]))


def test_each_sample_has_one_start_or_all_have_the_same():
    with pytest.raises(ValueError, match="start has 2 entries, and there are 3 samples"):
        uniform(0, 0, [0, 1, 2], [0, 0, 0], 4, [0, 1])


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"seed": 2**32}, {"stream": 1}, {"admission_N": [1]}, {"index_N": [1]}]
)
def test_every_part_of_the_counter_matters(change):
    base = {"seed": 0, "stream": 0, "admission_N": [0], "index_N": [0], "tokens": 64}
    assert not np.isin(uniform(**{**base, **change}), uniform(**base)).any()


def test_values_are_uniform_and_independent():
    values = uniform(3, 1, np.arange(200), np.zeros(200, dtype=int), 500)
    assert 0 < values.min() < 1e-4
    assert 1 - 1e-4 < values.max() < 1
    assert values.mean() == pytest.approx(0.5, abs=0.005)
    assert values.var() == pytest.approx(1 / 12, abs=0.002)
    counts, _ = np.histogram(values, bins=50, range=(0, 1))
    assert ((counts - 2000) ** 2 / 2000).sum() < 100  # chi-squared, 49 degrees of freedom: 99.9 % quantile is 86
    for left, right in ((values[:, :-1], values[:, 1:]), (values[:-1], values[1:])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 0.015


@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_the_ends_are_never_reached(monkeypatch, word):
    monkeypatch.setattr("ops.random.philox4x32", lambda counter, key: [np.full((1, 1), word, dtype=np.uint64)] * 4)
    (values,) = uniform(0, 0, [0], [0], 2)
    assert ((values > 0) & (values < 1)).all()


def test_permutation_is_one_and_is_fixed():
    assert sorted(permutation(0, 0, 1000)) == list(range(1000))
    assert permutation(0, 0, 10).tolist() == [0, 6, 8, 7, 2, 9, 1, 4, 5, 3]
    assert permutation(0, 0, 0).tolist() == []
    assert permutation(5, 2, 1).tolist() == [0]
    orders = {tuple(permutation(seed, stream, 50)) for seed in range(4) for stream in range(4)}
    assert len(orders) == 16


def test_permutation_has_no_favourite_place():
    first = np.array([permutation(seed, 0, 4)[0] for seed in range(2000)])
    assert np.bincount(first, minlength=4) == pytest.approx(np.full(4, 500), abs=90)


def test_shuffled_has_each_item_once_an_epoch_and_another_order_each():
    epochs = [[shuffled(7, epoch * 20 + i, 20) for i in range(20)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0, [0], [0], 1), "seed -1"),
        ((2**64, 0, [0], [0], 1), "seed"),
        ((0, 2**32, [0], [0], 1), "stream"),
        ((0, 0, [-1], [0], 1), "admission_N"),
        ((0, 0, [2**32], [0], 1), "admission_N"),
        ((0, 0, [0], [2**32 - 1], 1), "index_N"),
        ((0, 0, [0.5], [0], 1), "admission_N holds float64"),
        ((0, 0, [0, 1], [0], 1), "2 entries and index_N 1"),
        ((0, 0, [0], [0], -1), "tokens"),
        ((0, 0, [0], [0], 1, -1), "tokens"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        uniform(*arguments)
