"""Logprobs of the sampled tokens under the trainer's model before its update, and under the frozen model.

    PrevLogprobs(policy, on=learner), RefLogprobs(policy.frozen(), on=learner)

Both compute at the temperature at which the tokens were sampled. They start before the batch is whole, on runs of
samples in canonical order; what forms a run, and a microbatch of it, depends on that order and on lengths only, so the
numbers do not depend on when samples arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from pipeline import Field, Graph, Model, Output, Stage, StageContext, Task, WorkerGroup
from pipeline.declare.columns import Columns
from pipeline.declare.parameters import at_least, broken, is_number, is_whole
from pipeline.declare.sharding import Dynamic, Packed, Plain, Sharding
from pipeline.errors import Problem, shown
from stages.backends import backend_problems, engine, model_problems, one_shard
from stages.rollout import Rollout
from stages.vocabulary import PREV_LOGPROBS, PROMPT_IDS, REF_LOGPROBS, RESPONSE_IDS

_AT_ONCE = at_least("at_once", 0, why="at_once is samples that are scored as soon as they are there, or 0")


@dataclass(frozen=True)
class _Logprobs(Stage):
    model: Model
    _: KW_ONLY
    on: WorkerGroup | None = None
    microbatch: int | Dynamic | Packed = 0
    at_once: int = 0
    temperature: float = 1.0

    reads = (PROMPT_IDS, RESPONSE_IDS)
    per = "batch"

    @property
    def uses(self) -> tuple[Model, ...]:
        """The model that scores."""
        return (self.model,)

    @property
    def run_samples(self) -> int | None:
        """What it starts on: a microbatch for every worker, or what the user says."""
        if is_whole(self.at_once, 1):
            return self.at_once
        replicas = self.on.data_parallel if self.on else 1
        return self.microbatch * replicas if is_whole(self.microbatch, 1) else None  # type: ignore[operator]

    @property
    def sharding(self) -> Sharding:  # type: ignore[override]
        """Each worker may have another number of microbatches, unless they hold the weights together."""
        together = self.on is not None and (self.on.fully_sharded or self.on.expert_parallel > 1)
        return sharding(self.microbatch, equal=together)

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Backend, model, ranges, and the rollout's temperature."""
        yield from backend_problems(self.on, self, "score")
        yield from model_problems(self.model)
        yield from scoring_problems(self, graph, self.temperature, self.microbatch)
        yield from broken([_AT_ONCE], self, where=str(self.location), says=f"stage {self.name!r} has {{}}")

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Output]:
        """Opens the backend and its copy of the model."""
        backend = engine(context)
        field: Field = self.writes[0]

        def run(columns: Columns, task: Task) -> Output:
            prompt_ids: Any = columns[PROMPT_IDS.name]
            response_ids: Any = columns[RESPONSE_IDS.name]
            shard = task.shard or one_shard(prompt_ids, response_ids, self.sharding)
            logprobs = backend.score(self.model, prompt_ids, response_ids, shard, temperature=self.temperature)
            return Output({field.name: logprobs}, {"logprob_mean": logprobs.values.mean().item()})

        return run


@dataclass(frozen=True)
class PrevLogprobs(_Logprobs):
    """Logprobs under the trained model before this step's first update: the denominator of the ratio.

    microbatch   samples in one forward pass, 0 is all of the worker's; or Dynamic or Packed with a number of tokens
    at_once      samples that are scored as soon as all of them are there, in canonical order; 0 is one microbatch of
                 every worker, where microbatch is samples, and otherwise the batch
    temperature  the rollout's
    """

    name = "prev_logprobs"
    writes = (PREV_LOGPROBS,)


@dataclass(frozen=True)
class RefLogprobs(_Logprobs):
    """Logprobs under a frozen model, for the KL term of the loss. Give it `model.frozen()`.

    microbatch   samples in one forward pass, 0 is all of the worker's; or Dynamic or Packed with a number of tokens
    at_once      samples that are scored as soon as all of them are there, in canonical order; 0 is one microbatch of
                 every worker, where microbatch is samples, and otherwise the batch
    temperature  the rollout's
    """

    name = "ref_logprobs"
    writes = (REF_LOGPROBS,)

    def check(self, graph: Graph) -> Iterable[Problem]:
        """As for every scoring stage; and the model is frozen."""
        yield from super().check(graph)
        if self.model.trainable:
            yield Problem(
                where=str(self.location),
                what=f"stage {self.name!r} scores with the trained copy of {self.model.source!r}",
                why="the reference does not change during training",
                fix="RefLogprobs(model.frozen(), ...)",
            )


def sharding(microbatch: int | Dynamic | Packed, *, minibatches: int = 1, equal: bool) -> Sharding:
    """How the batch of a stage is divided; what `scoring_problems` finds wrong counts as 0."""
    made = microbatch if isinstance(microbatch, Dynamic | Packed) else Plain(microbatch)
    return Sharding.of(made, minibatches=minibatches, equal=equal)


def scoring_problems(
    stage: Stage, graph: Graph, temperature: float, microbatch: int | Dynamic | Packed
) -> Iterable[Problem]:
    """Ranges of a stage that recomputes logprobs, and whether its temperature is that of the samples."""
    where = str(stage.location)
    legal = is_number(temperature) and temperature > 0
    if not legal:
        yield Problem(
            where=where,
            what=f"stage {stage.name!r} has temperature={temperature!r}",
            why="temperature is a number above 0",
            fix="the rollout's temperature",
        )
    size = microbatch.tokens if isinstance(microbatch, Dynamic | Packed) else microbatch
    least = 0 if size is microbatch else 1
    if not is_whole(size, least):
        yield Problem(
            where=where,
            what=f"stage {stage.name!r} has microbatch={shown(microbatch)}",
            why="microbatch is samples in one pass, 0 for all, or Dynamic or Packed with a number of tokens",
            fix="microbatch=0, or microbatch=Packed(tokens=8192)",
        )
    for rollout in graph.stages:
        if not isinstance(rollout, Rollout):
            continue
        longest: Any = rollout.max_tokens
        fits = not is_whole(longest, 1) or size is microbatch or not is_whole(size, 1) or size > longest
        if not fits:
            yield Problem(
                where=where,
                what=f"stage {stage.name!r} has microbatch={microbatch} and {rollout.name!r} has max_tokens={longest}",
                why="the longest response has to fit together with its prompt",
                fix=f"microbatch={type(microbatch).__name__}(tokens={2 * longest})",
            )
        theirs: Any = rollout.temperature
        if legal and is_number(theirs) and theirs > 0 and theirs != temperature:
            yield Problem(
                where=where,
                what=f"{stage.name!r} has temperature={temperature} and {rollout.name!r} has {rollout.temperature}",
                why="logprobs at another temperature are those of another policy, and every ratio would be wrong",
                fix=f"temperature={rollout.temperature}",
            )
