"""Rollout: samples responses to prompts. Knows sampling parameters; the backend knows how to sample.

    Rollout(policy, on=sampler, samples_per_prompt=8, max_tokens=512, temperature=1.0)

How tokens are drawn is that of all stages that sample (stages/sampling_stage.py). The runner awaits between two tokens:
meanwhile the same worker can run other rollouts, rewards and a refit, and cancelled groups leave the batch.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from pipeline import Field, Graph, Output, StageContext, Task
from pipeline.declare.columns import Column, Columns, Ragged, take
from pipeline.declare.parameters import at_least, truth
from pipeline.declare.work import Decoding, GpuPart, Load
from pipeline.errors import Problem
from stages import images
from stages.backends import Cancelled, Draws, Generation, samples_of
from stages.forecast import vllm
from stages.model_files import untemplated
from stages.model_shape import length_problems
from stages.prompt_lengths import prompt_problems
from stages.prompts import Prompts
from stages.routes import of_replay
from stages.sampling_stage import SAMPLING_RULES, SamplingStage
from stages.vocabulary import (
    MESSAGES,
    PROMPT,
    PROMPT_IDS,
    RESPONSE,
    RESPONSE_IDS,
    ROLLOUT_LOGPROBS,
    TOKEN_VERSIONS,
    TRUNCATED,
)

if TYPE_CHECKING:
    from stages.backends import Engine


_RULES = (
    at_least("max_tokens", 1, most=2**31, why="max_tokens must be a whole number from 1 to 2**31", fix=512),
    *SAMPLING_RULES,
    truth("chat", fix=False),
    at_least("decode_batch", 0, why="decode_batch must be a whole number of groups, or 0 for all of the task"),
)


_WRITES = (PROMPT_IDS, RESPONSE, RESPONSE_IDS, ROLLOUT_LOGPROBS, TOKEN_VERSIONS, TRUNCATED)


@dataclass(frozen=True)
class Rollout(SamplingStage):
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

    _: KW_ONLY
    max_tokens: int = 512
    decode_batch: int = 0
    chat: bool = False

    name = "rollout"
    writes = _WRITES
    shows = (RESPONSE_IDS, ROLLOUT_LOGPROBS)

    def __post_init__(self) -> None:
        super().__post_init__()
        text = MESSAGES if self.chat else PROMPT
        object.__setattr__(self, "reads", (text, *images.fields_of(self.model)))
        object.__setattr__(self, "writes", (*_WRITES, *of_replay(self.model)))

    @property
    def bounds(self) -> dict[str, int]:
        """The most response tokens per sample."""
        return {str(RESPONSE_IDS.ragged): self.max_tokens}

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Check the backend, the model and the sampling parameters."""
        yield from self.sampling_problems(graph, _RULES)
        yield from length_problems(self.model, self.max_tokens, str(self.location), f"stage {self.name!r}")
        source = graph.source
        if isinstance(source, Prompts) and all(found.warning for found in source.check(graph)):
            says = f"stage {self.name!r}"
            yield from prompt_problems(self.model, source.source, source.layout, self.max_tokens, says)
        if self.chat:
            yield from untemplated(self.model)
        yield from images.unseen_problems(self.model, graph)

    def setup(self, context: StageContext) -> Callable[[Columns, Task], AsyncGenerator[Output, None]]:
        """Open the backend and its served copy of the model, while other workers set up. On GPUs that groups share, the
        first task does that, in the group's turn."""
        backend = self.opened(context)

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
        stream = self.drawn(
            backend,
            prompt_ids,
            self.sampling(self.max_tokens),
            Draws(context.seed, tuple(task.groups[i // size] for i in index), tuple(i % size for i in index)),
            group_size=size,
            version=task.version,
            unwanted=lambda group: task.groups[wanted[group]] in context.cancelled,
            **seen,
        )
        async with aclosing(stream):
            async for event in stream:
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


def _stored(routes: Ragged | None, field: Field) -> Ragged:
    """The experts in the dtype of their field, with its largest number for those that are not known."""
    import torch

    assert routes is not None, "a sampler that replays returns the routes that it was asked for"
    dtype = getattr(torch, field.dtype)
    known = routes.values.masked_fill(routes.values < 0, torch.iinfo(dtype).max)
    return Ragged(known.to(dtype), routes.lengths)
