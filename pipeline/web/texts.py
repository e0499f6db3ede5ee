"""The kept samples of a run: by step, and by prompt over all steps. Reads the run directory only."""

from __future__ import annotations

import codecs
import functools
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pipeline.reading import decode
from pipeline.rundir import RunDir

FILE_BYTES = 8 << 20  # maximum bytes read from a sample file
INSERTED = -1  # the version of a token that the policy did not draw
TEXT = 20_000  # maximum characters shown of a value
TOKENS = 8_000  # maximum tokens shown of a response
VOCABULARY_BYTES = 32 << 20
IDS, LOGPROBS, VERSIONS = "response_ids", "rollout_logprobs", "token_versions"
SHAPES = {"turn_ends": list[int], "turn_rewards": list[float | None]}  # of columns that a page takes apart
MADE = {"tokens", "group"}  # columns that are made here
FILES = 400  # number of sample files, the last ones, that are read for the list of prompts
PROMPTS = 200


T = TypeVar("T")


class ScoredPrompt(msgspec.Struct):
    """The part of a sample that the list of prompts needs; the rest of its line is not decoded."""

    prompt: Any = None
    reward: Any = None


class Prompt(msgspec.Struct, kw_only=True):
    """One prompt, over all its kept samples."""

    prompt: str
    samples: int = 0
    best: float = float("-inf")
    total: float = 0.0
    first: int = 0
    last: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.samples


def samples(run: Path, step: int) -> list[dict[str, Any]]:
    """Return the samples of a step as dicts, with `group` and `key` among the columns; long texts are cut and marked,
    and turns that are none are left out.

    `tokens` is a list of [text, nats] with the response's tokens and logprobs, if both were kept; [text, nats, drawn]
    if their versions were kept too, which are -1 for tokens that the policy did not draw. A character that spans
    several tokens belongs to the last one."""
    rows, vocabulary = [], _vocabulary(RunDir(run).vocabulary)
    for row in _lines(RunDir(run).samples(step), dict[str, Any]):
        group = str(row.get("key", "")).partition("_")[0]
        tokens = _tokens(row.pop(IDS, None), row.pop(LOGPROBS, None), row.pop(VERSIONS, None), vocabulary)
        shown = {name: _cut(value) for name, value in row.items() if name not in MADE and _has_shape(name, value)}
        rows.append(shown | {"group": group} | tokens)
    return rows


def prompts(run: Path) -> list[dict[str, Any]]:
    """Return the kept prompts, lowest best reward first."""
    found: dict[str, Prompt] = {}
    for step in RunDir(run).sampled_steps()[-FILES:]:
        for row in _lines(RunDir(run).samples(step), ScoredPrompt):
            text, reward = row.prompt, row.reward
            if not isinstance(text, str) or not isinstance(reward, int | float):
                continue
            of = found.setdefault(text, Prompt(prompt=text, first=step))
            of.samples += 1
            of.best = max(of.best, reward)
            of.total += reward
            of.last = step
    ordered = sorted(found.values(), key=lambda of: (of.best, of.mean))[:PROMPTS]
    return [
        {
            "prompt": _cut(of.prompt),
            "samples": of.samples,
            "best": of.best,
            "mean": of.mean,
            "first": of.first,
            "last": of.last,
        }
        for of in ordered
    ]


def _lines(path: Path, kind: type[T]) -> list[T]:
    """Return the valid lines of a sample file. Skips what cannot be read and everything over the limit."""
    if not path.is_file() or path.is_symlink():
        return []
    try:
        with path.open("rb") as file:
            text = file.read(FILE_BYTES)
    except OSError:
        return []
    decoder, rows = msgspec.json.Decoder(kind), []
    for line in text.split(b"\n"):
        with suppress(msgspec.DecodeError):
            rows.append(decode(line, decoder))
    return rows


def _tokens(ids: Any, logprobs: Any, versions: Any, vocabulary: list[bytes]) -> dict[str, Any]:
    if not vocabulary or not isinstance(ids, list) or not isinstance(logprobs, list) or len(ids) != len(logprobs):
        return {}
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [
        decoder.decode(vocabulary[n]) if isinstance(n, int) and 0 <= n < len(vocabulary) else "" for n in ids[:TOKENS]
    ]
    if isinstance(versions, list) and len(versions) == len(ids):
        return {"tokens": [*zip(texts, logprobs, [version != INSERTED for version in versions])]}
    return {"tokens": [*zip(texts, logprobs)]}


def _vocabulary(path: Path) -> list[bytes]:
    """Return the UTF-8 bytes of each token; empty if they were not kept."""
    if not path.is_file() or path.is_symlink() or path.stat().st_size > VOCABULARY_BYTES:
        return []
    return _read_vocabulary(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read_vocabulary(path: Path, changed: int) -> list[bytes]:
    try:
        return [text.encode("latin-1") for text in decode(path.read_bytes(), list[str])]
    except (msgspec.MsgspecError, UnicodeEncodeError, OSError):
        return []


def _has_shape(name: str, value: Any) -> bool:
    try:
        return name not in SHAPES or msgspec.convert(value, SHAPES[name]) is not None
    except msgspec.ValidationError:
        return False


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > TEXT:
        return f"{value[:TEXT]} ... ({len(value) - TEXT} more characters)"
    return value
