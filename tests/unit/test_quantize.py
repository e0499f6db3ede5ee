"""Blocks of 8-bit floats against a plain float64 version."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ops.quantize import BLOCK, dequantized, largest, quantize, quantized, relative_error, scales

FLOATS = np.array(sorted(torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()))


def nearest(size: float) -> float:
    """Return the 8-bit float nearest to a size; of two, the one with the even last bit."""
    after = int(np.searchsorted(FLOATS, size))
    if after == len(FLOATS):
        return float(FLOATS[-1])
    if after == 0 or FLOATS[after] == size:
        return float(FLOATS[after])
    below, above = FLOATS[after - 1], FLOATS[after]
    apart = (size - below) - (above - size)
    return float(below if apart < 0 or (apart == 0 and (after - 1) % 2 == 0) else above)


def plainly(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what the 8-bit floats of a float64 matrix stand for, and the scales, element by element."""
    rows, columns = matrix.shape
    exact = np.zeros((-(-rows // BLOCK), -(-columns // BLOCK)))
    made = np.zeros_like(matrix)
    for i, j in np.ndindex(exact.shape):
        block = np.s_[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
        top = max(1e-4, np.abs(matrix[block]).max())
        exact[i, j] = 2.0 ** math.ceil(math.log2(top / 464))
        rounded = [nearest(abs(x) / exact[i, j]) * exact[i, j] * np.sign(x) for x in matrix[block].flat]
        made[block] = np.reshape(rounded, matrix[block].shape)
    return made, exact


def matrix_of(seed: int, rows: int, columns: int) -> torch.Tensor:
    """Return a bfloat16 matrix whose blocks have very different sizes."""
    random = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-12, 12, (-(-rows // 64), -(-columns // 64)), generator=random).float())
    spread = spread.repeat_interleave(64, 0).repeat_interleave(64, 1)[:rows, :columns]
    return (torch.randn(rows, columns, generator=random) * spread).bfloat16()


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (130, 1), (7, 257)])
def test_it_is_what_the_plain_version_gives(rows: int, columns: int) -> None:
    matrix = matrix_of(rows, rows, columns)
    weight, scale = quantized(matrix)
    made, exact = plainly(matrix.double().numpy())
    assert weight.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    assert np.array_equal(scale.numpy(), exact)
    assert np.array_equal(dequantized(weight, scale).double().numpy(), made)
    sums = quantize(matrix, scale, torch.empty_like(weight))
    error = np.linalg.norm(made - matrix.double().numpy()) / np.linalg.norm(matrix.double().numpy())
    assert relative_error(sums) == pytest.approx(error, rel=1e-6) and 0.01 < error < 0.04


@given(st.integers(1, 300), st.integers(1, 300), st.lists(st.integers(0, 300), max_size=3), st.integers(0, 9))
def test_slices_give_the_blocks_of_the_whole_matrix(rows: int, columns: int, cuts: list[int], seed: int) -> None:
    """Wherever slices end, alone or with experts before them."""
    matrix = matrix_of(seed, rows, columns)
    whole, expected = quantized(matrix)
    tops = torch.zeros_like(expected)
    slices = [
        (first, last, left, right)
        for first, last in pairwise(sorted({0, rows, *(cut % rows for cut in cuts)}))
        for left, right in pairwise(sorted({0, columns, *(cut % columns for cut in cuts)}))
    ]
    for first, last, left, right in slices:
        own = tops[first // BLOCK : -(-last // BLOCK), left // BLOCK : -(-right // BLOCK)]
        torch.maximum(own, largest(matrix[first:last, left:right], (first, left)), out=own)
    made = scales(tops)
    assert torch.equal(made, expected)
    for first, last, left, right in slices:
        own = made[first // BLOCK : -(-last // BLOCK), left // BLOCK : -(-right // BLOCK)]
        part = torch.empty(2, last - first, right - left, dtype=whole.dtype)
        quantize(matrix[first:last, left:right].expand_as(part), own.expand(2, *own.shape), part, (first, left))
        for expert in part:
            assert torch.equal(expert.view(torch.uint8), whole[first:last, left:right].view(torch.uint8))


@given(st.floats(min_value=1e-30, max_value=1e30))
def test_what_vllm_does_for_deepgemm_changes_no_bit(top: float) -> None:
    """It quantizes the dequantized weights again, with the power of two at or above the largest element over 448."""
    matrix = torch.linspace(-top, top, 257)[None]
    weight, scale = quantized(matrix)
    again = dequantized(weight, scale)
    ceiling = torch.exp2(torch.ceil(torch.log2(largest(again).clamp(1e-4) / 448)))
    assert torch.equal(ceiling, scale)
    assert torch.equal((again / ceiling.repeat_interleave(128, 1)[:, :257]).to(weight.dtype).float(), weight.float())


def test_a_block_with_an_element_that_is_not_finite_is_not_a_number_and_others_are_untouched() -> None:
    for wrong in (torch.nan, torch.inf, -torch.inf):
        matrix = torch.ones(128, 256)
        matrix[3, 5] = wrong
        made = dequantized(*quantized(matrix))
        assert made[:, :128].isnan().all() and made[:, 128:].eq(1.0).all()


@pytest.mark.parametrize("size", [128, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_matrix_stays_as_it_is(size: int, dtype: torch.dtype) -> None:
    matrix = matrix_of(0, size, size).to(dtype)
    before = matrix.clone()
    quantized(matrix)
    assert torch.equal(matrix, before)


def test_zeros_stay_zeros() -> None:
    weight, scale = quantized(torch.zeros(3, 4))
    assert weight.float().eq(0).all() and scale.item() == 2.0**-22
    assert relative_error(quantize(torch.zeros(3, 4), scale, weight)) == 0.0
