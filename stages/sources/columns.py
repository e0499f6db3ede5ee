"""How users name columns: names, dotted paths, templates and typed extra columns; and checks of them.

    extra_column("extra_info.level")                               # ("extra_info.level", Field("level", dtype="str"))
    extra_column(("extra_info.level", Field("level", "int64")))    # the same column, typed

Knows no rows: `schema` reports invalid values of a column.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from string import Formatter
from typing import NamedTuple, TypeAlias

from pipeline import Field
from pipeline.errors import Problem
from stages.vocabulary import ANSWER, IMAGES, PROMPT

Extra: TypeAlias = "str | Field | tuple[str, str | Field]"


class FoundColumn(NamedTuple):
    """An extra column that is given by name only, and whose values have decided the type of its field."""

    column: str
    made: Field


def extra_entries(extra: Extra | Sequence[Extra]) -> tuple[Extra, ...]:
    """The entries of `extra`, of which a single one needs no tuple."""
    return (extra,) if isinstance(extra, str | Field) else tuple(extra)


def extra_column(entry: object) -> tuple[str, Field] | str:
    """The column and the field of an entry of `extra`, or why the entry is invalid."""
    column, made = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, entry)
    if isinstance(made, Field) and column is made:
        column = made.name
    if not isinstance(column, str) or not isinstance(made, str | Field):
        return "an extra column is a name, a Field, or a pair of a column and its field"
    if isinstance(made, str):
        try:
            made = Field(made.rpartition(".")[2] if made == column else made, dtype="str")
        except ValueError as error:
            return str(error)
    if made.per_step:
        return "a row of a data set holds no weights"
    return entry if isinstance(entry, FoundColumn) else (column, made)


def extra_columns(extra: Sequence[object], taken: Sequence[str]) -> tuple[tuple[str, Field], ...]:
    """The valid entries, each field once, without the names in `taken`."""
    found = [made for entry in extra if not isinstance(made := extra_column(entry), str)]
    return tuple({entry[1].name: entry for entry in found if entry[1].name not in taken}.values())


def template_columns(template: str) -> tuple[str, ...]:
    """The columns that a template names. Raises ValueError with the reason if it is not plain text and `{column}`."""
    columns = []
    for _, column, spec, conversion in Formatter().parse(template):
        if column is None:
            continue
        if not column:
            raise ValueError("it has {}, which names no column")
        if spec or conversion:
            raise ValueError(f"{{{column}}} has a format, but columns are inserted as they are")
        columns.append(column)
    if not columns:
        raise ValueError("it names no column, so every prompt would be the same")
    return tuple(columns)


def template_problems(template: object, prompt: str, where: str) -> Iterator[Problem]:
    """Check that a template is a text that names columns, and that `prompt` is not set too."""
    try:
        template_columns(template)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        yield Problem(
            where=where,
            what=f"template={template!r:.60}",
            why=str(error),
            fix='write template="Question: {question}\\nAnswer:", and double literal braces: {{ or }}',
        )
        return
    if prompt != "prompt":
        yield Problem(
            where=where,
            what=f"prompt={prompt!r} and a template",
            why="a template already names the columns of the prompt",
            fix="leave out prompt=, or template=",
        )


def column_problems(
    own: Mapping[str, str], extra: Sequence[object], taken: Sequence[str], where: str
) -> Iterator[Problem]:
    """Check that every column makes one field, and every field comes from one column.

    `own` are the columns of prompt and answer by field; `taken` are the names of all fields that are written anyway.
    """
    entries = [(entry, extra_column(entry)) for entry in extra]
    names = [entry_name(entry) for entry in extra]
    used = Counter([*own.values(), *(name for name in names if isinstance(name, str))])
    for column, count in used.items():
        if count > 1:
            yield Problem(
                where=where,
                what=f"column {column!r} is used {count} times",
                why="prompt, answer and extra are different fields",
                fix=f"name {column!r} once",
            )
    fields = [*taken]
    for (_, made), name in zip(entries, names):
        reason = made if isinstance(made, str) else None
        if not isinstance(made, str):
            if made[1].name in fields and used[made[0]] == 1:
                holds = own.get(made[1].name)
                reason = f"the field {made[1].name!r} " + (
                    f"holds the column {holds!r}" if holds else "is already written"
                )
            fields.append(made[1].name)
        if reason is not None:
            yield Problem(
                where=where,
                what=f"extra column {name!r}",
                why=reason,
                fix=f'name the field in a pair, such as extra=(({name!r}, "level"),), or leave the column out'
                if isinstance(name, str)
                else 'write extra=("level",) or extra=(Field("level", dtype="int64"),)',
            )


def own_columns(prompt: str, answer: str | None, template: str | None, images: str | None = None) -> dict[str, str]:
    """The columns that become prompt, answer and images, by field."""
    own = {} if template is not None else {PROMPT.name: prompt}
    own |= {} if answer is None else {ANSWER.name: answer}
    return own if images is None else own | {IMAGES.name: images}


def entry_name(entry: object) -> object:
    """The column of an entry of `extra`; for an invalid entry, the best name for messages."""
    if isinstance(entry, tuple) and entry:
        return entry[0]
    return entry.name if isinstance(entry, Field) else entry
