"""What all stages have in common that sample a policy: how tokens are drawn, and the one way to ask a backend for them.

A rollout asks once for each sample. A conversation asks once per turn, and its draws go on where those of its last turn
ended (stages/episode). A sample's random numbers are a function of the run's seed, the group's admission number, the
index in the group and the token, so a sample depends neither on other samples nor on a resume.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from pipeline import Graph, Model, Stage, StageContext, StageError, WorkerGroup
from pipeline.declare.columns import Ragged
from pipeline.declare.parameters import Rule, at_least, broken, number
from pipeline.errors import Problem, shown
from stages.backends import Cancelled, Decoded, Draws, Generation, Sampling, backend_problems, engine, model_problems
from stages.routes import replays
from stages.tasks import alphabet_problems
from stages.vocabulary import SERVED_WEIGHTS, TOKEN_VERSIONS

if TYPE_CHECKING:
    from stages.backends import Engine

SAMPLING_RULES = (
    number("temperature", lambda value: value > 0, why="temperature must be a number above 0", fix=1.0),
    number("top_p", lambda value: 0 < value <= 1, why="top_p must be a number above 0 and at most 1", fix=1.0),
    at_least("top_k", 0, why="top_k must be a whole number, 0 (off) or more"),
    number("min_p", lambda value: 0 <= value < 1, why="min_p must be a number from 0 (off) to below 1", fix=0.0),
    Rule("stop", lambda value: _are_texts(value), "stop must be a tuple of strings", lambda value: _as_stop(value)),
)


@dataclass(frozen=True)
class SamplingStage(Stage):
    """Base of the stages that sample `samples_per_prompt` responses or conversations for each row.

    temperature   divides the logits; logprobs are also at this temperature, over the whole vocabulary
    top_p, top_k, min_p   truncate the distribution; 1.0, 0 and 0.0 are off. Logprobs ignore them, so training is then
                  slightly off-policy
    stop          texts that end what is sampled, besides the model's end-of-sequence tokens; one token each on torch
    """

    model: Model
    _: KW_ONLY
    on: WorkerGroup | None = None
    samples_per_prompt: int = 8
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    shape = "stream"
    reads_back = (SERVED_WEIGHTS,)
    stamps = TOKEN_VERSIONS
    per = "group"

    def __post_init__(self) -> None:
        object.__setattr__(self, "group_size", self.samples_per_prompt)

    @property
    def uses(self) -> tuple[Model, ...]:
        """The served policy."""
        return (self.model,)

    def sampling_problems(self, graph: Graph, rules: Sequence[Rule]) -> Iterable[Problem]:
        """What is wrong with the backend, the model and the parameters, which `rules` are for."""
        yield from backend_problems(self.on, self, "sample")
        yield from model_problems(self.model)
        yield from alphabet_problems(getattr(graph.source, "source", None), self.model, str(self.model.location))
        yield from broken(rules, self, where=str(self.location), says=f"stage {self.name!r} has {{}}")

    def opened(self, context: StageContext) -> Engine:
        """Open the worker's backend with its served copy of the model; on GPUs that groups share, the first task loads
        it, in the group's turn."""
        backend = engine(context)
        if not context.in_turns:
            backend.load(self.model)
        return backend

    def vocabulary(self, context: StageContext) -> Sequence[bytes]:
        """The bytes of each token of the model's tokenizer, by id."""
        return engine(context).pieces(self.model)

    def sampling(self, max_tokens: int) -> Sampling:
        """How at most that many tokens are drawn."""
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=tuple(self.stop),
            min_p=self.min_p,
            routes=replays(self.model),
        )

    async def drawn(
        self,
        backend: Engine,
        prompt_ids: Ragged,
        sampling: Sampling,
        draws: Draws,
        *,
        group_size: int,
        version: int,
        unwanted: Callable[[int], bool],
        **seen: Any,
    ) -> AsyncGenerator[Decoded | Cancelled, None]:
        """Sample what follows these tokens, `group_size` samples each group, until none is left that is not `unwanted`.
        `seen` is what the prompts have besides tokens. Raises StageError if logprobs are not finite."""
        stream = backend.stream(
            self.model,
            prompt_ids,
            sampling,
            draws,
            group_size=group_size,
            version=version,
            unwanted=unwanted,
            **seen,
        )
        async with aclosing(stream):
            async for event in stream:
                _check_event(event, backend.served_version(self.model, version), self.name)
                yield event


def _are_texts(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(text, str) and text for text in value)


def _as_stop(value: Any) -> str:
    return f"stop=({value!r},)" if isinstance(value, str) else "stop=()"


def _check_event(event: object, served: object, stage: str) -> None:
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
