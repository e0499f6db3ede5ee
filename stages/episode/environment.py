"""Environments of episodes: what a user writes. Knows neither tokens nor models nor processes.

    @dataclass(frozen=True)
    class Calculator(Environment):
        reads = ("prompt",)

        def open(self, row, draw):
            return None, row["prompt"]                     # its state, and what the policy sees first

        def turn(self, state, reply):
            if not reply.text.endswith("="):
                return End("answered")
            return Messages(str(evaluate(reply.text)))

Test it with a list of replies:

    state, first = Calculator().open({"prompt": "17*23"}, Random(0))
    assert Calculator().turn(state, Reply("17*23=")) == Messages("391")
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, TypeAlias

Said: TypeAlias = str | Sequence[Mapping[str, Any]]  # a text, or messages of a chat
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


@dataclass(frozen=True)
class Tool:
    """A function that a chat model may call: its parameters by name, with their types."""

    name: str
    parameters: Mapping[str, type]
    description: str = ""

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates and servers of the OpenAI API have it."""
        properties = {name: {"type": JSON_TYPES.get(kind, "string")} for name, kind in self.parameters.items()}
        described = {"type": "object", "properties": properties, "required": list(self.parameters)}
        function = {"name": self.name, "description": self.description, "parameters": described}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Call:
    """A call of a tool, as the policy wrote it. `arguments` is None if they are no JSON object."""

    name: str
    arguments: Mapping[str, Any] | None


@dataclass(frozen=True)
class Reply:
    """What the policy wrote in a turn: the text without special tokens, and the calls of tools in it. `truncated`: it
    has reached the limit of a turn, or of the episode, without its closing token. `seen` and `drawn` are the tokens
    that the policy saw and wrote."""

    text: str
    calls: tuple[Call, ...] = ()
    truncated: bool = False
    seen: int = 0
    drawn: int = 0


@dataclass(frozen=True)
class Messages:
    """The environment's answer: what the policy sees before its next turn, and the reward of the turn."""

    said: Said
    reward: float = 0.0


@dataclass(frozen=True)
class End:
    """The end of an episode: a word for it, and the reward of the last turn."""

    kind: str = "answered"
    reward: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds, enforced from outside the environment's process: of `open`, of a turn, of a whole episode with the time
    of the model, and of `close`."""

    open_s: float = 60.0
    turn_s: float = 30.0
    episode_s: float = 900.0
    close_s: float = 10.0


@dataclass(frozen=True)
class Environment:
    """Base of environments. An instance is pickled and called in processes of its own, several episodes at a time.

    reads   the fields of a row that `open` sees: those of the graph's source
    tools   what a chat model may call
    """

    reads: ClassVar[Sequence[str]] = ("prompt",)
    tools: ClassVar[Sequence[Tool]] = ()

    def open(self, row: Mapping[str, Any], draw: Random) -> tuple[Any, Said]:
        """Begin an episode. Returns its state, and what the policy sees first. `draw` is seeded by the run's seed, the
        group and the sample, so an attempt that is repeated draws the same."""
        raise TypeError(f"{type(self).__name__} has no open()")

    def turn(self, state: Any, reply: Reply) -> Messages | End:
        """Answer a reply. May be `async`: turns of other episodes then run meanwhile. It is cancelled if its episode is
        not wanted any more."""
        raise TypeError(f"{type(self).__name__} has no turn()")

    def close(self, state: Any) -> None:
        """Release what the state holds. Called once per state, also if a turn raised; not if the process died."""


CALLED_WITH = {"open": "row, draw", "turn": "state, reply", "close": "state"}
METHODS = tuple(CALLED_WITH)


def plain_methods(environment: Environment) -> set[str]:
    """Return its methods that are no coroutines: of these, one call runs at a time."""
    return {name for name in METHODS if not inspect.iscoroutinefunction(getattr(environment, name))}
