"""Losses, KL estimators and corrections against hand-computed numbers, and the problems of invalid descriptions."""

import math
from dataclasses import fields

import cloudpickle
import pytest
import torch

from ops.correction import decoupled, icepop, sequence_mask, truncated_is
from ops.kl import kl_estimate, kl_k3
from ops.logprobs import entropy
from ops.loss import AGGREGATIONS, aggregate, aggregation_normalizer, cispo_loss, clipped_policy_loss
from stages import CispoLoss, ClippedLoss, Decoupled, IcePop, SequenceMask, TruncatedIS, losses
from stages.losses import PolicyLoss, loss_problems

torch.set_num_threads(1)
NAN, INF = math.nan, math.inf


def logs(*ratios):
    """Return one row of log-probabilities whose difference from `ZEROS` is the log of `ratios`."""
    return torch.tensor([[math.log(ratio) for ratio in ratios]], dtype=torch.float64)


def zeros(tokens):
    return torch.zeros(1, tokens, dtype=torch.float64)


def ones(tokens):
    return torch.ones(1, tokens, dtype=torch.bool)


def value_and_gradient(formula, lp, *args, **kwargs):
    leaf = lp.clone().requires_grad_()
    out, clipped = formula(leaf, *args, **kwargs)
    out.sum().backward()
    return out.detach(), leaf.grad, clipped


def near(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), rtol=1e-9, atol=1e-12)


# The clipped loss


def test_dual_clip_bounds_the_loss_where_the_advantage_is_negative():
    given = logs(0.5, 1.0, 2.5, 4.0)
    loss, gradient, clipped = value_and_gradient(
        clipped_policy_loss, given, zeros(4), torch.tensor([-2.0]).double(), ones(4), 0.2, 0.2, dual_clip=3.0
    )
    near(loss, [[1.6, 2.0, 5.0, 6.0]])
    near(gradient, [[0.0, 2.0, 5.0, 0.0]])
    assert clipped.tolist() == [[True, False, False, True]]


def test_dual_clip_leaves_positive_advantages():
    args = (logs(0.5, 1.0, 2.5, 4.0), zeros(4), torch.tensor([2.0]).double(), ones(4), 0.2, 0.2)
    plain, dual = clipped_policy_loss(*args), clipped_policy_loss(*args, dual_clip=1.5)
    assert torch.equal(plain[0], dual[0])
    assert torch.equal(plain[1], dual[1])


def test_the_ratio_of_a_sequence_is_the_geometric_mean_with_its_gradient():
    lp = torch.stack((logs(1.0, 4.0, 1.0, 1.0)[0], logs(2.0, 2.0, 2.0, 7.0)[0]))
    mask = torch.tensor([[True, True, False, False], [True, True, True, False]])
    lp[~mask] = NAN
    args = (torch.zeros(2, 4).double(), torch.tensor([1.0, -1.0]).double(), mask, 0.2, 9.0)
    loss, gradient, clipped = value_and_gradient(clipped_policy_loss, lp, *args, level="sequence")
    near(loss, [[-2.0, -2.0, 0.0, 0.0], [2.0, 2.0, 2.0, 0.0]])
    near(gradient, [[-2.0, -2.0, 0.0, 0.0], [2.0, 2.0, 2.0, 0.0]])  # each of m tokens gets 1 / m of each of m entries
    assert not clipped.any()


def test_a_sequence_is_clipped_whole():
    loss, gradient, clipped = value_and_gradient(
        clipped_policy_loss, logs(4.0, 1.0), zeros(2), torch.tensor([1.0]).double(), ones(2), 0.2, 0.2, level="sequence"
    )
    near(loss, [[-1.2, -1.2]])
    assert not gradient.any()
    assert clipped.all()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_weight_multiplies_loss_and_gradient(level):
    args = (zeros(2), torch.tensor([1.5]).double(), ones(2), 0.2, 0.3)
    lp, weight = logs(1.1, 0.9), torch.tensor([[0.5, 2.0]]).double()
    plain, weighted = (
        value_and_gradient(clipped_policy_loss, lp, *args, level=level, weight_NT=given)
        for given in (torch.ones_like(weight), weight)
    )
    torch.testing.assert_close(weighted[0], plain[0] * weight)
    if level == "token":
        torch.testing.assert_close(weighted[1], plain[1] * weight)
    bare = value_and_gradient(clipped_policy_loss, lp, *args, level=level)
    assert all(torch.equal(a, b) for a, b in zip(bare, plain))


@pytest.mark.parametrize("formula", [clipped_policy_loss, cispo_loss])
@pytest.mark.parametrize("adv", [-1.0, 1.0])
def test_a_weight_of_0_takes_out_a_ratio_that_overflows(formula, adv):
    lp = torch.tensor([[0.0, 0.0]])
    old = torch.tensor([[-1e4, 0.0]])
    weight = torch.tensor([[0.0, 1.0]])
    loss, gradient, _ = value_and_gradient(
        formula, lp, old, torch.tensor([adv]), torch.ones(1, 2), 0.2, 0.2, weight_NT=weight
    )
    assert loss[0, 0] == gradient[0, 0] == 0.0
    assert gradient[0, 1] == -adv


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("fill", [NAN, INF, -INF])
def test_what_is_masked_reaches_nothing(level, fill):
    mask = torch.tensor([[True, True, False]])
    lp, old = logs(1.1, 0.95, 1.0), zeros(3)
    args = (torch.tensor([1.0]).double(), mask, 0.2, 0.2)
    clean = [
        value_and_gradient(clipped_policy_loss, lp, old, *args, level=level, dual_clip=3.0),
        value_and_gradient(cispo_loss, lp, old, *args),
    ]
    lp[0, 2], old[0, 2] = fill, -fill
    dirty = [
        value_and_gradient(clipped_policy_loss, lp, old, *args, level=level, dual_clip=3.0),
        value_and_gradient(cispo_loss, lp, old, *args),
    ]
    for one, other in zip(clean, dirty):
        assert all(torch.equal(a, b) for a, b in zip(one, other))
        assert one[1][0, 2] == one[0][0, 2] == 0.0


# CISPO


def test_cispo_bounds_the_weight_and_keeps_the_gradient():
    lp = torch.tensor([[-1.0, -2.0, -3.0]]).double()
    old = lp - logs(0.5, 1.0, 4.0)
    adv = torch.tensor([2.0]).double()
    loss, gradient, clipped = value_and_gradient(cispo_loss, lp, old, adv, ones(3), 0.2, 0.5)
    near(loss, [[0.8 * 2 * 1, 1.0 * 2 * 2, 1.5 * 2 * 3]])
    near(gradient, [[-1.6, -2.0, -3.0]])
    assert clipped.tolist() == [[True, False, True]]
    loss, gradient, clipped = value_and_gradient(cispo_loss, lp, old, adv, ones(3), None, 0.5)
    near(gradient, [[-1.0, -2.0, -3.0]])
    assert clipped.tolist() == [[False, False, True]]


def test_cispo_of_a_ratio_that_overflows():
    lp, old = torch.tensor([[-1.0]]), torch.tensor([[-1e4]])
    for bound, adv, expected in ((0.5, 1.0, -1.5), (INF, 0.0, 0.0)):
        loss, gradient, _ = value_and_gradient(cispo_loss, lp, old, torch.tensor([adv]), torch.ones(1, 1), None, bound)
        assert gradient.item() == expected
        assert loss.item() == -expected


# Aggregation


def test_four_aggregations():
    loss = torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN], [NAN, NAN, NAN]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    expected = {"token": 9 / 3, "sequence": (1.5 + 6) / 3, "sequence_sum": 9 / 3, "fixed_length": 9 / 30}
    normalizers = {"token": 3, "sequence": 3, "sequence_sum": 3, "fixed_length": 30}
    assert set(expected) == set(AGGREGATIONS)
    for mode in AGGREGATIONS:
        normalizer = aggregation_normalizer(mode, 3, 3, 10)
        assert normalizer == normalizers[mode]
        assert aggregate(loss, mask, mode, normalizer).item() == pytest.approx(expected[mode])
    assert aggregation_normalizer("token", 7, 3, None) == 7
    assert aggregation_normalizer("sequence_sum", 7, 3, None) == 3


# KL


def test_kl_estimators_and_their_gradients():
    x = torch.tensor([[0.5, -0.25]]).double()
    ref = torch.tensor([[-1.0, -2.0]]).double()
    for kind, values, slopes in (
        ("k1", [0.5, -0.25], [1.0, 1.0]),
        ("k2", [0.125, 0.03125], [0.5, -0.25]),
        ("k3", [math.exp(-0.5) - 0.5, math.exp(0.25) - 1.25], [1 - math.exp(-0.5), 1 - math.exp(0.25)]),
    ):
        for importance in (False, True):
            leaf = (ref + x).requires_grad_()
            kl = kl_estimate(leaf, ref, kind=kind, importance=importance)
            kl.sum().backward()
            near(kl.detach(), [values])
            near(leaf.grad, [[s + v * importance for s, v in zip(slopes, values)]])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("fill", [NAN, INF])
def test_kl_of_what_is_masked_is_0(kind, fill):
    lp = torch.tensor([[-1.0, fill]], requires_grad=True)
    kl = kl_estimate(lp, torch.tensor([[-1.5, -INF]]), torch.tensor([[1, 0]]), kind, True)
    kl.sum().backward()
    assert kl[0, 1] == lp.grad[0, 1] == 0.0
    assert kl[0, 0] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_is_never_negative(dtype):
    near_0 = torch.logspace(-12, 0, 100_001, dtype=dtype)
    x = torch.cat((near_0, -near_0, torch.linspace(-20, 20, 100_001, dtype=dtype)))[None]
    assert kl_k3(x, torch.zeros_like(x)).min() >= 0


@pytest.mark.parametrize(("kind", "beyond"), [("k1", 12.0), ("k1", -12.0), ("k2", 5.0), ("k3", -2.7), ("k3", 12.0)])
def test_a_clamped_estimate_has_no_gradient_beyond(kind, beyond):
    """verl and NeMo-RL clamp k3 at 10."""
    x = torch.tensor([[0.5, beyond]], requires_grad=True)
    kl = kl_estimate(x, torch.zeros(1, 2), kind=kind, clamp=10.0)
    kl.sum().backward()
    assert kl[0, 1].abs() == 10.0 and x.grad[0, 1] == 0.0
    assert kl[0, 0] == kl_estimate(x, torch.zeros(1, 2), kind=kind)[0, 0] and x.grad[0, 0] != 0.0


def test_a_token_that_the_correction_removed_is_not_trained_by_the_ratio_of_its_response():
    """GSPO-token (arXiv 2507.18071, eq. 13 and 14): each token's gradient flows through its own logprob."""
    lp = torch.full((1, 2), -1.0, requires_grad=True)
    old, rollout, mask = lp.detach(), torch.tensor([[-4.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    weight, removed = icepop(old, rollout, mask, 0.5, 5.0)
    assert removed.tolist() == [[True, False]]
    loss, _ = clipped_policy_loss(lp, old, torch.ones(1), mask, 0.2, 0.2, level="sequence", weight_NT=weight)
    aggregate(loss, mask, "sequence", 1).backward()
    assert lp.grad.tolist() == [[0.0, -0.5]]


def test_k3_is_the_default():
    lp, ref = logs(0.5, 0.9), logs(0.6, 0.1)
    assert torch.equal(kl_estimate(lp, ref), kl_k3(lp, ref))


# Corrections: ratios 0.25, 1, 8 and a masked NaN; the second response has the ratio 1


PREV = torch.cat((torch.log(torch.tensor([[0.25, 1.0, 8.0, 1.0]])), torch.zeros(1, 4)))
ROLLOUT = torch.zeros(2, 4)
MASK = torch.tensor([[True, True, True, False], [True, False, False, False]])
PREV[0, 3] = ROLLOUT[1, 2] = NAN


@pytest.mark.parametrize(
    ("found", "weight", "changed"),
    [
        (lambda *a: truncated_is(*a, 2.0), [[0.25, 1, 2, 0], [1, 0, 0, 0]], [[0, 0, 1, 0], [0, 0, 0, 0]]),
        (lambda *a: truncated_is(*a, 1.5, "sequence"), [[1.5, 1.5, 1.5, 0], [1, 0, 0, 0]], [[1, 1, 1, 0], [0] * 4]),
        (lambda *a: truncated_is(*a, 3.0, "sequence"), [[2, 2, 2, 0], [1, 0, 0, 0]], [[0] * 4, [0] * 4]),
        (lambda *a: icepop(*a, 0.25, 7.9), [[0.25, 1, 0, 0], [1, 0, 0, 0]], [[0, 0, 1, 0], [0] * 4]),
        (lambda *a: icepop(*a, 0.26, 8.1), [[0, 1, 8, 0], [1, 0, 0, 0]], [[1, 0, 0, 0], [0] * 4]),
        (lambda *a: icepop(*a, 0.5, 1.9, "sequence"), [[0, 0, 0, 0], [1, 0, 0, 0]], [[1, 1, 1, 0], [0] * 4]),
        (lambda *a: icepop(*a, 0.5, 2.1, "sequence"), [[2, 2, 2, 0], [1, 0, 0, 0]], [[0] * 4, [0] * 4]),
        (lambda *a: sequence_mask(*a, 0.9, 1.3), [[0.25, 1, 8, 0], [1, 0, 0, 0]], [[0] * 4, [0] * 4]),
        (lambda *a: sequence_mask(*a, 0.9, 1.2), [[0] * 4, [1, 0, 0, 0]], [[1, 1, 1, 0], [0] * 4]),
        (lambda *a: decoupled(*a), [[0.25, 1, 8, 0], [1, 0, 0, 0]], [[0] * 4, [0] * 4]),
    ],
)
def test_corrections(found, weight, changed):
    prev = PREV.clone().requires_grad_()
    weight_NT, changed_NT = found(prev, ROLLOUT, MASK)
    assert not weight_NT.requires_grad
    torch.testing.assert_close(weight_NT, torch.tensor(weight, dtype=torch.float32))
    assert changed_NT.dtype == torch.bool
    assert changed_NT.int().tolist() == changed


def test_a_low_geometric_mean_is_taken_out():
    weight, changed = sequence_mask(-PREV, ROLLOUT, MASK, 0.9, 2.0)  # cube root of 0.5
    assert not weight[0].any()
    assert changed[0].tolist() == [True, True, True, False]


def test_corrections_of_a_ratio_that_overflows_are_finite():
    prev, rollout, mask = torch.zeros(1, 2), torch.full((1, 2), -1e4), torch.ones(1, 2)
    largest = torch.finfo(torch.float32).max
    assert truncated_is(prev, rollout, mask, 2.0, "sequence")[0].tolist() == [[2.0, 2.0]]
    assert decoupled(prev, rollout, mask)[0].tolist() == [[largest, largest]]
    assert icepop(prev, rollout, mask, 0.5, 5.0)[0].tolist() == [[0.0, 0.0]]
    assert sequence_mask(prev, rollout, mask, 0.5, 5.0)[0].tolist() == [[0.0, 0.0]]
    for found in (decoupled(rollout, prev, mask), truncated_is(rollout, prev, mask, 2.0)):
        assert found[0].tolist() == [[0.0, 0.0]]


def test_a_nan_that_is_not_masked_stays():
    prev, mask = torch.tensor([[NAN, 0.0]]), torch.ones(1, 2)
    for weight, _ in (
        truncated_is(prev, torch.zeros(1, 2), mask, 2.0),
        icepop(prev, torch.zeros(1, 2), mask, 0.5, 2.0),
        sequence_mask(prev, torch.zeros(1, 2), mask, 0.5, 2.0),
        decoupled(prev, torch.zeros(1, 2), mask),
    ):
        assert weight[0].isnan().tolist() == [True, False]


# Entropy


def test_the_gradient_of_the_entropy():
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    logits = p.log().reshape(1, 1, 3).requires_grad_()
    h = entropy(logits)
    exact = -(p * p.log()).sum()
    torch.testing.assert_close(h, exact.reshape(1, 1))
    (2 * h).sum().backward()
    torch.testing.assert_close(logits.grad.flatten(), -2 * p * (p.log() + exact))
    assert not entropy(logits.detach()).requires_grad


# Bad arguments


LP, ADV = torch.zeros(1, 2), torch.ones(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: clipped_policy_loss(LP, LP, ADV, LP, 0.2, 0.2, dual_clip=1.0), "dual_clip 1.0 is not above 1"),
        (lambda: clipped_policy_loss(LP, LP, ADV, LP, 0.2, 0.2, dual_clip=NAN), "dual_clip nan is not above 1"),
        (
            lambda: clipped_policy_loss(LP, LP, ADV, LP, 0.2, 0.2, level="group"),
            "level 'group' is not one of token, se",
        ),
        (lambda: clipped_policy_loss(LP, LP, ADV, LP, 0.2, NAN), "not a number"),
        (lambda: clipped_policy_loss(LP, LP, ADV, LP, 0.2, 0.2, weight_NT=ADV), r"weight of shape \(1,\)"),
        (lambda: cispo_loss(LP, LP, ADV, LP, -0.1, 0.2), "is negative"),
        (lambda: cispo_loss(LP, LP[:, :1], ADV, LP, None, 0.2), "are not three times"),
        (lambda: aggregation_normalizer("mean", 1, 1, 1), "'mean' is not one of token, sequence, sequence_sum, fixed_"),
        (lambda: aggregation_normalizer("fixed_length", 1, 1, None), "needs max_tokens"),
        (lambda: kl_estimate(LP, LP, kind="k4"), "'k4' is not one of k1, k2, k3"),
        (lambda: kl_estimate(LP, LP, clamp=0.0), "clamp 0.0 is not above 0"),
        (lambda: truncated_is(LP, LP, LP, 0.0), "cap 0.0 is not above 0"),
        (lambda: truncated_is(LP, LP, LP, 2.0, "group"), "level 'group' is not one of"),
        (lambda: truncated_is(LP, ADV, LP, 2.0), "are not three times"),
        (lambda: icepop(LP, LP, LP, 1.5, 2.0), r"bounds \(1.5, 2.0\)"),
        (lambda: sequence_mask(LP, LP, LP, 0.5, 0.9), r"bounds \(0.5, 0.9\)"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Descriptions


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (
            ClippedLoss(clip=(-0.1, 0.2)),
            "clip=(-0.1, 0.2)); clip[0] is below 1, and neither bound is negative",
        ),
        (ClippedLoss(clip=(1.0, 0.2)), "clip=(1.0, 0.2)); clip[0] is below 1"),
        (
            ClippedLoss(clip=0.2),
            "clip=0.2); clip must be two numbers, the distances below and above 1. Fix: clip=(0.2, 0.2)",
        ),
        (ClippedLoss(clip=(0.2, NAN)), "clip must be two numbers"),
        (
            ClippedLoss(dual_clip=0.9),
            "dual_clip=0.9); dual_clip must be a number above 1, or None. Fix: dual_clip=3.0",
        ),
        (ClippedLoss(ratio="group"), "ratio='group'); valid values are token, sequence. Fix: ratio='token'"),
        (ClippedLoss(kl=-1), "kl=-1); the KL weight must be a number, 0 (none) or more. Fix: kl=0.0"),
        (ClippedLoss(kl="0.1"), "kl='0.1')"),
        (ClippedLoss(kl_estimator="k4"), "kl_estimator='k4'); valid values are k1, k2, k3. Fix: kl_estimator='k3'"),
        (ClippedLoss(kl_importance=1), "kl_importance=1); it must be True or False"),
        (
            ClippedLoss(aggregation="mean"),
            "valid values are token, sequence, sequence_sum, fixed_length. Fix: aggregation='to",
        ),
        (ClippedLoss(aggregation="fixed_length"), "aggregation='fixed_length') without max_tokens; it divides by"),
        (ClippedLoss(max_tokens=0), "max_tokens=0); the maximum response length must be a whole number, 1 or more"),
        (ClippedLoss(entropy=-0.1), "entropy=-0.1); the entropy weight must be 0 (none) or more"),
        (
            ClippedLoss(correction="tis"),
            "correction='tis'); a correction is an instance of TruncatedIS, IcePop, Sequence",
        ),
        (ClippedLoss(correction=TruncatedIS), "correction=the class TruncatedIS); a correction is an instance of"),
        (
            ClippedLoss(correction=TruncatedIS(cap=0)),
            "TruncatedIS(cap=0); cap must be a number above 0. Fix",
        ),
        (
            ClippedLoss(correction=TruncatedIS(level="group")),
            "TruncatedIS(level='group'); valid values are token, sequence",
        ),
        (ClippedLoss(correction=IcePop(low=2.0)), "IcePop(low=2.0, high=5.0); the bounds are numbers with 0"),
        (ClippedLoss(correction=IcePop(level="all")), "IcePop(level='all'); valid values are"),
        (ClippedLoss(correction=SequenceMask(low=0.5, high=0.9)), "SequenceMask(low=0.5, high=0.9); the bounds"),
        (
            CispoLoss(clip=0.2),
            "CispoLoss(clip=0.2); clip must be two numbers, the distances below and above 1; the first may be None",
        ),
        (CispoLoss(clip=None), "CispoLoss(clip=None); clip must be two numbers"),
        (CispoLoss(clip=(0.2, None)), "CispoLoss(clip=(0.2, None)); clip must be two numbers"),
        (CispoLoss(clip=(1.5, 1.0)), "CispoLoss(clip=(1.5, 1.0)); clip[0] is at most 1"),
        (CispoLoss(kl=-1), "CispoLoss(kl=-1); the KL weight"),
        (
            "grpo",
            "loss='grpo'; a loss is an instance of ClippedLoss, CispoLoss, or your own class of PolicyLoss",
        ),
        (ClippedLoss, "loss=the class ClippedLoss; a loss is an instance of"),
        (PolicyLoss(), "PolicyLoss has no formula"),
    ],
)
def test_problems(loss, text):
    (problem,) = loss_problems(loss, "graph.py:7")
    assert str(problem).startswith("graph.py:7: ")
    assert text in str(problem)
    assert not problem.warning


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (ClippedLoss(kl=0.1, kl_estimator="k1"), "as a loss, k1 has gradient 0 in expectation"),
        (
            ClippedLoss(kl=0.1, kl_estimator="k2", kl_importance=True),
            "k2 has the gradient of the KL in expectation only without",
        ),
    ],
)
def test_warnings(loss, text):
    (problem,) = loss_problems(loss, "graph.py:7")
    assert problem.warning
    assert text in problem.why


@pytest.mark.parametrize(
    "loss",
    [
        ClippedLoss(),
        ClippedLoss(kl_estimator="k1", kl_importance=False),
        ClippedLoss(kl=0.1, kl_estimator="k1", kl_importance=True),
        ClippedLoss(ratio="sequence", clip=(3e-4, 4e-4), aggregation="sequence"),
        ClippedLoss(clip=(0.2, 0.28), dual_clip=3, aggregation="fixed_length", max_tokens=512, entropy=0.01),
        ClippedLoss(correction=Decoupled()),
        ClippedLoss(correction=SequenceMask(low=0.999, high=1.002)),
        ClippedLoss(correction=IcePop(low=0, high=INF, level="sequence")),
        CispoLoss(correction=TruncatedIS()),
        CispoLoss(clip=(1.0, 0.28)),
    ],
)
def test_descriptions_without_a_problem(loss):
    assert list(loss_problems(loss, "")) == []
    assert cloudpickle.loads(cloudpickle.dumps(loss)) == loss
    assert hash(loss) == hash(loss)


def test_all_problems_of_a_loss_come_together():
    bad = ClippedLoss(clip=(2, 0), dual_clip=0, kl=-1, entropy=-1, correction=IcePop(low=9, level="x"))
    assert len(list(loss_problems(bad, ""))) == 6


def test_what_a_loss_needs():
    assert not ClippedLoss().needs_reference
    assert CispoLoss(kl=0.1).needs_reference
    assert not ClippedLoss(kl=0.1).corrects_off_policy
    assert ClippedLoss(correction=Decoupled()).corrects_off_policy


def test_names_are_those_of_the_formulas():
    from ops import correction, kl, loss

    assert losses.AGGREGATIONS == loss.AGGREGATIONS
    assert losses.LEVELS == loss.LEVELS == correction.LEVELS
    assert losses.KL_ESTIMATORS == kl.ESTIMATORS
    assert {field.name for field in fields(CispoLoss)} < {field.name for field in fields(ClippedLoss)}


def test_a_loss_may_ask_for_the_gradient_of_the_entropy_without_a_bonus() -> None:
    class Own(PolicyLoss):
        entropy_gradient = True

    assert Own().needs_entropy and PolicyLoss(entropy=0.1).needs_entropy and not PolicyLoss().needs_entropy
