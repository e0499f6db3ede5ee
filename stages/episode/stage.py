"""Episode: samples conversations of a policy with an environment. Knows turns; the backend samples each of them.

    Episode(policy, Calculator(), on=sampler, samples_per_prompt=8, turns=4, tokens=256)

A conversation is one sample: its first prompt, and a response of all later tokens, as the engine had them. Those that
the policy did not draw have version -1, and no loss or metric counts them. A turn's random numbers continue those of
the sample, so an episode depends on nothing but the seed, its group, its index and its environment.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pipeline import Graph, Model, Output, Stage, StageContext, Task, WorkerGroup
from pipeline.declare.columns import Columns, plain_values
from pipeline.declare.parameters import at_least, broken, number
from pipeline.declare.times import ENVIRONMENT
from pipeline.errors import Problem, shown
from stages.backends import Sampling, engine
from stages.episode.environment import Deadlines, Environment, has_coroutines
from stages.model_shape import length_problems
from stages.rollout import SAMPLING_RULES, check_event, opened_sampler, sampling_of, sampling_problems
from stages.vocabulary import (
    CONVERSATION,
    END,
    PROMPT_IDS,
    RESPONSE,
    RESPONSE_IDS,
    ROLLOUT_LOGPROBS,
    SERVED_WEIGHTS,
    TOKEN_VERSIONS,
    TRUNCATED,
    TURN_ENDS,
    TURN_REWARDS,
    field_named,
)

if TYPE_CHECKING:
    from stages.episode.play import Play, Played
    from stages.episode.turns import TurnSampler

LOOK_S = 0.1  # between two looks for cancelled groups
ENDS = ("answered", "turns", "tokens", "deadline", "failed", "lost")  # that have a metric
_RULES = (
    *SAMPLING_RULES,
    at_least("turns", 1, why="turns must be a whole number, 1 or more", fix=8),
    at_least("tokens", 1, most=2**31, why="tokens must be a whole number from 1 to 2**31", fix=4096),
    at_least("turn_tokens", 1, most=2**31, why="turn_tokens must be a whole number from 1 to 2**31", fix=512),
    at_least("environments", 1, why="environments must be a whole number of processes, 1 or more", fix=4),
    at_least("retries", 0, why="retries must be a whole number, 0 or more", fix=2),
)
_DEADLINES = tuple(
    number(name, lambda value: value > 0, why=f"{name} must be a number of seconds above 0", fix=30.0)
    for name in ("open_s", "turn_s", "episode_s", "close_s")
)


@dataclass(frozen=True)
class Episode(Stage):
    """Samples `samples_per_prompt` conversations for each row.

    environment   what answers the policy (stages/episode/environment.py)
    turns         the most turns of the policy; an episode that has had them ends with `end="turns"`
    tokens        the most tokens after the first prompt, those of the environment included; `end="tokens"`
    turn_tokens   the most tokens of a turn
    temperature, top_p, top_k, min_p, stop, chat   as in Rollout
    environments  processes of the environment per worker; coroutines of one process run at the same time
    deadlines     of the environment's methods, and of an episode; `end="deadline"`
    retries       new environments after one that failed. Recorded replies are played again; a failure that comes again
                  at the same turn is the policy's, and ends the episode with `end="failed:<turn>:<kind>"`. Without
                  retries left, an episode is lost: its `end` begins with "lost:", and Filter("complete") drops its
                  group

    `response` is the policy's last reply, `conversation` all that was said, as JSON. `turn_ends` are the response
    tokens at the end of each turn of the policy. Metrics, means over samples: `turns`, `length_mean` (tokens that the
    policy drew), `inserted_mean` (tokens that it did not draw), `truncated`, `retried`, and `end_<kind>`, the fraction
    of each kind of end that Sluice has.
    """

    model: Model
    environment: Environment
    _: KW_ONLY
    on: WorkerGroup | None = None
    samples_per_prompt: int = 8
    turns: int = 8
    tokens: int = 4096
    turn_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    chat: bool = False
    environments: int = 4
    deadlines: Deadlines = field(default_factory=Deadlines)
    retries: int = 2

    name = "episode"
    shape = "stream"
    writes = (
        PROMPT_IDS, RESPONSE, RESPONSE_IDS, ROLLOUT_LOGPROBS, TOKEN_VERSIONS, TRUNCATED, TURN_ENDS, TURN_REWARDS,
        CONVERSATION, END,
    )  # fmt: skip
    reads_back = (SERVED_WEIGHTS,)
    stamps = TOKEN_VERSIONS
    per = "group"
    shows = (RESPONSE_IDS, ROLLOUT_LOGPROBS, TOKEN_VERSIONS, TURN_ENDS, TURN_REWARDS)

    def __post_init__(self) -> None:
        object.__setattr__(self, "group_size", self.samples_per_prompt)
        names = getattr(self.environment, "reads", ())
        object.__setattr__(self, "reads", tuple(made for name in names if (made := field_named(name))))

    @property
    def bounds(self) -> dict[str, int]:
        """The most response tokens and turns per sample."""
        return {str(RESPONSE_IDS.ragged): self.tokens, str(TURN_ENDS.ragged): self.turns}

    @property
    def uses(self) -> tuple[Model, ...]:
        """The served policy."""
        return (self.model,)

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Check the backend, the model, the environment and the parameters."""
        where, says = str(self.location), f"stage {self.name!r}"
        yield from sampling_problems(self, graph, _RULES)
        if isinstance(self.deadlines, Deadlines):
            yield from broken(_DEADLINES, self.deadlines, where=where, says=f"{says} has deadlines with {{}}")
        else:
            what, why = f"{says} has deadlines={shown(self.deadlines)}", "four waits have a deadline each"
            yield Problem(where=where, what=what, why=why, fix="Deadlines(turn_s=30.0)")
        yield from length_problems(self.model, self.tokens, where, says)
        yield from self._environment_problems(where, says)
        gate = next((stage for stage in graph.all_stages() if stage.gate), None)
        if gate is None or END not in gate.reads:
            keeps = f"{gate.name!r} keeps" if gate else "no Filter drops"
            yield Problem(
                where=where,
                what=f"{says} may lose episodes, and {keeps} their groups",
                why="an episode that its machine has failed is no sample of the policy",
                fix="Filter(..., episodes=True)" if gate else 'Filter("complete") after it',
            )

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
        if self.model.router_replay or self.model.images:
            has = "router_replay" if self.model.router_replay else "images"
            yield Problem(
                where=where,
                what=f"{says} samples a model with {has}=True",
                why="no test has sampled turns with it",
                fix=f"{has}=False",
            )

    def setup(self, context: StageContext) -> Callable[[Columns, Task], AsyncGenerator[Output, None]]:
        """Open the backend and its served copy of the model, as Rollout does. Processes start with the first task."""
        backend = opened_sampler(self.model, context)

        async def run(columns: Columns, task: Task) -> AsyncGenerator[Output, None]:
            async with aclosing(self._run(backend, columns, task, context)) as outputs:
                async for output in outputs:
                    yield output

        return run

    def vocabulary(self, context: StageContext) -> Any:
        """The bytes of each token of the model's tokenizer, by id."""
        return engine(context).pieces(self.model)

    def played(self, backend: Any, context: StageContext, rows: Sequence[Mapping[str, Any]]) -> list[Played]:
        """Play an episode for each row, with the most probable tokens."""

        async def run() -> list[Played]:
            given = [(i, 0, row) for i, row in enumerate(rows)]
            turns, plays = self._begun(
                backend, context, replace(sampling_of(self, self.turn_tokens), greedy=True), given, 0
            )
            try:
                return await _all(plays)
            finally:
                await turns.close()

        return asyncio.run(run())

    def _begun(
        self,
        backend: Any,
        context: StageContext,
        sampling: Sampling,
        rows: Sequence[tuple[int, int, Mapping[str, Any]]],
        version: int,
    ) -> tuple[TurnSampler, list[Play]]:
        """Episodes that are to be played: of a group, a sample and a row each."""
        from stages.episode.conversation import Conversations
        from stages.episode.play import Play
        from stages.episode.turns import EpisodeName, TurnSampler

        described, processes = context.group.description, self._processes(context)
        turns = TurnSampler(
            backend,
            self.model,
            sampling,
            seed=context.seed,
            version=version,
            joins=bool(described and described.joins),
            check=lambda event: check_event(event, backend.served_version(self.model, version)),
            unwanted=lambda group: group in context.cancelled,
        )
        written = Conversations(backend, self.model, chat=self.chat, tools=self.environment.tools)
        plays = [
            Play(self, EpisodeName(group, sample), row, turns, written, processes, context.seed)
            for group, sample, row in rows
        ]
        turns.enter([play.name for play in plays])
        return turns, plays

    async def _run(
        self, backend: Any, columns: Columns, task: Task, context: StageContext
    ) -> AsyncGenerator[Output, None]:
        from stages.episode.play import played_columns

        size = context.group_size
        plain = {made.name: plain_values(columns[made.name]) for made in self.reads}
        rows = [
            (task.groups[i // size], i % size, {name: values[i] for name, values in plain.items()})
            for i in range(len(task.groups) * size)
        ]
        turns, plays = self._begun(backend, context, sampling_of(self, self.turn_tokens), rows, task.version)
        groups = {
            position: asyncio.ensure_future(_all(plays[position * size : (position + 1) * size]))
            for position in range(len(task.groups))
        }
        try:
            while groups:
                await asyncio.wait(groups.values(), timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                for position in [position for position in groups if task.groups[position] in context.cancelled]:
                    running = groups.pop(position)
                    running.cancel()
                    await asyncio.gather(running, return_exceptions=True)
                    longest = max(play.tokens for play in plays[position * size : (position + 1) * size])
                    times = {i: plays[i].times for i in range(position * size, (position + 1) * size)}
                    yield Output(cancelled={position: longest}, times=times)
                for position in [position for position, running in groups.items() if running.done()]:
                    made = groups.pop(position).result()
                    index = list(range(position * size, (position + 1) * size))
                    times = {i: plays[i].times for i in index}
                    at_once = {} if has_coroutines(self.environment) else {ENVIRONMENT: self.environments}
                    columns, metrics = played_columns(made), _metrics(made)
                    yield Output(columns=columns, metrics=metrics, index=index, times=times, at_once=at_once)
        finally:
            for running in groups.values():
                running.cancel()
            await asyncio.gather(*groups.values(), return_exceptions=True)
            await turns.close()

    def _processes(self, context: StageContext) -> Any:
        from stages.episode.processes import Processes

        key = ("environments", id(self.environment))  # that other stages of the worker may have too
        if key not in context.shared:
            log = None if context.run_dir is None else context.run_dir / "logs"
            context.shared[key] = Processes(
                self.environment,
                count=self.environments,
                log=log,
                name=f"{self.name}-{context.group.name}-{context.rank}",
            )
        return context.shared[key]


def _is_missing(environment: Environment, method: str) -> bool:
    return getattr(type(environment), method) is getattr(Environment, method)


async def _all(plays: Sequence[Play]) -> list[Played]:
    """Play a group; if one play raises or is cancelled, all are."""
    running = [asyncio.ensure_future(play.run()) for play in plays]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _metrics(made: list[Played]) -> dict[str, float]:
    count = len(made)
    metrics = {
        "turns": sum(len(one.turn_ends) for one in made) / count,
        "length_mean": sum(one.drawn for one in made) / count,
        "inserted_mean": sum(len(one.ids) - one.drawn for one in made) / count,
        "truncated": sum(one.truncated for one in made) / count,
        "retried": sum(one.retried for one in made) / count,
    }
    kinds = [one.end.partition(":")[0] for one in made]
    return metrics | {f"end_{kind}": kinds.count(kind) / count for kind in ENDS}
