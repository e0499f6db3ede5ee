"""Scales from bounds: powers of two, no number above 448, and as precise as scales that fit, against float64."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ops.cache_scale import MARGIN, head_bound, power_of_two, rotated, row_bound

E4M3 = torch.float8_e4m3fn


@given(st.floats(1e-30, 1e30))
def test_a_scale_is_the_smallest_power_of_two_that_fits(bound: float) -> None:
    scale = power_of_two(bound)
    assert math.frexp(scale)[0] == 0.5
    most = Fraction(bound) * Fraction(MARGIN) / 448
    assert most * (1 - Fraction(2) ** -50) <= Fraction(scale) < 2 * most * (1 + Fraction(2) ** -50)


def test_where_there_is_nothing_to_scale_it_is_one() -> None:
    assert [power_of_two(bound) for bound in (0.0, math.inf, math.nan)] == [1.0, 1.0, 1.0]
    assert [power_of_two(448 / MARGIN * factor) for factor in (0.5, 1.0, 1.01, 2.0)] == [0.5, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_projection_of_a_normalized_input_is_within_its_bound_and_can_reach_it(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 80, generator=random).to(dtype)
    gain = (torch.randn(80, generator=random) * 3).to(dtype)
    bias = (torch.randn(96, generator=random) * 9).to(dtype)
    bound = float(row_bound(weight, gain, bias))
    each = (weight.double() * gain.double()).norm(dim=1) * math.sqrt(80) + bias.double().abs()
    assert bound == pytest.approx(float(each.max()), rel=1e-12)
    row = int(each.argmax())
    worst = weight[row].double() * gain.double() * (1 if bias[row] > 0 else -1)
    unit = worst / worst.square().mean().sqrt()
    made = weight.double() @ (gain.double() * unit) + bias.double()
    assert float(made.abs().max()) == pytest.approx(bound, rel=1e-12), "for the input that points where the row does"
    head = gain.double() * unit
    assert head.norm() <= head_bound(gain)
    assert float(head_bound(torch.tensor([1.0, -2.0, 0.5, 0.0]))) == 4.0
    assert float(rotated(torch.tensor(1.0, dtype=torch.float64))) == math.sqrt(2), "(1, 1) turned by 45 degrees"


def test_large_matrices_are_bounded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(33, 7, generator=torch.Generator().manual_seed(1))
    whole = row_bound(weight, torch.ones(7), torch.arange(33.0))
    monkeypatch.setattr("ops.cache_scale._CHUNK", 20)
    assert row_bound(weight, torch.ones(7), torch.arange(33.0)) == whole


def rounded(values: torch.Tensor, scale: float) -> torch.Tensor:
    """Return float64 numbers as a cache keeps them: 8-bit floats times a scale, saturating."""
    return (values / scale).clamp(-448, 448).to(E4M3).double() * scale


def attended(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return (queries @ keys.mT / math.sqrt(queries.shape[-1])).softmax(-1) @ values


def test_a_loose_bound_costs_no_precision_and_a_tight_one_that_saturates_does() -> None:
    """Attention in float64 over 8-bit keys and values, whose scales come from bounds that are 2^n too large: the error
    is that of scales which just fit up to 2^10, well above what sqrt(4096) and a few large rows make of a bound."""
    random = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(256, 64, generator=random).double() for _ in range(3))
    exact, top = attended(queries, keys, values), float(torch.stack([keys, values]).abs().max())

    def error(factor: float) -> float:
        scale = power_of_two(top * factor)
        made = attended(queries, rounded(keys, scale), rounded(values, scale))
        return float((made - exact).norm() / exact.norm())

    errors = {power: error(2.0**power) for power in (-4, -2, 0, 2, 4, 6, 8, 10, 16)}
    print({power: f"{100 * value:.2f} %" for power, value in errors.items()})
    assert 0.01 < errors[0] < 0.06
    assert all(errors[power] == pytest.approx(errors[0], rel=0.02) for power in (2, 4, 6, 8, 10))
    assert errors[-2] > 4 * errors[0] and errors[-4] > 10 * errors[0], "saturated"
    assert errors[16] > 3 * errors[0], "subnormal"


def test_numbers_up_to_2_13_below_the_bound_are_rounded_as_any_others() -> None:
    """A power of two moves the exponents of 8-bit floats. A smaller number has an error of 2^-10 of the scale."""
    random = torch.Generator().manual_seed(0)
    bound, values = 7.3, torch.rand(4096, generator=random).double() + 1.0
    scale = power_of_two(bound)
    for power in range(2, 13):
        own = values * bound * 2.0 ** -(power + 1)
        assert torch.equal(rounded(own, scale), rounded(own, power_of_two(float(own.max()))))
        assert ((rounded(own, scale) - own).abs() <= own / 16).all()
    small = values * bound * 2.0**-17
    assert ((rounded(small, scale) - small).abs() <= scale * 2.0**-10).all() and scale <= bound * 2.0**-7.6
