"""The objective of a microbatch: shares add up, and every parameter of a description affects its formula."""

from dataclasses import dataclass, replace

import pytest
import torch

from ops.correction import decoupled, icepop, sequence_mask, truncated_is
from ops.kl import kl_estimate
from ops.loss import aggregate, cispo_loss, clipped_policy_loss
from pipeline import StageError
from stages import CispoLoss, ClippedLoss, Correction, Decoupled, IcePop, PolicyLoss, SequenceMask, TruncatedIS
from stages.backends.objective import MAXIMA, Scored, objective

torch.set_num_threads(1)
N, T = 18, 5
LENGTHS = torch.tensor([5, 1, 3, 2, 5, 4] * 3)
TOKENS = int(LENGTHS.sum())
COLUMNS = ("logprobs_NT", "old_logprobs_NT", "rollout_logprobs_NT", "ref_logprobs_NT", "entropy_NT")
EVERYTHING = ClippedLoss(
    clip=(0.2, 0.28),
    dual_clip=1.5,
    kl=0.3,
    kl_estimator="k2",
    aggregation="sequence",
    correction=TruncatedIS(cap=1.2),
    entropy=0.05,
)


def scored(fill: float = float("nan"), drift: float = 0.4) -> Scored:
    """Return ragged rows with `fill` beyond the mask; all in float64."""
    random = torch.Generator().manual_seed(0)
    base = -1 - 2 * torch.rand(N, T, generator=random, dtype=torch.float64)
    mask = torch.arange(T) < LENGTHS[:, None]

    def column(spread: float) -> torch.Tensor:
        noise = torch.randn(N, T, generator=random, dtype=torch.float64) * spread
        return (base + noise).masked_fill(~mask, fill)

    advantage = torch.randn(N, generator=random, dtype=torch.float64)
    columns = {name: column(drift) for name in COLUMNS}
    columns["entropy_NT"] = -columns["entropy_NT"]
    for name in ("logprobs_NT", "entropy_NT"):
        columns[name].requires_grad_()
    return Scored(advantage=advantage, mask_NT=mask, **columns)


def rows(given: Scored, part: slice) -> Scored:
    names = (*COLUMNS, "advantage", "mask_NT")
    return Scored(**{name: getattr(given, name)[part] for name in names})


def run(loss, given):
    for name in ("logprobs_NT", "entropy_NT"):
        getattr(given, name).grad = None
    value, sums = objective(loss, given, tokens=TOKENS, samples=N)
    value.backward()
    return value.item(), sums, given.logprobs_NT.grad


LOSSES = [
    ClippedLoss(),
    EVERYTHING,
    ClippedLoss(aggregation="sequence_sum", correction=IcePop(low=0.7, high=1.4)),
    ClippedLoss(aggregation="fixed_length", max_tokens=9, correction=SequenceMask(low=0.9, high=1.2)),
    ClippedLoss(ratio="sequence", clip=(0.01, 0.02), aggregation="sequence", correction=Decoupled()),
    CispoLoss(clip=(0.3, 0.2), kl=0.1, kl_estimator="k1", kl_importance=True),
]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("cut", [1, 5])
def test_shares_of_microbatches_add_up(loss, cut):
    given = scored()
    value, sums, gradient = run(loss, given)
    for name in ("logprobs_NT", "entropy_NT"):
        getattr(given, name).grad = None
    shares = []
    for start in range(0, N, cut):
        part, found = objective(loss, rows(given, slice(start, start + cut)), tokens=TOKENS, samples=N)
        part.backward()
        shares.append(found)
    for name, whole in sums.items():
        total = max(one[name] for one in shares) if name in MAXIMA else sum(one[name] for one in shares)
        assert total == pytest.approx(whole, rel=1e-12, abs=1e-14), name
    torch.testing.assert_close(given.logprobs_NT.grad, gradient, rtol=1e-12, atol=1e-15)
    assert sums["loss"] == value != 0.0


@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_masked_reaches_nothing(loss):
    value, sums, gradient = run(loss, scored())
    other_value, other_sums, other_gradient = run(loss, scored(fill=0.0))
    assert (value, sums) == (other_value, other_sums)
    assert torch.equal(gradient, other_gradient)
    assert gradient.isfinite().all()
    assert not gradient[~scored().mask_NT].any()


@dataclass(frozen=True, kw_only=True)
class StraightThrough(PolicyLoss):
    """Sums differences of 0 over padding too: only their gradient reaches it."""

    def policy_loss(self, scored, weight_NT):
        zero_NT = scored.logprobs_NT - scored.logprobs_NT.detach()
        return -weight_NT * scored.advantage_N[:, None] * zero_NT.sum(1, keepdim=True).exp()


@dataclass(frozen=True, kw_only=True)
class DividesByTheMask(PolicyLoss):
    """Is infinite at padding, and so is its gradient there."""

    def policy_loss(self, scored, weight_NT):
        return -weight_NT * scored.logprobs_NT / scored.mask_NT


@pytest.mark.parametrize("loss", [StraightThrough(), DividesByTheMask()], ids=lambda loss: type(loss).__name__)
def test_the_gradient_of_a_formula_does_not_reach_padding(loss):
    given = scored(fill=-1.0)
    _, _, gradient = run(loss, given)
    assert gradient.isfinite().all() and gradient[given.mask_NT].any()
    assert not gradient[~given.mask_NT].any()


def test_the_loss_is_its_parts_put_together():
    given = scored()
    mask, adv = given.mask_NT, given.advantage_N
    weight, changed = truncated_is(given.old_logprobs_NT, given.rollout_logprobs_NT, mask, 1.2)
    policy, clipped = clipped_policy_loss(
        given.logprobs_NT, given.old_logprobs_NT, adv, mask, 0.2, 0.28, dual_clip=1.5, weight_NT=weight
    )
    kl = kl_estimate(given.logprobs_NT, given.ref_logprobs_NT, mask, "k2")
    expected = aggregate(policy + 0.3 * kl - 0.05 * given.entropy_NT, mask, "sequence", N)
    (gradient,) = torch.autograd.grad(expected, given.logprobs_NT)
    value, sums, found = run(EVERYTHING, given)
    assert value == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-15)
    assert given.entropy_NT.grad[1, 0] == pytest.approx(-0.05 / N)
    ratio = (given.logprobs_NT - given.old_logprobs_NT)[mask].exp()
    assert sums == pytest.approx(
        {
            "loss": expected.item(),
            "clip_fraction": clipped.sum().item(),
            "clip_high": clipped[mask][ratio > 1].sum().item(),
            "ratio_mean": ratio.sum().item(),
            "ratio_max": ratio.max().item(),
            "kl": kl.sum().item(),
            "entropy": given.entropy_NT[mask].sum().item(),
            "is_weight": weight[mask].sum().item(),
            "is_changed": changed.sum().item(),
        }
    )
    assert 0 < sums["is_changed"] < TOKENS
    assert 0 < sums["clip_high"] < sums["clip_fraction"] < TOKENS


CISPO = CispoLoss(clip=(0.3, 0.2))
SEQUENCE = replace(EVERYTHING, ratio="sequence")


@pytest.mark.parametrize(
    ("loss", "other"),
    [
        (EVERYTHING, {"clip": (0.1, 0.28)}),
        (EVERYTHING, {"clip": (0.2, 0.1)}),
        (EVERYTHING, {"dual_clip": None}),
        (EVERYTHING, {"dual_clip": 1.7}),
        (EVERYTHING, {"ratio": "sequence"}),
        (SEQUENCE, {"clip": (0.01, 0.01)}),
        (SEQUENCE, {"dual_clip": 1.01}),
        (EVERYTHING, {"kl": 0.4}),
        (EVERYTHING, {"kl": 0.0}),
        (EVERYTHING, {"kl_estimator": "k1"}),
        (EVERYTHING, {"kl_estimator": "k3"}),
        (EVERYTHING, {"kl_importance": True}),
        (EVERYTHING, {"aggregation": "token"}),
        (EVERYTHING, {"aggregation": "sequence_sum"}),
        (EVERYTHING, {"entropy": 0.1}),
        (EVERYTHING, {"correction": None}),
        (EVERYTHING, {"correction": TruncatedIS(cap=1.1)}),
        (EVERYTHING, {"correction": TruncatedIS(cap=1.2, level="sequence")}),
        (EVERYTHING, {"correction": IcePop(low=0.5, high=1.2)}),
        (EVERYTHING, {"correction": SequenceMask(low=0.5, high=1.2)}),
        (EVERYTHING, {"correction": Decoupled()}),
        (replace(EVERYTHING, correction=IcePop(low=0.8, high=1.2)), {"correction": IcePop(low=0.5, high=1.2)}),
        (replace(EVERYTHING, correction=IcePop(low=0.8, high=1.2)), {"correction": IcePop(low=0.8, high=1.5)}),
        (
            replace(EVERYTHING, correction=IcePop(low=0.8, high=1.2)),
            {"correction": IcePop(low=0.8, high=1.2, level="sequence")},
        ),
        (
            replace(EVERYTHING, correction=SequenceMask(low=0.9, high=1.1)),
            {"correction": SequenceMask(low=0.5, high=1.1)},
        ),
        (
            replace(EVERYTHING, correction=SequenceMask(low=0.9, high=1.1)),
            {"correction": SequenceMask(low=0.9, high=2.0)},
        ),
        (
            replace(EVERYTHING, aggregation="fixed_length", max_tokens=8),
            {"aggregation": "fixed_length", "max_tokens": 16},
        ),
        (CISPO, {"clip": (None, 0.2)}),
        (CISPO, {"clip": (0.3, 0.1)}),
        (CISPO, {"kl": 0.1}),
        (CISPO, {"entropy": 0.1}),
        (CISPO, {"aggregation": "sequence"}),
        (CISPO, {"correction": Decoupled()}),
    ],
    ids=str,
)
def test_every_parameter_counts(loss, other):
    value, _, gradient = run(loss, scored())
    changed_value, _, changed = run(replace(loss, **other), scored())
    if "entropy" in other:  # the entropy gradient goes to another column
        assert changed_value != value
    else:
        assert not torch.allclose(changed, gradient)


@pytest.mark.parametrize(
    ("correction", "formula"),
    [
        (TruncatedIS(cap=1.3), lambda *a: truncated_is(*a, 1.3)),
        (TruncatedIS(cap=1.3, level="sequence"), lambda *a: truncated_is(*a, 1.3, "sequence")),
        (IcePop(low=0.6, high=1.3), lambda *a: icepop(*a, 0.6, 1.3)),
        (IcePop(low=0.6, high=1.3, level="sequence"), lambda *a: icepop(*a, 0.6, 1.3, "sequence")),
        (SequenceMask(low=0.8, high=1.1), lambda *a: sequence_mask(*a, 0.8, 1.1)),
        (Decoupled(), decoupled),
    ],
    ids=lambda value: "" if callable(value) else str(value),
)
@pytest.mark.parametrize(
    ("loss", "policy"),
    [
        (ClippedLoss(), lambda *a, **k: clipped_policy_loss(*a, 0.2, 0.2, **k)),
        (CispoLoss(), lambda *a, **k: cispo_loss(*a, None, 4.0, **k)),
    ],
    ids=["clipped", "cispo"],
)
def test_corrections_weigh_the_policy_loss_by_prev_over_rollout(loss, policy, correction, formula):
    given = scored()
    weight, changed = formula(given.old_logprobs_NT, given.rollout_logprobs_NT, given.mask_NT)
    args = (given.logprobs_NT, given.old_logprobs_NT, given.advantage_N, given.mask_NT)
    # The weight multiplies the loss from outside, and the denominator counts every token.
    expected = aggregate(policy(*args)[0] * weight, given.mask_NT, "token", TOKENS)
    (gradient,) = torch.autograd.grad(expected, given.logprobs_NT)
    value, sums, found = run(replace(loss, correction=correction), given)
    assert value == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-15)
    assert sums["is_weight"] == pytest.approx(weight.sum().item())
    assert sums["is_changed"] == changed.sum()


def test_a_correction_does_not_weigh_the_kl_and_the_entropy():
    given = replace(scored(), advantage=torch.zeros(N, dtype=torch.float64))
    plain, corrected = (replace(EVERYTHING, correction=one) for one in (None, IcePop(low=1.0, high=1.0)))
    assert run(plain, given)[0] == run(corrected, given)[0] != 0.0


@pytest.mark.parametrize("loss", [EVERYTHING, CispoLoss(correction=IcePop()), ClippedLoss(ratio="sequence")])
def test_advantages_of_tokens_are_those_of_their_samples_to_the_bit(loss):
    given = scored()
    own = replace(given, advantage=given.advantage_NT.masked_fill(~given.mask_NT, float("nan")))
    (value, sums, gradient), (value_own, sums_own, gradient_own) = run(loss, given), run(loss, own)
    assert (value, sums) == (value_own, sums_own) and torch.equal(gradient, gradient_own)
    with pytest.raises(AttributeError, match=r"there is no scored\.advantage_N"):
        own.advantage_N  # noqa: B018


def test_kl_and_entropy_of_weight_0_are_metrics_only():
    given = scored()
    with_columns, sums, gradient = run(ClippedLoss(), given)
    assert given.entropy_NT.grad is None
    bare = replace(given, ref_logprobs_NT=None, entropy_NT=None)
    given.logprobs_NT.grad = None
    value, bare_sums = objective(ClippedLoss(), bare, tokens=TOKENS, samples=N)
    value.backward()
    assert value.item() == with_columns
    assert torch.equal(given.logprobs_NT.grad, gradient)
    assert sums.keys() - bare_sums.keys() == {"kl", "entropy"}


def test_a_token_that_is_taken_out_does_not_leak_an_overflow():
    given = scored()
    with torch.no_grad():
        given.logprobs_NT[0, 0] = 0.0
        given.old_logprobs_NT[0, 0] = -1e4
        given.rollout_logprobs_NT[0, 0] = 0.0
        given.advantage_N[0] = -1.0
    value, sums, gradient = run(ClippedLoss(correction=TruncatedIS(cap=2.0)), given)
    assert gradient.isfinite().all()
    assert gradient[0, 0] == 0.0
    assert sums["ratio_max"] == float("inf")
    assert value == sums["loss"]


@pytest.mark.parametrize(
    ("loss", "column"),
    [
        (ClippedLoss(kl=0.1), "ref_logprobs_NT"),
        (ClippedLoss(correction=Decoupled()), "rollout_logprobs_NT"),
        (CispoLoss(entropy=0.1), "entropy_NT"),
    ],
)
def test_a_missing_column_is_named(loss, column):
    given = replace(scored(), **{column: None})
    with pytest.raises(ValueError, match=f"needs {column}"):
        objective(loss, given, tokens=TOKENS, samples=N)


@pytest.mark.parametrize("tokens", [0, -1])
def test_counts_are_above_0(tokens):
    with pytest.raises(ValueError, match=f"normalizer {tokens} is not above 0"):
        objective(ClippedLoss(), scored(), tokens=tokens, samples=N)


def test_a_loss_without_a_formula_is_refused():
    with pytest.raises(StageError, match="PolicyLoss has no formula"):
        objective(PolicyLoss(), scored(), tokens=TOKENS, samples=N)
    with pytest.raises(StageError, match="Correction has no formula"):
        objective(ClippedLoss(correction=Correction()), scored(), tokens=TOKENS, samples=N)
