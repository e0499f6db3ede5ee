"""The losses agree with TRL's own code, up to rounding in float64, in every mode that both offer.

`GRPOTrainer._compute_loss` runs unbound on a stand-in that has the numbers in place of a model. TRL computes the
advantages and the importance weights in the middle of a long method; those statements are extracted and executed.

How the normalizers map: TRL divides by what one process sees in one accumulation window. With one process and one
microbatch that is our global count. "dapo" and "cispo" divide by the tokens of the window, and agree for any split into
microbatches; "grpo", "dr_grpo" and "luspo" average over microbatches, and agree if these have equally many samples;
"bnpo" divides by the tokens of each microbatch, and agrees with "token" if there is one.

Not offered here: sapo, vespo, the off-policy sequence mask, the top-entropy mask, and a lower bound of truncated IS.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from trl.rewards import get_soft_overlong_punishment
from trl.trainer import grpo_trainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

from ops import advantage, correction, kl, logprobs
from ops.masks import length_mask
from ops.rewards.length import overlong_penalty
from stages.backends.objective import Scored, objective
from stages.losses import CispoLoss, ClippedLoss, IcePop, PolicyLoss, TruncatedIS

torch.set_num_threads(1)
MAX_TOKENS = 8
LENGTHS = (5, 2, 6, 3, 1, 4)
SAMPLES = len(LENGTHS)
SEED = 2
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6}

# TRL's settings, and ours.
MODES: dict[str, tuple[dict[str, object], PolicyLoss]] = {
    "grpo": ({"loss_type": "grpo"}, ClippedLoss(aggregation="sequence")),
    "bnpo": ({"loss_type": "bnpo"}, ClippedLoss()),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, ClippedLoss(clip=(0.2, 0.28))),
    "dr_grpo": ({"loss_type": "dr_grpo"}, ClippedLoss(aggregation="fixed_length", max_tokens=MAX_TOKENS)),
    "luspo": (
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        ClippedLoss(ratio="sequence", aggregation="sequence_sum"),
    ),
    "luspo, token ratio": ({"loss_type": "luspo"}, ClippedLoss(aggregation="sequence_sum")),
    "gspo": (
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 0.03,
            "epsilon_high": 0.04,
        },
        ClippedLoss(ratio="sequence", clip=(0.03, 0.04), aggregation="sequence"),
    ),
    "gspo, tokens": (
        {"loss_type": "dapo", "importance_sampling_level": "sequence"},
        ClippedLoss(ratio="sequence"),
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.3}, CispoLoss(clip=(None, 0.3))),
    "two-sided clip": ({"loss_type": "dapo", "delta": 1.5}, ClippedLoss(dual_clip=1.5)),
    "k3": ({"loss_type": "grpo", "beta": 0.4}, ClippedLoss(aggregation="sequence", kl=0.4)),
    "k3, dr_grpo": (
        {"loss_type": "dr_grpo", "beta": 0.4},
        ClippedLoss(aggregation="fixed_length", max_tokens=MAX_TOKENS, kl=0.4),
    ),
    "k3, gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.4},
        ClippedLoss(ratio="sequence", aggregation="sequence", kl=0.4),
    ),
    "k3, cispo": ({"loss_type": "cispo", "epsilon_high": 1.3, "beta": 0.4}, CispoLoss(clip=(None, 0.3), kl=0.4)),
    "entropy bonus": ({"loss_type": "dapo", "entropy_coef": 0.3}, ClippedLoss(entropy=0.3)),
    "token_truncate": (
        {"loss_type": "dapo", "vllm_mode": "token_truncate", "vllm_max": 1.2},
        ClippedLoss(correction=TruncatedIS(cap=1.2)),
    ),
    "sequence_truncate": (
        {"loss_type": "grpo", "vllm_mode": "sequence_truncate", "vllm_max": 1.2},
        ClippedLoss(aggregation="sequence", correction=TruncatedIS(cap=1.2, level="sequence")),
    ),
    "token_mask": (
        {"loss_type": "dapo", "vllm_mode": "token_mask", "vllm_min": 0.8, "vllm_max": 1.2},
        ClippedLoss(correction=IcePop(low=0.8, high=1.2)),
    ),
    "sequence_mask": (
        {"loss_type": "dapo", "vllm_mode": "sequence_mask", "vllm_min": 0.5, "vllm_max": 1.5},
        ClippedLoss(correction=IcePop(low=0.5, high=1.5, level="sequence")),
    ),
    "gspo, sequence_truncate": (
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "vllm_mode": "sequence_truncate",
            "vllm_max": 1.2,
        },
        ClippedLoss(ratio="sequence", aggregation="sequence", correction=TruncatedIS(cap=1.2, level="sequence")),
    ),
    "cispo, token_truncate, k3": (
        {"loss_type": "cispo", "epsilon_high": 1.3, "vllm_mode": "token_truncate", "vllm_max": 1.2, "beta": 0.4},
        CispoLoss(clip=(None, 0.3), kl=0.4, correction=TruncatedIS(cap=1.2)),
    ),
    "all of it": (
        {
            "loss_type": "dapo",
            "epsilon_high": 0.28,
            "delta": 1.5,
            "beta": 0.4,
            "entropy_coef": 0.3,
            "vllm_mode": "token_truncate",
            "vllm_max": 1.2,
        },
        ClippedLoss(clip=(0.2, 0.28), dual_clip=1.5, kl=0.4, entropy=0.3, correction=TruncatedIS(cap=1.2)),
    ),
}


def batch(dtype=torch.float64):
    """Return the columns of one minibatch; ratios of 0.4 to 2.5, advantages of both signs and 0."""
    generator = torch.Generator().manual_seed(SEED)

    def normal(scale):
        return scale * torch.randn(SAMPLES, MAX_TOKENS - 1, generator=generator, dtype=torch.float64)

    lp = -normal(1.0).abs()
    old, rollout, ref = lp + normal(0.6), lp + normal(0.4), lp + normal(0.4)
    entropy = normal(1.0).abs()
    sign = torch.tensor([1.2, -0.7, 0.4, -1.5, 0.0, 0.9], dtype=torch.float64)
    columns = {
        "lp": lp,
        "old": old,
        "rollout": rollout,
        "ref": ref,
        "entropy": entropy,
        "advantage": sign,
    }
    named = SimpleNamespace(**{name: column.to(dtype) for name, column in columns.items()})
    named.mask = length_mask(LENGTHS, lp.shape[1])
    return named


def trainer(lp, entropy, *, accumulation=1, delta=None, beta=0.0, bias_corrected=False, entropy_coef=None, **mode):
    """Return what `_compute_loss` reads of a GRPOTrainer, with TRL's defaults and numbers in place of a model."""
    accelerator = SimpleNamespace(
        num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x
    )
    args = SimpleNamespace(delta=delta, use_bias_correction_kl=bias_corrected, steps_per_generation=accumulation)
    settings = {
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": "vllm_mode" in mode,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": mode.pop("vllm_mode", None),
        "vllm_importance_sampling_clip_min": mode.pop("vllm_min", None),
        "vllm_importance_sampling_clip_max": mode.pop("vllm_max", None),
        "beta": beta,
        "entropy_coef": entropy_coef,
        "_entropy_bonus_enabled": entropy_coef is not None,
        "use_adaptive_entropy": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "aux_loss_enabled": False,
        "max_completion_length": MAX_TOKENS,
        "current_gradient_accumulation_steps": accumulation,
        "model": SimpleNamespace(training=True),
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *args, **kwargs: (lp, entropy, None),
    }
    return SimpleNamespace(accelerator=accelerator, args=args, **(settings | mode))


def statement(found):
    """Compile the first `if` statement of TRL's method for which `found` is true, to run it on our numbers."""
    source = textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions))
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If) and found(node)]
    return compile(ast.Module(body=nodes[:1], type_ignores=[]), grpo_trainer.__file__, "exec")


def importance_weights(stub, old, rollout, mask):
    names = {"self": stub, "completion_mask": mask.to(old.dtype), "tool_mask": None}
    names |= {"old_per_token_logps": old, "sampling_per_token_logps": rollout}
    code = statement(lambda node: any(ast.unparse(part).startswith("per_token_logps_diff =") for part in node.body))
    exec(code, vars(grpo_trainer) | names, scope := {})
    return scope["vllm_importance_sampling_ratio"]


def given(columns, rows=slice(None)):
    """Return the inputs of `_compute_loss`: empty prompts, and responses of which only the mask is used."""
    mask = columns.mask[rows].to(columns.lp.dtype)
    return {
        "prompt_ids": mask[:, :0],
        "prompt_mask": mask[:, :0],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": columns.advantage[rows],
        "old_per_token_logps": columns.old[rows],
        "ref_per_token_logps": columns.ref[rows],
        "num_items_in_batch": columns.mask.sum(),
    }


def theirs(mode, columns, cut=SAMPLES):
    """Return TRL's loss and its gradients in the logprobs and in the entropy, over microbatches of `cut` samples."""
    lp, entropy = (column.clone().requires_grad_() for column in (columns.lp, columns.entropy))
    total = 0.0
    for start in range(0, SAMPLES, cut):
        rows = slice(start, start + cut)
        stub = trainer(lp[rows], entropy[rows], accumulation=SAMPLES // cut, **mode)
        inputs = given(columns, rows)
        if stub.use_vllm:
            weights = importance_weights(stub, columns.old[rows], columns.rollout[rows], columns.mask[rows])
            inputs["importance_sampling_ratio"] = weights
        part = GRPOTrainer._compute_loss(stub, None, inputs)
        part.backward()
        total += part.detach()
    return total, lp.grad, torch.zeros_like(lp) if entropy.grad is None else entropy.grad


def scored(loss, columns, lp=None, entropy=None):
    lp, entropy = (columns.lp if lp is None else lp), (columns.entropy if entropy is None else entropy)
    ref = columns.ref if loss.kl else None
    return Scored(lp, columns.old, columns.rollout, columns.advantage, columns.mask, ref, entropy)


def ours(loss, columns):
    lp, entropy = (column.clone().requires_grad_() for column in (columns.lp, columns.entropy))
    value, _ = objective(loss, scored(loss, columns, lp, entropy), tokens=sum(LENGTHS), samples=SAMPLES)
    value.backward()
    return value.detach(), lp.grad, torch.zeros_like(lp) if entropy.grad is None else entropy.grad


def compare(actual, expected, tolerance):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MODES)
def test_loss_and_gradient(name, dtype):
    mode, loss = MODES[name]
    columns = batch(dtype)
    compare(ours(loss, columns), theirs(mode, columns), TOLERANCE[dtype])


@pytest.mark.parametrize("name", MODES)
def test_the_numbers_are_such_that_every_bound_acts(name):
    _, loss = MODES[name]

    def counts(loss):
        return objective(loss, scored(loss, batch()), tokens=1, samples=1)[1]

    assert 0 < counts(loss)["clip_fraction"] < sum(LENGTHS)
    if loss.correction is not None:
        assert 0 < counts(loss)["is_changed"] < sum(LENGTHS)
    if getattr(loss, "dual_clip", None) is not None:
        assert counts(loss)["clip_fraction"] > counts(replace(loss, dual_clip=None))["clip_fraction"]


@pytest.mark.parametrize("name", [name for name in MODES if MODES[name][0]["loss_type"] not in ("bnpo",)])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_microbatches_of_equally_many_samples(name, cut):
    """TRL's entropy bonus is a mean over each microbatch and agrees only for a single microbatch."""
    mode, loss = MODES[name]
    if loss.entropy == 0:
        compare(ours(loss, batch()), theirs(mode, batch(), cut), TOLERANCE[torch.float64])


def test_bnpo_depends_on_the_cut_into_microbatches_and_ours_does_not():
    mode, loss = MODES["bnpo"]
    assert (theirs(mode, batch(), cut=2)[0] - ours(loss, batch())[0]).abs() > 1e-3


def test_bias_corrected_kl_is_the_importance_factor_on_policy():
    """TRL multiplies k3 by the ratio to the old policy, which equals ours if the old policy is the current one."""
    columns = batch()
    mode = {"loss_type": "grpo", "beta": 0.4, "bias_corrected": True}
    loss = ClippedLoss(aggregation="sequence", kl=0.4, kl_importance=True)
    assert (ours(loss, columns)[0] - theirs(mode, columns)[0]).abs() > 1e-3
    columns.old = columns.lp
    compare(ours(loss, columns), theirs(mode, columns), TOLERANCE[torch.float64])


@pytest.mark.parametrize(
    ("mode", "ours"),
    [
        ({"vllm_mode": "token_truncate", "vllm_max": 1.2}, lambda *a: correction.truncated_is(*a, 1.2)),
        ({"vllm_mode": "sequence_truncate", "vllm_max": 1.2}, lambda *a: correction.truncated_is(*a, 1.2, "sequence")),
        ({"vllm_mode": "token_mask", "vllm_min": 0.8, "vllm_max": 1.2}, lambda *a: correction.icepop(*a, 0.8, 1.2)),
        (
            {"vllm_mode": "sequence_mask", "vllm_min": 0.6, "vllm_max": 1.6},
            lambda *a: correction.icepop(*a, 0.6, 1.6, "sequence"),
        ),
        ({"vllm_mode": "token_truncate", "vllm_max": math.inf}, correction.decoupled),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_importance_weights(mode, ours):
    columns = batch()
    expected = importance_weights(trainer(None, None, **mode), columns.old, columns.rollout, columns.mask)
    weight, changed = ours(columns.old, columns.rollout, columns.mask)
    torch.testing.assert_close(weight, expected * columns.mask, rtol=1e-14, atol=0)
    if mode["vllm_max"] < math.inf:
        assert 0 < changed.sum() < columns.mask.sum()


@pytest.mark.parametrize(
    ("scale", "formula"),
    [
        ("group", lambda reward: advantage.group_relative(reward, 3, eps=1e-4)),
        ("none", lambda reward: advantage.mean_centred(reward, 3)),
    ],
)
def test_advantages(scale, formula):
    reward = torch.tensor([1.0, 0.0, 0.3, 1.0, 1.0, 1.0, -2.0, 0.5, 4.0], dtype=torch.float64)
    stub = SimpleNamespace(
        multi_objective_aggregation="sum_then_normalize", scale_rewards=scale, reward_weights=torch.ones(1).double()
    )
    names = {"self": stub, "rewards_per_func": reward[:, None], "unscorable_mask": torch.zeros(9, dtype=torch.bool)}
    names |= {"num_generations": 3, "device": torch.device("cpu")}
    code = statement(lambda node: ast.unparse(node.test) == "self.multi_objective_aggregation == 'sum_then_normalize'")
    exec(code, vars(grpo_trainer) | names, scope := {})
    torch.testing.assert_close(formula(reward), scope["advantages"], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("own", "other"),
    [
        (logprobs.selected_logprobs, selective_log_softmax),
        (lambda x, _: logprobs.entropy(x), lambda x, _: entropy_from_logits(x)),
    ],
    ids=["logprobs", "entropy"],
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_logprobs_and_entropy(own, other, dtype):
    torch.manual_seed(0)
    logits, ids = torch.randn(3, 5, 17, dtype=torch.float64) * 3, torch.randint(0, 17, (3, 5))
    results = []
    for call in (own, other):
        leaf = logits.detach().to(dtype, copy=True).requires_grad_()
        value = call(leaf, ids)
        (value * torch.arange(1, 6)).sum().backward()
        results.append((value.detach(), leaf.grad))
    compare(*results, 10 * TOLERANCE[dtype])


def test_metrics():
    columns = batch()
    mode, loss = MODES["all of it"]
    stub = trainer(columns.lp, columns.entropy, **mode)
    inputs = given(columns) | {"importance_sampling_ratio": torch.ones_like(columns.lp)}
    GRPOTrainer._compute_loss(stub, None, inputs)
    metrics = stub._metrics["train"]
    columns.rollout = columns.old
    _, sums = objective(loss, scored(loss, columns), tokens=sum(LENGTHS), samples=SAMPLES)
    assert metrics["kl"] == [pytest.approx(sums["kl"] / sum(LENGTHS), rel=1e-13)]
    assert metrics["entropy"] == [pytest.approx(sums["entropy"] / sum(LENGTHS), rel=1e-13)]
    # TRL's fraction does not count tokens clipped by delta.
    plain = objective(ClippedLoss(clip=loss.clip), scored(loss, columns), tokens=1, samples=1)[1]["clip_fraction"]
    assert metrics["clip_ratio/region_mean"] == [pytest.approx(plain / sum(LENGTHS))]
    assert sums["clip_fraction"] > plain > 0
    estimate = kl.kl_k3(columns.lp, columns.ref, columns.mask).sum().item()
    assert sums["kl"] == pytest.approx(estimate, rel=1e-13)


def test_overlong():
    punishment = get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=8)
    lengths = range(30)
    assert [overlong_penalty(n, max_tokens=20, cache=8) for n in lengths] == punishment([[0] * n for n in lengths])
    assert not math.isclose(overlong_penalty(13, max_tokens=20, cache=8), 0.0)
