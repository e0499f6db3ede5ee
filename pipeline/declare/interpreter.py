"""The interpreter of a worker group with its own `python`: its file, and what it can import.

    interpreter.ask("venv/bin/python", packages=("vllm",)).missing        # a process of its own answers

Asks without loading anything here. Knows no backend and no executor.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import msgspec

from pipeline.precedence import STARTUP, for_another_python

DEADLINE_S = 60.0  # for a process that imports Ray on a busy machine
_elsewhere = ContextVar("elsewhere", default=False)


@contextmanager
def elsewhere() -> Iterator[None]:
    """Inside this context, workers are taken to run on another machine, which has what they need:
    interpreters, packages, the files of models."""
    token = _elsewhere.set(True)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def is_elsewhere() -> bool:
    """Return whether workers run on another machine, so that nothing here says what they have."""
    return _elsewhere.get()


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What an interpreter has.

    python    major and minor version
    versions  of distributions; None if one is absent
    missing   packages that it cannot find
    home      the file from which it imports `pipeline`, if it has
    failed    why `module` could not be imported; empty if it could
    silent    why there is no answer; everything else is then empty
    """

    python: tuple[int, int] = (0, 0)
    versions: dict[str, str | None] = {}
    missing: tuple[str, ...] = ()
    home: str | None = None
    failed: str = ""
    silent: str = ""


def ask(
    python: str,
    *,
    distributions: Sequence[str] = (),
    packages: Sequence[str] = (),
    module: str = "",
    deadline_s: float = DEADLINE_S,
) -> Answer:
    """Ask an interpreter for the versions of distributions, whether it finds packages, and whether `module` imports."""
    asked = json.dumps({"distributions": distributions, "packages": packages, "module": module})
    try:
        done = subprocess.run(
            [python, str(STARTUP / "probe.py"), asked],
            env=os.environ | for_another_python(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(silent=f"gives no answer within {deadline_s:g} s")
    except OSError as error:
        return Answer(silent=f"cannot be started: {error.strerror}")
    return _parsed(done)


def _parsed(done: subprocess.CompletedProcess[str]) -> Answer:
    """Return the last line of the output as an answer."""
    lines = done.stdout.splitlines() or [""]
    try:
        return msgspec.json.decode(lines[-1], type=Answer)
    except msgspec.DecodeError:
        said = (done.stderr.strip() or lines[-1]).splitlines()[-1:] or [f"it ended with exit code {done.returncode}"]
        return Answer(silent=f"does not behave like Python: {said[0][:200]}")


def not_usable(python: str) -> str | None:
    """Return why a path is not an interpreter, as far as its file shows; None if it may be one."""
    path = Path(python)
    if path.is_dir():
        return "it is a folder"
    if not path.exists():
        return "the file does not exist"
    return None if os.access(path, os.X_OK) else "the file is not executable"
