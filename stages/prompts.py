"""Prompts: the source of a graph, with prompts and answers from an enumerable task or a data set.

    Prompts(Generated("reverse"), batch=32)
    Prompts("train.jsonl", batch=32, prompt="question", answer="solution", extra=("level",))
    Prompts("data/*.parquet", template="Question: {question}\\nAnswer:", answer="reward_model.ground_truth")
    Prompts(Dataset("openai/gsm8k", config="main", split="train"), prompt="question")
    Prompts(Mixture((Dataset("gsm8k", split="train", name="gsm8k"), 2), (Dataset("math.jsonl", name="math"), 1)))

Knows no tokenizer. The row of an admission number does not depend on earlier admissions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import Field, Output, Stage, StageContext, Task
from pipeline.declare.columns import Columns
from pipeline.declare.parameters import Rule, broken, is_whole, truth
from pipeline.errors import Problem, kind_of
from stages.sources.columns import (
    Extra,
    column_problems,
    entry_name,
    extra_columns,
    extra_entries,
    own_columns,
    template_problems,
)
from stages.sources.dataset import Dataset, dataset_problems
from stages.sources.draws import columns_read, open_source, source_problems
from stages.sources.mixture import Mixture
from stages.sources.schema import Schema
from stages.sources.typed import typed_columns
from stages.sources.values import column_of
from stages.tasks import Generated
from stages.vocabulary import DATASET, MESSAGES, PROMPT

if TYPE_CHECKING:
    from pipeline import Graph


_RULES = (
    Rule(
        "batch", lambda value: is_whole(value, 1), "a step needs a whole number of groups, 1 or more", "write batch=32"
    ),
    Rule(
        "seed",
        lambda value: value is None or (isinstance(value, int) and 0 <= value < 2**64),
        "a seed must be a whole number from 0 to 2**64 - 1, or None for the run's seed",
        "write seed=0",
    ),
    truth("chat", fix=True),
    truth("shuffle", fix=True),
)


@dataclass(frozen=True)
class Prompts(Stage):
    """Draws groups endlessly: each epoch has every row once, in an order that depends only on the seed.

    source    a `Generated` task, the path of a data set (see `Dataset`), a `Dataset`, or a `Mixture` of these
    batch     groups per step
    prompt    column of the prompts
    answer    column of the answers; None means no field `answer`
    extra     columns that become fields: a name gives a field of that name, a `Field` a typed field from the column of
              its name, and a pair (column, name or `Field`) names both. Without a `Field`, most of the first 1,000
              rows decide: a column of whole numbers is int64, one of numbers float32, one of truths bool, any other str
    template  a text with `{column}` in it, used as the prompt instead of the column `prompt`
    chat      also write `messages`, the conversation as JSON text: a column with lists of {"role", "content"}, or the
              prompt as one user message. The field `prompt` is then the text of the last message
    system    with `chat`: the system message for conversations that do not start with one
    as_text   columns whose numbers, booleans, lists and objects are converted to JSON text
    images    column of the images, for a `Model(..., images=True)`: a path relative to the data's folder, bytes, or
              {"bytes", "path"}; a list of these; or null. The field `images` has the files as they are. In the prompt,
              or in messages, each `<image>` stands for an image; without any, images precede the (last) text
    shuffle   False draws rows in file order
    seed      of the order; None means the run's seed

    A column may be a dotted path into nested objects, such as "reward_model.ground_truth"; the field of an extra column
    gets the last name of its path. A `Mixture`, or a `Dataset` with a name, also writes the field `dataset`: the name
    of each prompt's source.
    """

    source: Generated | str | Path | Dataset | Mixture
    batch: int = 32
    _: KW_ONLY
    prompt: str = "prompt"
    answer: str | None = "answer"
    extra: Extra | Sequence[Extra] = ()
    template: str | None = None
    chat: bool = False
    system: str | None = None
    as_text: str | Sequence[str] = ()
    images: str | None = None
    shuffle: bool = True
    seed: int | None = None
    writes: Sequence[Field] = field(init=False)

    name = "prompts"
    per = "group"

    def __post_init__(self) -> None:
        object.__setattr__(self, "extra", typed_columns(self.source, extra_entries(self.extra), self._as_text()))
        named = (DATASET,) if self._named() else ()
        object.__setattr__(self, "writes", (*self.layout.fields, *named))

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Check the parameters, and at most the first 1,000 rows of each data set."""
        where = str(self.location)
        found = [*self._parameter_problems(where), *self._column_problems(where), *self._source_problems(where)]
        yield from found
        if found:
            return
        columns = columns_read(self.source, self.layout)
        for column in (column for column in self._as_text() if column not in columns):
            close = get_close_matches(column, columns, n=1)
            yield Problem(
                where=where,
                what=f"as_text names {column!r}",
                why=f"the columns that are read are {', '.join(map(repr, columns))}",
                fix=f"did you mean {close[0]!r}?" if close else f"leave out {column!r}",
            )
        yield from source_problems(self.source, self.layout, where)
        reads = {made for stage in graph.stages for made in stage.reads}
        if self.chat and PROMPT in reads and MESSAGES not in reads:
            yield Problem(
                where=where,
                what="chat=True, and no stage reads the messages",
                why="only their last text would be sampled from, without the chat template",
                fix="Rollout(..., chat=True) too, or leave out chat=True",
            )

    def _parameter_problems(self, where: str) -> Iterator[Problem]:
        yield from broken(_RULES, self, where=where)
        if self.system is not None and not (self.chat and isinstance(self.system, str) and self.system):
            yield Problem(
                where=where,
                what=f"system={self.system!r:.40}" + ("" if self.chat else " without chat=True"),
                why="it is the text of the first message of a conversation",
                fix="write chat=True, or leave out system=" if self.system else "leave out system=",
            )

    def _column_problems(self, where: str) -> Iterator[Problem]:
        own = own_columns(self.prompt, self.answer, self.template, self.images)
        for column in (*own.values(), *self._as_text()):
            if not isinstance(column, str):
                yield Problem(
                    where=where,
                    what=f"column {column!r} is not a string",
                    why="columns are found by name",
                    fix='write prompt="prompt", answer="answer"',
                )
                return
        if self.template is not None:
            yield from template_problems(self.template, self.prompt, where)
        yield from column_problems(own, extra_entries(self.extra), self._taken(), where)

    def _source_problems(self, where: str) -> Iterator[Problem]:
        source = self.source
        if isinstance(source, Mixture):
            yield from source.problems(where)
        elif isinstance(source, Dataset):
            yield from dataset_problems(source, where)
        elif not isinstance(source, str | Path | Generated):
            yield Problem(
                where=where,
                what=f"source is {kind_of(source)}",
                why="prompts come from a Generated task, a data set given by its path, or a Mixture of these",
                fix='write Prompts(Dataset(("a.jsonl", "b.jsonl")))'
                if isinstance(source, list | tuple)
                else 'write Prompts(Generated("reverse")) or Prompts("train.jsonl")',
            )
        columns = [self.prompt, self.answer, *map(entry_name, extra_entries(self.extra))]
        columns += [] if self.images is None else [self.images]
        if isinstance(source, Generated) and columns != ["prompt", "answer"]:
            yield Problem(
                where=where,
                what=f"columns {', '.join(map(str, columns))} of a Generated task",
                why="a Generated task has no columns to choose from",
                fix="leave out prompt=, answer=, extra= and images=",
            )
        if isinstance(source, Generated) and not self.shuffle:
            yield Problem(
                where=where,
                what="shuffle=False for a Generated task",
                why="only the seed orders its prompts",
                fix="leave out shuffle=",
            )

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Output]:
        """Return the runner: one row per admission number in `task.groups`, repeated for each sample of the group."""
        layout = self.layout
        seed = context.seed if self.seed is None else self.seed
        draw = open_source(self.source, layout, seed, shuffle=self.shuffle)

        def run(columns: Columns, task: Task) -> Output:
            names, rows = zip(*(draw(admission) for admission in task.groups))
            made = {
                made.name: column_of(made, [row[i] for row in rows], context.group_size)
                for i, made in enumerate(layout.fields)
            }
            if self._named():
                made[DATASET.name] = column_of(DATASET, names, context.group_size)
            return Output(made)

        return run

    @property
    def layout(self) -> Schema:
        """The valid columns; `check` reports the others."""
        return Schema(
            prompt=self.prompt,
            answer=self.answer,
            extra=extra_columns(extra_entries(self.extra), self._taken()),
            template=self.template,
            chat=self.chat,
            system=self.system,
            as_text=self._as_text(),
            images=self.images,
        )

    def _taken(self) -> list[str]:
        """Names of the fields other than extra columns."""
        fields = Schema(answer=self.answer, chat=self.chat, images=self.images).fields
        return [made.name for made in (*fields, *((DATASET,) if self._named() else ()))]

    def _named(self) -> bool:
        """Whether to write the name of each prompt's source."""
        return isinstance(self.source, Mixture) or (isinstance(self.source, Dataset) and self.source.name is not None)

    def _as_text(self) -> tuple[str, ...]:
        return (self.as_text,) if isinstance(self.as_text, str) else tuple(self.as_text)
