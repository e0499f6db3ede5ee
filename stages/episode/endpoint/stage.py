"""Endpoint: samples conversations of a policy with a program that talks to it as to a server.

Endpoint(policy, command=("python", "/home/me/agent.py"), on=sampler, samples_per_prompt=8, turns=20, tokens=16384)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import Graph, StageContext
from pipeline.declare.parameters import Rule, at_least, broken
from pipeline.errors import Problem
from stages.episode.turn_stage import TurnStage

if TYPE_CHECKING:
    from stages.episode.attempts import Places

_RULES = (
    Rule(
        "command",
        lambda value: isinstance(value, tuple | list) and bool(value) and all(isinstance(one, str) for one in value),
        "command must be a program and its arguments, as texts",
        'command=("python", "/home/me/agent.py")',
    ),
    Rule(
        "variables",
        lambda value: (
            isinstance(value, Mapping) and all(isinstance(one, str) for pair in value.items() for one in pair)
        ),
        "variables must be names and values, as texts",
        'variables={"MODE": "train"}',
    ),
    at_least("commands", 1, why="commands must be a whole number, 1 or more", fix=64),
)


@dataclass(frozen=True)
class Endpoint(TurnStage):
    """Samples `samples_per_prompt` conversations for each row, each with a command that talks to a server.

    command       a program and its arguments; {prompt} in an argument stands for that field of the row
    given         the fields of a row that the command gets, as a JSON object on its standard input
    variables     of its environment, besides PATH, HOME and the like
    commands      the most that run at a time, per worker
    turns, tokens, turn_tokens, temperature, top_p, top_k, min_p, stop, renderer, retries   as in Episode
    deadlines     open_s: until the first request; turn_s: from an answer to the next request, or to the end of the
                  command; close_s: from SIGTERM to SIGKILL

    The server is on the loopback address and has the OpenAI API (POST /v1/chat/completions) and the Anthropic API
    (POST /v1/messages), both with tools and streams. A command finds it by OPENAI_BASE_URL and OPENAI_API_KEY, or
    ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY; the key stands for its episode. Each request is a turn of the policy. It
    has to continue the conversation: one that changes earlier messages ends the episode with `end="rewritten"`. The
    tokens that are trained are those that were drawn, whatever a client does with their text.

    The episode ends when the command does. If its last line of output is a JSON object, `reward` is the reward of the
    last turn, and `end` the word for the end. A command that fails is started again with the same SLUICE_SEED, and gets
    the answers so far; what comes again at the same turn is the policy's.
    """

    _: KW_ONLY
    command: Sequence[str]
    given: Sequence[str] = ("prompt",)
    variables: Mapping[str, str] = field(default_factory=dict)
    commands: int = 64

    name = "endpoint"

    @property
    def asks(self) -> Sequence[str]:
        """The fields of the command's row."""
        return self.given

    @property
    def most_open(self) -> int:
        """The number of commands that run at a time."""
        return self.commands

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Check the backend, the model, the command and the parameters."""
        yield from super().check(graph)
        yield from broken(_RULES, self, where=str(self.location), says=f"stage {self.name!r} has {{}}")

    def places(self, context: StageContext) -> Places:
        """Its commands; those of one worker serve all its stages that have them."""
        from stages.episode.endpoint.commands import Commands

        key = ("endpoint", tuple(self.command), tuple(sorted(self.variables.items())))

        def made(log: Path | None, name: str) -> Commands:
            return Commands(self.command, variables=self.variables, log=log, name=name)

        places: Places = self._on_worker(context, key, made)
        return places
