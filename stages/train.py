"""Train: optimizer updates from one batch. Knows what a batch is cut into; the backend knows how to update.

Train(policy, on=learner, loss=ClippedLoss(clip=(0.2, 0.28), kl=0.001), lr=1e-6, minibatches=4)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pipeline import Graph, Model, Output, Stage, StageContext, Task, WorkerGroup
from pipeline.columns import Columns
from pipeline.errors import Problem
from stages.backends import Engine, Minibatch, Optimization, backend_problems, engine, model_problems
from stages.logprobs import scoring_problems
from stages.vocabulary import (
    ADVANTAGE,
    PREV_LOGPROBS,
    PROMPT_IDS,
    REF_LOGPROBS,
    RESPONSE_IDS,
    ROLLOUT_LOGPROBS,
    TOKEN_VERSIONS,
    TRAINED_WEIGHTS,
)

AGGREGATIONS = ("token", "sequence")
SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True, kw_only=True)
class ClippedLoss:
    """The clipped policy loss (PPO, arXiv 1707.06347) with an optional KL term (GRPO, arXiv 2402.03300).

    clip         how far the ratio may fall below and rise above 1; (0.2, 0.28) is clip-higher (DAPO, arXiv 2503.14476)
    kl           weight of the k3 estimate of the divergence from the frozen model; 0 needs no RefLogprobs
    aggregation  "token": mean over the tokens of the minibatch; "sequence": mean over samples of their token means
    """

    clip: tuple[float, float] = (0.2, 0.2)
    kl: float = 0.0
    aggregation: Literal["token", "sequence"] = "token"


@dataclass(frozen=True)
class Train(Stage):
    """Makes `minibatches` x `epochs` updates of each batch. Minibatches are runs of whole groups in canonical order.

    lr, betas, eps, weight_decay  of AdamW
    schedule, warmup              "constant", "linear" or "cosine" over all updates of the run, after a linear rise
                                  over `warmup` updates
    clip_grad                     bound of the gradient's norm; 0 is none
    microbatch                    samples in one pass, whose gradients add up; 0 is the whole minibatch
    temperature                   the rollout's
    checkpoint_activations        recompute activations in the backward pass: less memory, more time

    Metrics, means over the step's updates: `loss`, `kl` (to the frozen model, nat a token), `clip_fraction`,
    `ratio_max`, `grad_norm` (before clipping), `lr`, `entropy` (nat a token); `mismatch_kl`, the k3 estimate between
    the sampler's and the trainer's logprobs of the same weights; `updates`, how many changed the weights; `skipped`,
    how many did not, because their loss or gradient was not finite; `staleness_mean` and `staleness_max`, how many
    versions older than the trained weights the tokens are.
    """

    model: Model
    _: KW_ONLY
    on: WorkerGroup | None = None
    loss: ClippedLoss = ClippedLoss()
    lr: float
    minibatches: int = 1
    epochs: int = 1
    microbatch: int = 0
    clip_grad: float = 1.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = 0
    temperature: float = 1.0
    checkpoint_activations: bool = False

    name = "train"
    writes = (TRAINED_WEIGHTS,)
    per = "batch"

    def __post_init__(self) -> None:
        reads = (PROMPT_IDS, RESPONSE_IDS, ADVANTAGE, PREV_LOGPROBS, ROLLOUT_LOGPROBS, TOKEN_VERSIONS)
        object.__setattr__(self, "reads", (*reads, REF_LOGPROBS) if self.loss.kl > 0 else reads)

    @property
    def uses(self) -> tuple[Model, ...]:
        """The model that it trains."""
        return (self.model,)

    @property
    def updates(self) -> Model:
        """The model that it trains."""
        return self.model

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Backend, model, and every range."""
        yield from backend_problems(self.on)
        yield from model_problems(self.model)
        yield from scoring_problems(self, graph, self.temperature, self.microbatch)
        for what, legal, why, fix in self._ranges(max(graph.batch, 1)):
            if not legal:
                yield Problem(where=str(self.location), what=f"stage {self.name!r} has {what}", why=why, fix=fix)
        if self.on is not None and self.on.workers > 1:
            yield Problem(
                where=str(self.on.location),
                what=f"stage {self.name!r} runs on {self.on.workers} workers of group {self.on.name!r}",
                why=f"the backend {self.on.backend!r} trains in one process",
                fix="workers=1",
            )

    def _ranges(self, batch: int) -> Iterable[tuple[str, bool, str, str]]:
        """(what, whether it is legal, why, fix) of every parameter."""
        loss, (low, high) = self.loss, self.loss.clip
        yield f"lr={self.lr}", self.lr >= 0, "the learning rate is 0 or more", "lr=1e-6"
        legal = 0 <= low < 1 and high >= 0
        yield (
            f"clip={loss.clip}",
            legal,
            "the ratio may fall by less than 1, and no bound is negative",
            "clip=(0.2, 0.2)",
        )
        yield f"kl={loss.kl}", loss.kl >= 0, "the weight of the KL term is 0 (none) or more", "kl=0.0"
        for name, value, known in (
            ("aggregation", loss.aggregation, AGGREGATIONS),
            ("schedule", self.schedule, SCHEDULES),
        ):
            yield f"{name}={value!r}", value in known, "known are " + ", ".join(known), f"{name}={known[0]!r}"
        yield f"epochs={self.epochs}", self.epochs >= 1, "each batch is used once or more", "epochs=1"
        for name, number, fix in (
            ("warmup", self.warmup, "warmup=0"),
            ("clip_grad", self.clip_grad, "clip_grad=1.0"),
            ("weight_decay", self.weight_decay, "weight_decay=0.0"),
        ):
            yield f"{name}={number}", number >= 0, f"{name} is 0 (none) or more", fix
        legal = all(0 <= beta < 1 for beta in self.betas)
        yield f"betas={self.betas}", legal, "betas are at least 0 and below 1", "betas=(0.9, 0.999)"
        yield f"eps={self.eps}", self.eps > 0, "eps is above 0", "eps=1e-8"
        what = f"minibatches={self.minibatches} for {batch} groups a batch"
        legal = self.minibatches >= 1 and batch % self.minibatches == 0
        fix = "minibatches=" + " or ".join(str(number) for number in _divisors(batch, near=self.minibatches))
        yield what, legal, "minibatches are equal runs of whole groups", fix

    def setup(self, context: StageContext) -> TrainRunner:
        """Opens the backend, its trained copy of the model, and an optimizer."""
        return TrainRunner(self, engine(context), context)


class TrainRunner:
    """Holds the learner; part of every checkpoint."""

    def __init__(self, stage: Train, backend: Engine, context: StageContext) -> None:
        self.stage, self.group_size = stage, context.group_size
        self.learner = backend.learner(
            stage.model,
            Optimization(
                lr=stage.lr,
                betas=stage.betas,
                eps=stage.eps,
                weight_decay=stage.weight_decay,
                clip_grad=stage.clip_grad,
                schedule=stage.schedule,
                warmup=stage.warmup,
                updates=context.steps * stage.minibatches * stage.epochs,
                microbatch=stage.microbatch,
                checkpoint_activations=stage.checkpoint_activations,
            ),
        )

    def __call__(self, columns: Columns, task: Task) -> Output:
        from ops.kl import kl_k3

        stage = self.stage
        column: dict[str, Any] = dict(columns)
        batch = Minibatch(
            column[PROMPT_IDS.name],
            column[RESPONSE_IDS.name],
            column[ADVANTAGE.name],
            column[PREV_LOGPROBS.name],
            column[REF_LOGPROBS.name] if stage.loss.kl > 0 else None,
        )
        groups = len(batch) // self.group_size
        edges = [groups * i // stage.minibatches * self.group_size for i in range(stage.minibatches + 1)]
        results = [
            self.learner.update(batch.part(start, stop), stage.loss, temperature=stage.temperature)
            for _ in range(stage.epochs)
            for start, stop in pairwise(edges)
            if stop > start
        ]
        done = [result for result in results if not result["skipped"]]
        metrics = {name: sum(result[name] for result in done) / len(done) for name in done[0]} if done else {}
        mismatch = kl_k3(column[ROLLOUT_LOGPROBS.name].values, batch.old_logprobs.values).mean().item()
        age = task.step - column[TOKEN_VERSIONS.name].values  # the weights before these updates are version `step`
        counts = {
            "updates": float(len(done)),
            "skipped": float(len(results) - len(done)),
            "mismatch_kl": mismatch,
            "staleness_mean": age.float().mean().item(),
            "staleness_max": float(age.max()),
        }
        return Output(metrics=metrics | counts, weights=(task.step + 1, ""))

    def save(self, folder: Path) -> None:
        """Weights and optimizer, into a folder that exists."""
        self.learner.save(folder)

    def restore(self, folder: Path) -> None:
        """What `save` wrote. Raises CheckpointError where it is not whole."""
        self.learner.restore(folder)


def _divisors(number: int, near: int) -> list[int]:
    """The two divisors of `number` that are closest to `near`, in order."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    return sorted(sorted(divisors, key=lambda n: abs(n - near))[:2])
