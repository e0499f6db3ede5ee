"""Episode: samples conversations of a policy with an environment of the user's.

Episode(policy, Calculator(), on=sampler, samples_per_prompt=8, turns=4, tokens=256)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import Graph, StageContext
from pipeline.declare.parameters import at_least, broken, truth
from pipeline.declare.times import ENVIRONMENT
from pipeline.errors import Problem, shown
from stages.episode.environment import Environment, Tool, plain_methods
from stages.episode.turn_stage import TurnStage

if TYPE_CHECKING:
    from stages.episode.attempts import Places

_RULES = (
    at_least("environments", 1, why="environments must be a whole number of processes, 1 or more", fix=4),
    truth("chat", fix=False),
)


@dataclass(frozen=True)
class Episode(TurnStage):
    """Samples `samples_per_prompt` conversations for each row.

    environment   what answers the policy (stages/episode/environment.py)
    turns         the most turns of the policy; an episode that has had them ends with `end="turns"`
    tokens        the most tokens after the first prompt, those of the environment included; `end="tokens"`
    turn_tokens   the most tokens of a turn
    temperature, top_p, top_k, min_p, stop, chat   as in Rollout
    renderer      with `chat`: the family of models ("qwen3") of the library renderers that writes messages, in the
                  place of the chat template. It changes no earlier turns; a reply that is closed within a thought ends
                  the episode with `end="failed:<turn>:malformed"` if more is said
    environments  processes of the environment per worker; coroutines of one process run at the same time
    deadlines     of the environment's methods, and of an episode; `end="deadline"`
    retries       new environments after one that failed. Recorded replies are played again; a failure that comes again
                  at the same turn is the policy's, and ends the episode with `end="failed:<turn>:<kind>"`. Without
                  retries left, an episode is lost: its `end` begins with "lost:", and Filter("complete") drops its
                  group

    `response` is the policy's last reply, `conversation` all that was said, as JSON. `turn_ends` are the response
    tokens at the end of each turn of the policy. Metrics, means over samples: `turns`, `length_mean` (tokens that the
    policy drew), `inserted_mean` (tokens that it did not draw), `truncated`, `retried`, and `end_<kind>`, the fraction
    of each kind of end that Sluice has. In a run that goes on with kept turns also `turns_found` and `differed`
    (stages/episode/kept_turns.py).
    """

    environment: Environment
    _: KW_ONLY
    chat: bool = False
    environments: int = 4

    name = "episode"

    @property
    def asks(self) -> Sequence[str]:
        """What the environment reads."""
        return getattr(self.environment, "reads", ())  # `check` reports anything else

    @property
    def is_chat(self) -> bool:
        """Whether the environment says messages."""
        return self.chat

    @property
    def tools(self) -> Sequence[Tool]:
        """The environment's."""
        return self.environment.tools

    @property
    def at_once(self) -> Mapping[str, int]:
        """A process runs one turn at a time, unless turns are coroutines."""
        return {ENVIRONMENT: self.environments} if "turn" in plain_methods(self.environment) else {}

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Check the backend, the model, the environment and the parameters."""
        where, says = str(self.location), f"stage {self.name!r}"
        yield from super().check(graph)
        yield from broken(_RULES, self, where=where, says=f"{says} has {{}}")
        yield from self._environment_problems(where, says)

    def _environment_problems(self, where: str, says: str) -> Iterable[Problem]:
        if not isinstance(self.environment, Environment):
            yield Problem(
                where=where,
                what=f"{says} has environment={shown(self.environment)}",
                why="an environment has open(), turn() and close()",
                fix="an instance of a class derived from stages.Environment",
            )
        elif lacks := [name for name in ("open", "turn") if _is_missing(self.environment, name)]:
            kind = type(self.environment).__name__
            yield Problem(
                where=where,
                what=f"the environment {kind} has no {' and no '.join(f'{name}()' for name in lacks)}",
                why="open() begins an episode, and turn() answers a reply",
                fix=f"define {lacks[0]}() in {kind}",
            )

    def places(self, context: StageContext) -> Places:
        """Processes of the environment; those of one worker serve all its stages that have it."""
        from stages.episode.processes import Processes

        def made(log: Path | None, name: str) -> Processes:
            return Processes(self.environment, count=self.environments, log=log, name=name)

        places: Places = self._on_worker(context, ("environments", id(self.environment)), made)
        return places


def _is_missing(environment: Environment, method: str) -> bool:
    return getattr(type(environment), method) is getattr(Environment, method)
