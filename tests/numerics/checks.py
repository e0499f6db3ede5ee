"""Checks of `ops` against the loops. A check takes the module to test, so that it also runs on broken copies.

    check_token_loss(ops.loss)

Masked entries hold NaN and infinities in every check, so an ignored mask is noticed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from types import ModuleType

import logit_checks
import loops
import torch
from cases import CASES, DOUBLE, Policies, near, policies, ragged, refuses, same

CLIP = (0.2, 0.35)


# ops.advantage


def check_advantages(ops: ModuleType) -> None:
    formulas = [
        (lambda r, n: ops.group_relative(r, n, eps=1e-6), lambda r, n: loops.group_relative(r, n, 1e-6)),
        (ops.group_relative, lambda r, n: loops.group_relative(r, n, 1e-6)),
        (lambda r, n: ops.group_relative(r, n, eps=0.5), lambda r, n: loops.group_relative(r, n, 0.5)),
        (ops.leave_one_out, loops.leave_one_out),
        (ops.mean_centred, loops.mean_centred),
    ]
    for seed in range(CASES):
        rng = random.Random(seed)
        size, groups = 2 + seed % 4, rng.randint(1, 3)
        rewards = [rng.choice([0.0, 0.1, 0.5, 1.0, rng.gauss(0, 3)]) for _ in range(size * groups)] + [0.1] * size
        for ours, loop in formulas:
            actual = ours(torch.tensor(rewards, dtype=DOUBLE), size)
            near(actual, loop(rewards, size))
            assert actual[-size:].tolist() == [0.0] * size
    for ours, _ in formulas:
        tenths = torch.full((6,), 0.1)  # in float32, the mean of three of them differs from each
        assert ours(tenths, 3).tolist() == [0.0] * 6
        assert ours(torch.tensor([1.0, 2.0]), 1).tolist() == [0.0] * 2
        assert ours(torch.tensor([]), 3).tolist() == []
        assert ours(tenths, 2).dtype == torch.float32


def _turns(rng: random.Random, samples: int) -> list[list[float]]:
    """The rewards of one to four turns per sample."""
    return [[rng.choice([0.0, 0.1, 1.0, rng.gauss(0, 3)]) for _ in range(rng.randint(1, 4))] for _ in range(samples)]


def check_turns(ops: ModuleType) -> None:
    for seed in range(CASES):
        rng = random.Random(seed)
        size, groups, discount = 1 + seed % 4, rng.randint(1, 3), (1.0, 0.5, 0.0)[seed % 3]
        turns, equal = _turns(rng, size * groups), [[0.1] * (1 + i) for i in range(size)]
        rewards = [rng.choice([0.0, 1.0, rng.gauss(0, 3)]) for _ in turns] + [0.0] * size
        rows = [torch.tensor(row, dtype=DOUBLE) for row in turns + equal]
        for eps in (1e-6, 0.5):
            actual = ops.turn_relative(rows, torch.tensor(rewards, dtype=DOUBLE), size, discount, eps)
            for found, expected in zip(actual, loops.turn_relative(turns + equal, rewards, size, discount, eps)):
                near(found, expected)
            assert [found.tolist() for found in actual[-size:]] == [[0.0] * len(row) for row in equal]
        plain = ops.turn_relative(rows, torch.tensor(rewards, dtype=DOUBLE), size)
        for found, expected in zip(plain, loops.turn_relative(turns + equal, rewards, size, 1.0, 1e-6), strict=True):
            near(found, expected)
    assert ops.turn_relative([], torch.tensor([]), 2) == []
    single = [torch.tensor([0.1 * i]) for i in range(6)]  # float32; one turn each is a reward per sample
    found = ops.turn_relative(single, torch.arange(6.0), 3)
    assert torch.equal(torch.cat(found), ops.group_relative(torch.cat(single) + torch.arange(6.0), 3))


def check_tokens_of_turns(ops: ModuleType) -> None:
    for seed in range(CASES):
        rng = random.Random(seed)
        drawn, ends = [], []
        for turn in range(rng.randint(1, 4)):
            drawn += [False] * (rng.randint(0, 2) if turn else 0) + [True] * rng.randint(1, 3)
            ends.append(len(drawn))
        drawn += [False] * (seed % 2)
        advantages = [rng.gauss(0, 1) for _ in ends]
        given = torch.tensor(advantages, dtype=DOUBLE), torch.tensor(ends), torch.tensor(drawn)
        near(ops.of_tokens(*given), loops.of_tokens(advantages, ends, drawn), tolerance=0.0)
    one, two, four = torch.ones(1), torch.ones(2), torch.ones(4, dtype=torch.bool)
    assert ops.of_tokens(two, torch.tensor([4, 4]), four).tolist() == [1.0] * 4
    assert ops.of_tokens(one, torch.tensor([3]), torch.tensor([True] * 3 + [False])).tolist() == [1.0] * 3 + [0.0]
    refuses("1 ends of turns for 2 advantages", lambda: ops.of_tokens(two, torch.tensor([4]), four))
    refuses(r"end at \[3, 2\], which does not", lambda: ops.of_tokens(two, torch.tensor([3, 2]), four & False))
    refuses(r"end at \[5\], which does not divide a response of 4", lambda: ops.of_tokens(one, torch.tensor([5]), four))
    refuses(r"end at \[3\], which does not", lambda: ops.of_tokens(one, torch.tensor([3]), four))


def check_turn_input(ops: ModuleType) -> None:
    row, two = torch.zeros(2), torch.zeros(2)
    refuses("not whole groups of 2", lambda: ops.turn_relative([row], torch.zeros(1), 2))
    refuses("torch.int64", lambda: ops.turn_relative([row, row], torch.zeros(2, dtype=torch.int64), 2))
    refuses("turn rewards of 1 samples for the rewards of 2", lambda: ops.turn_relative([row], two, 2))
    refuses("a sample has no turn", lambda: ops.turn_relative([row, torch.zeros(0)], two, 2))
    refuses("a sample has no turn", lambda: ops.turn_relative([row, torch.zeros(1, 2)], two, 2))


def check_zero_spread(ops: ModuleType) -> None:
    reward = torch.tensor([1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 1.0, 1.0, 0.5, 0.5, 1.0, 1.0])
    for size, expected in ((1, 12), (2, 5), (3, 2), (4, 0), (6, 0), (12, 0)):
        count = ops.zero_spread_groups(reward, size)
        assert count == expected
        assert type(count) is int


def check_advantage_input(ops: ModuleType) -> None:
    for formula in (ops.group_relative, ops.leave_one_out, ops.mean_centred, ops.zero_spread_groups):
        refuses(r"shape \(5,\) are not whole groups of 2", lambda f=formula: f(torch.zeros(5), 2))
        refuses("not whole groups of 0", lambda f=formula: f(torch.zeros(4), 0))
        refuses("not whole groups of -2", lambda f=formula: f(torch.zeros(4), -2))
        refuses(r"shape \(2, 2\)", lambda f=formula: f(torch.zeros(2, 2), 2))
        refuses("torch.int64", lambda f=formula: f(torch.zeros(4, dtype=torch.int64), 2))


# ops.loss


def check_token_loss(ops: ModuleType) -> None:
    for seed in range(CASES):
        for dual in (None, 1.5):
            for weighted in (False, True):
                _compare_clipped(ops, policies(seed), "token", dual, CLIP, loops.token_ratios, weighted)


def check_sequence_loss(ops: ModuleType) -> None:
    for seed in range(CASES):
        for dual, clip in ((None, (0.05, 0.1)), (1.1, (0.05, 0.02))):
            for weighted in (False, True):
                _compare_clipped(ops, policies(seed), "sequence", dual, clip, loops.sequence_ratios, weighted)


def _compare_clipped(
    ops: ModuleType,
    batch: Policies,
    level: str,
    dual: float | None,
    clip: tuple[float, float],
    ratios: Callable[[list[float], list[float]], list[float]],
    weighted: bool,
) -> None:
    case, args = batch.case, (*clip, dual)
    lp, old, advantage = batch.tensors()
    weights = case.choices(0.0, 0.5, 2.0) if weighted else None
    loss, flags = ops.clipped_policy_loss(
        lp,
        old,
        advantage,
        case.mask,
        *clip,
        dual_clip=dual,
        level=level,
        weight_NT=None if weights is None else case.tensor(weights, math.nan),
    )
    upstream = case.normal()
    (loss * case.tensor(upstream)).sum().backward()
    token_advantage = batch.token_advantage(weights)
    pairs = [list(zip(ratios(n, o), a)) for n, o, a in zip(batch.new, batch.old, token_advantage)]
    near(loss.detach(), case.list([[loops.clipped(*pair, *args) for pair in row] for row in pairs]))
    same(flags, case.flags([[loops.is_clipped(*pair, *args) for pair in row] for row in pairs]))
    slopes = [[loops.clipped_slope(*pair, *args) for pair in row] for row in pairs]
    near(lp.grad, case.list([[s * u for s, u in zip(*rows)] for rows in zip(slopes, upstream)]))
    whole = ops.log_ratio(lp, old, case.mask, level)
    near(
        whole.detach().masked_fill(~case.mask.bool(), 0.0),
        case.list([[math.log(ratio) for ratio in ratios(*rows)] for rows in zip(batch.new, batch.old)]),
    )


def check_default_level(ops: ModuleType) -> None:
    old, mask, advantage = torch.zeros(2, 3), torch.ones(2, 3), torch.tensor([1.0, -1.0])
    logprobs = torch.tensor([[0.1, 0.3, -0.2], [-0.4, 0.0, 0.5]])
    assert torch.equal(ops.log_ratio(logprobs, old, mask), logprobs)
    args = logprobs, old, advantage, mask, 0.2, 0.2
    assert torch.equal(ops.clipped_policy_loss(*args)[0], ops.clipped_policy_loss(*args, level="token")[0])


def check_clip_of_zero(ops: ModuleType) -> None:
    """A ratio on a bound is not clipped: the loss is -r A with slope -r A."""
    for level in ("token", "sequence"):
        lp = torch.tensor([[-1.0, -2.0], [-0.5, -0.25]], dtype=DOUBLE, requires_grad=True)
        advantage = torch.tensor([2.0, -3.0], dtype=DOUBLE)
        mask = torch.ones(2, 2, dtype=torch.bool)
        loss, flags = ops.clipped_policy_loss(lp, lp.detach(), advantage, mask, 0.0, 0.0, level=level)
        loss.sum().backward()
        assert not flags.any()
        assert loss.tolist() == [[-2.0, -2.0], [3.0, 3.0]]
        near(lp.grad, [[-2.0, -2.0], [3.0, 3.0]])
        assert not ops.cispo_loss(lp, lp.detach(), advantage, mask, 0.0, 0.0)[1].any()
        twice = lp.detach() - math.log(2.0)
        args = (lp, twice, -advantage.abs(), mask, 0.0, 0.0)
        assert not ops.clipped_policy_loss(*args, dual_clip=2.0, level=level)[1].any()


def check_overflow(ops: ModuleType) -> None:
    """If the loss does not change, the gradient is 0 even if the ratio is infinite."""
    for level in ("token", "sequence"):
        for advantage, dual, expected in ((1.0, None, -1.2), (0.0, None, 0.0), (-1.0, 3.0, 3.0), (0.0, 3.0, 0.0)):
            lp = torch.zeros(1, 2, requires_grad=True)
            args = (torch.full((1, 2), -1e4), torch.tensor([advantage]), torch.ones(1, 2), 0.2, 0.2)
            loss, flags = ops.clipped_policy_loss(lp, *args, dual_clip=dual, level=level)
            loss.sum().backward()
            torch.testing.assert_close(loss.detach(), torch.full((1, 2), expected))
            assert lp.grad.tolist() == [[0.0, 0.0]]
            assert flags.tolist() == [[advantage != 0] * 2]
            weight = torch.zeros(1, 2)  # removes a token, so its ratio does not matter
            loss, _ = ops.clipped_policy_loss(lp, *args[:-2], 0.2, math.inf, level=level, weight_NT=weight)
            assert torch.autograd.grad(loss.sum(), lp)[0].tolist() == loss.tolist() == [[0.0, 0.0]]
    lp = torch.full((1, 2), -3.0, requires_grad=True)
    args = (torch.tensor([[-1e4, -1e4]]), torch.zeros(1), torch.ones(1, 2), None, math.inf)
    loss, _ = ops.cispo_loss(lp, *args)
    assert torch.autograd.grad(loss.sum(), lp)[0].tolist() == loss.tolist() == [[0.0, 0.0]]


def check_cispo(ops: ModuleType) -> None:
    for seed in range(CASES):
        for clip in ((0.2, 0.35), (None, 0.35)):
            for weighted in (False, True):
                batch = policies(seed)
                case = batch.case
                lp, old, advantage = batch.tensors()
                weights = case.choices(0.0, 0.5, 2.0) if weighted else None
                given = None if weights is None else case.tensor(weights, math.nan)
                loss, flags = ops.cispo_loss(lp, old, advantage, case.mask, *clip, weight_NT=given)
                upstream = case.normal()
                (loss * case.tensor(upstream)).sum().backward()
                rows = [list(zip(*rows)) for rows in zip(batch.new, batch.old, batch.token_advantage(weights))]
                near(loss.detach(), case.list([[loops.cispo(*args, *clip) for args in row] for row in rows]))
                slopes = [[loops.cispo_slope(*args, *clip) for args in row] for row in rows]
                near(lp.grad, case.list([[s * u for s, u in zip(*pair)] for pair in zip(slopes, upstream)]))
                bounded = [[loops.is_bounded(new, old, *clip) for new, old, _ in row] for row in rows]
                same(flags, case.flags(bounded))


def check_advantages_of_tokens(ops: ModuleType) -> None:
    """An advantage per token is that of the sample times any factor of the token."""
    for seed in range(CASES):
        batch = policies(seed)
        lp, old, advantage = batch.tensors()
        factor, mask = batch.case.tensor(batch.case.choices(0.0, 0.5, 2.0), math.nan), batch.case.mask
        for formula, given in ((ops.clipped_policy_loss, CLIP), (ops.cispo_loss, CLIP), (ops.cispo_loss, (None, 0.3))):
            wanted, wanted_flags = formula(lp, old, advantage, mask, *given, weight_NT=factor)
            loss, flags = formula(lp, old, advantage[:, None] * factor, mask, *given)
            assert torch.equal(loss, wanted) and torch.equal(flags, wanted_flags)
            twice, _ = formula(lp, old, advantage[:, None] * factor, mask, *given, weight_NT=factor)
            assert torch.equal(twice, formula(lp, old, advantage, mask, *given, weight_NT=factor * factor)[0])


def check_aggregate(ops: ModuleType) -> None:
    for seed in range(CASES):
        case = ragged(seed)
        rows, longest = case.normal(), case.width + 3
        for mode in ("token", "sequence", "sequence_sum", "fixed_length"):
            for mask in (case.mask, case.mask.float(), case.mask.long()):
                count = ops.aggregation_normalizer(mode, sum(case.lengths), len(case.lengths), longest)
                loss = case.tensor(rows, math.nan).requires_grad_()
                total = ops.aggregate(loss, mask, mode, count)
                total.backward()
                near(total.detach(), loops.aggregate(rows, mode, longest))
                shares = loops.shares(case.lengths, mode, longest)
                near(loss.grad, case.list([[share] * n for share, n in zip(shares, case.lengths)]))


def check_loss_input(ops: ModuleType) -> None:
    row, one, mask = torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2)
    for clip in ((-0.1, 0.2), (0.2, -0.1), (math.nan, 0.2), (0.2, math.nan)):
        refuses("negative or not a number", lambda c=clip: ops.clipped_policy_loss(row, row, one, mask, *c))
        refuses("negative or not a number", lambda c=clip: ops.cispo_loss(row, row, one, mask, *c))
    other, two, wide = torch.zeros(1, 3), torch.ones(2), torch.zeros(1, 2, 1)
    for args in ((other, row, one, mask), (row, other, one, mask), (row, row, one, other), (row, row, two, mask)):
        refuses("are not three times", lambda a=args: ops.clipped_policy_loss(*a, 0.2, 0.2))
        refuses("are not three times", lambda a=args: ops.cispo_loss(*a, 0.2, 0.2))
    refuses("are not three times", lambda: ops.clipped_policy_loss(row, row, other, mask, 0.2, 0.2))
    refuses("are not three times", lambda: ops.clipped_policy_loss(wide, wide, one, wide, 0.2, 0.2))
    for weight in (other, torch.ones(1), torch.ones(2, 2)):
        refuses("weight of shape", lambda w=weight: ops.clipped_policy_loss(row, row, one, mask, 0, 0, weight_NT=w))
        refuses("weight of shape", lambda w=weight: ops.cispo_loss(row, row, one, mask, 0, 0, weight_NT=w))
    for dual in (1.0, 0.5, math.nan):
        refuses("dual", lambda d=dual: ops.clipped_policy_loss(row, row, one, mask, 0.2, 0.2, dual_clip=d))
    refuses(
        "'group' is not one of token, sequence$",
        lambda: ops.clipped_policy_loss(row, row, one, mask, 0.2, 0.2, level="group"),
    )
    for count in (0, -1.0, math.nan):
        refuses("is not above 0", lambda c=count: ops.aggregate(row, mask, "token", c))
    known = "'mean' is not one of token, sequence, sequence_sum, fixed_length$"
    refuses(known, lambda: ops.aggregate(row, mask, "mean", 1))
    refuses(known, lambda: ops.aggregation_normalizer("mean", 1, 1, 1))
    refuses("needs max_tokens", lambda: ops.aggregation_normalizer("fixed_length", 1, 1, None))
    assert [ops.aggregation_normalizer(mode, 12, 3, None) for mode in ops.AGGREGATIONS[:3]] == [12, 3, 3]


# ops.kl


def check_kl(ops: ModuleType) -> None:
    for seed in range(CASES):
        case = ragged(seed)
        ref, new = case.normal(-2.0), case.normal(-2.0)
        pairs = [list(zip(*rows)) for rows in zip(new, ref)]
        for kind in ("k1", "k2", "k3"):
            for importance, clamp in ((False, None), (True, None), (True, 0.3)):
                lp = case.tensor(new, math.nan).requires_grad_()
                args = (lp, case.tensor(ref, -math.inf), case.mask)
                estimate = ops.kl_estimate(*args, kind=kind, importance=importance, clamp=clamp)
                estimate.sum().backward()
                near(estimate.detach(), case.list([[loops.kl(*pair, kind, clamp) for pair in row] for row in pairs]))
                near(
                    lp.grad,
                    case.list([[loops.kl_slope(*pair, kind, importance, clamp) for pair in row] for row in pairs]),
                )


def check_kl_far_from_the_clamp(ops: ModuleType) -> None:
    """Far below, exp(-x) overflows; near it, the clamp alone decides."""
    for clamp in (1e-3, 10.0, 100.0, 1e4):
        for x in (-1e4, -800.0, -math.log(4 * clamp + 8), -math.log(clamp + 1), -0.01, 0.5):
            lp = torch.tensor([[x - 3.0]], dtype=DOUBLE, requires_grad=True)
            ref = torch.tensor([[-3.0]], dtype=DOUBLE, requires_grad=True)
            estimate = ops.kl_estimate(lp, ref, kind="k3", clamp=clamp)
            estimate.backward()
            whole = math.inf if x < -700 else math.expm1(-x) + x
            near(estimate.detach(), [[min(whole, clamp)]])
            slope = 0.0 if whole > clamp else -math.expm1(-x)
            near(lp.grad, [[slope]])
            near(ref.grad, [[-slope]])


def check_kl_defaults(ops: ModuleType) -> None:
    lp, ref = torch.tensor([[-1.0, math.nan]], dtype=DOUBLE), torch.tensor([[-2.5, -1.0]], dtype=DOUBLE)
    expected = loops.kl(-1.0, -2.5, "k3")
    for call in (ops.kl_k3, ops.kl_estimate):
        near(call(lp, ref, torch.tensor([[True, False]])), [[expected, 0.0]])
        near(call(lp, ref)[:, :1], [[expected]])
        assert call(lp, ref)[0, 1].isnan()
        leaf = lp.clone().requires_grad_()
        call(leaf, ref, torch.tensor([[1, 0]])).sum().backward()
        near(leaf.grad, [[loops.kl_slope(-1.0, -2.5, "k3"), 0.0]])
    refuses("'k4' is not one of k1, k2, k3$", lambda: ops.kl_estimate(lp, ref, kind="k4"))
    refuses("clamp 0.0 is not above 0$", lambda: ops.kl_estimate(lp, ref, clamp=0.0))


# ops.correction


def check_corrections(ops: ModuleType) -> None:
    bound = 1.3
    calls: list[tuple[Callable, Callable]] = [
        (lambda *a: ops.truncated_is(*a, cap=bound), lambda *a: loops.truncated_is(*a, bound)),
        (
            lambda *a: ops.truncated_is(*a, cap=bound, level="sequence"),
            lambda *a: loops.truncated_is(*a, bound, "sequence"),
        ),
        (lambda *a: ops.icepop(*a, low=0.8, high=bound), lambda *a: loops.icepop(*a, 0.8, bound)),
        (
            lambda *a: ops.icepop(*a, low=0.8, high=bound, level="sequence"),
            lambda *a: loops.icepop(*a, 0.8, bound, "sequence"),
        ),
        (lambda *a: ops.sequence_mask(*a, low=0.9, high=1.1), lambda *a: loops.sequence_mask(*a, 0.9, 1.1)),
        (ops.decoupled, loops.decoupled),
    ]
    for seed in range(CASES):
        batch = policies(seed)
        case, mask = batch.case, batch.case.mask
        for ours, loop in calls:
            for filled in ((math.nan, math.inf), (math.inf, math.nan), (-math.inf, math.inf), (900.0, -900.0)):
                prev = case.tensor(batch.new, filled[0]).requires_grad_()
                rollout = case.tensor(batch.old, filled[1]).requires_grad_()
                weight, changed = ours(prev, rollout, mask)
                rows = [loop(*pair) for pair in zip(batch.new, batch.old)]
                assert not weight.requires_grad
                near(weight, case.list([row[0] for row in rows]))
                same(changed, case.flags([row[1] for row in rows]))


def check_moments(ops: ModuleType) -> None:
    """Moments of the weights prev / rollout, summed by hand, in float64 for any dtype of the columns."""
    prev = torch.tensor([-0.1, -2.0, -0.7, -3.0], dtype=torch.float32)
    rollout = torch.tensor([-0.4, -1.0, -0.7, -3.5], dtype=torch.float32)
    weights = [math.exp(a - b) for a, b in zip(prev.tolist(), rollout.tolist())]
    found = ops.moments(prev, rollout)
    expected = (sum(weights), sum(w * w for w in weights), max(weights))
    assert all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(found, expected, strict=True)), (found, expected)


def check_multiplicative_error(ops: ModuleType) -> None:
    """Factors of 2 and 4 in either direction and of 1, and a column of float32 whose difference float32 would round."""
    prev, rollout = torch.log(torch.tensor([0.2, 0.4, 0.5, 0.1])), torch.log(torch.tensor([0.4, 0.1, 0.5, 0.1]))
    assert math.isclose(ops.multiplicative_error(prev, rollout), 2 + 4 + 1 + 1, rel_tol=1e-6)
    prev, rollout = torch.tensor([-1.0, -9.0], dtype=torch.float32), torch.tensor([-1e-8, 9.0], dtype=torch.float32)
    expected = sum(math.exp(abs(a - b)) for a, b in zip(prev.tolist(), rollout.tolist()))
    assert math.isclose(ops.multiplicative_error(prev, rollout), expected, rel_tol=1e-12)


def check_correction_bounds(ops: ModuleType) -> None:
    """A weight on a bound is kept."""
    log2 = torch.tensor([[math.log(2.0)]], dtype=DOUBLE)
    zero, mask = torch.zeros(1, 1, dtype=DOUBLE), torch.ones(1, 1, dtype=torch.bool)
    for prev, rollout, w in ((log2, zero, log2.exp().item()), (zero, log2, (-log2).exp().item())):
        low, high = min(w, 1.0), max(w, 1.0)
        for call in (ops.icepop, ops.sequence_mask):
            weight, changed = call(prev, rollout, mask, low, high)
            assert (weight.tolist(), changed.tolist()) == ([[w]], [[False]])
        weight, changed = ops.truncated_is(prev, rollout, mask, w)
        assert (weight.tolist(), changed.tolist()) == ([[w]], [[False]])
    for call in (ops.icepop, ops.sequence_mask):
        assert call(zero, zero, mask, 0.0, 1.0)[0].tolist() == [[1.0]]


def check_correction_overflow(ops: ModuleType) -> None:
    """No weight is infinite: infinity times an advantage of 0 would be NaN."""
    prev, rollout, mask = torch.tensor([[0.0, 0.0]]), torch.tensor([[-1e4, -1.0]]), torch.ones(1, 2)
    for weight, _ in (
        ops.decoupled(prev, rollout, mask),
        ops.truncated_is(prev, rollout, mask, math.inf),
        ops.truncated_is(prev, rollout, mask, math.inf, level="sequence"),
        ops.sequence_mask(prev, rollout, mask, 0.0, math.inf),
        ops.icepop(prev, rollout, mask, 0.0, math.inf),
    ):
        assert weight.isfinite().all()
        assert weight[0, 0] > 1e38
        assert weight.dtype == torch.float32


def check_correction_input(ops: ModuleType) -> None:
    row, mask, other, flat = torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(1, 3), torch.zeros(2)
    calls = {
        "truncated_is": lambda *a: ops.truncated_is(*a, 2.0),
        "icepop": lambda *a: ops.icepop(*a, 0.5, 2.0),
        "sequence_mask": lambda *a: ops.sequence_mask(*a, 0.5, 2.0),
        "decoupled": ops.decoupled,
    }
    for call in calls.values():
        for args in ((other, row, mask), (row, other, mask), (row, row, other), (flat, flat, flat)):
            refuses("are not three times", lambda c=call, a=args: c(*a))
    for cap in (0.0, -1.0, math.nan):
        refuses("is not above 0", lambda c=cap: ops.truncated_is(row, row, mask, c))
    refuses("'group' is not one of token, sequence$", lambda: ops.truncated_is(row, row, mask, 2.0, level="group"))
    refuses("'group' is not one of token, sequence$", lambda: ops.icepop(row, row, mask, 0.5, 2.0, level="group"))
    for low, high in ((-0.1, 2.0), (1.1, 2.0), (0.5, 0.9), (math.nan, 2.0), (0.5, math.nan)):
        for call in (ops.icepop, ops.sequence_mask):
            refuses("bounds", lambda c=call, b=(low, high): c(row, row, mask, *b))


CHECKS: dict[str, tuple[Callable[[ModuleType], None], ...]] = {
    "ops.advantage": (
        check_advantages,
        check_turns,
        check_tokens_of_turns,
        check_turn_input,
        check_zero_spread,
        check_advantage_input,
    ),
    "ops.loss": (
        check_token_loss,
        check_sequence_loss,
        check_default_level,
        check_clip_of_zero,
        check_overflow,
        check_cispo,
        check_advantages_of_tokens,
        check_aggregate,
        check_loss_input,
    ),
    "ops.kl": (check_kl, check_kl_far_from_the_clamp, check_kl_defaults),
    "ops.correction": (
        check_corrections,
        check_moments,
        check_multiplicative_error,
        check_correction_bounds,
        check_correction_overflow,
        check_correction_input,
    ),
    **logit_checks.CHECKS,
}
