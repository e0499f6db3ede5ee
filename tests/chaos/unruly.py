"""Environments that fail as a seed says, and the ends that their episodes may have.

    environment = Unruly(seed=7, folder=str(folder), rate=0.1)
    environment.ends((0, 5, 1), retries=1)                   # of sample 1 of group 5, in a run with the seed 0

What happens is drawn for each (seed, group, sample, turn, attempt), so a failure may come again or not. An episode of a
process that others share may also fail because one of them takes the process down.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from stages import End, Environment, Messages, Reply

OPEN, CLOSE = -1, 9  # stand for the turns of these methods
HANGS_S = 60.0
KINDS = {  # what is drawn, and the kind of failure that comes of it
    "raise": "OSError",
    "5xx": "ServiceError",
    "quit": "SystemExit",
    "exit": "died",
    "kill": "died",
    "hang": "deadline",
    "pause": "deadline",
    "nothing": "TypeError",
    "no number": "ValueError",
    "lie": None,
    "slow": None,
    "child": None,
}


HARD = ("died", "deadline")  # kinds of failures that take down a process, which others may share


class ServiceError(Exception):
    """A service answered 503."""


@dataclass(frozen=True)
class State:
    """An episode here: its name, its attempt, and how many turns it has had."""

    name: int
    attempt: int
    turn: int = 0


@dataclass(frozen=True)
class Unruly(Environment):
    """Ends after one to three turns. Each call fails with a chance of `rate`, and some turns always do; if it is
    `gentle`, none takes the process down. Writes its process, and those that it starts, into `folder`."""

    seed: int = 0
    folder: str = ""
    rate: float = 0.1
    gentle: bool = False
    collateral: ClassVar[Sequence[str]] = ("died",)  # how a call fails whose process another episode takes down

    def open(self, row: Mapping[str, Any], draw: Random) -> tuple[Any, str]:
        name = draw.getrandbits(64)
        attempts = Path(self.folder, f"{name}.attempts")
        with attempts.open("a") as file:
            file.write("x")
        self._note(os.getpid())
        state = [State(name, attempts.stat().st_size - 1)]
        self._fails(state[0], OPEN)
        return state, row["prompt"] + self._answer(name, state[0].attempt, OPEN)

    def turn(self, state: Any, reply: Reply) -> Messages | End:
        (at,) = state
        state[0] = replace(at, turn=at.turn + 1)
        if (fault := self._fails(at, at.turn)) == "nothing":
            return None  # type: ignore[return-value]
        reward = float("nan") if fault == "no number" else 0.5
        if at.turn + 1 == self.turns(at.name):
            return End("answered", reward)
        return Messages(self._answer(at.name, at.attempt, at.turn), reward)

    def close(self, state: Any) -> None:
        self._fails(state[0], CLOSE)

    def turns(self, name: int) -> int:
        """How many turns an episode has."""
        return 1 + name % 3

    def fault(self, name: int, attempt: int, turn: int) -> str | None:
        """What is drawn for a call."""
        always = Random(f"{self.seed} {name} {turn}")
        draw = always if always.random() < self.rate / 2 else Random(f"{self.seed} {name} {turn} {attempt}")
        if draw is not always and draw.random() >= self.rate:
            return None
        return draw.choice([fault for fault, kind in KINDS.items() if not (self.gentle and kind in HARD)])

    def _answer(self, name: int, attempt: int, turn: int) -> str:
        return str(attempt % 10) if self.fault(name, attempt, turn) == "lie" else "b"

    def _note(self, pid: int) -> None:
        Path(self.folder, f"{pid}.process").touch()

    def _fails(self, at: State, turn: int) -> str | None:
        match fault := self.fault(at.name, at.attempt, turn):
            case "raise":
                raise OSError("the disk is full")
            case "5xx":
                raise ServiceError("503")
            case "quit":
                raise SystemExit(1)
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(HANGS_S)
            case "pause":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "slow":
                time.sleep(0.05)
            case "child":
                self._note(subprocess.Popen(["sleep", str(HANGS_S)]).pid)
        return fault

    # What may come of it.

    def ends(self, seeds: tuple[int, int, int], *, retries: int) -> set[str]:
        """The ends that an episode may have: one, unless others may take its first process down."""
        name = Random(repr(seeds)).getrandbits(64)
        return set(_Course(self, name).opens(_Stand(left=retries, own=self.gentle)))


@dataclass(frozen=True)
class AsyncUnruly(Unruly):
    """With coroutines, so that several episodes of a process are in a call at the same time."""

    collateral = HARD  # all calls of a process that was paused

    async def turn(self, state: Any, reply: Reply) -> Messages | End:  # type: ignore[override]
        (at,) = state
        if self.fault(at.name, at.attempt, at.turn) == "hang":
            await asyncio.sleep(HANGS_S)
        await asyncio.sleep(0.005)
        return super().turn(state, reply)


@dataclass(frozen=True)
class _Stand:
    """How far an episode has come: attempts that the environment has seen, retries left, whether no other takes its
    process down, what was said first and after each turn, and the failures of this turn."""

    left: int
    attempt: int = 0
    own: bool = False
    first: str | None = None
    said: tuple[str, ...] = ()
    failures: int = 0


@dataclass(frozen=True)
class _Course:
    """What may happen to one episode, as docs/episodes.md says it."""

    environment: Unruly
    name: int

    def opens(self, at: _Stand) -> Iterator[str]:
        """The ends from an `open` on."""
        for kind in () if at.own else self.environment.collateral:  # before or after it was called
            yield from self.again(at, "open", kind)
            yield from self.again(replace(at, attempt=at.attempt + 1), "open", kind)
        after = replace(at, attempt=at.attempt + 1)
        if failed := self.kind(at, OPEN):
            yield from self.again(after, "open", failed)
            return
        first = self.answer(at, OPEN)
        if at.first not in (None, first):
            yield from self.again(after, "open", "differed")
            return
        for turn, said in enumerate(at.said):
            if failed := self.kind(at, turn) or ("differed" if self.answer(at, turn) != said else None):
                yield from self.again(after, "turn", failed)
                return
        yield from self.turns(replace(at, first=first))

    def turns(self, at: _Stand) -> Iterator[str]:
        """The ends from the next turn on."""
        turn = len(at.said)
        for kind in () if at.own else self.environment.collateral:
            yield from self.failed(at, kind)
        if failed := self.kind(at, turn):
            yield from self.failed(at, failed)
        elif turn + 1 == self.environment.turns(self.name):
            yield "answered"
        else:
            yield from self.turns(replace(at, said=(*at.said, self.answer(at, turn)), failures=0))

    def failed(self, at: _Stand, kind: str) -> Iterator[str]:
        """The ends after a turn that failed."""
        if at.failures:
            yield "deadline" if kind == "deadline" else f"failed:{len(at.said)}:{kind}"
        else:
            yield from self.again(replace(at, attempt=at.attempt + 1, failures=1), "turn", kind)

    def again(self, at: _Stand, method: str, kind: str) -> Iterator[str]:
        """The ends after a failure that is not the policy's."""
        if at.left:
            yield from self.opens(replace(at, left=at.left - 1, own=True))
        else:
            yield f"lost:{method}:{kind}"

    def kind(self, at: _Stand, turn: int) -> str | None:
        """How a call fails."""
        fault = self.environment.fault(self.name, at.attempt, turn)
        if turn == OPEN and fault in ("nothing", "no number"):
            return None
        return KINDS[fault] if fault else None

    def answer(self, at: _Stand, turn: int) -> str:
        """What the environment says."""
        return self.environment._answer(self.name, at.attempt, turn)
