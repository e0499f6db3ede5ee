"""Damage to files, as crashes, failing disks and other programs do it, and what a command may make of it.

with damaged(file, how):  # how is drawn from damages()
    answered(folder, "run", "--json", program="analyse")
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.errors.harness import PROBLEM, command

SECONDS = 20  # that a command may take
MEMORY_BYTES = 2 << 30  # that it may add to what the process has
DEEP = 100_000
WEIRD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 10**6, 2**31, 2**63, -(2**63), 10**30, 10**400, 0.5, -0.5, 1e308, -1e308, 5e-324,
    "", "x", "\0", "\u202e", "NaN", "../../x", "/etc/passwd", "x" * 10_000, [], {}, [[]], [None], ["a", 1, None],
    {"": {}}, {"a": [1]}, [0] * 1000,
)  # fmt: skip
TOKENS = ("NaN", "Infinity", "-Infinity", "1e999", "-0", "[" * DEEP, '{"a":' * DEEP, '"\\ud800"', "01", "'x'", "")
WHOLE = (
    b"", b"\n", b"\0" * 4096, b"null", b"[]", b"{}", b"0", b'"text"', b"{" * 7, b"[" * DEEP, b'{"a":' * DEEP,
    b"\xff\xfe\x00", b"\x1f\x8b\x08\x00", b"PAR1", b"NaN\n", b"[[1], {}]\n", b"\xef\xbb\xbf{}", b"<html></html>",
)  # fmt: skip
PLACES = ("absent", "folder", "loop", "dangling", "pipe", "failing")  # what may be in the place of a file
_MARK = "\ue000"  # stands for a raw token until the text is made


class Place(str):
    """One of PLACES."""


KINDS = ("bytes", "bytes", "whole", "place", "recoded", "json", "json", "json", "lines")


def damages() -> st.SearchStrategy[tuple[str, int]]:
    """Return what happens to a file: a kind of damage, and the seed of its details."""
    return st.tuples(st.sampled_from(KINDS), st.integers(0, 2**32 - 1))


def hit(original: bytes, how: tuple[str, int]) -> bytes | Place:
    """Return what is found in the place of a file that had this content. The kind may be one of `PLACES` too."""
    kind, seed = how
    rng = Random(seed)
    match kind:
        case "whole":
            return rng.choice(WHOLE)
        case "place":
            return Place(rng.choice(PLACES))
        case _ if kind in PLACES:
            return Place(kind)
        case "recoded":
            return recoded(rng, original)
        case "json" if _is_json(original):
            return changed_json(rng, original)
        case "json" if b"\n" in original:
            return json_lines(rng, original)
        case "lines" if b"\n" in original:
            return moved_lines(rng, original)
    return broken_bytes(rng, original)


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def broken_bytes(rng: Random, original: bytes) -> bytes:
    """Flip, insert, remove, repeat or zero bytes at a few places, or cut the end off."""
    data = bytearray(original)
    for kind in rng.choices(["flip", "insert", "remove", "repeat", "zero", "cut", "torn"], k=rng.randint(1, 3)):
        at, size = rng.randint(0, len(data)), rng.randint(1, 64)
        if kind == "flip" and at < len(data):
            data[at] ^= rng.randint(1, 255)
        elif kind == "insert":
            data[at:at] = rng.randbytes(rng.randint(1, 8))
        elif kind == "remove":
            del data[at : at + size]
        elif kind == "repeat":
            data[at:at] = data[at : at + size]
        elif kind == "zero":
            data[at : at + size] = bytes(len(data[at : at + size]))
        elif kind == "cut":
            del data[at:]
        elif kind == "torn":  # a file system that lost the last blocks keeps the size
            data[at:] = bytes(len(data) - at)
    return bytes(data)


def recoded(rng: Random, original: bytes) -> bytes:
    """The text in another encoding or with other ends of lines, or compressed."""
    text = original.decode("utf-8", errors="replace")
    made = [text.encode(name, errors="replace") for name in ("utf-16", "utf-32", "utf-8-sig", "cp037")]
    return rng.choice([*made, original.replace(b"\n", b"\r\n"), original.rstrip(b"\n"), gzip.compress(original)])


def changed_json(rng: Random, original: bytes) -> bytes:
    """Change a few values of a JSON text: replace, remove, rename, repeat a key, or put in what is no JSON."""
    value = json.loads(original)
    tokens: list[str] = []
    for _ in range(rng.randint(1, 2)):
        value = _changed(rng, value, tokens)
    text = json.dumps(value, ensure_ascii=False)
    for i, token in enumerate(tokens):
        text = text.replace(f'"{_MARK}{i}{_MARK}"', token)
    if isinstance(value, dict) and value and rng.random() < 0.1:  # the key twice; readers take one of the two
        text = text[:-1] + f", {json.dumps(rng.choice([*value]))}: {json.dumps(rng.choice(WEIRD))}}}"
    return text.encode("utf-8", errors="replace")


def _changed(rng: Random, value: Any, tokens: list[str]) -> Any:
    inner = [*value] if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    if not inner or rng.random() < 0.1:
        return _other(rng, value, tokens)
    key, other, made = rng.choice(inner), rng.choice(inner), value.copy()
    kind = rng.choice(["deeper", "deeper", "deeper", "deeper", "remove", "rename", "repeat", "swap"])
    if kind == "deeper":
        made[key] = _changed(rng, value[key], tokens)
    elif kind == "remove":
        del made[key]
    elif kind == "swap":
        made[key], made[other] = value[other], value[key]
    elif isinstance(made, dict):
        made[rng.choice(["", "name", f"{key} ", other])] = made[key] if kind == "repeat" else made.pop(key)
    else:
        made[key:key] = [made[key]] * rng.randint(1, 3)
    return made


def _other(rng: Random, value: Any, tokens: list[str]) -> Any:
    near: list[Any] = [-value, value + 1, value * 1000] if type(value) in (int, float) else [[value], {"a": value}]
    if isinstance(value, str):
        near += [value[:-1], value + "x", value.upper()]
    kind = rng.choice((near, WEIRD, WEIRD, TOKENS))
    if kind is not TOKENS:
        return rng.choice(kind)
    tokens.append(rng.choice(TOKENS))
    return f"{_MARK}{len(tokens) - 1}{_MARK}"


def moved_lines(rng: Random, original: bytes) -> bytes:
    """Remove, repeat or exchange lines, or let one end in its middle."""
    lines = original.splitlines(keepends=True)
    for kind in rng.choices(["remove", "span", "repeat", "swap", "torn"], k=rng.randint(1, 4)):
        if not lines:
            break
        i, j = sorted(rng.randrange(len(lines)) for _ in range(2))
        if kind == "remove":
            del lines[i]
        elif kind == "span":
            del lines[i:j]
        elif kind == "repeat":
            lines.insert(j, lines[i])
        elif kind == "swap":
            lines[i], lines[j] = lines[j], lines[i]
        elif kind == "torn":
            lines[i] = lines[i][: len(lines[i]) // 2]
    return b"".join(lines)


def json_lines(rng: Random, original: bytes) -> bytes:
    """Change the JSON of one or two lines."""
    lines = original.splitlines()
    for i in rng.sample(range(len(lines)), min(len(lines), rng.randint(1, 2))):
        if _is_json(lines[i]):
            lines[i] = changed_json(rng, lines[i]).replace(b"\n", b" ")
    return b"".join(line + b"\n" for line in lines)


@contextmanager
def damaged(path: Path, how: tuple[str, int]) -> Iterator[None]:
    """Damage a file within the context."""
    before, opened = path.read_bytes(), io.open
    made = hit(before, how)
    try:
        if isinstance(made, bytes):
            path.write_bytes(made)
        elif made == "failing":
            io.open = _failing(path, opened)  # type: ignore[assignment]
        else:
            path.unlink()
            _put(path, made)
        yield
    finally:
        io.open = opened
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        path.write_bytes(before)


def _put(path: Path, hit: Place) -> None:
    if hit == "folder":
        path.mkdir()
    elif hit == "loop":
        path.symlink_to(path.name)
    elif hit == "dangling":
        path.symlink_to("nowhere")
    elif hit == "pipe":
        os.mkfifo(path)


def _failing(path: Path, opened: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `open` that the disk fails for this file."""

    def fails(file: Any, *rest: Any, **named: Any) -> Any:
        if isinstance(file, str | Path) and os.path.abspath(file) == os.path.abspath(path):
            raise PermissionError(13, os.strerror(13), str(file))
        return opened(file, *rest, **named)

    return fails


@contextmanager
def bounded(seconds: int = SECONDS) -> Iterator[None]:
    """Let what this block does end: in time, and in memory."""

    def late(number: int, frame: Any) -> None:
        pytest.fail(f"it takes longer than {seconds} s:\n{''.join(traceback.format_stack(frame)[-6:])}")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def answered(folder: Path, *argv: str, program: str = "run", seconds: int = SECONDS) -> tuple[int, str]:
    """Run a command on damaged files. It must succeed, or say in problems, and with a code that is not 0, why not.
    Returns the code and what it said."""
    with bounded(seconds):
        code, _, err = command(folder, *argv, program=program)
    if code == 3 and "--replay" in argv:  # a stage that fails on other inputs shows its traceback, then the problem
        err = err.splitlines()[-1]
    problems = [line for line in err.splitlines() if not re.match(r"(resume|replay): ", line)]
    wrong = [line for line in problems if not PROBLEM.fullmatch(line)]
    assert not wrong, f"code {code}: {wrong[0][:1000]}"
    assert code in (0, 2, 3, 4, 5, 6), code
    assert bool(code) == any(": warning: " not in line for line in problems), err
    return code, err
