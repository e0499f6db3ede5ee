"""Train: optimizer updates from one batch. Knows how a batch is split; the backend knows how to update.

Train(policy, on=learner, loss=ClippedLoss(clip=(0.2, 0.28), kl=0.001), lr=1e-6, minibatches=4)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from pipeline import Field, Graph, Model, Output, Stage, StageContext, StageError, Task, WorkerGroup
from pipeline.declare.columns import Columns, Ragged
from pipeline.declare.held import Copies, Weighs
from pipeline.declare.parameters import is_number, is_whole
from pipeline.declare.saved_model import MODEL, Describes
from pipeline.declare.sharding import Dynamic, Packed, Shard, Sharding
from pipeline.declare.work import GpuPart, GpuWork, Load
from pipeline.errors import Problem, shown
from stages import images
from stages.after_first import rest_of
from stages.backends import (
    Batch,
    Engine,
    Optimization,
    backend_problems,
    engine,
    model_problems,
    one_shard,
)
from stages.forecast.megatron import RECOMPUTED, Passes, held
from stages.logprobs import division, scored, scoring_problems, sharding, speed
from stages.losses import ClippedLoss, PolicyLoss, has_own_formula, loss_problems
from stages.rollout import Rollout
from stages.routes import of_replay
from stages.vocabulary import (
    ADVANTAGE,
    IMAGES,
    PREV_LOGPROBS,
    PROMPT_IDS,
    REF_LOGPROBS,
    RESPONSE_IDS,
    ROLLOUT_LOGPROBS,
    TOKEN_ADVANTAGES,
    TOKEN_VERSIONS,
    TRAINED_WEIGHTS,
)

_LARGEST = ("staleness_max", "mismatch_ratio_max")  # maximum over ranks; other numbers are summed
SCHEDULES = ("constant", "linear", "cosine")
OWN = "own"
PREVS = ("field", OWN)
TOKEN = "token"
ADVANTAGES = ("sample", TOKEN)
_COLUMNS = {
    "prompt_ids": PROMPT_IDS,
    "response_ids": RESPONSE_IDS,
    "old_logprobs": PREV_LOGPROBS,
    "rollout_logprobs": ROLLOUT_LOGPROBS,
    "ref_logprobs": REF_LOGPROBS,
    "images": IMAGES,
}


@dataclass(frozen=True)
class Train(Stage):
    """Makes `minibatches` x `epochs` updates per batch. Minibatches are consecutive whole groups in canonical order.

    lr, betas, eps, weight_decay  of AdamW
    schedule, warmup              "constant", "linear" or "cosine" over all updates of the run, after a linear warmup
                                  of `warmup` updates
    clip_grad                     maximum gradient norm; 0 means no clipping
    microbatch                    samples per pass of a worker, with accumulated gradients; 0 means its whole part of
                                  a minibatch. Dynamic(tokens) groups samples of similar length, Packed(tokens)
                                  concatenates them into rows without padding, with Megatron-core also without
                                  computing the prompt of a group again, if that pays
    temperature                   the rollout's temperature
    checkpoint_activations        recompute activations in the backward pass: less memory, more time. True keeps the
                                  inputs of layers only; "mlp", with Megatron-core, everything but what feed-forward
                                  parts compute
    prev                          where the denominator of the ratio comes from: "field", the field prev_logprobs of a
                                  stage PrevLogprobs; or "own": the first minibatch has the logprobs of its own pass,
                                  and the others are scored before the first update, in the rows of their updates
    advantage     "sample": the field `advantage`, one per sample; "token": the field `token_advantages`, one per
                  response token, which Advantage("turn") writes

    Metrics, means over the step's updates: `loss`, `kl` (to the frozen model, nat per token), `clip_fraction`, its part
    `clip_high` with a ratio above 1, `ratio_mean`, `ratio_max`, `grad_norm` (before clipping), `lr`, `entropy` (nat per
    token). Distance of the sampler, its kernels and its age, from the weights before these updates: `mismatch_kl`, the
    k3 estimate in nat per token; `token_mult_prob_error`, the mean of exp(|difference of the logprobs|) over tokens, as
    NeMo-RL reports it; `mismatch_ratio_max`, the largest importance weight of a token; `mismatch_ess`, the
    effective sample size of those weights as a fraction of the tokens. `updates` that changed the weights; `skipped`
    updates with a non-finite loss or gradient; `staleness_mean` and `staleness_max`, the age of the tokens in versions
    relative to the trained weights; with a correction, `is_weight` (mean weight per token) and `is_changed` (the
    fraction truncated or rejected); with router replay, `router_disagreement`, the fraction of tokens and layers for
    which the trainer's router would have chosen other experts. `padding`, the fraction of the computed tokens that is
    padding; `shared`, the fraction of the samples' tokens that is not computed, since samples of a group share their
    prompt; `imbalance`, the cost of the slowest rank over the mean of all ranks; `microbatches`, the passes of a rank
    per epoch. `flops` of all forward and backward passes, counted from sequence lengths, a shared prompt once; `ranks`
    of the worker group; `tflops_per_s` per rank; `utilization`, its fraction of the GPU's peak, if known.
    """

    model: Model
    _: KW_ONLY
    on: WorkerGroup | None = None
    loss: PolicyLoss = field(default_factory=ClippedLoss)
    lr: float
    minibatches: int = 1
    epochs: int = 1
    microbatch: int | Dynamic | Packed = 0
    clip_grad: float = 1.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = 0
    temperature: float = 1.0
    checkpoint_activations: bool | Literal["mlp"] = False
    prev: Literal["field", "own"] = "field"
    advantage: Literal["sample", "token"] = "sample"

    name = "train"
    writes = (TRAINED_WEIGHTS,)
    per = "batch"

    def __post_init__(self) -> None:
        reads: tuple[Field, ...] = (
            PROMPT_IDS,
            RESPONSE_IDS,
            self._advantage,
            *(() if self.prev == OWN else (PREV_LOGPROBS,)),
            ROLLOUT_LOGPROBS,
            TOKEN_VERSIONS,
        )
        described = isinstance(self.loss, PolicyLoss)  # `check` reports anything else
        object.__setattr__(self, "corrects_off_policy", described and self.loss.corrects_off_policy)
        if described and self.loss.needs_reference:
            reads = (*reads, REF_LOGPROBS)
        reads = (*reads, *of_replay(self.model))
        if described:
            reads = tuple(dict.fromkeys((*reads, *self.loss.columns)))
        reads = tuple(dict.fromkeys((*reads, *images.fields_of(self.model))))
        object.__setattr__(self, "reads", reads)

    @property
    def _advantage(self) -> Field:
        return TOKEN_ADVANTAGES if self.advantage == TOKEN else ADVANTAGE

    @property
    def uses(self) -> tuple[Model, ...]:
        """The trained model."""
        return (self.model,)

    @property
    def sharding(self) -> Sharding:  # type: ignore[override]
        """Ranks synchronize per update or, with sharded weights, per layer: all need the same number of
        microbatches."""
        return sharding(self.model, self.on, self.microbatch, minibatches=self.minibatches, equal=True)

    @property
    def updates(self) -> Model:
        """The trained model."""
        return self.model

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Check the backend, the model, the loss and all ranges."""
        yield from backend_problems(self.on, self, "train")
        yield from model_problems(self.model)
        yield from scoring_problems(self, graph, self.temperature, self.microbatch)
        yield from self._loss_problems()
        for what, legal, why, fix in self._ranges(graph):
            if not legal:
                yield Problem(where=str(self.location), what=f"stage {self.name!r} has {what}", why=why, fix=fix)
        if is_whole(self.minibatches, 1):
            yield from self._share_problems(graph)
        for stage in graph.stages:
            if self.prev == OWN and PREV_LOGPROBS in stage.writes:
                yield Problem(
                    where=str(self.location),
                    what=f"{self.name!r} has prev={OWN!r} and stage {stage.name!r} computes these logprobs too",
                    why="each token is scored once",
                    fix=f"leave {stage.name!r} out, or prev={PREVS[0]!r}",
                )
        for rollout in graph.stages:
            longest = self.loss.max_tokens if isinstance(self.loss, PolicyLoss) else None
            if isinstance(rollout, Rollout) and is_whole(longest, 1) and longest != rollout.max_tokens:
                yield Problem(
                    where=str(self.location),
                    what=f"the loss of {self.name!r} has max_tokens={longest} and {rollout.name!r} "
                    f"has {rollout.max_tokens}",
                    why="the loss divides by the maximum response length",
                    fix=f"max_tokens={rollout.max_tokens}",
                )

    def _loss_problems(self) -> Iterable[Problem]:
        """Check the loss; if nothing else is wrong, run a user's formulas on a few tokens."""
        where = str(self.location)
        found = list(loss_problems(self.loss, where))
        yield from found
        if all(problem.warning for problem in found) and has_own_formula(self.loss):
            from stages.formula_check import trial_problems  # loads torch

            yield from trial_problems(self.loss, where, per_token=self.advantage == TOKEN)

    def _share_problems(self, graph: Graph) -> Iterable[Problem]:
        """Check that every worker gets part of every minibatch."""
        replicas = self.on.data_parallel if self.on else 1
        if graph.batch % replicas:
            return  # reported for the worker group
        samples = graph.batch * graph.group_size // self.minibatches
        whole = isinstance(self.microbatch, int) and samples % replicas
        if samples < replicas or whole:
            yield Problem(
                where=str(self.location),
                what=f"stage {self.name!r} has minibatches of {samples} samples for {replicas} workers",
                why="every worker needs samples of every minibatch, equally many if microbatches count samples",
                fix="fewer minibatches, or fewer workers"
                if samples < replicas
                else f"a number of samples that {replicas} divides, or microbatch=Packed(tokens=...)",
            )

    def _ranges(self, graph: Graph) -> Iterable[tuple[str, bool, str, str]]:
        """(what, whether it is legal, why, fix) for each parameter."""
        legal = is_number(self.lr) and self.lr >= 0
        yield f"lr={self.lr!r}", legal, "the learning rate must be a number, 0 or more", "lr=1e-6"
        known, fix = "valid values are " + ", ".join(SCHEDULES), f"schedule={SCHEDULES[0]!r}"
        yield f"schedule={shown(self.schedule)}", self.schedule in SCHEDULES, known, fix
        known, fix = "valid values are " + ", ".join(PREVS), f"prev={OWN!r}"
        yield f"prev={shown(self.prev)}", self.prev in PREVS, known, fix
        known, fix = "valid values are " + ", ".join(ADVANTAGES), f"advantage={ADVANTAGES[0]!r}"
        yield f"advantage={shown(self.advantage)}", self.advantage in ADVANTAGES, known, fix
        yield from self._recomputed()
        why = "epochs must be a whole number, 1 or more"
        yield f"epochs={self.epochs!r}", is_whole(self.epochs, 1), why, "epochs=1"
        why = "warmup must be a whole number of updates, 0 (none) or more"
        yield f"warmup={self.warmup!r}", is_whole(self.warmup, 0), why, "warmup=0"
        for name, number, fix in (
            ("clip_grad", self.clip_grad, "clip_grad=1.0"),
            ("weight_decay", self.weight_decay, "weight_decay=0.0"),
        ):
            yield (
                f"{name}={number!r}",
                is_number(number) and number >= 0,
                f"{name} must be 0 (none) or more",
                fix,
            )
        betas: Any = self.betas
        legal = isinstance(betas, tuple | list) and len(betas) == 2
        legal = legal and all(is_number(beta) and 0 <= beta < 1 for beta in betas)
        yield f"betas={betas!r}", legal, "betas must be two numbers, at least 0 and below 1", "betas=(0.9, 0.999)"
        yield f"eps={self.eps!r}", is_number(self.eps) and self.eps > 0, "eps must be a number above 0", "eps=1e-8"
        batch = graph.batch
        is_wrong = getattr(graph.source, "batch", batch) != batch  # which is reported for the source
        what = f"minibatches={self.minibatches!r} for {batch} groups per batch"
        legal = is_whole(self.minibatches, 1) and (is_wrong or batch % self.minibatches == 0)
        near = int(self.minibatches) if is_number(self.minibatches) else 1
        fix = "minibatches=" + " or ".join(str(number) for number in _divisors(batch, near=near))
        yield what, legal, "minibatches must be equal runs of whole groups", fix

    def _recomputed(self) -> Iterable[tuple[str, bool, str, str]]:
        given: Any = self.checkpoint_activations
        what = f"checkpoint_activations={shown(given)}"
        known = "valid values are " + ", ".join(map(repr, RECOMPUTED))
        yield what, given == "mlp" or isinstance(given, bool), known, "checkpoint_activations=False"
        whole = given != "mlp" or self.on is None or self.on.backend != "torch"
        yield what, whole, "the backend 'torch' recomputes whole layers", "checkpoint_activations=True"

    def work(self, load: Load) -> Sequence[GpuWork] | None:
        """All updates of a batch, and before them the scoring that `prev` asks for; None unless the backend is
        megatron."""
        updates = self._passes(load).work(load) if load.group.backend == "megatron" else None
        if updates is None or self.prev != OWN or self.minibatches == 1:
            return None if updates is None else [updates]
        rest = msgspec.structs.replace(load, responses=load.responses[len(load.responses) // self.minibatches :])
        again = sharding(self.model, self.on, self.microbatch, minibatches=self.minibatches - 1, equal=True)
        scored = replace(self._passes(load), sharding=again, training=False, epochs=1).work(rest)
        return [updates] if scored is None else [scored, updates]

    def memory(self, load: Load) -> Sequence[GpuPart] | None:
        """The memory of the trained copy, its optimizer and a pass; None unless the backend is megatron."""
        if load.group.backend != "megatron":
            return None
        return [*held(self.model, load, trains=True), *self._passes(load).parts(load)]

    def fitting(self, load: Load, room_bytes: float) -> str:
        """The microbatch whose pass takes at most `room_bytes`, with as little computed again as that needs."""
        passes = self._passes(load)
        if found := passes.fitting(load, room_bytes):
            return found
        for more in RECOMPUTED[RECOMPUTED.index(passes.recompute) + 1 :]:
            if again := replace(passes, recompute=more).fitting(load, room_bytes):
                return f"checkpoint_activations={more!r}, {again}"
        return ""

    def _passes(self, load: Load) -> Passes:
        return Passes(
            model=self.model,
            microbatch=self.microbatch,
            sharding=self.sharding,
            samples=len(load.responses) // self.minibatches,
            training=True,
            recompute=self.checkpoint_activations,
            epochs=self.epochs,
        )

    def setup(self, context: StageContext) -> TrainRunner:
        """Open the backend, its trained copy of the model, and an optimizer."""
        return TrainRunner(self, engine(context), context)


class TrainRunner:
    """Holds the learner; part of every checkpoint."""

    def __init__(self, stage: Train, backend: Engine, context: StageContext) -> None:
        self.stage, self.backend, self.ranks = stage, backend, context.ranks
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
                checkpoint_activations=stage.checkpoint_activations,
            ),
        )

    def __call__(self, columns: Columns, task: Task) -> Output:
        stage, column = self.stage, dict(columns)
        given: Any = {attribute: column.get(field.name) for attribute, field in _COLUMNS.items()}
        given["advantage"] = column[stage._advantage.name]
        read: Any = {field.name: column[field.name] for field in stage.loss.columns}
        routes: Any = next((column[field.name] for field in of_replay(stage.model)), None)
        batch = Batch(**given, columns=read, routes=routes, sampled=_sampled(column[TOKEN_VERSIONS.name]))
        shard = task.shard or one_shard(batch.prompt_ids, batch.response_ids, stage.sharding)
        shard = self._counted(batch, shard)
        start_s = time.monotonic()
        results, batch = self._updated(batch, shard)
        done = [result for result in results if not result["skipped"]]
        metrics = {name: sum(result[name] for result in done) / len(done) for name in done[0]} if done else {}
        counts = {"updates": float(len(done)), "skipped": float(len(results) - len(done))}
        taken_s = time.monotonic() - start_s
        counts |= self._ages(batch, column[TOKEN_VERSIONS.name], task) | self._work(batch, shard, taken_s)
        return Output(metrics=metrics | counts | division(shard), weights=(task.step + 1, ""))

    def _counted(self, batch: Batch, shard: Shard) -> Shard:
        """The shard whose updates count the tokens that the policy drew, over all ranks; its own counts are of lengths,
        so they count the others too. All ranks call it together."""
        drawn = batch.response_ids.lengths
        if batch.sampled is not None:
            drawn = tuple(int(row.sum()) for row in batch.sampled.rows())
        own = {
            str(number): float(sum(drawn[sample] for part in update.microbatches for sample in part.samples))
            for number, update in enumerate(shard.updates)
        }
        totals = [int(count) for count in self.ranks.totals(own).values()]
        if 0 in totals:
            raise StageError(self._nothing_drawn(totals.index(0) + 1))
        updates = (msgspec.structs.replace(update, tokens=count) for update, count in zip(shard.updates, totals))
        return msgspec.structs.replace(shard, updates=tuple(updates))

    def _nothing_drawn(self, minibatch: int) -> Problem:
        return Problem(
            where=str(self.stage.location),
            what=f"minibatch {minibatch} of {self.stage.name!r} has no token that the policy drew",
            why=f"{TOKEN_VERSIONS.name} is -1 for all of them, and the loss divides by their number",
            fix="write the version of the weights for tokens that the policy drew, and -1 for others only",
        )

    def _updated(self, batch: Batch, shard: Shard) -> tuple[list[dict[str, float]], Batch]:
        """Make all updates. Returns their metrics, and the batch with its old logprobs."""
        stage, results = self.stage, []
        rest = rest_of(batch, shard) if batch.old_logprobs is None else None
        later: Sequence[Any] = ()
        if rest:
            part, cut = rest
            given: Any = (part.prompt_ids, part.response_ids, cut, stage.temperature)
            later = scored(self.backend, stage.model, *given, routes=part.routes, images=part.images).rows()
        for update in shard.updates * stage.epochs:
            results.append(
                self.learner.update(
                    batch, stage.loss, temperature=stage.temperature, update=update, packed=shard.packed
                )
            )
            if batch.old_logprobs is None:
                batch = replace(batch, old_logprobs=Ragged.of([*self.learner.own_logprobs().rows(), *later]))
        return results, batch

    def _ages(self, batch: Batch, versions: Any, task: Task) -> dict[str, float]:
        """Distance of the sampler and its samples from the trained weights, over all ranks."""
        from ops.correction import moments, multiplicative_error
        from ops.kl import kl_k3

        assert batch.rollout_logprobs is not None
        assert batch.old_logprobs is not None
        drawn = slice(None) if batch.sampled is None else batch.sampled.values
        sampled, trained = batch.rollout_logprobs.values[drawn], batch.old_logprobs.values[drawn]
        weight, square, largest = moments(trained, sampled)
        age = task.step - versions.values[drawn]  # the weights before these updates are version `step`
        totals = self.ranks.totals(
            {
                "tokens": float(len(age)),
                "mismatch_kl": kl_k3(sampled, trained).sum().item(),
                "token_mult_prob_error": multiplicative_error(trained, sampled),
                "mismatch_ratio_max": largest,
                "weight": weight,
                "square": square,
                "staleness_mean": float(age.sum()),
                "staleness_max": float(age.max()) if len(age) else 0.0,
            },
            largest=_LARGEST,
        )
        tokens = totals.pop("tokens")
        effective = totals.pop("weight") ** 2 / totals.pop("square") / tokens
        means = {name: value if name in _LARGEST else value / tokens for name, value in totals.items()}
        return means | {"mismatch_ess": effective}

    def _work(self, batch: Batch, shard: Shard, taken_s: float) -> dict[str, float]:
        """Operations and speed over all ranks; empty if the model's operations are unknown."""
        stage = self.stage
        lengths, given = batch.prompt_ids.lengths, (stage.model, batch.prompt_ids, batch.response_ids)
        flops = self.backend.flops(*given, training=True, spared=shard.spared(lengths))
        if flops is None:
            return {}
        flops *= stage.epochs
        if stage.prev == OWN and (rest := rest_of(batch, shard)):
            part, cut = rest
            spared = cut.spared(part.prompt_ids.lengths)
            given = (stage.model, part.prompt_ids, part.response_ids)
            flops += self.backend.flops(*given, training=False, spared=spared) or 0.0
        total = self.ranks.totals({"flops": flops, "s": taken_s}, largest=("s",))
        ranks = self.ranks.layout.size
        work = {"flops": total["flops"], "ranks": float(ranks)}
        return work | speed(total["flops"], total["s"], ranks, self.backend)

    def save(self, folder: Path) -> None:
        """Save weights and optimizer into an existing folder, and what an export needs beside the weights."""
        self.learner.save(folder)
        self._describe(folder)

    def copied(self) -> Callable[[Path], None] | None:
        """Copy weights and optimizer. Returns a function that writes what `save` would have written; None if the
        learner cannot."""
        write = self.learner.copied() if isinstance(self.learner, Copies) else None
        if write is None:
            return None

        def both(folder: Path) -> None:
            write(folder)
            self._describe(folder)

        return both

    def _describe(self, folder: Path) -> None:
        if isinstance(self.backend, Describes):
            self.backend.describe(self.stage.model, folder / MODEL)

    def saved_bytes(self) -> int:
        """Return how many bytes this rank saves, if the learner knows."""
        return self.learner.saved_bytes() if isinstance(self.learner, Weighs) else 0

    def restore(self, folder: Path) -> None:
        """Load what `save` wrote. Raises CheckpointError if it is incomplete."""
        self.learner.restore(folder)


def _sampled(versions: Any) -> Ragged | None:
    """The tokens that the policy drew; None if it drew all."""
    drawn = versions.values >= 0
    return None if bool(drawn.all()) else Ragged(drawn, versions.lengths)


def _divisors(number: int, near: int) -> list[int]:
    """The two divisors of `number` closest to `near` among the next 1,000 numbers, in order; 1 if there are none."""
    near = max(1, min(near, number))
    divisors = [n for n in range(max(1, near - 1000), min(number, near + 1000) + 1) if number % n == 0] or [1]
    return sorted(sorted(divisors, key=lambda n: abs(n - near))[:2])
