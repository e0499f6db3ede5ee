"""Rollout: samples responses to prompts. Knows sampling parameters; the backend knows how to sample.

    Rollout(policy, on=sampler, samples_per_prompt=8, max_tokens=512, temperature=1.0)

A sample's random numbers are a function of the run's seed, the group's admission number, the index in the group and the
token, so a sample depends neither on other samples nor on a resume. The runner awaits between two tokens: meanwhile the
same worker can run other rollouts, rewards and a refit, and cancelled groups leave the batch.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from pipeline import Field, Graph, Model, Output, Stage, StageContext, StageError, Task, WorkerGroup
from pipeline.declare.columns import Column, Columns, Ragged, take
from pipeline.declare.parameters import Rule, at_least, broken, number, truth
from pipeline.declare.work import Decoding, GpuPart, Load
from pipeline.errors import Problem, shown
from stages import images
from stages.backends import (
    Cancelled,
    Decoded,
    Draws,
    Generation,
    Sampling,
    backend_problems,
    engine,
    model_problems,
    samples_of,
)
from stages.forecast import vllm
from stages.model_shape import length_problems
from stages.routes import of_replay, replays
from stages.tasks import alphabet_problems
from stages.vocabulary import (
    MESSAGES,
    PROMPT,
    PROMPT_IDS,
    RESPONSE,
    RESPONSE_IDS,
    ROLLOUT_LOGPROBS,
    SERVED_WEIGHTS,
    TOKEN_VERSIONS,
    TRUNCATED,
)

if TYPE_CHECKING:
    from stages.backends import Engine
    from stages.episode.turn_stage import TurnStage


SAMPLING_RULES = (
    number("temperature", lambda value: value > 0, why="temperature must be a number above 0", fix=1.0),
    number("top_p", lambda value: 0 < value <= 1, why="top_p must be a number above 0 and at most 1", fix=1.0),
    at_least("top_k", 0, why="top_k must be a whole number, 0 (off) or more"),
    number("min_p", lambda value: 0 <= value < 1, why="min_p must be a number from 0 (off) to below 1", fix=0.0),
    Rule("stop", lambda value: _are_texts(value), "stop must be a tuple of strings", lambda value: _as_stop(value)),
)
_RULES = (
    at_least("max_tokens", 1, most=2**31, why="max_tokens must be a whole number from 1 to 2**31", fix=512),
    *SAMPLING_RULES,
    truth("chat", fix=False),
    at_least("decode_batch", 0, why="decode_batch must be a whole number of groups, or 0 for all of the task"),
)


_WRITES = (PROMPT_IDS, RESPONSE, RESPONSE_IDS, ROLLOUT_LOGPROBS, TOKEN_VERSIONS, TRUNCATED)


@dataclass(frozen=True)
class Rollout(Stage):
    """Samples `samples_per_prompt` responses to each prompt.

    max_tokens    maximum response length, the closing token included
    temperature   divides the logits; logprobs are also at this temperature, over the whole vocabulary
    top_p, top_k, min_p   truncate the distribution; 1.0, 0 and 0.0 are off. Logprobs ignore them, so training is then
                  slightly off-policy
    stop          texts that end a response, besides the model's end-of-sequence tokens; one token each on torch
    decode_batch  groups of a task that are decoded together; 0 means all
    chat          prompts are lists of messages (`Prompts(..., chat=True)`), formatted with the model's chat template

    A group is returned as soon as its last sample has ended; groups that end at the same token are returned together.
    `token_versions` holds the version of the weights that sampled each token. With `Model(router_replay=True)`,
    `routed_experts` holds the experts that computed each token (stages/routes.py).
    Metrics, means over samples: `length_mean` (tokens), `truncated` (fraction). With `WorkerGroup(speculate=...)` also
    `tokens_per_pass`, the mean number of tokens that a sample gains in a pass: about 1 if no draft is right.
    """

    model: Model
    _: KW_ONLY
    on: WorkerGroup | None = None
    samples_per_prompt: int = 8
    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    decode_batch: int = 0
    chat: bool = False

    name = "rollout"
    shape = "stream"
    writes = _WRITES
    reads_back = (SERVED_WEIGHTS,)
    stamps = TOKEN_VERSIONS
    per = "group"
    shows = (RESPONSE_IDS, ROLLOUT_LOGPROBS)

    def __post_init__(self) -> None:
        object.__setattr__(self, "group_size", self.samples_per_prompt)
        text = MESSAGES if self.chat else PROMPT
        object.__setattr__(self, "reads", (text, *images.fields_of(self.model)))
        object.__setattr__(self, "writes", (*_WRITES, *of_replay(self.model)))

    @property
    def bounds(self) -> dict[str, int]:
        """The most response tokens per sample."""
        return {str(RESPONSE_IDS.ragged): self.max_tokens}

    @property
    def uses(self) -> tuple[Model, ...]:
        """The served policy."""
        return (self.model,)

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Check the backend, the model and the sampling parameters."""
        yield from sampling_problems(self, graph, _RULES)
        yield from length_problems(self.model, self.max_tokens, str(self.location), f"stage {self.name!r}")
        yield from images.unseen_problems(self.model, graph)

    def setup(self, context: StageContext) -> Callable[[Columns, Task], AsyncGenerator[Output, None]]:
        """Open the backend and its served copy of the model, while other workers set up. On GPUs that groups share, the
        first task does that, in the group's turn."""
        backend = opened_sampler(self.model, context)

        async def run(columns: Columns, task: Task) -> AsyncGenerator[Output, None]:
            step = self.decode_batch or len(task.groups)
            for start in range(0, len(task.groups), step):
                positions = range(len(task.groups))[start : start + step]
                async with aclosing(self._decode(backend, columns, positions, task, context)) as outputs:
                    async for output in outputs:
                        yield output

        return run

    def work(self, load: Load) -> Decoding | None:
        """The decoding of one replica; None unless the backend is vllm."""
        return vllm.decoding(self.model, load) if load.group.backend == "vllm" else None

    def memory(self, load: Load) -> Sequence[GpuPart] | None:
        """The memory of the served copy and of the key-value cache; None unless the backend is vllm."""
        return vllm.memory(self.model, load) if load.group.backend == "vllm" else None

    def fitting(self, load: Load, room_bytes: float) -> str:
        """Nothing: what it takes depends on its worker group."""
        return ""

    def vocabulary(self, context: StageContext) -> Sequence[bytes]:
        """The bytes of each token of the model's tokenizer, by id."""
        return engine(context).pieces(self.model)

    async def _decode(
        self, backend: Engine, columns: Columns, positions: Sequence[int], task: Task, context: StageContext
    ) -> AsyncGenerator[Output, None]:
        """Decode the groups at these positions of the task as one batch, except those already cancelled."""
        size = context.group_size
        wanted = [position for position in positions if task.groups[position] not in context.cancelled]
        if len(wanted) < len(positions):
            yield Output(cancelled={position: 0 for position in positions if position not in wanted})
        if not wanted:
            return
        index = samples_of(wanted, size)
        texts: Any = take(columns[self.reads[0].name], index)
        seen: dict[str, Any] = {name: take(column, index) for name, column in images.given(columns).items()}
        prompt_ids = backend.encode(self.model, texts, chat=self.chat, **seen)
        stream = backend.stream(
            self.model,
            prompt_ids,
            sampling_of(self, self.max_tokens),
            Draws(context.seed, tuple(task.groups[i // size] for i in index), tuple(i % size for i in index)),
            group_size=size,
            version=task.version,
            unwanted=lambda group: task.groups[wanted[group]] in context.cancelled,
            **seen,
        )
        async with aclosing(stream):
            async for event in stream:
                check_event(event, backend.served_version(self.model, task.version), self.name)
                if isinstance(event, Cancelled):
                    yield Output(cancelled={wanted[group]: tokens for group, tokens in event.tokens.items()})
                    continue
                samples = samples_of(event.groups, size)
                ids = prompt_ids if len(samples) == len(index) else take(prompt_ids, samples)
                yield self._output(backend, ids, event.made, [index[i] for i in samples])

    def _output(self, backend: Engine, prompt_ids: Column, made: Generation, index: list[int]) -> Output:
        lengths = made.response_ids.lengths
        return Output(
            columns={
                PROMPT_IDS.name: prompt_ids,
                RESPONSE.name: backend.decode(self.model, made.response_ids),
                RESPONSE_IDS.name: made.response_ids,
                ROLLOUT_LOGPROBS.name: made.logprobs,
                TOKEN_VERSIONS.name: made.versions,
                TRUNCATED.name: made.truncated,
                **{field.name: _stored(made.routes, field) for field in of_replay(self.model)},
            },
            metrics={
                "length_mean": sum(lengths) / len(lengths),
                "truncated": made.truncated.float().mean().item(),
                **({"tokens_per_pass": sum(lengths) / made.passes} if made.passes else {}),
            },
            index=index,
        )


def sampling_problems(stage: Rollout | TurnStage, graph: Graph, rules: Sequence[Rule]) -> Iterator[Problem]:
    """What is wrong with the backend, the model and the parameters of a stage that samples."""
    yield from backend_problems(stage.on, stage, "sample")
    yield from model_problems(stage.model)
    yield from alphabet_problems(getattr(graph.source, "source", None), stage.model, str(stage.model.location))
    yield from broken(rules, stage, where=str(stage.location), says=f"stage {stage.name!r} has {{}}")


def opened_sampler(model: Model, context: StageContext) -> Engine:
    """Open the worker's backend with its served copy of the model; on GPUs that groups share, the first task loads it,
    in the group's turn."""
    backend = engine(context)
    if not context.in_turns:
        backend.load(model)
    return backend


def sampling_of(stage: Rollout | TurnStage, max_tokens: int) -> Sampling:
    """How a stage samples responses of at most that many tokens."""
    return Sampling(
        max_tokens=max_tokens,
        temperature=stage.temperature,
        top_p=stage.top_p,
        top_k=stage.top_k,
        stop=tuple(stage.stop),
        min_p=stage.min_p,
        routes=replays(stage.model),
    )


def _stored(routes: Ragged | None, field: Field) -> Ragged:
    """The experts in the dtype of their field, with its largest number for those that are not known."""
    import torch

    assert routes is not None, "a sampler that replays returns the routes that it was asked for"
    dtype = getattr(torch, field.dtype)
    known = routes.values.masked_fill(routes.values < 0, torch.iinfo(dtype).max)
    return Ragged(known.to(dtype), routes.lengths)


def _are_texts(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(text, str) and text for text in value)


def _as_stop(value: Any) -> str:
    return f"stop=({value!r},)" if isinstance(value, str) else "stop=()"


def check_event(event: object, served: object, stage: str) -> None:
    """Raise if a backend's stream yields something else, or samples of a version that it does not serve. A version that
    is on its way may be sampled from before the backend counts it as served. Raise StageError, for a stage of that
    name, if a token was drawn from weights that are not numbers."""
    if isinstance(event, Cancelled):
        return
    if not (isinstance(event, Decoded) and isinstance(event.made, Generation)):
        raise TypeError(
            f"the backend's stream() yielded {shown(event)}; it yields Decoded with a Generation, or Cancelled"
        )
    if not isinstance(served, int):
        raise TypeError(f"the backend's served_version() returned {shown(served)}; it returns a number")
    versions = event.made.versions.values
    newest = int(versions.max()) if len(versions) else 0
    if newest > served + 1:
        raise ValueError(f"the backend sampled tokens of version {newest}, and serves version {served}")
    odd = (~event.made.logprobs.values.isfinite()).nonzero()
    if len(odd):
        raise StageError(
            Problem(
                where=f"stage {stage!r}",
                what=f"tokens of version {int(versions[odd[0, 0]])} have logprobs that are not finite",
                why="an update has made the weights infinite, or too large to compute with",
                fix="a lower lr, a smaller clip_grad or a warmup in Train, from an earlier checkpoint",
            )
        )
