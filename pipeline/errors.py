"""Every error that Sluice raises on purpose, and the common form of its text.

A `Problem` says where, what, why and how to fix it. Errors carry one or more problems, print one line
each, and end the command with an exit code that is not 0.
"""

from __future__ import annotations

import inspect
import os
import re
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType

import msgspec
from msgspec import structs

_OS_ERROR = re.compile(r"os error (\d+)")
_LINE = re.compile(r"(:\d+|\[\d+\])$")  # of a file, or of a table
_LIBRARY = ("stdlib", "platstdlib", "purelib", "platlib")
_NOT_THE_USERS = (
    *{f"{Path(sysconfig.get_path(name))}/" for name in _LIBRARY},
    *(f"{Path(__file__).parents[1] / name}/" for name in ("pipeline", "stages", "ops")),
)


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One problem.

    `where` is a file and line, a flag, or a stage; `what` is the fact; `why` is the rule that it breaks;
    `fix` is what to write instead.
    """

    where: str
    what: str
    why: str
    fix: str
    warning: bool = False

    def __post_init__(self) -> None:
        for name in ("where", "what", "why", "fix"):
            text = getattr(self, name)
            if not text.isprintable():  # controls the terminal, or is no text, as the name of a file may be
                seen = (each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)
                msgspec.structs.force_setattr(self, name, "".join(seen))

    def __str__(self) -> str:
        kind = "warning: " if self.warning else ""
        return f"{self.where}: {kind}{self.what}; {self.why}. Fix: {self.fix}"


def shown(value: object, limit: int = 80) -> str:
    """Return a value as text for a message: one line cut at `limit`, no addresses; classes and functions by name."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if type(value).__repr__ is object.__repr__:
        return f"{type(value).__name__}(...)"
    text = " ".join(re.sub(r" at 0x[0-9a-f]+", "", repr(value)).splitlines())
    text = re.sub(r"<(?:built-in )?function (\w+)>", r"\1", text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def kind_of(value: object) -> str:
    """Return what kind of value something is, for a message: "None", "a list", "an int"."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 GPU", "2 GPUs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def message_of(error: BaseException, limit: int = 300) -> str:
    """Return an error's class and text for a message: one line, cut at `limit`. The text is the user's code."""
    try:
        said = str(error)
    except Exception as second:  # noqa: BLE001 - whatever it raises, there is no text
        said = f"its text cannot be read: {type(second).__name__}"
    text = " ".join(f"{type(error).__name__}: {said}".split()).removesuffix(":")
    return text if len(text) <= limit else text[: limit - 3] + "..."


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError of this block name the path, if it names none: a failing write and fsync do not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def as_os_error(path: Path) -> Iterator[None]:
    """Turn an error of a library in Rust that the system caused into an OSError. One that names no path names this."""
    try:
        with naming(path):
            yield
    except Exception as error:
        if isinstance(error, OSError) or not (found := _OS_ERROR.search(str(error))):
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


def problems_of(
    check: Callable[..., Iterable[object]], *given: object, says: str, where: str, why: str, fix: str
) -> list[Problem]:
    """Return what a check of the user's yields when called with `given`: problems, or (what, why, fix) of each.

    If it raises or yields something else, that is the one problem: at the last line of the user's code that ran, or the
    check's own line, or else at `where`. `says` names the check.
    """
    try:
        return [_problem(one, where) for one in check(*given)]
    except CALLED as error:
        if not is_users(error):
            raise
        where = user_line(error) or line_of_code(check) or where
        return [Problem(where=where, what=f"{says} raised {message_of(error)}", why=why, fix=fix)]


def _problem(one: object, where: str) -> Problem:
    match one:
        case Problem():
            return one
        case (str(what), str(why), str(fix)):
            return Problem(where=where, what=what, why=why, fix=fix)
    raise TypeError(
        f"it yields {shown(one)}, which is neither a Problem (pipeline.errors) nor what, why and fix of one"
    )


def line_of_code(function: Callable[..., object]) -> str:
    """Return the file and line of a function of the user's; "" if it is not written in Python, or is not theirs."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code and is_user_file(code.co_filename) else ""


def user_line(error: BaseException) -> str:
    """Return the file and line of the last user code in an error's traceback; "" if there is none."""
    return _last_own(traceback.extract_tb(error.__traceback__))


def line_of_frame(frame: FrameType | None) -> str:
    """Return the file and line of the user code that a thread is in, by its current frame; "" if there is none."""
    return _last_own(traceback.extract_stack(frame)) if frame else ""


def _last_own(frames: traceback.StackSummary) -> str:
    own = [frame for frame in frames if is_user_file(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def mistaken_import(error: BaseException) -> Problem | None:
    """Return the problem of a user's file that raised, if a package imported it in place of one that is not installed.

    torch, for example, imports a file triton.py in the working directory if the package triton is missing.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen importlib")]
    for by, frame in pairwise(frames):
        path = Path(frame.filename)
        name = path.parent.name if path.stem == "__init__" else path.stem
        asked = re.search(rf"\b(?:import|from) +{re.escape(name)}\b", by.line or "")
        if asked and frame.name == "<module>" and is_user_file(frame.filename) and not is_user_file(by.filename):
            return Problem(
                where=f"{frame.filename}:{frame.lineno}",
                what=f"{message_of(error)}, when {by.filename} imported it as the package {name!r}",
                why=f"no package {name!r} is installed, so Python found this file",
                fix=f"rename {path.parent if path.stem == '__init__' else path}",
            )
    before = error.__cause__ or error.__context__
    return mistaken_import(before) if before else None


USERS: tuple[type[BaseException], ...] = (Exception, SystemExit, KeyboardInterrupt)  # what user code may raise
CALLED: tuple[type[BaseException], ...] = (BaseException,)  # and a plain call of it, if `is_users`


class Overdue(BaseException):
    """Raised in the main thread at a deadline. Not an Exception: user code must not catch it."""


def in_main_thread() -> bool:
    """Return whether this is the thread in which signals and deadlines raise; no other one can install handlers."""
    return threading.current_thread() is threading.main_thread()


def is_users(error: BaseException) -> bool:
    """Return whether an exception comes from user code, not from a signal or a deadline: any but `Overdue`; sys.exit(),
    unless a signal handler of this process or of Ray called it; and KeyboardInterrupt where Ctrl-C does not raise it,
    as in a run and in all threads but the main one."""
    if isinstance(error, KeyboardInterrupt):
        return not in_main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    if not isinstance(error, SystemExit):
        return not isinstance(error, Overdue)
    frames = traceback.extract_tb(error.__traceback__)
    return not frames or not re.search(r"/ray/|/engine/termination\.py$", frames[-1].filename)


class SluiceError(Exception):
    """Base class of all errors that the user can fix. `problems` is never empty; `exit_code` is never 0."""

    exit_code = 1

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))

    def __reduce__(self) -> tuple[type, tuple[Problem, ...]]:
        return type(self), self.problems


def leave_with(error: SluiceError, last_words: Callable[[], None], leave: Callable[[int], object]) -> None:
    """Print an error and `last_words`, and `leave` this process with its exit code: its main thread cannot."""
    print(error, file=sys.stderr, flush=True)
    last_words()
    leave(error.exit_code)


def user_error(error: BaseException, *, stage: str, where: str, when: str, log: Path | None = None) -> SluiceError:
    """Return the error to raise for an exception of user code in a stage. A SluiceError keeps its type; problems that
    name no line get the stage's line.

    The problem points at the last line of the user's own code, or, if there is none, at the stage's line, `where`.
    `when` says when it happened; `log` is the file or folder with the traceback, if any.
    """
    if isinstance(error, SluiceError):
        added = _LINE.search(where) and not is_user_file(_LINE.sub("", where))  # a stage that a run adds by itself
        if added or all(_LINE.search(problem.where) for problem in error.problems):
            return error
        placed = (
            problem if _LINE.search(problem.where) else structs.replace(problem, where=f"{where}, {problem.where}")
            for problem in error.problems
        )
        return type(error)(*placed)
    if problem := mistaken_import(error):
        return StageError(problem)
    own = user_line(error)
    return StageError(
        Problem(
            where=own or where,
            what=f"stage {stage!r} {when}: {message_of(error)}",
            why=f"the stage at {where} raised" if own else "code that it calls raised",
            fix="correct the stage, then resume"
            if own
            else f"see the traceback in {log}"
            if log
            else "see its traceback above",
        )
    )


def is_user_file(file: str) -> bool:
    """Return whether a source file belongs to the user: not to Python, an installed package, or Sluice's own code."""
    path = Path(file).resolve()
    installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    return not file.startswith("<") and not installed and not str(path).startswith(_NOT_THE_USERS)


class GraphError(SluiceError):
    """The graph, or a flag or file that it names, is wrong. Raised before anything is started."""

    exit_code = 2


def refusals(check: Callable[[], object]) -> tuple[Problem, ...]:
    """Return the problems with which a check raises GraphError; none if it passes."""
    try:
        check()
    except GraphError as error:
        return error.problems
    return ()


@contextmanager
def together_with(problems: Sequence[Problem]) -> Iterator[None]:
    """Raise GraphError with these problems and those of the block, which come first, if there are any."""
    try:
        yield
    except GraphError as error:
        raise type(error)(*error.problems, *problems) from error
    if problems:
        raise GraphError(*problems)


class StageError(SluiceError):
    """A stage, or user code inside it, failed while the graph ran."""

    exit_code = 3


class WorkerLost(StageError):  # noqa: N818 - beside DataPlaneLost
    """A worker process died or does not answer, and only a checkpoint can restore its state."""


class PeerLost(WorkerLost):
    """A worker waited in vain for another one. If that one died, its own loss is reported instead."""


class Unfit(WorkerLost):
    """A worker cannot continue, but a replacement can."""


class DataPlaneError(SluiceError):
    """A put or get broke the contract of the data plane (schema, presence, reader, range)."""

    exit_code = 4


class DataPlaneLost(DataPlaneError):  # noqa: N818 - the name that the contract of the data plane uses
    """The data plane's controller or a storage unit did not answer before the deadline."""

    exit_code = 5


class CheckpointError(SluiceError):
    """A checkpoint is missing, incomplete, or differs from its manifest, or it or the record cannot be written."""

    exit_code = 6
