"""Finds prompts of a data set that a model cannot read, or that leave it no room for a response, before it loads.

Counts with the model's own tokenizer where a prompt could be too long, and there only: a token is at least one byte.
Prompts with a chat template have more tokens than are counted. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline import Model, StageError
from pipeline.declare.parameters import is_whole
from pipeline.errors import Problem
from stages.model_shape import known_config, positions
from stages.sources.draws import checked_rows
from stages.sources.schema import Schema

LOOKED_AT = 8  # prompts of the most bytes that are counted


def prompt_problems(model: Model, source: Any, layout: Schema, max_tokens: Any, says: str) -> Iterator[Problem]:
    """Yield, among the rows that a check reads, the first prompt with characters that the model's alphabet lacks, and
    the longest one, if it and `max_tokens` are more than the model has positions. The rows, the model and `max_tokens`
    are checked apart."""
    if layout.images is not None:
        return
    most = positions(known_config(model))
    is_bounded = most is not None and is_whole(max_tokens, 1) and max_tokens < most
    alphabet = model.alphabet if model.config is not None and model.alphabet != "bytes" else None
    if not (is_bounded or isinstance(alphabet, str)):
        return
    prompts = list(_prompts(source, layout))
    if isinstance(alphabet, str):
        yield from _unknown_problems(alphabet, prompts)
    if most is None or not is_bounded:
        return
    room = most - max_tokens
    texts = [(len(text.encode(errors="replace")), where, text) for where, text in prompts]
    doubtful = sorted((each for each in texts if each[0] > room), reverse=True)[:LOOKED_AT]
    count = _counting(model) if doubtful else None
    if count is None:
        return
    longest, where = max((count(text), where) for _, where, text in doubtful)
    if longest > room:
        yield Problem(
            where=where,
            what=f"the prompt has {longest:,} tokens, and {says} has max_tokens={max_tokens}",
            why=f"the model {model.source!r} has {most:,} positions (max_position_embeddings)",
            fix=f"max_tokens={most - longest}, or leave out such rows" if longest < most else "leave out such rows",
        )


def _unknown_problems(alphabet: str, prompts: Iterable[tuple[str, str]]) -> Iterator[Problem]:
    """Yield the first prompt with characters outside the alphabet; the fix has those of all of them."""
    lacking = {where: unknown for where, text in prompts if (unknown := set(text) - set(alphabet))}
    for where, unknown in islice(lacking.items(), 1):
        every = "".join(sorted(set().union(*lacking.values())))
        yield Problem(
            where=where,
            what=f"the prompt has the characters {', '.join(map(repr, sorted(unknown)))}",
            why=f"the alphabet of the model is {alphabet!r}",
            fix=f"Model(..., alphabet={alphabet + every!r}), or other prompts",
        )


def _prompts(source: Any, layout: Schema) -> Iterator[tuple[str, str]]:
    """Yield (file and row, the prompt) of the rows that a check reads, but of invalid ones."""
    for dataset, where, row in checked_rows(source, layout.of):
        with suppress(StageError):
            yield where, layout.of(dataset).read(row, where, arrays=False)[0]


def _counting(model: Model) -> Callable[[str], int] | None:
    """Return what counts the tokens of a text; None if the tokenizer is not in a file of its own."""
    if model.config is not None:
        return (lambda text: len(text.encode(errors="replace"))) if model.alphabet == "bytes" else len
    file = Path(model.source) / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        made = Tokenizer.from_file(str(file))
    except Exception:  # noqa: BLE001 - the library raises no other for a file that it cannot read, which is reported apart
        return None
    return lambda text: len(made.encode(text).ids)
