"""Words that texts must not use; a failure names a plainer one."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pipeline", "stages", "ops", "graphs", "benchmarks")
TEXTS = ("README.md", "docs/*.md", "pipeline/web/static/*.js", "pipeline/web/static/*.html", "tests/errors/golden.txt")
UNIT = r"(minutes|workers|GPUs|columns|rows|values|messages|files|threads|calls|[kMG]i?B(/s)?|\d+ m?s|\d+ %)"
OF = r"(file|stage|batch|(micro|mini)batch|call|card|core|node|host|process|response|version|update|task|run|epoch|row)"
END = r"(?= *([,.;:)\"']|$|(in|on|at|of|for|and|or|with|as|to|from|while|than)\b))"  # not "the rows a process wrote"
INSTEAD = {  # disallowed word -> replacement
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\banew\b": "again",
    r"\bwhoever\b": "the caller, or whatever it is",
    r"\bwhosoever\b": "the caller, or whatever it is",
    r"\bso many (bytes|tokens|groups|samples|steps|rows|seconds|times)\b(?!.* (that|and so many) )": "that many",
    r"\b(is|are|was|were) behind(?= (it|them|us|and|or)\b|[,.;:)]| *$)": "is done",
    r"\b(seconds|ms|milliseconds|metrics|updates|steps|tokens|tok|decisions|events|bytes|line|lines) an? "
    r"(step|second|minute|sample|token|group|GPU|worker|rank|machine)\b": "per",
    rf"\b({UNIT} an? (step|second|minute|sample|token|group|GPU|worker|rank|machine|{OF})|"
    rf"(seconds|ms|bytes|tokens|updates|steps|events) an? {OF}){END}": "per",
    rf"\b(once|twice|times) an? (second|minute|hour|day|step|sample|token|group|worker|rank|machine|{OF}){END}": "per",
    r"\bone an? [a-z]+\b": "one per",
    r"\blooks? nothing up\b": "plans and allocates nothing",
    r"\bowes? an answer\b": "has a request outstanding",
    r"\bis (waited|asked) for by\b": "waits for",
    r"\bonce it is warm\b": "after the first one",
    r"\bsays nothing of\b": "does not cover",
    r"\bthe begin of\b": "the start of",
    r"\btold\b": "reported, given, or what the value is",
}
PATTERN = re.compile("|".join(f"(?P<w{i}>{word})" for i, word in enumerate(INSTEAD)), re.IGNORECASE)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that people read: comments and strings in Python, every line in other files."""
    text = path.read_text()
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from enumerate(token.string.splitlines(), token.start[0])


def odd(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str, str]]:
    """Yield (line, word, replacement) for each disallowed word."""
    words = list(INSTEAD.values())
    for number, line in lines:
        for found in PATTERN.finditer(line):
            kind = next(name for name, text in found.groupdict().items() if text and re.fullmatch(r"w\d+", name))
            yield number, found.group(), words[int(kind[1:])]


def files() -> list[Path]:
    return [
        *(path for package in SOURCES for path in sorted((ROOT / package).rglob("*.py"))),
        *(path for pattern in TEXTS for path in sorted(ROOT.glob(pattern))),
    ]


def test_words_that_are_not_used() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word!r}; write {instead!r}"
        for path in files()
        for line, word, instead in odd(prose(path))
    ]
    assert not found, f"{len(found)} of them\n" + "\n".join(found)


def test_no_identifier_is_told() -> None:
    """No part of a name is "told": name what the value is."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files()
        if path.suffix == ".py"
        for node in ast.walk(ast.parse(path.read_text()))
        for key in ("id", "name", "arg", "attr")
        if "told" in str(getattr(node, key, "")).lower().split("_")
    ]
    assert not found, found


@pytest.mark.parametrize(
    "text",
    [
        *("mend that line", "64 tokens a second", "whoever reads it", "one a sample", "as it was told"),
        *("one a file", "90 s a call.", "16 tokens a response in the mean", "50 GB/s a card", "4 workers a group"),
        *(
            "once its step is behind and recorded",
            "when all of them are behind",
            "the step is behind us",
            "at most once a second",
        ),
    ],
)
def test_the_list_bites(text: str) -> None:
    assert list(odd(iter([(1, text)])))


@pytest.mark.parametrize(
    "text",
    [
        *("disks are behind interfaces", "the rows a process wrote", "it updates a model on 2 workers and has none"),
        *("rank 0 serves a key", "became -1.1 in a second call", "3 a stage failed", "the columns a stage declares"),
        "raises once a machine counts as lost",
    ],
)
def test_other_texts_pass(text: str) -> None:
    assert not list(odd(iter([(1, text)])))
