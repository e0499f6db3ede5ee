"""Episode: samples conversations of a policy with an environment of the user's.

Episode(policy, Calculator(), on=sampler, samples_per_prompt=8, turns=4, tokens=256)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import Graph, StageContext, WorkerGroup
from pipeline.declare.calls import takes
from pipeline.declare.parameters import Rule, broken, is_whole, truth
from pipeline.declare.task import ServerAddress
from pipeline.declare.times import ENVIRONMENT
from pipeline.errors import Problem, shown
from stages.episode.environment import CALLED_WITH, Environment, Tool, plain_methods
from stages.episode.turn_stage import TurnStage

if TYPE_CHECKING:
    from stages.episode.attempts import Places
    from stages.episode.environment_client import ServedEnvironments
    from stages.episode.environment_server import EnvironmentServer
    from stages.episode.processes import Processes

_RULES = (
    Rule(
        "environments",
        lambda value: isinstance(value, WorkerGroup) or is_whole(value, 1),
        "environments must be a whole number of processes, 1 or more, or a WorkerGroup",
        "environments=4",
    ),
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
    environments  processes of the environment per worker; or WorkerGroup("envs", workers=16), each of whose workers has
                  one process, for all workers that sample. Coroutines of one process run at the same time
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
    environments: int | WorkerGroup = 4

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
        """A process runs one turn at a time, unless turns are coroutines. Of a group, which all sampling workers share,
        each counts its share."""
        if "turn" not in plain_methods(self.environment):
            return {}
        if isinstance(self.environments, int):
            return {ENVIRONMENT: self.environments}
        sharing = self.on.data_parallel if self.on else 1
        return {ENVIRONMENT: -(-self.environments.workers // sharing)}

    @property
    def server(self) -> WorkerGroup | None:
        """The group that has the environments."""
        return self.environments if isinstance(self.environments, WorkerGroup) else None

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
            return
        kind = type(self.environment).__name__
        if lacks := [name for name in ("open", "turn") if _is_missing(self.environment, name)]:
            yield Problem(
                where=where,
                what=f"the environment {kind} has no {' and no '.join(f'{name}()' for name in lacks)}",
                why="open() begins an episode, and turn() answers a reply",
                fix=f"define {lacks[0]}() in {kind}",
            )
        for name, given in CALLED_WITH.items():
            if not takes(getattr(self.environment, name), given):
                yield Problem(
                    where=where,
                    what=f"the environment {kind} has a {name}() that does not take ({given})",
                    why="an episode calls it with these, by position",
                    fix=f"def {name}(self, {given})",
                )

    def places(self, context: StageContext) -> Places:
        """Processes of the environment, beside this worker or, in a run that has a group for them, there; those of one
        worker serve all its stages that have it."""

        def beside(log: Path | None, name: str) -> Processes:
            count = self.environments
            return self._processes(log, name, count.workers if isinstance(count, WorkerGroup) else count)

        def there(log: Path | None, name: str) -> ServedEnvironments:
            from stages.episode.environment_client import ServedEnvironments

            return ServedEnvironments(self.environment, context.servers, first=context.rank)

        places: Places = self._on_worker(context, self._key, there if context.servers else beside)
        return places

    def serve(self, context: StageContext, host: str) -> ServerAddress:
        """Listen for the workers that sample; a worker of the group has one process of an environment."""

        def made(log: Path | None, name: str) -> EnvironmentServer:
            from stages.episode.environment_server import EnvironmentServer

            return EnvironmentServer(self._processes(log, name, 1))

        server: EnvironmentServer = self._on_worker(context, self._key, made)
        return server.listen(host)

    @property
    def _key(self) -> tuple[Any, ...]:
        return "environments", id(self.environment), self.server.name if self.server else ""

    def _processes(self, log: Path | None, name: str, count: int) -> Processes:
        from stages.episode.processes import Processes

        return Processes(self.environment, count=count, log=log, name=name)


def _is_missing(environment: Environment, method: str) -> bool:
    return getattr(type(environment), method) is getattr(Environment, method)
