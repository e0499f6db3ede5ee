"""Logprobs of the sampled tokens under the trainer's model before its update, and under the frozen model.

    PrevLogprobs(policy, on=learner), RefLogprobs(policy.frozen(), on=learner)

Both use the sampling temperature. They start before the batch is complete, on runs of samples in canonical order. Runs
and their microbatches depend only on this order and on lengths, so the results do not depend on when samples arrive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from msgspec.structs import replace

from pipeline import Field, Graph, Model, Output, Stage, StageContext, Task, WorkerGroup
from pipeline.declare.columns import Columns, Ragged
from pipeline.declare.parameters import at_least, broken, is_number, is_whole
from pipeline.declare.sharding import Dynamic, Packed, Plain, Shard, Sharding
from pipeline.declare.work import GpuPart, GpuWork, Load
from pipeline.errors import Problem, shown
from stages import images
from stages.backends import Engine, backend_problems, engine, model_problems, one_shard
from stages.forecast.megatron import Passes, exchanged_bytes, held
from stages.model_shape import attention_cost, launched_tokens
from stages.rollout import Rollout
from stages.routes import of_replay
from stages.vocabulary import PREV_LOGPROBS, PROMPT_IDS, REF_LOGPROBS, RESPONSE_IDS

_AT_ONCE = at_least("at_once", 0, why="at_once must be a number of samples, or 0 for the default")


@dataclass(frozen=True)
class _Logprobs(Stage):
    model: Model
    _: KW_ONLY
    on: WorkerGroup | None = None
    microbatch: int | Dynamic | Packed = 0
    at_once: int = 0
    temperature: float = 1.0

    per = "batch"

    def __post_init__(self) -> None:
        read = (PROMPT_IDS, RESPONSE_IDS, *of_replay(self.model), *images.fields_of(self.model))
        object.__setattr__(self, "reads", read)

    @property
    def uses(self) -> tuple[Model, ...]:
        """The scoring model."""
        return (self.model,)

    @property
    def run_samples(self) -> int | None:
        """Samples that a run needs: `at_once`, or one microbatch per worker; None means the whole batch."""
        if is_whole(self.at_once, 1):
            return self.at_once
        replicas = self.on.data_parallel if self.on else 1
        return self.microbatch * replicas if is_whole(self.microbatch, 1) else None  # type: ignore[operator]

    @property
    def sharding(self) -> Sharding:  # type: ignore[override]
        """Workers may have different numbers of microbatches, unless they share the weights or the experts."""
        together = self.on is not None and (self.on.fully_sharded or self.on.expert_parallel > 1)
        return sharding(self.model, self.on, self.microbatch, equal=together)

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Check the backend, the model, all ranges, and that the temperature is the rollout's."""
        yield from backend_problems(self.on, self, "score")
        yield from model_problems(self.model)
        yield from scoring_problems(self, graph, self.temperature, self.microbatch)
        yield from broken([_AT_ONCE], self, where=str(self.location), says=f"stage {self.name!r} has {{}}")

    def work(self, load: Load) -> GpuWork | None:
        """A forward pass over its samples; None unless the backend is megatron. A frozen copy changes places with the
        trained one, if there is one."""
        found = self._passes(load).work(load) if load.group.backend == "megatron" else None
        if found is None or self.model not in [model.frozen() for model in load.trained]:
            return found
        return replace(found, copied_bytes=exchanged_bytes(self.model, load))

    def memory(self, load: Load) -> Sequence[GpuPart] | None:
        """The memory of the weights and of a pass; None unless the backend is megatron."""
        if load.group.backend != "megatron":
            return None
        return [*held(self.model, load, trains=False), *self._passes(load).parts(load)]

    def fitting(self, load: Load, room_bytes: float) -> str:
        """The microbatch whose pass takes at most `room_bytes`."""
        return self._passes(load).fitting(load, room_bytes)

    def _passes(self, load: Load) -> Passes:
        return Passes(model=self.model, microbatch=self.microbatch, sharding=self.sharding, samples=len(load.responses))

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Output]:
        """Open the backend and its copy of the model."""
        backend = engine(context)
        field: Field = self.writes[0]

        def run(columns: Columns, task: Task) -> Output:
            prompt_ids: Any = columns[PROMPT_IDS.name]
            response_ids: Any = columns[RESPONSE_IDS.name]
            shard = task.shard or one_shard(prompt_ids, response_ids, self.sharding)
            start_s = time.monotonic()
            routes: Any = next((columns[field.name] for field in of_replay(self.model)), None)
            logprobs = scored(
                backend, self.model, prompt_ids, response_ids, shard, self.temperature,
                routes=routes, **images.given(columns),
            )  # fmt: skip
            metrics = {"logprob_mean": logprobs.values.mean().item()} | division(shard)
            spared = shard.spared(prompt_ids.lengths)
            flops = backend.flops(self.model, prompt_ids, response_ids, training=False, spared=spared)
            if flops is not None:
                ranks = context.group.processes // context.group.data_parallel  # they score these samples together
                metrics |= speed(flops, time.monotonic() - start_s, ranks, backend)
            return Output({field.name: logprobs}, metrics)

        return run


@dataclass(frozen=True)
class PrevLogprobs(_Logprobs):
    """Logprobs under the trained model before this step's first update: the denominator of the ratio.

    microbatch   samples per forward pass, 0 means all of the worker's; or Dynamic or Packed with a number of tokens
    at_once      samples to score as soon as all of them are available, in canonical order; 0 means one microbatch per
                 worker if microbatch is a number of samples, otherwise the whole batch
    temperature  the rollout's temperature
    """

    name = "prev_logprobs"
    writes = (PREV_LOGPROBS,)

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Also check that it is the trained model."""
        yield from super().check(graph)
        trained = [stage.updates for stage in graph.stages if stage.updates and stage.updates.trainable]
        if trained and self.model not in trained:
            yield Problem(
                where=str(self.location),
                what=f"stage {self.name!r} scores with {_called(self.model)}; {_called(trained[0])} is trained",
                why="the loss divides the probabilities of the trained model, after and before the update",
                fix="give PrevLogprobs and Train the same model",
            )


@dataclass(frozen=True)
class RefLogprobs(_Logprobs):
    """Logprobs under a frozen model, for the KL term of the loss. Give it `model.frozen()`.

    microbatch   samples per forward pass, 0 means all of the worker's; or Dynamic or Packed with a number of tokens
    at_once      samples to score as soon as all of them are available, in canonical order; 0 means one microbatch per
                 worker if microbatch is a number of samples, otherwise the whole batch
    temperature  the rollout's temperature
    """

    name = "ref_logprobs"
    writes = (REF_LOGPROBS,)

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Also check that the model is frozen."""
        yield from super().check(graph)
        if self.model.trainable:
            yield Problem(
                where=str(self.location),
                what=f"stage {self.name!r} scores with the trained copy of {self.model.source!r}",
                why="the reference does not change during training",
                fix="RefLogprobs(model.frozen(), ...)",
            )


def _called(model: Model) -> str:
    return repr(model.source) if model.trainable else f"a frozen copy of {model.source!r}"


def sharding(
    model: Model,
    group: WorkerGroup | None,
    microbatch: int | Dynamic | Packed,
    *,
    minibatches: int = 1,
    equal: bool,
) -> Sharding:
    """How a stage's batch is divided. An invalid microbatch, which `scoring_problems` reports, counts as 0."""
    if not isinstance(microbatch, Dynamic | Packed):
        return Sharding.of(Plain(microbatch), minibatches=minibatches, equal=equal)
    backend = group.description if group else None
    whole_rows = isinstance(microbatch, Packed) and backend is not None and not backend.separates
    quadratic = 0.0 if whole_rows else attention_cost(model)
    shares = group is not None and group.context_parallel == 1 and backend is not None and backend.shares
    floor = launched_tokens(model) if shares and group is not None and group.gpus else 0.0
    return Sharding.of(
        microbatch, minibatches=minibatches, equal=equal, quadratic=quadratic, shares=shares, floor=floor
    )


def scored(
    backend: Engine, model: Model, prompt_ids: Ragged, response_ids: Ragged, shard: Shard, temperature: float,
    *, routes: Ragged | None = None, images: Ragged | None = None,
) -> Ragged:  # fmt: skip
    """The logprobs of samples, with the experts of `routes` and the images of their prompts, if they have any."""
    given: Any = (model, prompt_ids, response_ids, shard)
    if routes is not None:
        return backend.score_replayed(*given, temperature=temperature, routes=routes)
    seen: Any = {} if images is None else {"images": images}
    return backend.score(*given, temperature=temperature, **seen)


def division(shard: Shard) -> dict[str, float]:
    """The metrics `padding`, `shared`, `imbalance` and `microbatches` (passes of a rank) of a batch, equal on all
    ranks."""
    passes = sum(len(update.microbatches) for update in shard.updates)
    fractions = {"padding": shard.padding, "shared": shard.shared, "imbalance": shard.imbalance}
    return fractions | {"microbatches": float(passes)}


def speed(flops: float, taken_s: float, ranks: int, backend: Engine) -> dict[str, float]:
    """The metrics `tflops_per_s`, per rank, and `utilization`, its fraction of the device's peak, if that is known."""
    tflops_per_s, peak = flops / taken_s / ranks / 1e12, backend.peak_tflops()
    return {"tflops_per_s": tflops_per_s} | ({"utilization": tflops_per_s / peak} if peak else {})


def scoring_problems(
    stage: Stage, graph: Graph, temperature: float, microbatch: int | Dynamic | Packed
) -> Iterable[Problem]:
    """Check the ranges of a stage that recomputes logprobs, and that its temperature is the rollout's."""
    where = str(stage.location)
    legal = is_number(temperature) and temperature > 0
    if not legal:
        yield Problem(
            where=where,
            what=f"stage {stage.name!r} has temperature={temperature!r}",
            why="temperature must be a number above 0",
            fix="use the rollout's temperature",
        )
    size = microbatch.tokens if isinstance(microbatch, Dynamic | Packed) else microbatch
    least = 0 if size is microbatch else 1
    if not is_whole(size, least):
        yield Problem(
            where=where,
            what=f"stage {stage.name!r} has microbatch={shown(microbatch)}",
            why="microbatch is samples per pass (0 for all), or Dynamic or Packed with a number of tokens",
            fix="microbatch=0, or microbatch=Packed(tokens=8192)",
        )
    if isinstance(microbatch, Packed) and not isinstance(microbatch.shared, bool):
        yield Problem(
            where=where,
            what=f"stage {stage.name!r} has a microbatch with shared={shown(microbatch.shared)}",
            why="shared says whether rows may compute the prompt of a group once",
            fix="shared=True, where it pays, or shared=False",
        )
    yield from _slice_problems(stage, microbatch)
    for rollout in graph.stages:
        if not isinstance(rollout, Rollout):
            continue
        longest: Any = rollout.max_tokens
        fits = not is_whole(longest, 1) or size is microbatch or not is_whole(size, 1) or size > longest
        if not fits:
            yield Problem(
                where=where,
                what=f"stage {stage.name!r} has microbatch={microbatch} and {rollout.name!r} has max_tokens={longest}",
                why="the longest response must fit together with its prompt",
                fix=f"microbatch={type(microbatch).__name__}(tokens={2 * longest})",
            )
        theirs: Any = rollout.temperature
        if legal and is_number(theirs) and theirs > 0 and theirs != temperature:
            yield Problem(
                where=where,
                what=f"{stage.name!r} has temperature={temperature} and {rollout.name!r} has {rollout.temperature}",
                why="logprobs at another temperature belong to another policy, so every ratio would be wrong",
                fix=f"temperature={rollout.temperature}",
            )


def _slice_problems(stage: Stage, microbatch: int | Dynamic | Packed) -> Iterable[Problem]:
    """Check that context-parallel workers get packed rows, if they divide nothing else."""
    for group in stage.groups():
        backend = group.description
        if group.context_parallel > 1 and backend and backend.slices and not isinstance(microbatch, Packed):
            tokens = microbatch.tokens if isinstance(microbatch, Dynamic) else 8192
            yield Problem(
                where=str(stage.location),
                what=f"stage {stage.name!r} has microbatch={shown(microbatch)} and its worker group {group.name!r} has "
                f"context_parallel={group.context_parallel}",
                why="these workers divide the samples of packed rows, not of padded ones",
                fix=f"microbatch=Packed(tokens={tokens})",
            )
