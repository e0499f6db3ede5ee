"""Evaluate: scores greedy responses of the served policy to held-out prompts. Writes no field, only metrics.

Evaluate(policy, Generated("reverse"), on=sampler, every=10, prompts=1000, max_tokens=6)
Evaluate(policy, "test.jsonl", on=sampler, prompt="question", reward=math_verify)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ops.rewards import exact_match
from pipeline import Graph, Model, Output, Stage, StageContext, Task, WorkerGroup
from pipeline.declare.abilities import HasServer, server_of
from pipeline.declare.columns import Columns, take
from pipeline.declare.parameters import at_least, broken, number
from pipeline.declare.task import ServerAddress
from pipeline.declare.work import Decoding, GpuPart, Load
from pipeline.errors import Problem, StageError, shown
from stages import images
from stages.backends import Generation, Sampling, backend_problems, engine, model_problems
from stages.episode.turn_stage import TooManyLostError, TurnStage, ends
from stages.forecast import vllm
from stages.model_files import untemplated
from stages.model_shape import length_problems
from stages.prompt_lengths import prompt_problems
from stages.reward import function_problems
from stages.scoring import AsyncCalls, RewardFunction, Scorer, fields_of, name_of, where_of
from stages.sources import Dataset
from stages.sources.columns import template_problems
from stages.sources.dataset import dataset_problems
from stages.sources.draws import open_rows, source_problems
from stages.sources.schema import Schema
from stages.sources.values import column_of
from stages.tasks import Generated
from stages.vocabulary import IMAGES, PROMPT, SERVED_WEIGHTS

if TYPE_CHECKING:
    from stages.episode.play import Played

_RULES = (
    at_least("prompts", 1, fix=1000),
    at_least("max_tokens", 1, most=2**31, why="max_tokens must be a whole number from 1 to 2**31", fix=512),
    at_least("decode_batch", 0, fix=0),
    number("lost", lambda value: 0 <= value <= 1, why="lost must be a fraction of its episodes", fix=0.2),
)


@dataclass(frozen=True)
class Evaluate(Stage):
    """Scores greedy responses to held-out prompts.

    source        a `Generated` task, whose held-out prompts are used, or a data set of held-out rows, as for Prompts
    reward        a reward function of `response`, `answer` and `prompt`, or several
    every         steps between evaluations
    prompts       number of prompts, starting with the first; fewer if the source has fewer
    max_tokens    maximum response length
    decode_batch  prompts decoded together; 0 means all
    prompt, answer, template  as for Prompts: columns of the data set, and the text of the prompt
    chat, system  as for Prompts and Rollout: prompts are lists of messages
    images        as for Prompts, for a `Model(..., images=True)`
    episode       an Episode, whose environment then answers the policy; its tokens and turns are the limits. A row's
                  `prompt` is what its environment reads, and `response` is the last reply
    lost          the largest fraction of its episodes that may be lost; the run ends as soon as more are. One may be
                  lost, unless it is 0

    Metrics: `eval/<reward>` per function, such as `eval/exact_match`; `eval/count`, `eval/length_mean`,
    `eval/truncated`; and metrics that a function reports itself, such as `eval/math_verify_timeouts`. Of episodes also
    `eval/end_<kind>`, their fraction by kind of end. A lost episode, `eval/end_lost`, counts in no other metric; if all
    are lost, the run ends too.
    """

    model: Model
    source: Generated | str | Path | Dataset
    _: KW_ONLY
    on: WorkerGroup | None = None
    reward: RewardFunction | Sequence[RewardFunction] = exact_match
    every: int = 10
    prompts: int = 1000
    max_tokens: int = 512
    decode_batch: int = 0
    prompt: str = "prompt"
    answer: str = "answer"
    template: str | None = None
    chat: bool = False
    system: str | None = None
    images: str | None = None
    episode: TurnStage | None = None
    lost: float = 0.2

    name = "evaluate"
    reports_as = "eval"
    reads = (SERVED_WEIGHTS,)
    per = "batch"

    @property
    def uses(self) -> tuple[Model, ...]:
        """The served policy."""
        return (self.model,)

    @property
    def server(self) -> WorkerGroup | None:
        """The group that has the environments of its episode."""
        return server_of(self.episode)

    def serve(self, context: StageContext, host: str) -> ServerAddress:
        """Listen on a worker of that group."""
        assert isinstance(self.episode, HasServer), "it has a server"
        return self.episode.serve(context, host)

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Check the backend, the model, all ranges, and that there are held-out prompts."""
        where = str(self.location)
        yield from backend_problems(self.on, self, "sample")
        yield from model_problems(self.model)
        yield from broken(_RULES, self, where=where, says=f"stage {self.name!r} has {{}}")
        if self.episode is None:
            yield from length_problems(self.model, self.max_tokens, where, f"stage {self.name!r}")
        else:
            yield from self._episode_problems(where)
        yield from self._reward_problems(where)
        if isinstance(self.source, Generated):
            if self.source.held_out == 0:
                yield Problem(
                    where=where,
                    what=f"the task {self.source.task!r} has no held-out prompts",
                    why="evaluation on training prompts measures memory, not skill",
                    fix="Generated(..., held_out=1000)",
                )
            if self.chat:
                yield Problem(
                    where=where,
                    what=f"stage {self.name!r} has chat=True and a Generated task",
                    why="a Generated task has texts, not messages",
                    fix="chat=False",
                )
            return
        found = list(self._layout_problems(where))
        yield from found
        if not found:
            yield from source_problems(self.source, self._layout(), where)
            if self.episode is None:
                says = f"stage {self.name!r}"
                yield from prompt_problems(self.model, self.source, self._layout(), self.max_tokens, says)
                yield from untemplated(self.model) if self.chat else ()

    def work(self, load: Load) -> Decoding | None:
        """The decoding of its prompts, with responses like those of the step; None unless the backend is vllm."""
        found = vllm.decoding(self.model, load) if load.group.backend == "vllm" else None
        if found is None:
            return None
        mean = min(self.max_tokens, round(fmean(load.responses)))
        return replace(found, responses=(mean,) * self.prompts)

    def memory(self, load: Load) -> Sequence[GpuPart] | None:
        """The memory of the served copy and of the key-value cache; None unless the backend is vllm."""
        return vllm.memory(self.model, load) if load.group.backend == "vllm" else None

    def fitting(self, load: Load, room_bytes: float) -> str:
        """Nothing: what it takes depends on its worker group."""
        return ""

    def _layout_problems(self, where: str) -> Iterator[Problem]:
        """Check the parameters, without reading a row."""
        source: Any = self.source
        if isinstance(source, Dataset):
            yield from dataset_problems(source, where)
        elif not isinstance(source, str | Path):
            yield Problem(
                where=where,
                what=f"stage {self.name!r} has the source {shown(source)}",
                why="held-out prompts come from a Generated task, or from a data set given by its path",
                fix='write Evaluate(policy, "test.jsonl", ...), one stage per data set',
            )
        if self.template is not None:
            yield from template_problems(self.template, self.prompt, where)
        columns = (("prompt", self.prompt), ("answer", self.answer), ("images", self.images or "images"))
        for name, value in columns:
            if not isinstance(value, str):
                yield Problem(
                    where=where,
                    what=f"stage {self.name!r} has {name}={shown(value)}",
                    why="columns are found by name",
                    fix=f"{name}={name!r}",
                )
        if (self.images is not None) != bool(images.fields_of(self.model)):
            yield Problem(
                where=where,
                what=f"stage {self.name!r} has images={shown(self.images)} and a Model with "
                f"images={shown(bool(images.fields_of(self.model)))}",
                why="a model whose prompts have images sees those of held-out rows too",
                fix='images="images", the column of the images'
                if self.images is None
                else "leave out images=, or Model(..., images=True)",
            )
        if self.system is not None and not self.chat:
            yield Problem(
                where=where,
                what=f"stage {self.name!r} has system={shown(self.system)} without chat=True",
                why="it is the text of the first message of a conversation",
                fix="chat=True, or leave out system=",
            )

    def _episode_problems(self, where: str) -> Iterator[Problem]:
        if not isinstance(self.episode, TurnStage):
            what, why = (
                f"stage {self.name!r} has episode={shown(self.episode)}",
                "it is a stage Episode or Endpoint, or None",
            )
            yield Problem(where=where, what=what, why=why, fix="the Episode of the graph")
        elif self.episode.model != self.model:
            what = f"stage {self.name!r} evaluates another model than its Episode samples"
            yield Problem(where=where, what=what, why="it samples as that stage does", fix="the model of the Episode")
        elif (reads := [made.name for made in self.episode.reads]) != [PROMPT.name]:
            yield Problem(
                where=where,
                what=f"the environment of stage {self.name!r} reads {', '.join(reads)}",
                why="held-out rows have a prompt",
                fix="an environment with reads = ('prompt',)",
            )

    def _reward_problems(self, where: str) -> Iterator[Problem]:
        for function in self._rewards():
            found = list(function_problems(function, where))
            yield from found
            unknown = [name for name in fields_of(function) if name not in ("prompt", "response", "answer")]
            if unknown and not found:
                yield Problem(
                    where=where_of(function) or where,
                    what=f"reward {name_of(function)} reads {', '.join(unknown)}",
                    why=f"stage {self.name!r} has the fields prompt, response and answer",
                    fix="use a reward that reads only these fields",
                )

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Output]:
        """Open the backend and its served copy of the model, and read the prompts."""
        backend = engine(context)
        pairs = self._pairs()
        asked = [row[2] if self.chat else row[0] for row in pairs]
        seen = {} if self.images is None else {IMAGES.name: column_of(IMAGES, [row[-1] for row in pairs], 1)}
        rewards = self._rewards()
        scorer = Scorer(rewards, AsyncCalls(), str(self.location))
        sampling = Sampling(self.max_tokens, greedy=True)

        def sampled() -> tuple[list[str], list[int], int]:
            texts: list[str] = []
            lengths: list[int] = []
            truncated = 0
            step = self.decode_batch or len(pairs)
            for start in range(0, len(pairs), step):
                now = range(len(pairs))[start : start + step]
                given: dict[str, Any] = {name: take(column, now) for name, column in images.given(seen).items()}
                prompt_ids = backend.encode(self.model, [asked[i] for i in now], chat=self.chat, **given)
                made = backend.generate(self.model, prompt_ids, sampling, None, **given)
                if not isinstance(made, Generation):
                    raise TypeError(f"the backend's generate() returned {shown(made)}; it returns a Generation")
                texts += backend.decode(self.model, made.response_ids)
                lengths += made.response_ids.lengths
                truncated += int(made.truncated.sum())
            return texts, lengths, truncated

        def run(columns: Columns, task: Task) -> Output:
            rows = [{PROMPT.name: text} for text in asked]
            made = self._played(self.episode, backend, context, rows) if self.episode else []
            kept = [i for i in range(len(pairs)) if not (made and made[i].is_lost)]
            if made and not kept:
                raise StageError(self._too_many_lost([one.end for one in made], len(made)))
            if made:
                texts, lengths = [made[i].response for i in kept], [made[i].drawn for i in kept]
                truncated = sum(made[i].truncated for i in kept)
            else:
                texts, lengths, truncated = sampled()
            shown_to = {"prompt": [pairs[i][0] for i in kept], "answer": [pairs[i][1] for i in kept], "response": texts}
            scores = scorer.scores(shown_to, len(kept), lambda n: f"held-out prompt {kept[n]} of step {task.step + 1}")
            scored = {f"eval/{name_of(function)}": fmean(values) for function, values in zip(rewards, scores)}
            scored |= {f"eval/{name}": value for name, value in scorer.metrics().items()}
            counts = {
                "eval/count": float(len(kept)),
                "eval/length_mean": fmean(lengths),
                "eval/truncated": truncated / len(kept),
            }
            counts |= {f"eval/{name}": value for name, value in ends(made).items()} if made else {}
            return Output(metrics=scored | counts, times={i: one.times for i, one in enumerate(made)})

        return run

    def _played(self, episode: TurnStage, backend: Any, context: StageContext, rows: list[Any]) -> list[Played]:
        """An episode of each row. Raises StageError as soon as too many are lost."""
        most = max(int(self.lost * len(rows)), 1 if self.lost else 0)
        try:
            return episode.played(backend, context, rows, most_lost=most)
        except TooManyLostError as error:
            raise StageError(self._too_many_lost(error.ends, len(rows))) from None

    def _too_many_lost(self, lost: Sequence[str], count: int) -> Problem:
        commonest, times = Counter(lost).most_common(1)[0]
        return Problem(
            where=str(self.location),
            what=f"stage {self.name!r} has lost {len(lost)} of its {count} episodes, {times} of them as {commonest}",
            why=f"an episode that its machine has failed has no score, and lost={self.lost:g}",
            fix="see why in logs/ of the run, and correct the environment, its deadlines or its retries",
        )

    def _pairs(self) -> list[tuple[Any, ...]]:
        """Prompt and answer of each held-out row; with `chat`, also its messages; with `images`, these at the end."""
        if isinstance(self.source, Generated):
            return list(self.source.held_out_pairs(min(self.prompts, self.source.held_out)))
        return list(open_rows(self.source, self._layout())[: self.prompts])

    def _layout(self) -> Schema:
        return Schema(
            prompt=self.prompt,
            answer=self.answer,
            template=self.template,
            chat=self.chat,
            system=self.system,
            images=self.images,
        )

    def _rewards(self) -> tuple[RewardFunction, ...]:
        return (self.reward,) if callable(self.reward) else tuple(self.reward)
