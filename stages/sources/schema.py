"""Maps a row of a data set to the values of a prompt's fields. Knows columns and fields, not file formats.

    layout = Schema(prompt="question", answer="reward_model.ground_truth", extra=(("level", LEVEL),))
    row = {"question": "1+1=", "reward_model": {"ground_truth": "2"}, "level": 4}
    layout.read(row, "train.jsonl:3")     # ("1+1=", "2", 4)

A column is a name, or a dotted path into nested objects; a column whose own name has the dots takes precedence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any, NoReturn

from pipeline import Field, StageError
from pipeline.errors import Problem
from stages.images import MARK, framed, mark_reason
from stages.sources.columns import FoundColumn, template_columns
from stages.sources.values import (
    array_value,
    array_wanted,
    image_files,
    is_plain,
    junk_reason,
    scalar_reason,
    shown_value,
    takes_files,
)
from stages.vocabulary import ANSWER, IMAGES, MESSAGES, PROMPT

if TYPE_CHECKING:
    import numpy as np

    from stages.sources.dataset import Dataset


_SURROGATE = re.compile("[\ud800-\udfff]")
_ABSENT = object()


@dataclass(frozen=True)
class Schema:
    """Maps columns of a row to fields.

    prompt    column of the prompt: a text, or with `chat` also a list of messages
    answer    column of the answer; None means no such field
    extra     (column, field) pairs
    template  a text with `{column}` in it, used as the prompt instead of the column `prompt`
    chat      also make `messages`, the conversation as JSON; `prompt` is then the text of its last message
    system    with `chat`: the system message for conversations that do not start with one
    as_text   columns whose numbers, booleans, lists and objects become JSON text
    images    column of the images; None means no such field
    """

    prompt: str = "prompt"
    answer: str | None = "answer"
    extra: tuple[tuple[str, Field], ...] = ()
    template: str | None = None
    chat: bool = False
    system: str | None = None
    as_text: tuple[str, ...] = ()
    images: str | None = None

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """The fields of a row, in the order of `read`."""
        own = (PROMPT, *((ANSWER,) if self.answer is not None else ()), *((MESSAGES,) if self.chat else ()))
        own = (*own, *((IMAGES,) if self.images is not None else ()))
        return own + tuple(made for _, made in self.extra)

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Every column that is read, once each."""
        prompt = (self.prompt,) if self.template is None else template_columns(self.template)
        others = tuple(column for column in (self.answer, self.images) if column is not None)
        return tuple(dict.fromkeys((*prompt, *others, *(column for column, _ in self.extra))))

    @cached_property
    def arrays(self) -> frozenset[str]:
        """The columns with more than one value per row."""
        arrays = frozenset(column for column, made in self.extra if array_wanted(made))
        return arrays if self.images is None else arrays | {self.images}

    def of(self, dataset: Dataset) -> Schema:
        """This layout with the columns that the data set names itself."""
        own_prompt = dataset.prompt is not None or dataset.template is not None
        return replace(
            self,
            prompt=self.prompt if dataset.prompt is None else dataset.prompt,
            answer=self.answer if dataset.answer is None or self.answer is None else dataset.answer,
            template=dataset.template if own_prompt else self.template,
        )

    def read(self, row: Mapping[str, Any], where: str, *, folder: Path | None = None, arrays: bool = True) -> tuple:
        """The values of `fields`: texts, numbers and numpy arrays. Raises StageError with one problem at `where`.

        Relative paths of images start at `folder`. Without `arrays`, array columns are skipped unread; with a `folder`,
        it is then checked that files of images exist.
        """
        values: list[Any] = list(self._prompt(row, where))
        if self.answer is not None:
            values.insert(1, self._text(row, self.answer, where))
        if self.images is not None and (arrays or folder is not None):
            values += self._images(row, values[-1] if self.chat else values[0], where, folder or Path(), read=arrays)
        for entry in self.extra:
            column, made = entry
            if made.dtype == "str":
                values.append(self._text(row, column, where))
            elif not array_wanted(made):
                value = _found(row, column, where)
                if reason := scalar_reason(made, value):
                    raise _odd(where, entry, value) or _mistyped(where, column, made, reason)
                values.append(value)
            elif arrays:
                value, reason = array_value(made, _found(row, column, where), folder or Path())
                if reason:
                    raise _mistyped(where, column, made, reason)
                values.append(value)
        return tuple(values)

    def _images(
        self, row: Mapping[str, Any], prompt: str, where: str, folder: Path, *, read: bool
    ) -> Iterator[np.ndarray]:
        """The images of a row whose prompt has this text, or messages as JSON; none if they are not to be `read`."""
        import numpy as np

        assert self.images is not None
        value = _found(row, self.images, where)
        files, reason = image_files(value, folder, read=read)
        if reason:
            raise _problem(
                where,
                f"column {self.images!r} {reason}",
                "a row has an image, a list of images, or null",
                "give each image as its path relative to the data's folder, or as its bytes",
            )
        if reason := junk_reason(value, files) if read else None:
            raise _problem(
                where,
                f"column {self.images!r} {reason}",
                "an image is a file that Pillow reads, such as PNG or JPEG",
                "save the image again, or remove the row",
            )
        if reason := mark_reason([prompt], len(files)):
            raise _problem(
                where,
                f"the row has {reason} in its prompt",
                f"each {MARK} stands for an image, in order; without any, images precede the prompt",
                f"write {MARK} once for each image",
            )
        if read:
            yield np.frombuffer(framed(files), dtype=np.uint8)

    def _prompt(self, row: Mapping[str, Any], where: str) -> Iterator[str]:
        """The prompt and, with `chat`, the messages."""
        value: Any = _found(row, self.prompt, where) if self.template is None else self._filled(row, where)
        if self.template is None and not (self.chat and isinstance(value, list)):
            value = self._text(row, self.prompt, where, empty=False)
        if not self.chat:
            yield value
            return
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else _messages(value)
        if isinstance(messages, str):
            raise _problem(
                where,
                f"column {self.prompt!r} {messages}",
                "a conversation is a list of messages, and the response follows the last one",
                'write it as [{"role": "user", "content": "1+1="}]',
            )
        if self.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system})
        yield messages[-1]["content"]
        yield json.dumps(messages, ensure_ascii=False)

    def _filled(self, row: Mapping[str, Any], where: str) -> str:
        made = []
        for text, column in self._template:
            made.append(text)
            if column is not None:
                value = _found(row, column, where)
                number = isinstance(value, int | float) and not isinstance(value, bool)
                made.append(str(value) if number else self._text(row, column, where))
        if not (prompt := "".join(made)):
            raise _problem(
                where,
                "the prompt is empty",
                f"the template is {self.template!r:.60}, and its columns are empty here",
                "add text to the template, or remove the row",
            )
        return prompt

    @cached_property
    def _template(self) -> tuple[tuple[str, str | None], ...]:
        return tuple((text, column) for text, column, _, _ in Formatter().parse(self.template or ""))

    def _text(self, row: Mapping[str, Any], column: str, where: str, *, empty: bool = True) -> str:
        value = _found(row, column, where)
        if not isinstance(value, str) and value is not None and column in self.as_text and is_plain(value):
            value = json.dumps(value, ensure_ascii=False)
        if isinstance(value, str) and (value or empty) and (value.isascii() or not _SURROGATE.search(value)):
            return value
        self._not_text(value, column, where)

    def _not_text(self, value: object, column: str, where: str) -> NoReturn:
        if value == "":
            why, fix = "a response continues a prompt", "write a prompt, or remove the row"
            raise _problem(where, f"column {column!r} is empty", why, fix)
        if isinstance(value, str):
            why, fix = "a text is valid Unicode", "write both halves of the pair, or remove the one"
            raise _problem(where, f"column {column!r} has half of a surrogate pair", why, fix)
        is_number = isinstance(value, int | float)
        fix = f'write it as a string, such as "{column}": {json.dumps(str(value) if is_number else "2")}'
        what = f"is {shown_value(value)}, which is not a string"
        if column == self.prompt and not isinstance(_messages(value), str):
            what, fix = "is a list of messages, not a string", "write Prompts(..., chat=True)"
        elif value is not None and is_plain(value):
            fix += f", or Prompts(..., as_text=({column!r},))"
            if column not in (self.prompt, self.answer) and is_number:
                kind, dtype = ("a truth", "bool") if isinstance(value, bool) else ("a number", "float32")
                fix += f", or, as {kind}, extra=(Field({column!r}, dtype={dtype!r}),)"
        raise _problem(where, f"column {column!r} {what}", self._wanted(column), fix)

    def _wanted(self, column: str) -> str:
        """What the values of a column are, where its field is a text."""
        if any(column == name for name, _ in self.extra):
            return "an extra column is all strings, all numbers or all truths, and arrays need a Field"
        is_filled = self.template is not None and column != self.answer
        return "a template is filled with strings and numbers" if is_filled else "prompts and answers are strings"


def missing(where: str, column: str, names: Sequence[str], has: str) -> Problem:
    """The problem of a column that is not in `names`; `has` introduces these, such as "this line has"."""
    close = get_close_matches(column, names, n=1)
    return Problem(
        where=where,
        what=f"column {column!r} is missing",
        why=f"{has} {', '.join(map(repr, names)) or 'no columns'}",
        fix=f"did you mean {close[0]!r}?" if close else "name the columns with prompt=, answer= or extra=",
    )


def value_of(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column of a row, or None."""
    try:
        return _found(row, column, "")
    except StageError:
        return None


def _found(row: Mapping[str, Any], column: str, where: str) -> Any:
    value: Any = row.get(column, _ABSENT)
    if value is not _ABSENT:
        return value
    value = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise StageError(missing(where, column, _names(row, column), "this line has"))
        value = value[part]
    return value


def _names(row: Mapping[str, Any], column: str) -> list[str]:
    """The names in a row; for a dotted column, also those inside objects."""
    if "." not in column:
        return list(row)
    return [
        inner
        for name, value in row.items()
        for inner in ([f"{name}.{key}" for key in value] if isinstance(value, Mapping) and value else [name])
    ]


def _messages(value: object) -> list[dict[str, Any]] | str:
    """The messages without null entries, or why they are invalid."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return f"is {shown_value(value)}, which is not a list of messages"
    for i, message in enumerate(value):
        if not (isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))):
            return f"has a message {i} whose role or content is not a string"
        if _SURROGATE.search(message["content"]):
            return f"has half of a surrogate pair in message {i}"
    if value[-1]["role"] == "assistant":
        return "ends with a message of the assistant"
    if not value[-1]["content"]:
        return "ends with an empty message"
    return [{key: part for key, part in message.items() if part is not None} for message in value]


def _odd(where: str, entry: tuple[str, Field], value: object) -> StageError | None:
    """The error of a value that is not of the kind of the others, which decided the type; None if that is not why."""
    column, made = entry
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not isinstance(entry, FoundColumn) or (is_number and made.dtype != "bool"):
        return None
    are, one = ("truths", "true or false") if made.dtype == "bool" else ("numbers", "a number")
    what, why = f"column {column!r} is {shown_value(value)}", f"most of the others are {are}"
    return _problem(where, what, why, f"write {one}, or remove the row")


def _mistyped(where: str, column: str, made: Field, reason: str) -> StageError:
    shape = "".join(f"[{symbol}]" for symbol in made.dims.split()[1:])
    wanted = f"numbers {shape}" if shape else "one value of that type"
    if takes_files(made):
        wanted += ", or a file: its bytes, or its path relative to the data's folder"
    return _problem(
        where,
        f"column {column!r} {reason}",
        f"the field {made.name!r} is {made.dtype}, dims {made.dims!r}",
        f"give each row {wanted}, or correct the Field in extra=",
    )


def _problem(where: str, what: str, why: str, fix: str) -> StageError:
    return StageError(Problem(where=where, what=what, why=why, fix=fix))
