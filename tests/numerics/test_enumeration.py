"""A policy so small that every sequence can be enumerated: exact gradients against the expectation of the estimators.

What holds exactly, and is shown here:
- RLOO has the gradient of E[R], Dr. GRPO (G - 1) / G of it; GRPO's division by the standard deviation optimizes another
  quantity (with two samples, the chance of beating the old policy).
- As a loss, k2 has the gradient of KL(policy || ref), k1 none, k3 that of KL(ref || policy). With the importance factor
  k1 and k3 have that of KL(policy || ref), and k2 does not.
- For more than one token, a per-token KL loss has that gradient at the sampled prefixes, but ignores that an early
  token decides which prefixes occur; as part of the reward, the detached k1 gives the whole gradient.
- With samples of another policy, the untruncated weight of the whole response gives the on-policy gradient; the weights
  of its tokens do so for responses of one token only.

Legend: S all sequences, T tokens, V vocabulary.
"""

import itertools
import math

import pytest
import torch

from ops.advantage import group_relative, leave_one_out, mean_centred
from ops.correction import decoupled, icepop, sequence_mask, truncated_is
from ops.kl import kl_estimate, kl_k3
from ops.logprobs import entropy, selected_logprobs
from ops.loss import aggregate, cispo_loss, clipped_policy_loss
from pipeline import StageContext, Task, WorkerGroup
from pipeline.declare.columns import Ragged
from stages.advantage import Advantage

torch.set_num_threads(1)
V = 3


class Policy:
    """Logits of the first token, and of the second token given the first."""

    def __init__(self, seed, tokens):
        generator = torch.Generator().manual_seed(seed)
        self.first = torch.randn(V, generator=generator, dtype=torch.float64, requires_grad=True)
        self.second = torch.randn(V, V, generator=generator, dtype=torch.float64, requires_grad=True)
        self.weights = (self.first, self.second)[:tokens]
        self.ids_ST = torch.tensor(list(itertools.product(range(V), repeat=tokens)))
        self.mask_ST = torch.ones(self.ids_ST.shape, dtype=torch.bool)

    def logits(self):
        rows = [[self.first, self.second[ids[0]]][: len(ids)] for ids in self.ids_ST.tolist()]
        return torch.stack([torch.stack(row) for row in rows])

    def logprobs(self):
        return selected_logprobs(self.logits(), self.ids_ST)

    def exact(self):
        """Return the log-probability of every sequence, by log_softmax."""
        first = self.first.log_softmax(-1)[self.ids_ST[:, 0]]
        if self.ids_ST.shape[1] == 1:
            return first
        return first + self.second.log_softmax(-1)[self.ids_ST[:, 0], self.ids_ST[:, 1]]

    def gradient(self, value):
        return torch.cat([part.flatten() for part in torch.autograd.grad(value, self.weights, retain_graph=True)])

    def reward_gradient(self):
        return self.gradient((self.exact().exp() * rewards(self)).sum())


def rewards(policy):
    return torch.tensor([math.sin(7 * i) + (i % 2) for i in range(len(policy.ids_ST))], dtype=torch.float64)


def expected_loss(policy, sampler, advantage, **parameters):
    """Return the loss over all sequences, weighted by `sampler`'s probabilities: it is linear in the advantage."""
    lp = policy.logprobs()
    often = (advantage * sampler.exact().exp()).detach()
    loss, clipped = clipped_policy_loss(lp, lp.detach(), often, policy.mask_ST, 0.2, 0.2, **parameters)
    assert not clipped.any()
    return aggregate(loss, policy.mask_ST, "sequence_sum", 1.0)


def equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def differs(actual, other):
    assert (actual - other).abs().max() > 0.01


# Advantages


@pytest.mark.parametrize("tokens", [1, 2])
def test_on_policy_gradient_is_that_of_the_expected_reward(tokens):
    policy = Policy(0, tokens)
    equal(-policy.gradient(expected_loss(policy, policy, rewards(policy))), policy.reward_gradient())


@pytest.mark.parametrize("tokens", [1, 2])
def test_cispo_on_policy_is_the_same(tokens):
    policy = Policy(0, tokens)
    lp, often = policy.logprobs(), (rewards(policy) * policy.exact().exp()).detach()
    loss, _ = cispo_loss(lp, lp.detach(), often, policy.mask_ST, 0.2, 0.2)
    equal(-policy.gradient(aggregate(loss, policy.mask_ST, "token", 1.0)), policy.reward_gradient())


def test_off_policy_gradient_without_clipping_is_that_of_the_expected_reward():
    policy, old = Policy(0, 1), Policy(1, 1)
    often = (rewards(policy) * old.exact().exp()).detach()
    for loss_of in (clipped_policy_loss, cispo_loss):
        loss, _ = loss_of(policy.logprobs(), old.logprobs().detach(), often, policy.mask_ST, 1.0, math.inf)
        equal(-policy.gradient(loss.sum()), policy.reward_gradient())


def groups_of(policy, size):
    """Return every group of `size` sequences: rows, rewards, and the group's probability, repeated per sample."""
    rows = torch.tensor(list(itertools.product(range(len(policy.ids_ST)), repeat=size)))
    often = policy.exact().detach().exp()[rows].prod(1).repeat_interleave(size)
    return rows.flatten(), rewards(policy)[rows.flatten()], often


def group_gradient(policy, size, advantage_of):
    rows, reward, often = groups_of(policy, size)
    lp, mask = policy.logprobs()[rows], policy.mask_ST[rows]
    loss, _ = clipped_policy_loss(lp, lp.detach(), advantage_of(reward) * often, mask, 0.2, 0.2)
    return -policy.gradient(aggregate(loss, mask, "sequence_sum", size))


@pytest.mark.parametrize(("tokens", "size"), [(1, 2), (1, 3), (1, 4), (2, 2), (2, 3)])
def test_rloo_and_dr_grpo_are_gradients_of_the_expected_reward(tokens, size):
    policy = Policy(6, tokens)
    exact = policy.reward_gradient()
    equal(group_gradient(policy, size, lambda reward: leave_one_out(reward, size)), exact)
    equal(group_gradient(policy, size, lambda reward: mean_centred(reward, size)), exact * (size - 1) / size)
    unscaled = group_gradient(policy, size, lambda reward: group_relative(reward, size, eps=1e9) * 1e9)
    torch.testing.assert_close(unscaled, exact * (size - 1) / size, rtol=1e-6, atol=1e-8)
    scaled = group_gradient(policy, size, lambda reward: group_relative(reward, size))
    assert torch.nn.functional.cosine_similarity(scaled, exact, dim=0) < 0.9999


def test_group_relative_pairs_raise_the_chance_of_beating_the_old_policy():
    """In a group of two the advantage is sign(R1 - R2) / sqrt 2, so the gradient increases its expectation."""
    policy = Policy(2, 2)
    reward, p = rewards(policy), policy.exact().exp()
    estimated = group_gradient(policy, 2, lambda reward: group_relative(reward, 2, eps=1e-300))
    duel = torch.sign(reward[:, None] - reward[None, :]) / math.sqrt(2)
    equal(estimated, policy.gradient((p[:, None] * p.detach()[None, :] * duel).sum()))


def test_gspo_on_policy_weighs_a_response_by_one_over_its_length():
    """d s / d theta is the mean of the tokens' gradients; with the mean over tokens that is 1 / T of the gradient."""
    policy = Policy(0, 2)
    lp, often = policy.logprobs(), (rewards(policy) * policy.exact().exp()).detach()
    loss, _ = clipped_policy_loss(lp, lp.detach(), often, policy.mask_ST, 0.2, 0.2, level="sequence")
    equal(-policy.gradient(aggregate(loss, policy.mask_ST, "sequence", 1.0)), policy.reward_gradient() / 2)


# The divergence from the reference


def kl_exact(policy, ref, myopic=False):
    """Return KL(policy || ref) of whole sequences. `myopic` holds the probability of each prefix fixed."""
    first, ref_first = policy.first.log_softmax(-1), ref.first.log_softmax(-1).detach()
    total = (first.exp() * (first - ref_first)).sum()
    if policy.ids_ST.shape[1] == 2:
        second, ref_second = policy.second.log_softmax(-1), ref.second.log_softmax(-1).detach()
        by_prefix = (second.exp() * (second - ref_second)).sum(-1)
        total = total + ((first.detach() if myopic else first).exp() * by_prefix).sum()
    return total


def kl_loss(policy, ref, kind, importance=False):
    """Return the estimator as a loss, in expectation over the policy's samples."""
    often = policy.exact().detach().exp()[:, None]
    estimate = kl_estimate(policy.logprobs(), ref.logprobs().detach(), policy.mask_ST, kind, importance)
    return aggregate(often * estimate, policy.mask_ST, "sequence_sum", 1.0)


@pytest.mark.parametrize("tokens", [1, 2])
def test_k1_and_k3_are_unbiased_values_of_the_kl_and_k2_is_not(tokens):
    policy, ref = Policy(3, tokens), Policy(4, tokens)
    for importance in (False, True):
        for kind in ("k1", "k3"):
            equal(kl_loss(policy, ref, kind, importance), kl_exact(policy, ref))
        differs(kl_loss(policy, ref, "k2", importance), kl_exact(policy, ref))
    p = policy.exact().exp()
    equal((p[:, None] * kl_k3(policy.logprobs(), ref.logprobs())).sum(), kl_exact(policy, ref))


@pytest.mark.parametrize("tokens", [1, 2])
def test_gradient_of_the_kl_as_a_loss(tokens):
    policy, ref = Policy(3, tokens), Policy(4, tokens)
    exact = policy.gradient(kl_exact(policy, ref, myopic=True))
    equal(policy.gradient(kl_loss(policy, ref, "k1")), torch.zeros_like(exact))
    equal(policy.gradient(kl_loss(policy, ref, "k2")), exact)
    differs(policy.gradient(kl_loss(policy, ref, "k3")), exact)
    equal(policy.gradient(kl_loss(policy, ref, "k1", importance=True)), exact)
    differs(policy.gradient(kl_loss(policy, ref, "k2", importance=True)), exact)
    equal(policy.gradient(kl_loss(policy, ref, "k3", importance=True)), exact)


def test_k3_as_a_loss_follows_the_reverse_direction():
    policy, ref = Policy(3, 1), Policy(4, 1)
    q = ref.exact().exp().detach()
    towards_ref = (q * (q.log() - policy.exact())).sum()
    equal(policy.gradient(kl_loss(policy, ref, "k3")), policy.gradient(towards_ref))


def test_a_kl_loss_by_tokens_does_not_see_which_prefixes_come():
    policy, ref = Policy(3, 2), Policy(4, 2)
    whole, myopic = (policy.gradient(kl_exact(policy, ref, myopic)) for myopic in (False, True))
    differs(whole[:V], myopic[:V])
    equal(whole[V:], myopic[V:])


@pytest.mark.parametrize("tokens", [1, 2])
def test_detached_k1_in_the_reward_has_the_whole_gradient(tokens):
    """R - beta * sum over tokens of (prev - ref), computed by the advantage stage."""
    policy, ref, beta = Policy(3, tokens), Policy(4, tokens), 0.7
    columns = {"reward": rewards(policy)}
    for name, scorer in (("prev_logprobs", policy), ("ref_logprobs", ref)):
        columns[name] = Ragged.of(list(scorer.logprobs().detach()))
    columns["token_versions"] = Ragged(torch.zeros(policy.ids_ST.numel(), dtype=torch.int32), columns[name].lengths)
    context = StageContext(group=WorkerGroup("host"), rank=0, seed=0, group_size=1, run_dir=None, shared={})
    groups = tuple(range(len(policy.ids_ST)))
    out = Advantage("reward", kl=beta).setup(context)(columns, Task(stage="advantage", step=0, groups=groups))
    paid = out.columns["advantage"]
    exact = policy.reward_gradient() - beta * policy.gradient(kl_exact(policy, ref))
    equal(-policy.gradient(expected_loss(policy, policy, paid)), exact)


# Samples of another policy


@pytest.mark.parametrize("tokens", [1, 2])
def test_weight_of_the_whole_response_recovers_the_on_policy_gradient(tokens):
    policy, behaviour = Policy(0, tokens), Policy(1, tokens)
    given = (policy.logprobs(), behaviour.logprobs(), policy.mask_ST)
    for weight, changed in (
        truncated_is(*given, cap=math.inf, level="sequence"),
        icepop(*given, low=0.0, high=math.inf, level="sequence"),
    ):
        assert not changed.any()
        loss = expected_loss(policy, behaviour, rewards(policy), weight_NT=weight)
        equal(-policy.gradient(loss), policy.reward_gradient())
    differs(-policy.gradient(expected_loss(policy, behaviour, rewards(policy))), policy.reward_gradient())


@pytest.mark.parametrize("tokens", [1, 2])
def test_weights_of_tokens_do_so_for_one_token_only(tokens):
    policy, behaviour = Policy(0, tokens), Policy(1, tokens)
    given = (policy.logprobs(), behaviour.logprobs(), policy.mask_ST)
    for weight, changed in (
        decoupled(*given),
        truncated_is(*given, cap=math.inf),
        icepop(*given, low=0.0, high=math.inf),
        sequence_mask(*given, low=0.0, high=math.inf),
    ):
        assert not changed.any()
        loss = expected_loss(policy, behaviour, rewards(policy), weight_NT=weight)
        (equal if tokens == 1 else differs)(-policy.gradient(loss), policy.reward_gradient())


def test_rloo_of_another_policys_groups_needs_each_responses_own_weight_only():
    """The baseline uses the other responses only, so it is independent of the response it is subtracted from."""
    policy, behaviour, size = Policy(0, 1), Policy(1, 1), 3
    rows, reward, often = groups_of(behaviour, size)
    lp, mask = policy.logprobs()[rows], policy.mask_ST[rows]
    weight, _ = decoupled(lp, behaviour.logprobs()[rows], mask)
    advantage = leave_one_out(reward, size) * often
    loss, _ = clipped_policy_loss(lp, lp.detach(), advantage, mask, 0.2, 0.2, weight_NT=weight)
    equal(-policy.gradient(aggregate(loss, mask, "sequence_sum", size)), policy.reward_gradient())


def test_decoupled_loss_is_unbiased_between_updates_too():
    """pi_prev / pi_rollout times pi / pi_prev is pi / pi_rollout for any proximal policy."""
    policy, prev, behaviour = Policy(0, 1), Policy(5, 1), Policy(1, 1)
    weight, _ = decoupled(prev.logprobs(), behaviour.logprobs(), policy.mask_ST)
    often = (rewards(policy) * behaviour.exact().exp()).detach()
    loss, _ = clipped_policy_loss(
        policy.logprobs(), prev.logprobs().detach(), often, policy.mask_ST, 1.0, math.inf, weight_NT=weight
    )
    equal(-policy.gradient(loss.sum()), policy.reward_gradient())


def test_entropy_and_its_gradient_are_the_expected_surprise():
    policy = Policy(5, 1)
    p = policy.exact().exp()
    estimated, surprise = (p.detach()[:, None] * entropy(policy.logits())).sum(), -(p * policy.exact()).sum()
    equal(estimated, surprise)
    equal(policy.gradient(estimated), policy.gradient(surprise))
    both = Policy(5, 2)
    p = both.exact().exp()
    equal((p[:, None] * entropy(both.logits())).sum(), -(p * both.exact()).sum())
