"""Checks fail for wrong formulas: every mechanical mutant, and common mistakes that are larger than a mutant."""

import importlib
import inspect
import re

import checks
import mutate
import objective_checks
import pytest
from equivalent import EQUIVALENT

CHECKS = checks.CHECKS | {
    "stages.backends.objective": objective_checks.CHECKS,
    "stages.losses": objective_checks.FORMULAS,
}
MECHANICAL = (*(name for name in checks.CHECKS if name != "ops.rewards.length"), "stages.backends.objective")
# What a check may raise for a wrong formula. A NameError would be a mistake of the mutator.
CAUGHT = (
    AssertionError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    pytest.fail.Exception,
)


def survives(name, source):
    module = importlib.import_module(name)
    try:
        mutant = mutate.load(source, module)
        for check in CHECKS[name]:
            check(mutant)
    except CAUGHT:
        return False
    return True


@pytest.mark.search
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::SyntaxWarning")
@pytest.mark.parametrize("name", MECHANICAL)
def test_only_equivalent_mutants_survive(name):
    made = list(mutate.mutants(inspect.getsource(importlib.import_module(name))))
    assert len(dict(made)) == len(made) > 20
    survivors = {mutant for mutant, source in made if survives(name, source)}
    listed = set(EQUIVALENT[name])
    assert not survivors - listed, f"no check of {name} sees these mistakes"
    assert not listed - survivors, f"these are listed as equivalent, and are caught or no longer made: {name}"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::SyntaxWarning")
@pytest.mark.parametrize("name", MECHANICAL)
def test_of_every_tenth_mutant_only_equivalent_ones_survive(name):
    made = dict(list(mutate.mutants(inspect.getsource(importlib.import_module(name))))[::10])
    assert {mutant for mutant, source in made.items() if survives(name, source)} == set(EQUIVALENT[name]) & set(made)


def test_no_mutant_of_a_loss_survives():
    """Only the formulas of the descriptions; out-of-range values are covered by tests/errors."""
    made = list(mutate.mutants(inspect.getsource(importlib.import_module("stages.losses"))))
    formulas = [one for one in made if re.match(r"\w+\.(policy_loss|weights|trained|sampled): ", one[0])]
    assert len(formulas) >= 4
    assert not [name for name, source in formulas if survives("stages.losses", source)]


def test_the_unchanged_source_passes():
    """The mutator writes the module back unchanged but for the mutation, so a mutant is caught for that alone."""
    for name in MECHANICAL:
        assert survives(name, inspect.getsource(importlib.import_module(name)))


def test_the_mutator_makes_what_it_says():
    source = '''
"""Text."""
def f(x, y: int = 2, *, flag: bool = False) -> "a | b":
    """Text, 1 + 1."""
    if not x > 0 and flag:
        raise ValueError(f"{x - 1}")
    z = torch.where(x, y, -y) - blank(x.detach(), y)
    return z.sum(dim=0) if flag == "all" else -1
'''
    difference = "torch.where(x, y, -y) - blank(x.detach(), y)"
    names = [name.removeprefix("f: ") for name, _ in mutate.mutants(source)]
    assert sorted(names) == sorted(
        [
            "2 -> 3",
            "2 -> 1",
            "False -> True",
            "not x > 0 and flag -> not x > 0 or flag",
            "not x > 0 -> x > 0",
            "x > 0 -> x >= 0",
            "x > 0 -> x <= 0",
            "0 -> 1",
            "0 -> -1",
            f"{difference} -> torch.where(x, y, -y) + blank(x.detach(), y)",
            f"{difference} -> blank(x.detach(), y) - torch.where(x, y, -y)",
            "torch.where(x, y, -y) -> torch.where(x, -y, y)",
            "torch.where(x, y, -y) -> torch.where(y, x, -y)",
            "-y -> y",
            "blank(x.detach(), y) -> x.detach()",
            "blank(x.detach(), y) -> blank(y, x.detach())",
            "x.detach() -> x",
            "z.sum(dim=0) if flag == 'all' else -1 -> -1 if flag == 'all' else z.sum(dim=0)",
            "flag == 'all' -> flag != 'all'",
            "'all' -> 'all_'",
            "z.sum(dim=0) -> z.mean(dim=0)",
            "z.sum(dim=0) -> z.sum()",
            "0 -> 1 #2",
            "0 -> -1 #2",
            "1 -> 2",
            "1 -> 0",
        ]
    )


HANDWRITTEN = [  # (module, original text that occurs once, replacement)
    ("ops.loss", "logprobs_NT - old_logprobs_NT\n", "logprobs_NT - old_logprobs_NT.roll(1, 1)\n"),
    ("ops.loss", "logprobs_NT - old_logprobs_NT\n", "logprobs_NT.roll(1, 0) - old_logprobs_NT\n"),
    ("ops.loss", "torch.where(clipped_NT, bound_NT, active_NT)", "active_NT"),
    ("ops.loss", "& (advantage_NT < 0)", ""),
    ("ops.loss", "masked_mean(log_ratio_NT.detach(), ", "masked_mean(log_ratio_NT, "),
    ("ops.loss", " + (logprobs_NT - logprobs_NT.detach())\n", "\n"),
    ("ops.loss", "log_ratio_NT.masked_fill(still_NT, 0.0)", "log_ratio_NT"),
    ("ops.advantage", "correction=1", "correction=0"),
    ("ops.advantage", "(reward_G - reward_G.mean()) / (", "reward_G / ("),
    ("ops.advantage", "correction=1) + eps)", "correction=1))"),
    ("ops.advantage", "(reward_BG == reward_BG[:, :1])", "(reward_BG == reward_BG[:1, :1])"),
    ("ops.advantage", "reward_N.reshape(-1, group_size)", "reward_N.reshape(group_size, -1).T"),
    ("ops.kl", "kl_k3(near_NT, ref_logprobs_NT)\n", "kl_k3(ref_logprobs_NT, near_NT)\n"),
    ("ops.kl", "clamp(-clamp, clamp)", "clamp(0, clamp)"),
    ("ops.kl", "logprobs_NT - logprobs_NT.detach()", "logprobs_NT - ref_logprobs_NT"),
    ("ops.correction", ").abs().exp().sum()", ").exp().sum()"),
    ("ops.correction", ").abs().exp().sum()", ").exp().abs().sum()"),
    ("ops.correction", ").abs().exp().sum()", ").abs().sum()"),
    (
        "ops.logprobs",
        "logits_NTV.shape[-1]), ids_NT.reshape(-1)\n",
        "logits_NTV.shape[-1]), ids_NT.roll(1).reshape(-1)\n",
    ),
    ("ops.logprobs", "norm_R[rows, None]).exp_().mul_(-grad_R", "norm_R[rows, None]).exp_().mul_(grad_R"),
    ("ops.logprobs", "block_RV.scatter_add_(-1, ids_R[rows, None], grad_R[rows, None])", "pass"),
    ("ops.logprobs", "shifted_RV.logsumexp(-1) - expected_R", "shifted_RV.logsumexp(-1) + expected_R"),
    ("ops.logprobs", "shifted_RV.logsumexp(-1) - expected_R", "wide_RV.logsumexp(-1) - expected_R"),
    ("ops.masks", "mask.bool().sum(dim)", "mask.shape[1]"),
    (
        "stages.losses",
        "return self.old_logprobs_NT, self.rollout_logprobs_NT, self.mask_NT",
        "return self.rollout_logprobs_NT, self.old_logprobs_NT, self.mask_NT",
    ),
    (
        "stages.losses",
        "return self.logprobs_NT, self.old_logprobs_NT, self.advantage, self.mask_NT",
        "return self.logprobs_NT, self.rollout_logprobs_NT, self.advantage, self.mask_NT",
    ),
    (
        "stages.backends.objective",
        "scored.logprobs_NT, scored.ref_logprobs_NT, mask_NT, loss.kl_estimator",
        "scored.old_logprobs_NT, scored.ref_logprobs_NT, mask_NT, loss.kl_estimator",
    ),
    ("stages.backends.objective", "loss.log_ratio(scored)", "(scored.logprobs_NT - scored.old_logprobs_NT)"),
    ("stages.backends.objective", "clipped_NT & (weight_NT != 0)", "clipped_NT"),
    ("stages.backends.objective", ", loss.kl_clamp\n", "\n"),
    ("stages.backends.objective", "aggregation, tokens, samples, ", "aggregation, samples, tokens, "),
]


@pytest.mark.parametrize(
    ("name", "right", "wrong"), HANDWRITTEN, ids=[f"{m[1][:24]}->{m[2][:24]}" for m in HANDWRITTEN]
)
def test_usual_mistakes_are_caught(name, right, wrong):
    source = inspect.getsource(importlib.import_module(name))
    assert source.count(right) == 1, f"{name} no longer holds {right!r} once: adapt this list"
    assert not survives(name, source.replace(right, wrong))
