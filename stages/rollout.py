"""Rollout: prompts in, sampled responses out. Knows sampling parameters; the backend knows how to sample.

    Rollout(policy, on=sampler, samples_per_prompt=8, max_tokens=512, temperature=1.0)

A sample's random numbers are a function of the run's seed, its admission number, its index in the group and the token,
so a sample depends neither on its neighbours nor on a resume.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from pipeline import Graph, Model, Output, Stage, StageContext, Task, WorkerGroup
from pipeline.columns import Columns, Ragged
from pipeline.errors import Problem, shown
from pipeline.parameters import is_number, is_whole
from stages.backends import STREAM_ROLLOUT, Sampling, backend_problems, engine, model_problems
from stages.vocabulary import (
    MADE_BY,
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


@dataclass(frozen=True)
class Rollout(Stage):
    """Samples `samples_per_prompt` responses to each prompt.

    max_tokens    tokens of a response at most, the closing one included
    temperature   divides the logits; logprobs are taken at it too, over the whole vocabulary
    top_p, top_k  cut the tail off; 1.0 and 0 keep it. The logprobs do not change, so training is slightly off-policy
    stop          texts that end a response besides the model's own end of sequence, each one token
    decode_batch  groups that are decoded together and handed on as soon as they are done; 0 is all of the task
    chat          prompts are lists of messages (`Prompts(..., chat=True)`), in the chat template of the model

    Metrics: `length_mean` (tokens), `truncated` (fraction), `tokens` (mean over decode batches).
    """

    model: Model
    _: KW_ONLY
    on: WorkerGroup | None = None
    samples_per_prompt: int = 8
    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    decode_batch: int = 0
    chat: bool = False

    name = "rollout"
    shape = "stream"
    writes = (PROMPT_IDS, RESPONSE, RESPONSE_IDS, ROLLOUT_LOGPROBS, TOKEN_VERSIONS, TRUNCATED)
    reads_back = (SERVED_WEIGHTS,)
    per = "group"
    hints = MADE_BY

    def __post_init__(self) -> None:
        object.__setattr__(self, "group_size", self.samples_per_prompt)
        object.__setattr__(self, "reads", (MESSAGES,) if self.chat else (PROMPT,))

    @property
    def uses(self) -> tuple[Model, ...]:
        """The served policy."""
        return (self.model,)

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Backend, model and the ranges of the sampling parameters."""
        yield from backend_problems(self.on, self)
        yield from model_problems(self.model)
        stop: Any = self.stop
        texts = isinstance(stop, tuple | list) and all(isinstance(text, str) and text for text in stop)
        for name, value, legal, rule in (
            ("max_tokens", self.max_tokens, is_whole(self.max_tokens, 1), "a whole number, 1 or more"),
            ("temperature", self.temperature, is_number(self.temperature) and self.temperature > 0, "a number above 0"),
            ("top_p", self.top_p, is_number(self.top_p) and 0 < self.top_p <= 1, "a number above 0 and at most 1"),
            ("top_k", self.top_k, is_whole(self.top_k, 0), "a whole number, 0 (off) or more"),
            ("decode_batch", self.decode_batch, is_whole(self.decode_batch, 0), "a whole number, 0 is all of the task"),
            ("stop", stop, texts, "a tuple of texts"),
            ("chat", self.chat, isinstance(self.chat, bool), "True or False"),
        ):
            if not legal:
                yield Problem(
                    where=str(self.location),
                    what=f"stage {self.name!r} has {name}={shown(value)}",
                    why=f"{name} is {rule}",
                    fix=f"stop=({stop!r},)"
                    if name == "stop" and isinstance(stop, str)
                    else f"{name}={Rollout.__dataclass_fields__[name].default}",
                )

    def setup(self, context: StageContext) -> Callable[[Columns, Task], AsyncIterator[Output]]:
        """Opens the backend and its served copy of the model."""
        backend = engine(context)

        async def run(columns: Columns, task: Task) -> AsyncIterator[Output]:
            size = context.group_size
            step = (self.decode_batch or len(task.groups)) * size
            prompts: Any = columns[self.reads[0].name]
            for start in range(0, len(prompts), step):
                index = range(start, min(start + step, len(prompts)))
                yield self._decode(backend, [prompts[i] for i in index], index, task, context)

        return run

    def _decode(self, backend: Engine, prompts: list[Any], index: range, task: Task, context: StageContext) -> Output:
        import torch

        from ops.random import uniform

        size = context.group_size
        sampling = Sampling(self.max_tokens, self.temperature, self.top_p, self.top_k, self.stop)
        prompt_ids = backend.encode(self.model, prompts, chat=self.chat)
        uniforms = uniform(
            context.seed,
            STREAM_ROLLOUT,
            [task.groups[i // size] for i in index],
            [i % size for i in index],
            self.max_tokens,
        )
        made = backend.generate(self.model, prompt_ids, sampling, uniforms)
        lengths = made.response_ids.lengths
        versions = torch.full((sum(lengths),), task.version, dtype=torch.int32)
        return Output(
            columns={
                PROMPT_IDS.name: prompt_ids,
                RESPONSE.name: backend.decode(self.model, made.response_ids),
                RESPONSE_IDS.name: made.response_ids,
                ROLLOUT_LOGPROBS.name: made.logprobs,
                TOKEN_VERSIONS.name: Ragged(versions, lengths),
                TRUNCATED.name: made.truncated,
            },
            metrics={
                "length_mean": sum(lengths) / len(lengths),
                "truncated": made.truncated.float().mean().item(),
                "tokens": float(sum(lengths)),
            },
            index=index,
        )
