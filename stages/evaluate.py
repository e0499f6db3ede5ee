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
from pipeline import Field, Graph, Model, Output, Stage, StageContext, Task, WorkerGroup
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
from stages.held_out import environment_problems, plain, read_of, reward_problems
from stages.model_files import untemplated
from stages.model_shape import length_problems
from stages.prompt_lengths import prompt_problems
from stages.scoring import AsyncCalls, RewardFunction, Scorer, fields_of, name_of
from stages.sources import Dataset
from stages.sources.columns import Extra, column_problems, extra_columns, extra_entries, own_columns, template_problems
from stages.sources.dataset import dataset_problems
from stages.sources.draws import open_rows, source_problems
from stages.sources.schema import Schema
from stages.sources.typed import typed_columns
from stages.sources.values import column_of
from stages.tasks import Generated
from stages.vocabulary import ANSWER, IMAGES, MESSAGES, PROMPT, RESPONSE, SERVED_WEIGHTS, TRUNCATED

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
    reward        a reward function of `response`, `truncated` and the columns of a row, or several
    every         steps between evaluations
    prompts       number of prompts, starting with the first; fewer if the source has fewer
    max_tokens    maximum response length
    decode_batch  prompts decoded together; 0 means all
    prompt, answer, template  as for Prompts: columns of the data set, and the text of the prompt
    extra         as for Prompts: more columns, which rewards and environments then read
    chat, system  as for Prompts and Rollout: prompts are lists of messages
    images        as for Prompts, for a `Model(..., images=True)`
    episode       an Episode, whose environment then answers the policy; its tokens and turns are the limits. Rewards
                  may also read `end`, `turn_rewards` and `conversation`, and `response` is the last reply
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
    extra: Extra | Sequence[Extra] = ()
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "extra", typed_columns(self.source, extra_entries(self.extra), ()))

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
        is_task, has_turns = isinstance(self.source, Generated), self.episode is not None
        wrong = list(self._task_problems(where) if is_task else self._data_problems(where))
        yield from wrong
        sound, says = all(problem.warning for problem in wrong), f"stage {self.name!r}"
        has = {"columns": not is_task, "episodes": has_turns, "typed": sound}
        yield from reward_problems(self._rewards(), self._fields, where, says, **has)
        if sound and not is_task and not has_turns:
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

    def _task_problems(self, where: str) -> Iterator[Problem]:
        assert isinstance(self.source, Generated)
        if self.source.held_out == 0:
            yield Problem(
                where=where,
                what=f"the task {self.source.task!r} has no held-out prompts",
                why="evaluation on training prompts measures memory, not skill",
                fix="Generated(..., held_out=1000)",
            )
        for name, default in (("chat", False), ("extra", ())):
            if (value := getattr(self, name)) != default:
                yield Problem(
                    where=where,
                    what=f"stage {self.name!r} has {name}={shown(value)} and a Generated task",
                    why="a Generated task has texts, and neither messages nor other columns",
                    fix=f"leave out {name}=",
                )

    def _data_problems(self, where: str) -> Iterator[Problem]:
        wrong = list(self._layout_problems(where))
        yield from wrong or source_problems(self.source, self._layout(), where)

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
        own = own_columns(self.prompt, self.answer, self.template, self.images)
        yield from column_problems(own, extra_entries(self.extra), self._taken(), where)
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
        else:
            columns = not isinstance(self.source, Generated)
            yield from environment_problems(self.episode, self._fields, where, f"stage {self.name!r}", columns=columns)

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Output]:
        """Open the backend and its served copy of the model, and read the prompts."""
        backend = engine(context)
        rows = self._rows()
        asked = [row[(MESSAGES if self.chat else PROMPT).name] for row in rows]
        seen = {} if self.images is None else {IMAGES.name: column_of(IMAGES, [row[IMAGES.name] for row in rows], 1)}
        asked_of = [{name: row[name] for name in self.episode.asks} for row in rows] if self.episode else []
        rewards = self._rewards()
        read = {name for function in rewards for name in fields_of(function)}
        known = plain(rows, [made for made in self._fields if made.name in read])
        scorer = Scorer(rewards, AsyncCalls(), str(self.location))
        sampling = Sampling(self.max_tokens, greedy=True)

        def sampled() -> tuple[list[str], list[int], list[bool]]:
            texts: list[str] = []
            lengths: list[int] = []
            truncated: list[bool] = []
            step = self.decode_batch or len(rows)
            for start in range(0, len(rows), step):
                now = range(len(rows))[start : start + step]
                given: dict[str, Any] = {name: take(column, now) for name, column in images.given(seen).items()}
                prompt_ids = backend.encode(self.model, [asked[i] for i in now], chat=self.chat, **given)
                made = backend.generate(self.model, prompt_ids, sampling, None, **given)
                if not isinstance(made, Generation):
                    raise TypeError(f"the backend's generate() returned {shown(made)}; it returns a Generation")
                texts += backend.decode(self.model, made.response_ids)
                lengths += made.response_ids.lengths
                truncated += made.truncated.tolist()
            return texts, lengths, truncated

        def run(columns: Columns, task: Task) -> Output:
            made = self._played(self.episode, backend, context, asked_of) if self.episode else []
            kept = [i for i in range(len(rows)) if not (made and made[i].is_lost)]
            if made and not kept:
                raise StageError(self._too_many_lost([one.end for one in made], len(made)))
            given = {name: [values[i] for i in kept] for name, values in known.items()}
            if made:
                played = [made[i] for i in kept]
                texts, lengths = [one.response for one in played], [one.drawn for one in played]
                truncated = [one.truncated for one in played]
                given |= read_of(played)
            else:
                texts, lengths, truncated = sampled()
            shown_to = given | {RESPONSE.name: texts, TRUNCATED.name: truncated}
            scores = scorer.scores(shown_to, len(kept), lambda n: f"held-out prompt {kept[n]} of step {task.step + 1}")
            scored = {f"eval/{name_of(function)}": fmean(values) for function, values in zip(rewards, scores)}
            scored |= {f"eval/{name}": value for name, value in scorer.metrics().items()}
            counts = {
                "eval/count": float(len(kept)),
                "eval/length_mean": fmean(lengths),
                "eval/truncated": fmean(truncated),
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

    @property
    def _fields(self) -> tuple[Field, ...]:
        """The fields of a held-out row."""
        return (PROMPT, ANSWER) if isinstance(self.source, Generated) else self._layout().fields

    def _rows(self) -> list[dict[str, Any]]:
        """The values of each held-out row, by field."""
        if isinstance(self.source, Generated):
            rows: Sequence[Sequence[Any]] = self.source.held_out_pairs(min(self.prompts, self.source.held_out))
        else:
            rows = open_rows(self.source, self._layout())[: self.prompts]
        return [dict(zip((made.name for made in self._fields), row, strict=True)) for row in rows]

    def _layout(self) -> Schema:
        return Schema(
            prompt=self.prompt,
            answer=self.answer,
            extra=extra_columns(extra_entries(self.extra), self._taken()),
            template=self.template,
            chat=self.chat,
            system=self.system,
            images=self.images,
        )

    def _taken(self) -> list[str]:
        """Names of the fields other than extra columns."""
        return [made.name for made in Schema(chat=self.chat, images=self.images).fields]

    def _rewards(self) -> tuple[RewardFunction, ...]:
        return (self.reward,) if callable(self.reward) else tuple(self.reward)
