"""A policy so small that every sequence can be enumerated: exact gradients against the expectation of the estimators.

Legend: S all sequences, T tokens, V vocabulary.
"""

import itertools
import math

import pytest
import torch

from ops.advantage import group_relative
from ops.kl import kl_k3
from ops.logprobs import entropy, selected_logprobs
from ops.loss import aggregate, clipped_policy_loss

torch.set_num_threads(1)
V = 3


class Policy:
    """Logits of the first token, and of the second one given the first."""

    def __init__(self, seed, tokens):
        generator = torch.Generator().manual_seed(seed)
        self.first = torch.randn(V, generator=generator, dtype=torch.float64, requires_grad=True)
        self.second = torch.randn(V, V, generator=generator, dtype=torch.float64, requires_grad=True)
        self.weights = (self.first, self.second)[:tokens]
        self.ids_ST = torch.tensor(list(itertools.product(range(V), repeat=tokens)))

    def logits(self):
        rows = [[self.first, self.second[ids[0]]][: len(ids)] for ids in self.ids_ST.tolist()]
        return torch.stack([torch.stack(row) for row in rows])

    def logprobs(self):
        return selected_logprobs(self.logits(), self.ids_ST)

    def exact(self):
        """Log-probability of every sequence, by log_softmax."""
        first = self.first.log_softmax(-1)[self.ids_ST[:, 0]]
        if self.ids_ST.shape[1] == 1:
            return first
        return first + self.second.log_softmax(-1)[self.ids_ST[:, 0], self.ids_ST[:, 1]]

    def gradient(self, value):
        return torch.cat([part.flatten() for part in torch.autograd.grad(value, self.weights, retain_graph=True)])


def rewards(policy):
    return torch.tensor([math.sin(7 * i) + (i % 2) for i in range(len(policy.ids_ST))], dtype=torch.float64)


@pytest.mark.parametrize("tokens", [1, 2])
def test_on_policy_gradient_is_that_of_the_expected_reward(tokens):
    policy, everything = Policy(0, tokens), torch.ones(V**tokens, tokens)
    reward = rewards(policy)
    p = policy.exact().exp()
    lp = policy.logprobs()
    # Each sequence counts as often as it is sampled: the weight goes into the advantage, in which the loss is linear.
    loss, clipped = clipped_policy_loss(lp, lp.detach(), (reward * p).detach(), everything, 0.2, 0.2)
    estimated = policy.gradient(aggregate(loss, everything, "token", 1.0))
    torch.testing.assert_close(-estimated, policy.gradient((p * reward).sum()), rtol=1e-10, atol=1e-12)
    assert not clipped.any()


def test_off_policy_gradient_without_clipping_is_that_of_the_expected_reward():
    policy, old, everything = Policy(0, 1), Policy(1, 1), torch.ones(V, 1)
    reward = rewards(policy)
    advantage = (reward * old.exact().exp()).detach()
    loss, _ = clipped_policy_loss(policy.logprobs(), old.logprobs().detach(), advantage, everything, math.inf, math.inf)
    expected = policy.gradient((policy.exact().exp() * reward).sum())
    torch.testing.assert_close(-policy.gradient(loss.sum()), expected, rtol=1e-10, atol=1e-12)


def test_group_relative_pairs_raise_the_chance_of_beating_the_old_policy():
    """In a group of two the advantage is sign(R1 - R2) / sqrt 2, so that is what the gradient raises."""
    policy = Policy(2, 2)
    reward, p = rewards(policy), policy.exact().exp()
    pairs = list(itertools.product(range(len(reward)), repeat=2))
    advantage_N = group_relative(torch.stack([reward[i] for pair in pairs for i in pair]), 2, eps=1e-300)
    chance_N = torch.stack([p[i] * p[j] for i, j in pairs]).detach().repeat_interleave(2)
    rows = torch.tensor(pairs).flatten()
    lp, everything = policy.logprobs()[rows], torch.ones(len(rows), 2)
    loss, _ = clipped_policy_loss(lp, lp.detach(), advantage_N * chance_N, everything, 0.2, 0.2)
    estimated = policy.gradient(aggregate(loss, everything, "token", 2.0))
    duel = torch.sign(reward[:, None] - reward[None, :]) / math.sqrt(2)
    expected = policy.gradient((p[:, None] * p.detach()[None, :] * duel).sum())
    torch.testing.assert_close(-estimated, expected, rtol=1e-10, atol=1e-12)


def test_k3_is_an_unbiased_value_of_the_kl():
    policy, ref = Policy(3, 2), Policy(4, 2)
    p = policy.exact().exp()
    exact = (p * (policy.exact() - ref.exact())).sum()
    estimated = (p[:, None] * kl_k3(policy.logprobs(), ref.logprobs())).sum()
    torch.testing.assert_close(estimated, exact, rtol=1e-10, atol=1e-12)


def test_k3_as_a_loss_follows_the_reverse_direction():
    policy, ref = Policy(3, 1), Policy(4, 1)
    p, q = policy.exact().exp(), ref.exact().exp().detach()
    loss = (p.detach()[:, None] * kl_k3(policy.logprobs(), ref.logprobs().detach())).sum()
    towards_ref = (q * (q.log() - policy.exact())).sum()
    torch.testing.assert_close(policy.gradient(loss), policy.gradient(towards_ref), rtol=1e-10, atol=1e-12)
    kl = (p * (policy.exact() - q.log())).sum()
    assert (policy.gradient(loss) - policy.gradient(kl)).abs().max() > 0.01


def test_entropy_is_the_expected_surprise():
    policy = Policy(5, 2)
    p = policy.exact().exp()
    estimated = (p[:, None] * entropy(policy.logits())).sum()
    torch.testing.assert_close(estimated, -(p * policy.exact()).sum(), rtol=1e-10, atol=1e-12)
