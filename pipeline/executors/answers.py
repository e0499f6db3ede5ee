"""Replies of actors, and errors for missing replies."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from pipeline.data_plane.patience import LOOK_S
from pipeline.errors import Problem, SluiceError, StageError, WorkerLost, is_user_file, message_of
from pipeline.executors.heartbeat import dead

_FRAME = re.compile(r'File "(.+?)", line (\d+)')  # of a traceback
_HEADER = re.compile(r"ray::(?:\w+\.)?(?P<call>\w+)\(\)[^(]*\(pid=\d+, ip=(?P<machine>[^,)]+)")  # and colors between
START_DEADLINE_S = 300.0  # to place all workers, and for them to join
EXCHANGE_DEADLINE_S = 900.0  # between ranks of a group; a failed rank ends the run at once
SETUP_DEADLINE_S = 1200.0  # for all workers to load models and start engines, which have 900 s themselves


def get_all(
    refs: Sequence[ray.ObjectRef], what: str, deadline_s: float = START_DEADLINE_S, *, among: Sequence[Any] = (),
    look: Callable[[], None] | None = None,
) -> list[Any]:  # fmt: skip
    """Wait for calls on all actors. Raises the first error that a worker returned, raised or died with. If one `among`
    these workers is dead, that is the error: it explains the others'. `look` is called every second meanwhile, and ends
    the wait if it raises."""
    try:
        answers = _got(list(refs), deadline_s, look)
    except GetTimeoutError as error:
        raise WorkerLost(
            Problem(
                where="Ray",
                what=f"the workers did not {what} in {deadline_s:g} s",
                why="every wait has a deadline",
                fix="check the logs of the run and of Ray",
            )
        ) from error
    except RayError as error:
        gone = None if isinstance(error, RayActorError) or not among else dead(among)
        if not gone and isinstance(error, RayTaskError) and isinstance(error.cause, SluiceError):
            raise error.cause from None
        raise lost(what, gone[1] if gone else error) from error
    for answer in answers:
        if isinstance(answer, SluiceError):
            raise answer
    return answers


def _got(refs: list[ray.ObjectRef], deadline_s: float, look: Callable[[], None] | None) -> list[Any]:
    """Return what the calls return. Raises GetTimeoutError at the deadline."""
    ends_s = time.monotonic() + deadline_s
    while True:
        left_s = max(0.0, ends_s - time.monotonic())
        try:
            return ray.get(refs, timeout=min(left_s, LOOK_S) if look else left_s)
        except GetTimeoutError:
            if look is None or left_s <= LOOK_S:
                raise
            look()


def unanswered(calls: Mapping[str, list[ray.ObjectRef]]) -> list[str]:
    """Return the names of those who have not answered all of their calls."""
    return [name for name, refs in calls.items() if ray.wait(refs, num_returns=len(refs), timeout=0)[1]]


def lost(what: str, error: RayError, more: str = "", *, fate: str = "died") -> StageError:
    died = isinstance(error, RayActorError)
    return (WorkerLost if died else StageError)(
        Problem(
            where="Ray",
            what=f"a worker {f'{fate} and did not' if died else 'did not'} {what}: {one_line(error)}{more}",
            why="its task has no result",
            fix="check the logs of the run and of Ray, then resume",
        )
    )


def one_line(error: Exception) -> str:
    """Return the first informative line; Ray's messages can be pages long. For an exception in a worker, whose first
    line is Ray's header of the traceback, it is the cause, with the call and the machine."""
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip(" .")]
    header = _HEADER.search(lines[0]) if lines else None
    if header is None:
        return lines[0].strip() if lines else type(error).__name__
    cause = error.cause if isinstance(error, RayTaskError) else None
    frames = [number for number, line in enumerate(lines) if line.startswith(" ")]
    said = message_of(cause) if isinstance(cause, Exception) else " ".join(lines[max(frames, default=0) + 1 :])
    return f"{said or lines[-1].strip()} (in {header['call']} on {header['machine']})"


def not_started(what: str, error: RayActorError) -> StageError:
    """Return the error for an actor that Ray could not create: at the last line of the user's in Ray's text, if any."""
    text = str(error)
    own = [(file, line) for file, line in _FRAME.findall(text) if is_user_file(file)]
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip(" .")), "")
    return StageError(
        Problem(
            where=":".join(own[-1]) if own else "Ray",
            what=f"{what} does not start: {last}",
            why=f"its process imports {own[-1][0]}" if own else "the run keeps its columns there",
            fix="rename that file, or correct it" if own else "check the logs of Ray",
        )
    )
