"""Samples that are given instead of sampled, and a graph that trains on them with reference logprobs and a KL term.

For each kind of microbatches, a minibatch of these lengths has one best division over two ranks, which a search other
than Sluice's finds too (`two_ranks_by_hand`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from graphs.quickstart import TINY_QWEN3
from pipeline import Field, Graph, Model, Schedule, Stage, StageContext, WorkerGroup
from pipeline.declare.columns import Ragged
from pipeline.declare.sharding import Dynamic, Packed
from stages import ClippedLoss, PrevLogprobs, RefLogprobs, Train
from stages.vocabulary import (
    ADVANTAGE,
    PROMPT_IDS,
    RESPONSE_IDS,
    ROLLOUT_LOGPROBS,
    TOKEN_ADVANTAGES,
    TOKEN_VERSIONS,
)

ALPHABET = "0123456789>"
STEPS, GROUPS, GROUP_SIZE, MINIBATCHES, LR, SEED, KL = 2, 8, 2, 2, 2e-3, 3, 0.1
SCORED_AT_ONCE = 4  # samples
KINDS: dict[str, int | Dynamic | Packed] = {
    "plain": 3,
    "dynamic": Dynamic(48),
    "packed": Packed(24, shared=False),  # samples of a group have different prompts here
}
PER_SAMPLE = "plain"  # the kind whose samples have one advantage each; in the others, each token has its own
TOKENS = {  # of the eight samples of a minibatch, prompt and response together, before they are shuffled
    "plain": (20, 8, 23, 10, 17, 4, 11, 9),
    "dynamic": (23, 22, 21, 20, 9, 8, 7, 4),
    "packed": (20, 18, 16, 14, 10, 8, 6, 4),
}


@dataclass(frozen=True)
class Sample:
    """One sample: token ids, and the advantage and the sampler's logprob of each response token, and whether the policy
    drew it."""

    prompt: torch.Tensor
    response: torch.Tensor
    advantages: torch.Tensor
    logprobs: torch.Tensor
    drawn: torch.Tensor


def sample(kind: str, number: int) -> Sample:
    """Return a sample by its number in canonical order, from the first step on."""
    lengths = list(TOKENS[kind])
    random.Random(number // len(lengths)).shuffle(lengths)
    tokens = lengths[number % len(lengths)]
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(2, 2 + len(ALPHABET), (tokens,), generator=generator)
    split = 1 + tokens % 3
    logprobs = -torch.rand(tokens - split, generator=generator) - 1.0
    drawn = (torch.arange(tokens - split) % 3 != 1) | (number % 3 != 1)  # of every third sample some are not
    advantages = torch.randn(1 if kind == PER_SAMPLE else len(drawn), generator=generator).expand(len(drawn))
    return Sample(ids[:split], ids[split:], advantages, logprobs, drawn)


@dataclass(frozen=True)
class Given(Stage):
    """Writes the samples."""

    kind: str
    name: str = "given"
    batch: int = GROUPS
    group_size: int = GROUP_SIZE

    @property
    def writes(self) -> tuple[Field, ...]:  # type: ignore[override]
        """The fields of samples."""
        advantage = ADVANTAGE if self.kind == PER_SAMPLE else TOKEN_ADVANTAGES
        return PROMPT_IDS, RESPONSE_IDS, advantage, ROLLOUT_LOGPROBS, TOKEN_VERSIONS

    def setup(self, context: StageContext) -> Any:
        def run(columns: Any, task: Any) -> dict[str, Any]:
            made = [sample(self.kind, g * GROUP_SIZE + i) for g in task.groups for i in range(GROUP_SIZE)]
            if self.kind == PER_SAMPLE:
                advantages = {"advantage": torch.stack([each.advantages[0] for each in made])}
            else:
                advantages = {"token_advantages": Ragged.of([each.advantages for each in made])}
            return advantages | {
                "prompt_ids": Ragged.of([each.prompt for each in made]),
                "response_ids": Ragged.of([each.response for each in made]),
                "rollout_logprobs": Ragged.of([each.logprobs for each in made]),
                "token_versions": Ragged.of([each.drawn.int() * (task.step + 1) - 1 for each in made]),
            }

        return run


def graph(kind: str, learner: WorkerGroup, train: type[Train] = Train) -> Graph:
    """Return a graph that trains on the samples in one kind of microbatches, on all workers of `learner`."""
    policy = Model("tiny", config=TINY_QWEN3, alphabet=ALPHABET, seed=SEED)
    cut: Any = KINDS[kind]
    return Graph(
        name="given",
        host=WorkerGroup("host", cpus=0.25),
        source=Given(kind),
        stages=(
            PrevLogprobs(policy, on=learner, microbatch=cut, at_once=SCORED_AT_ONCE),
            RefLogprobs(policy.frozen(), on=learner, microbatch=cut, at_once=SCORED_AT_ONCE),
            train(
                policy,
                on=learner,
                loss=ClippedLoss(kl=KL),
                lr=LR,
                minibatches=MINIBATCHES,
                microbatch=cut,
                advantage="sample" if kind == PER_SAMPLE else "token",
            ),
        ),
        schedule=Schedule(steps=STEPS, seed=SEED),
    )
