"""Every error that Sluice raises on purpose, and the one shape that its text has.

A `Problem` says where, what, why and how to mend it. Errors carry one or more problems, print one line
each, and end the command line with an exit code that is not 0.
"""

from __future__ import annotations

import traceback

import msgspec


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong.

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


class SluiceError(Exception):
    """Base of all errors that are the user's to mend. `problems` is never empty; `exit_code` is never 0."""

    exit_code = 1

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))

    def __reduce__(self) -> tuple[type, tuple[Problem, ...]]:
        return type(self), self.problems


def user_error(error: Exception, *, stage: str, where: str, when: str) -> SluiceError:
    """What user code raised, as the error of the stage that ran it. A SluiceError stays what it is.

    The problem points at the line that raised; `where` is the stage's own, `when` says when it happened.
    """
    if isinstance(error, SluiceError):
        return error
    last = traceback.extract_tb(error.__traceback__)[-1]
    return StageError(
        Problem(
            where=f"{last.filename}:{last.lineno}",
            what=f"stage {stage!r} {when}: {type(error).__name__}: {error}",
            why=f"the stage of {where} raised",
            fix="mend the stage, then resume",
        )
    )


class GraphError(SluiceError):
    """The graph, or a flag or file that it names, is wrong. Found before anything is started."""

    exit_code = 2


class StageError(SluiceError):
    """A stage, or user code inside it, failed while the graph ran."""

    exit_code = 3


class DataPlaneError(SluiceError):
    """A put or get broke the contract of the data plane (schema, presence, reader, range)."""

    exit_code = 4


class DataPlaneLost(DataPlaneError):  # noqa: N818 - the name that the contract of the data plane uses
    """The data plane's controller or a storage unit did not answer before the deadline."""

    exit_code = 5


class CheckpointError(SluiceError):
    """A checkpoint is missing, incomplete, or not what its manifest says."""

    exit_code = 6
