"""The source of a graph: prompts and their answers, from an enumerable task or a JSONL file.

    Prompts(Generated("reverse"), batch=32)
    Prompts("train.jsonl", batch=32, prompt="question", answer="solution", extra=("level",))

Knows no tokenizer. A row of the file is one JSON object; `prompt` and `answer` name its columns, and each column in
`extra` becomes a str field of the same name. The row of an admission number never depends on what was admitted before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import Field, Output, Stage, StageContext, StageError, Task
from pipeline.columns import Columns
from pipeline.errors import Problem
from stages.tasks import Generated
from stages.vocabulary import ANSWER, PROMPT

if TYPE_CHECKING:
    from pipeline import Graph

CHECKED_LINES = 1000  # of a data file, before the run; the run itself reads them all
_SHOWN_LINES = 3  # bad lines that are reported one by one


@dataclass(frozen=True)
class Prompts(Stage):
    """Draws groups without end: each epoch has every row once, in an order that is a pure function of the seed.

    source  a `Generated` task, or the path of a JSONL file
    batch   groups a step
    prompt, answer, extra   columns of the file
    seed    of the order; None takes the run's
    """

    source: Generated | str | Path
    batch: int = 32
    _: KW_ONLY
    prompt: str = "prompt"
    answer: str = "answer"
    extra: Sequence[str] = ()
    seed: int | None = None
    writes: Sequence[Field] = field(init=False)

    name = "prompts"
    per = "group"

    def __post_init__(self) -> None:
        fields = [made for column in self._extra() if isinstance(made := _text_field(column), Field)]
        fields = [made for made in fields if made not in (PROMPT, ANSWER)]
        object.__setattr__(self, "writes", (PROMPT, ANSWER, *fields))

    def check(self, graph: Graph) -> Iterable[Problem]:
        """The parameters, and at most the first 1,000 lines of the file."""
        where = str(self.location)
        if not isinstance(self.batch, int) or isinstance(self.batch, bool) or self.batch < 1:
            yield Problem(
                where=where,
                what=f"batch={self.batch!r}",
                why="a step needs a whole number of groups, 1 or more",
                fix="write batch=32",
            )
        if self.seed is not None and not (isinstance(self.seed, int) and 0 <= self.seed < 2**64):
            yield Problem(
                where=where,
                what=f"seed={self.seed!r}",
                why="a seed is a whole number from 0 to 2**64 - 1, or None for the run's",
                fix="write seed=0",
            )
        yield from self._check_columns(where)
        columns = self._columns()
        if isinstance(self.source, str | Path) and all(isinstance(column, str) for column in columns):
            yield from file_problems(self.source, self._columns(), where)
        if not isinstance(self.source, str | Path | Generated):
            yield Problem(
                where=where,
                what=f"source is {type(self.source).__name__}",
                why="prompts come from a Generated task or from the path of a JSONL file",
                fix='write Prompts(Generated("reverse")) or Prompts("train.jsonl")',
            )

    def _check_columns(self, where: str) -> Iterator[Problem]:
        columns = self._columns()
        for column in columns:
            if not isinstance(column, str):
                yield Problem(
                    where=where,
                    what=f"column {column!r} is not a text",
                    why="columns are found by name",
                    fix='write prompt="prompt", answer="answer"',
                )
                return
        if isinstance(self.source, Generated) and columns != ("prompt", "answer"):
            yield Problem(
                where=where,
                what=f"columns {', '.join(columns)} of a Generated task",
                why="a Generated task has no columns to choose from",
                fix="leave out prompt=, answer= and extra=",
            )
        for column in dict.fromkeys(column for column in columns if columns.count(column) > 1):
            yield Problem(
                where=where,
                what=f"column {column!r} is used {columns.count(column)} times",
                why="prompt, answer and extra are different fields",
                fix=f"name {column!r} once",
            )
        for column in self._extra():
            reason = _text_field(column)
            if column in (PROMPT.name, ANSWER.name) and columns.count(column) == 1:
                reason = f"the field {column!r} holds the column {columns[column == ANSWER.name]!r}"
            if isinstance(reason, str):
                yield Problem(
                    where=where,
                    what=f"extra column {column!r}",
                    why=reason,
                    fix="rename the column in the file, or leave it out",
                )

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Output]:
        """The runner: for each admission number in `task.groups` one row, repeated for every sample of the group."""
        row = self._rows(context.seed if self.seed is None else self.seed)
        names = [made.name for made in self.writes]

        def run(columns: Columns, task: Task) -> Output:
            rows = [row(admission) for admission in task.groups]
            size = context.group_size
            return Output({name: [values[i] for values in rows for _ in range(size)] for i, name in enumerate(names)})

        return run

    def _rows(self, seed: int) -> Callable[[int], tuple[str, ...]]:
        source = self.source
        if isinstance(source, Generated):
            return lambda admission: source.train(admission, order=seed)
        rows = read_jsonl(source, self._columns())

        def row(admission: int) -> tuple[str, ...]:
            from ops.random import shuffled

            return rows[shuffled(seed, admission, len(rows))]

        return row

    def _columns(self) -> tuple[str, ...]:
        return (self.prompt, self.answer, *self._extra())

    def _extra(self) -> tuple[str, ...]:
        return (self.extra,) if isinstance(self.extra, str) else tuple(self.extra)


def read_jsonl(path: str | Path, columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Every row of the file, as the texts of `columns`. Raises StageError with file and line for the first bad line."""
    rows: list[tuple[str, ...]] = []
    for row in _rows_of(Path(path), columns, str(path)):
        if isinstance(row, Problem):
            raise StageError(row)
        rows.append(row)
    if not rows:
        raise StageError(_empty(path))
    return rows


def file_problems(path: str | Path, columns: Sequence[str], where: str) -> Iterator[Problem]:
    """What is wrong with the first 1,000 rows of a JSONL file; `where` is the place that names the file."""
    rows = list(islice(_rows_of(Path(path), columns, where), CHECKED_LINES))
    problems = [row for row in rows if isinstance(row, Problem)]
    yield from problems[:_SHOWN_LINES]
    if len(problems) > _SHOWN_LINES:
        yield Problem(
            where=str(path),
            what=f"{len(problems) - _SHOWN_LINES} more of the first {len(rows)} lines are wrong",
            why=f"only the first {_SHOWN_LINES} are shown",
            fix="mend those first, they are likely alike",
        )
    if not rows:
        yield _empty(path)
    elif not problems and (repeats := len(rows) - len(set(rows))):
        yield Problem(
            where=str(path),
            what=f"{repeats} of the first {len(rows)} rows repeat an earlier one",
            why="a row that is there twice is drawn twice an epoch",
            fix="remove the repeats, or leave them where that is meant",
            warning=True,
        )


def _rows_of(path: Path, columns: Sequence[str], where: str) -> Iterator[tuple[str, ...] | Problem]:
    """One item a line that is not blank; a single problem where there is no file to read."""
    if not path.is_file():
        yield _missing(path, where)
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _row(f"{path}:{number}", line, columns)


def _row(where: str, line: bytes, columns: Sequence[str]) -> tuple[str, ...] | Problem:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return Problem(
            where=where,
            what=f"this line is not JSON ({error})",
            why="every line of a JSONL file is one JSON object in UTF-8",
            fix='write lines such as {"prompt": "1+1=", "answer": "2"}',
        )
    if not isinstance(row, dict):
        return Problem(
            where=where,
            what=f"this line holds a JSON {type(row).__name__}, not an object",
            why="the columns are found by name",
            fix='write lines such as {"prompt": "1+1=", "answer": "2"}',
        )
    for column in columns:
        if column not in row:
            close = get_close_matches(column, row, n=1)
            return Problem(
                where=where,
                what=f"column {column!r} is missing",
                why=f"this line has {', '.join(map(repr, row)) or 'no column at all'}",
                fix=f"did you mean {close[0]!r}?"
                if close
                else "name the columns in Prompts(..., prompt=, answer=, extra=)",
            )
        if reason := _not_text(row[column], empty=column != columns[0]):
            return Problem(
                where=where,
                what=f"column {column!r} {reason}",
                why="prompts, answers and extra columns are texts",
                fix=f'write it as a text, such as "{column}": "2"',
            )
    return tuple(row[column] for column in columns)


def _not_text(value: object, empty: bool) -> str | None:
    if not isinstance(value, str):
        return f"is {json.dumps(value)[:40]}, which is not a text"
    if not value and not empty:
        return "is empty"
    return "has half of a surrogate pair" if any("\ud800" <= char <= "\udfff" for char in value) else None


def _missing(path: Path, where: str) -> Problem:
    folder = path.parent
    files = [str(folder / entry.name) for entry in folder.iterdir()] if folder.is_dir() else []
    close = get_close_matches(str(path), [file for file in files if Path(file).is_file()], n=1)
    return Problem(
        where=where,
        what=f"{str(path)!r} {'is a folder' if path.is_dir() else 'is not there'}",
        why="Prompts reads a JSONL file, by its path from the working directory",
        fix=f"did you mean {close[0]!r}?" if close else "give the path of a file with one JSON object a line",
    )


def _empty(path: str | Path) -> Problem:
    return Problem(
        where=str(path),
        what="the file has no row",
        why="there is no prompt to draw",
        fix='write one JSON object a line, such as {"prompt": "1+1=", "answer": "2"}',
    )


def _text_field(column: str) -> Field | str:
    """The str field of an extra column, or why there is none."""
    try:
        return Field(column, dtype="str")
    except (TypeError, ValueError) as error:
        return str(error)
