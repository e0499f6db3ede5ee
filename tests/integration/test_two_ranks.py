"""Two data-parallel ranks on Ray and TransferQueue train on the right bytes, in each kind of microbatches.

The expected losses and weights come from a loop written by hand that divides the samples itself.
"""

from __future__ import annotations

import json

import pytest
import torch

from graphs.quickstart import TINY_QWEN3
from ops.flops import Transformer, quadratic_cost
from pipeline import WorkerGroup
from pipeline.rundir import RunDir
from tests.integration import given_samples as given
from tests.integration import two_ranks_by_hand as by_hand
from tests.integration.handwritten import build
from tests.integration.test_parity import execute, losses, weights

VOCAB = len(given.ALPHABET) + 2


def expected(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and weights of the loop written by hand."""
    torch.set_num_threads(1)
    size = given.GROUPS * given.GROUP_SIZE
    steps = []
    for step in range(given.STEPS):
        made = [given.sample(kind, step * size + i) for i in range(size)]
        columns = [list(column) for column in zip(*(vars(each).values() for each in made))]
        prompts, responses, advantages, _, drawn = columns
        steps.append(by_hand.Samples(prompts, responses, drawn, advantages))
    cut = given.KINDS[kind]
    settings = by_hand.Settings(
        cut=by_hand.Cut(kind, cut if isinstance(cut, int) else cut.tokens),
        quadratic=0.0 if kind == "plain" else quadratic_cost(Transformer.of({"vocab_size": VOCAB, **TINY_QWEN3})),
        minibatches=given.MINIBATCHES,
        at_once=given.SCORED_AT_ONCE,
        lr=given.LR,
        kl=given.KL,
    )
    return by_hand.train(build(TINY_QWEN3, given.ALPHABET, given.SEED), steps, settings)


@pytest.mark.parametrize("kind", given.KINDS)
def test_two_ranks_train_on_the_samples_that_were_divided_by_hand(tmp_path, ray_session, kind):
    from pipeline.executors.ray import RayExecutor
    from pipeline.executors.sent import user_modules

    learner = WorkerGroup("learner", backend="torch", workers=2, threads=1, cpus=0.25)
    run_dir = RunDir(tmp_path)
    execute(RayExecutor(modules=user_modules(given)), run_dir, graph=given.graph(kind, learner))
    wanted_losses, wanted_weights = expected(kind)
    assert losses(run_dir) == wanted_losses
    ages = [json.loads(line)["train/staleness_max"] for line in run_dir.metrics.read_text().splitlines()]
    assert ages == [0.0] * given.STEPS, "tokens that were inserted have no age"
    found = weights(run_dir, steps=given.STEPS)
    assert found.keys() == wanted_weights.keys()
    assert all(torch.equal(found[name], wanted_weights[name]) for name in found)
