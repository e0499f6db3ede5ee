"""A formula that is wrong in a usual way fails its check: sign, mask, swapped policies, Bessel, shift by one."""

import inspect
from types import ModuleType

import formula_oracles as oracles
import pytest

from ops import advantage, kl, logprobs, loss, masks

MUTANTS = [
    (loss, oracles.check_clipped_loss, "return -torch.where(", "return torch.where("),
    (loss, oracles.check_clipped_loss, "ratio_NT > bound_NT", "ratio_NT < bound_NT"),
    (loss, oracles.check_clipped_loss, "1.0 - clip_low", "1.0 - clip_high"),
    (loss, oracles.check_clipped_loss, "advantage_NT > 0, 1.0 + clip_high", "advantage_NT > 0, 1.0 + clip_low"),
    (loss, oracles.check_clipped_loss, "& (advantage_NT < 0)", ""),
    (loss, oracles.check_clipped_loss, "torch.where(clipped_NT, bound_NT, active_NT)", "active_NT"),
    (loss, oracles.check_clipped_loss, "logprobs_NT - old_logprobs_NT\n", "old_logprobs_NT - logprobs_NT\n"),
    (loss, oracles.check_clipped_loss, "log_ratio_NT.masked_fill(still_NT, 0.0)", "log_ratio_NT"),
    (
        loss,
        oracles.check_clipped_loss,
        "blank(advantage_N[:, None].expand_as(mask_NT), mask_NT)",
        "advantage_N[:, None]",
    ),
    (loss, oracles.check_aggregate, "masked_sum(loss_NT, mask_NT)", "loss_NT.sum()"),
    (loss, oracles.check_aggregate, "masked_sum(loss_NT, mask_NT)", "masked_mean(loss_NT, mask_NT)"),
    (loss, oracles.check_aggregate, "dim=1).sum()", "dim=1).mean()"),
    (loss, oracles.check_aggregate, "masked_mean(loss_NT, mask_NT, dim=1)", "masked_sum(loss_NT, mask_NT, dim=1)"),
    (kl, oracles.check_kl, "logprobs_NT - ref_logprobs_NT\n    return", "ref_logprobs_NT - logprobs_NT\n    return"),
    (kl, oracles.check_kl, "+ x_NT - 1.0", "- x_NT - 1.0"),
    (kl, oracles.check_kl, "+ x_NT - 1.0", "+ x_NT"),
    (kl, oracles.check_kl, "blank(logprobs_NT, mask_NT), ", "logprobs_NT, "),
    (advantage, oracles.check_advantage, "correction=1", "correction=0"),
    (advantage, oracles.check_advantage, "reward_G - reward_G.mean()", "reward_G"),
    (advantage, oracles.check_advantage, "correction=1) + eps)", "correction=1))"),
    (advantage, oracles.check_advantage, "if bool((reward_G == reward_G[0]).all())", "if len(reward_G) == 1"),
    (advantage, oracles.check_advantage, "(reward_BG == reward_BG[:, :1])", "(reward_BG == reward_BG[:1, :1])"),
    (logprobs, oracles.check_logprobs, "ids_NT.reshape(-1)\n", "ids_NT.roll(1).reshape(-1)\n"),
    (logprobs, oracles.check_logprobs, ".mul_(-grad_R", ".mul_(grad_R"),
    (logprobs, oracles.check_logprobs, "block_RV.scatter_add_(-1, ids_R[rows, None], grad_R[rows, None])", "pass"),
    (
        logprobs,
        oracles.check_logprobs,
        "shifted_RV.logsumexp(-1) - expected_R",
        "shifted_RV.logsumexp(-1) + expected_R",
    ),
    (logprobs, oracles.check_logprobs, "shifted_RV.logsumexp(-1) - expected_R", "wide_RV.logsumexp(-1) - expected_R"),
    (masks, oracles.check_masks, "[None, :] < lengths", "[None, :] <= lengths"),
    (masks, oracles.check_masks, "torch.where(mask.bool(), values, ", "torch.where(mask.bool(), values, values * "),
    (masks, oracles.check_masks, ".clamp(min=1)", ".clamp(min=2)"),
    (masks, oracles.check_masks, "mask.bool().sum(dim)", "mask.shape[1]"),
]


@pytest.mark.parametrize(
    ("module", "check", "right", "wrong"), MUTANTS, ids=[f"{m[2][:24]}->{m[3][:24]}" for m in MUTANTS]
)
def test_mutant_is_caught(module, check, right, wrong):
    source = inspect.getsource(module)
    assert source.count(right) == 1, f"{module.__name__} no longer holds {right!r} once: adapt this list"
    mutant = ModuleType(module.__name__)
    exec(compile(source.replace(right, wrong), module.__file__, "exec"), mutant.__dict__)
    caught = False
    try:
        check(mutant)
    except (AssertionError, RuntimeError, TypeError, AttributeError):
        caught = True
    assert caught
