"""Every error that Sluice raises on purpose, and the common form of its text.

A `Problem` says where, what, why and how to fix it. Errors carry one or more problems, print one line
each, and end the command with an exit code that is not 0.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import structs

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

    def __str__(self) -> str:
        kind = "warning: " if self.warning else ""
        return f"{self.where}: {kind}{self.what}; {self.why}. Fix: {self.fix}"


def shown(value: object, limit: int = 80) -> str:
    """Return a value as text for a message: one line cut at `limit`, no addresses; classes and functions by name."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = " ".join(re.sub(r" at 0x[0-9a-f]+", "", repr(value)).splitlines())
    text = re.sub(r"<(?:built-in )?function (\w+)>", r"\1", text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def message_of(error: BaseException, limit: int = 300) -> str:
    """Return an error's class and text for a message: one line, cut at `limit`."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def only_problems(found: Iterable[object]) -> list[Problem]:
    """Return the problems that a check of the user's yields. Raises TypeError if one is something else."""
    made: list[Problem] = []
    for one in found:
        if not isinstance(one, Problem):
            raise TypeError(f"it yields {shown(one)}, which is not a Problem (pipeline.errors)")
        made.append(one)
    return made


def is_users(error: BaseException) -> bool:
    """Return whether an exception comes from user code: any Exception, and sys.exit(), unless a signal handler of this
    process or of Ray raised it."""
    if not isinstance(error, SystemExit):
        return isinstance(error, Exception)
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


def user_error(error: BaseException, *, stage: str, where: str, when: str) -> SluiceError:
    """Return the error to raise for an exception of user code in a stage. A SluiceError keeps its type; problems that
    name no line get the stage's line.

    The problem points at the last line of the user's own code, or, if there is none, at the stage's line, `where`.
    `when` says when it happened.
    """
    if isinstance(error, SluiceError):
        if all(_LINE.search(problem.where) for problem in error.problems):
            return error
        placed = (
            problem if _LINE.search(problem.where) else structs.replace(problem, where=f"{where}, {problem.where}")
            for problem in error.problems
        )
        return type(error)(*placed)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_the_users(frame.filename)]
    return StageError(
        Problem(
            where=f"{own[-1].filename}:{own[-1].lineno}" if own else where,
            what=f"stage {stage!r} {when}: {message_of(error)}",
            why=f"the stage at {where} raised" if own else "code that it calls raised",
            fix="correct the stage, then resume" if own else "see the traceback in RUN/logs",
        )
    )


def _is_the_users(file: str) -> bool:
    return not file.startswith("<") and not str(Path(file).resolve()).startswith(_NOT_THE_USERS)


class GraphError(SluiceError):
    """The graph, or a flag or file that it names, is wrong. Raised before anything is started."""

    exit_code = 2


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
    """A checkpoint is missing, incomplete, or differs from its manifest."""

    exit_code = 6
