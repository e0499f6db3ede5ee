"""Environments for tests of episodes. Faults are switched on and off by files, which both processes see."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from pipeline import Graph
from stages import End, Environment, Episode, Filter, Messages, Reply, Rollout


def with_episodes(graph: Graph, environment: Environment, **settings: Any) -> Graph:
    """The graph with episodes in the place of its rollout, of which no group may be lost."""
    stages = []
    for stage in graph.stages:
        if isinstance(stage, Rollout):
            size = stage.samples_per_prompt
            stages += [Episode(stage.model, environment, on=stage.on, samples_per_prompt=size, **settings)]
            stages += [Filter("complete", lost=0.0)]
        else:
            stages.append(stage)
    return replace(graph, stages=tuple(stages))


@dataclass(frozen=True)
class OneTurn(Environment):
    """Ends each episode with its first reply, as Rollout does."""

    def open(self, row: Mapping[str, Any], draw: Random) -> tuple[Any, str]:
        return None, row["prompt"]

    def turn(self, state: Any, reply: Reply) -> Messages | End:
        return End()


@dataclass(frozen=True)
class Echo(Environment):
    """Repeats the first two characters of a reply, or says "1" after an empty one; ends after `turns` of them."""

    turns: int = 3
    sleep_s: float = 0.0

    def open(self, row: Mapping[str, Any], draw: Random) -> tuple[Any, str]:
        return {"turn": 0, "draw": draw.random()}, row["prompt"]

    def turn(self, state: Any, reply: Reply) -> Messages | End:
        time.sleep(self.sleep_s * state["draw"])
        state["turn"] += 1
        if state["turn"] == self.turns:
            return End("answered", 1.0)
        return Messages(reply.text[:2] or "1", 0.5)


@dataclass(frozen=True)
class Telling(Environment):
    """Ends with what it has read."""

    reads = ("prompt", "answer", "level")

    def open(self, row: Mapping[str, Any], draw: Random) -> tuple[Any, str]:
        return f"{row['answer']}{row['level'] + 1}", row["prompt"]

    def turn(self, state: Any, reply: Reply) -> End:
        return End(state)


@dataclass(frozen=True)
class Sleeping(Environment):
    """Coroutines that sleep."""

    sleep_s: float = 0.2

    async def open(self, row: Mapping[str, Any], draw: Random) -> tuple[Any, str]:
        await asyncio.sleep(self.sleep_s)
        return None, row["prompt"]

    async def turn(self, state: Any, reply: Reply) -> Messages | End:
        await asyncio.sleep(self.sleep_s)
        return End()


@dataclass(frozen=True)
class Uneven(Echo):
    """Echo in coroutines, with `slow_s` more for each turn of the prompts that begin with `of`. Writes to the file
    `log` when a method begins, and when a turn is over or cancelled, with the draw of the episode."""

    of: str = "none"
    slow_s: float = 0.0
    log: str = ""

    async def open(self, row: Mapping[str, Any], draw: Random) -> tuple[Any, str]:
        state, said = super().open(row, draw)
        self._log("open", state)
        return state | {"slow_s": self.slow_s if said.startswith(self.of) else 0.0}, said

    async def turn(self, state: Any, reply: Reply) -> Messages | End:
        self._log("turn", state)
        try:
            await asyncio.sleep(self.sleep_s * state["draw"] + state["slow_s"])
        finally:
            self._log("over", state)
        state["turn"] += 1
        return End() if state["turn"] == self.turns else Messages(reply.text[:2] or "1")

    async def close(self, state: Any) -> None:
        self._log("close", state)

    def _log(self, what: str, state: Any) -> None:
        with Path(self.log).open("a") as file:
            file.write(f"{state['draw']} {what}\n")


@dataclass(frozen=True)
class Faulty(Echo):
    """Fails in `method` (from its `turn` number `at` on) of the prompts that begin with `of`: always, or `once`: if the
    file `mark` is not there yet. Writes the name of each method to `mark` with the suffix .log."""

    method: str = "turn"
    at: int = 0
    fault: str = "raise"
    mark: str = ""
    of: str = ""
    once: bool = False

    def open(self, row: Mapping[str, Any], draw: Random) -> tuple[Any, str]:
        self._log(f"open {row['prompt']}")
        if row["prompt"].startswith(self.of):
            self._fail("open", 0)
        state, said = super().open(row, draw)
        return state | {"prompt": row["prompt"]}, said

    def turn(self, state: Any, reply: Reply) -> Messages | End:
        if state["prompt"].startswith(self.of) and state["turn"] >= self.at:
            self._fail("turn", state["turn"])
        found = super().turn(state, reply)
        if self.fault == "differ" and isinstance(found, Messages) and Path(self.mark).exists():
            return Messages("9")
        return found

    def close(self, state: Any) -> None:
        self._log(f"close {state['prompt']}")
        self._fail("close", 0)

    def _log(self, text: str) -> None:
        with Path(f"{self.mark}.log").open("a") as file:
            file.write(f"{text}\n")

    def _fail(self, method: str, turn: int) -> None:
        if method != self.method or (self.once and Path(self.mark).exists()):
            return
        Path(self.mark).touch()
        match self.fault:
            case "raise" | "differ":
                raise OSError("the disk is full")
            case "hang":
                time.sleep(60)
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "quit":
                raise SystemExit(1)


@dataclass(frozen=True)
class Saying(Environment):
    """Says this text after the first reply, `times` times over, and ends after the second."""

    text: str
    times: int = 1

    def open(self, row: Mapping[str, Any], draw: Random) -> tuple[Any, str]:
        return {"turns": 0}, row["prompt"]

    def turn(self, state: Any, reply: Reply) -> Messages | End:
        state["turns"] += 1
        return Messages(self.text * self.times) if state["turns"] == 1 else End()


class UnreadableError(Exception):
    """An error whose text raises."""

    def __str__(self) -> str:
        raise ValueError("no text")


@dataclass(frozen=True)
class Unreadable(Echo):
    """Raises one."""

    def turn(self, state: Any, reply: Reply) -> Messages | End:
        raise UnreadableError


@dataclass(frozen=True)
class Lying(Environment):
    """Returns what no environment returns."""

    value: Any = None

    def open(self, row: Mapping[str, Any], draw: Random) -> tuple[Any, str]:
        return None, row["prompt"]

    def turn(self, state: Any, reply: Reply) -> Messages | End:
        return self.value


@dataclass(frozen=True)
class Chatty(Environment):
    """A chat whose tool says this."""

    text: str = "77"

    def open(self, row: Mapping[str, Any], draw: Random) -> tuple[Any, Any]:
        return 0, [{"role": "system", "content": "ab"}, {"role": "user", "content": row["prompt"]}]

    def turn(self, state: Any, reply: Reply) -> Messages | End:
        return Messages([{"role": "tool", "content": self.text}])
