"""What stages have in common whose samples are conversations of a policy with something that answers it.

A conversation is one sample: its first prompt, and a response of all later tokens, as the engine had them. Those that
the policy did not draw have version -1, and no loss or metric counts them. A turn's random numbers continue those of
the sample, so an episode depends on nothing but the seed, its group, its index and what answers it.
"""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import Graph, Output, Stage, StageContext, Task
from pipeline.declare.columns import Columns, plain_values
from pipeline.declare.fields import ANY
from pipeline.declare.parameters import Rule, at_least, broken, number
from pipeline.declare.version_folders import VersionFolders
from pipeline.errors import Problem, shown
from stages.episode.environment import Deadlines, Tool
from stages.model_files import untemplated
from stages.model_shape import known_config, length_problems, positions
from stages.reward import Reward
from stages.sampling_stage import SAMPLING_RULES, SamplingStage
from stages.scoring import fields_of, name_of, where_of
from stages.vocabulary import (
    CONVERSATION,
    END,
    PROMPT_IDS,
    RESPONSE,
    RESPONSE_IDS,
    ROLLOUT_LOGPROBS,
    TOKEN_VERSIONS,
    TRUNCATED,
    TURN_ENDS,
    TURN_REWARDS,
    field_named,
)

if TYPE_CHECKING:
    from stages.episode.attempts import Places
    from stages.episode.play import Play, Played
    from stages.episode.turns import EpisodeName, TurnSampler

LOOK_S = 0.1  # between two looks for cancelled groups
ENDS = ("answered", "turns", "tokens", "deadline", "rewritten", "failed", "lost")  # that have a metric
_RULES = (
    *SAMPLING_RULES,
    at_least("turns", 1, why="turns must be a whole number, 1 or more", fix=8),
    at_least("tokens", 1, most=2**31, why="tokens must be a whole number from 1 to 2**31", fix=4096),
    at_least("turn_tokens", 1, most=2**31, why="turn_tokens must be a whole number from 1 to 2**31", fix=512),
    at_least("retries", 0, why="retries must be a whole number, 0 or more", fix=2),
    Rule(
        "renderer",
        lambda value: value is None or (isinstance(value, str) and bool(value)),
        "a renderer is the name of a family of models in the library renderers",
        'renderer="qwen3", or None for the chat template',
    ),
)
_DEADLINES = tuple(
    number(name, lambda value: value > 0, why=f"{name} must be a number of seconds above 0", fix=30.0)
    for name in ("open_s", "turn_s", "episode_s", "close_s")
)


class TooManyLostError(Exception):
    """More episodes are lost than may be; `ends` are theirs."""

    def __init__(self, ends: Sequence[str]) -> None:
        super().__init__(*ends)
        self.ends = ends


@dataclass(frozen=True)
class TurnStage(SamplingStage, ABC):
    """Base of `Episode` and `Endpoint`, which say what answers the policy: `places`, and what it `asks` of a row.

    turns         the most turns of the policy; an episode that has had them ends with `end="turns"`
    tokens        the most tokens after the first prompt, inserted ones included; `end="tokens"`
    turn_tokens   the most tokens of a turn
    deadlines     of what answers, and of an episode; `end="deadline"`
    retries       new attempts after one that failed; without any left, an episode is lost
    renderer      of a chat: what writes it in the place of the chat template, by a model's family, such as "qwen3"
    """

    _: KW_ONLY
    turns: int = 8
    tokens: int = 4096
    turn_tokens: int = 512
    deadlines: Deadlines = field(default_factory=Deadlines)
    retries: int = 2
    renderer: str | None = None

    writes = (
        PROMPT_IDS, RESPONSE, RESPONSE_IDS, ROLLOUT_LOGPROBS, TOKEN_VERSIONS, TRUNCATED, TURN_ENDS, TURN_REWARDS,
        CONVERSATION, END,
    )  # fmt: skip
    shows = (RESPONSE_IDS, ROLLOUT_LOGPROBS, TOKEN_VERSIONS, TURN_ENDS, TURN_REWARDS)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "reads", tuple(made for name in self.asks if (made := field_named(name, ANY))))

    @property
    @abstractmethod
    def asks(self) -> Sequence[str]:
        """The fields of a row that what answers the policy gets."""

    @abstractmethod
    def places(self, context: StageContext) -> Places:
        """What answers the policy, on this worker; its processes start with the first episode."""

    def _on_worker(self, context: StageContext, key: tuple[Any, ...], made: Callable[[Path | None, str], Any]) -> Any:
        """What `made` makes from the folder for logs and the name of this stage's files, once per worker for all stages
        with this key."""
        if key not in context.shared:
            log = None if context.run_dir is None else context.run_dir / "logs"
            context.shared[key] = made(log, f"{self.name}-{context.group.name}-{context.rank}")
        return context.shared[key]

    @property
    def is_chat(self) -> bool:
        """Whether messages are said, and not texts."""
        return True

    @property
    def tools(self) -> Sequence[Tool]:
        """What a chat model may call, as far as that is known before an episode is open."""
        return ()

    @property
    def most_open(self) -> int:
        """The most episodes of a worker that are open at a time; 0 is no limit."""
        return 0

    @property
    def at_once(self) -> Mapping[str, int]:
        """The most calls of what answers that run at the same time, by their part of an episode's time, if bounded."""
        return {}

    @property
    def positions(self) -> int:
        """The most tokens of a prompt and its response, as far as the model's config says so."""
        return positions(known_config(self.model)) or sys.maxsize

    @property
    def bounds(self) -> dict[str, int]:
        """The most response tokens and turns per sample."""
        return {str(RESPONSE_IDS.ragged): self.tokens, str(TURN_ENDS.ragged): self.turns}

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Check the backend, the model and the parameters."""
        where, says = str(self.location), f"stage {self.name!r}"
        yield from self.sampling_problems(graph, _RULES)
        if isinstance(self.deadlines, Deadlines):
            yield from broken(_DEADLINES, self.deadlines, where=where, says=f"{says} has deadlines with {{}}")
        else:
            what, why = f"{says} has deadlines={shown(self.deadlines)}", "four waits have a deadline each"
            yield Problem(where=where, what=what, why=why, fix="Deadlines(turn_s=30.0)")
        yield from length_problems(self.model, self.tokens, where, says)
        if self.is_chat and (self.renderer is None or self.model.config is not None):
            yield from untemplated(self.model)
        if isinstance(self.renderer, str) and not self.is_chat:
            what, why = f"{says} has renderer={self.renderer!r} without chat=True", "a renderer writes messages"
            yield Problem(where=where, what=what, why=why, fix="chat=True, or leave out renderer=")
        if self.model.router_replay or self.model.images:
            has = "router_replay" if self.model.router_replay else "images"
            yield Problem(
                where=where,
                what=f"{says} samples a model with {has}=True",
                why="no test has sampled turns with it",
                fix=f"{has}=False",
            )
        for stage in graph.all_stages():
            yield from self._unmasked(stage)
        gate = next((stage for stage in graph.all_stages() if stage.gate), None)
        if gate is None or END not in gate.reads:
            keeps = f"{gate.name!r} keeps" if gate else "no Filter drops"
            yield Problem(
                where=where,
                what=f"{says} may lose episodes, and {keeps} their groups",
                why="an episode that its machine has failed is no sample of the policy",
                fix="Filter(..., episodes=True)" if gate else 'Filter("complete") after it',
            )

    def _unmasked(self, stage: Stage) -> Iterable[Problem]:
        """What takes tokens for the policy's that it did not draw: it reads them, and makes none of its own."""
        readers = [(f"stage {stage.name!r}", str(stage.location), [made.name for made in stage.reads])]
        if isinstance(stage, Reward):
            readers = [
                (f"reward {name_of(one)}", where_of(one) or readers[0][1], fields_of(one)) for one in stage.functions
            ]
        ragged = RESPONSE_IDS.ragged
        if stage is self or any(made.ragged == ragged for made in stage.writes):
            return
        for who, where, names in readers:
            found = [name for name in names if (made := field_named(name)) and made.ragged == ragged]
            if found and TOKEN_VERSIONS.name not in names:
                yield Problem(
                    where=where,
                    what=f"{who} reads {', '.join(map(repr, found))} and not {TOKEN_VERSIONS.name!r}",
                    why=f"{self.name!r} inserts tokens of version -1, which the policy did not draw",
                    fix=f"read {TOKEN_VERSIONS.name!r} too, and leave out tokens whose version is below 0",
                )

    def setup(self, context: StageContext) -> Callable[[Columns, Task], AsyncGenerator[Output, None]]:
        """Open the backend and its served copy of the model, as Rollout does. Processes start with the first task."""
        backend = self.opened(context)
        self._keep_turns(context)

        async def run(columns: Columns, task: Task) -> AsyncGenerator[Output, None]:
            async with aclosing(self._run(backend, columns, task, context)) as outputs:
                async for output in outputs:
                    yield output

        return run

    def played(
        self,
        backend: Any,
        context: StageContext,
        rows: Sequence[Mapping[str, Any]],
        names: Sequence[EpisodeName] | None = None,
        *,
        greedy: bool = True,
        most_lost: int = sys.maxsize,
    ) -> list[Played]:
        """Play an episode for each row, with the most probable tokens, or with those that are drawn for an episode of
        its name. Raises TooManyLostError as soon as more than `most_lost` are lost."""
        from stages.episode.turns import EpisodeName

        lost: list[str] = []

        async def one(play: Play) -> Played:
            made = await play.run()
            if made.is_lost:
                lost.append(made.end)
            if len(lost) > most_lost:
                raise TooManyLostError(tuple(lost))
            return made

        async def run() -> list[Played]:
            of = names or [EpisodeName(i, 0) for i in range(len(rows))]
            turns = self._turns(backend, context, 0, greedy=greedy)
            plays = self.plays(backend, context, turns, of, rows, joins=_joins(context))
            try:
                return await _all([one(play) for play in plays])
            finally:
                await turns.close()

        return asyncio.run(run())

    def _turns(self, backend: Any, context: StageContext, version: int, *, greedy: bool = False) -> TurnSampler:
        from stages.episode.turns import TurnSampler

        return TurnSampler(
            partial(self.drawn, backend),
            replace(self.sampling(self.turn_tokens), greedy=greedy),
            seed=context.seed,
            version=version,
            joins=_joins(context),
            unwanted=lambda group: group in context.cancelled,
            kept=None if greedy else context.shared.get(self._turns_key),
        )

    @property
    def _turns_key(self) -> tuple[str, str]:
        return "turns", self.name

    def _keep_turns(self, context: StageContext) -> None:
        """Keep turns on disk, and read those that an earlier part of the run has kept."""
        from stages.episode.kept_turns import KeptTurns

        if context.run_dir is not None:
            folders = VersionFolders(context.run_dir / "turns")
            settings = (context.seed, context.group.backend, self.model.source, self.sampling(self.turn_tokens))
            self._on_worker(context, self._turns_key, lambda _, name: KeptTurns(folders, name, settings))

    def plays(
        self,
        backend: Any,
        context: StageContext,
        turns: Any,
        names: Sequence[EpisodeName],
        rows: Sequence[Mapping[str, Any]],
        *,
        joins: bool,
    ) -> list[Play]:
        """Episodes that are to be played, of a row each; `turns` samples them, and `backend` writes their texts."""
        from stages.episode.conversation import Conversations
        from stages.episode.doors import Doors
        from stages.episode.play import Play

        written = Conversations(backend, self.model, chat=self.is_chat, tools=self.tools, renderer=self.renderer)
        doors = Doors(turns, names, most=self.most_open, joins=joins)
        places, asked = self.places(context), [made.name for made in self.reads]
        return [
            Play(self, name, {of: row[of] for of in asked}, turns, doors, written, places, context.seed)
            for name, row in zip(names, rows, strict=True)
        ]

    def replayed(self, sample: Mapping[str, Any], context: StageContext, *, live: bool) -> tuple[list[str], bool]:
        """Play a kept episode with its recorded replies and, if `live`, sample it again. Returns lines that say how it
        went, and whether the first went as before."""
        from stages.episode import replay

        lines, same = replay.replayed(self, sample, context)
        return [*lines, *(replay.live(self, sample, context) if live else ())], same

    async def _run(
        self, backend: Any, columns: Columns, task: Task, context: StageContext
    ) -> AsyncGenerator[Output, None]:
        from stages.episode.open_episodes import OpenEpisodes
        from stages.episode.play import played_columns
        from stages.episode.turns import EpisodeName

        size = context.group_size
        plain = {made.name: plain_values(columns[made.name]) for made in self.reads}
        samples = range(len(task.groups) * size)
        names = [EpisodeName(task.groups[i // size], i % size) for i in samples]
        rows = [{name: values[i] for name, values in plain.items()} for i in samples]
        turns = self._turns(backend, context, task.version)
        kept = context.shared.get(self._turns_key)
        plays = self.plays(backend, context, turns, names, rows, joins=_joins(context))
        open_now = context.shared.setdefault((OpenEpisodes, self.name), OpenEpisodes())
        open_now.add(plays)
        groups = {
            position: asyncio.ensure_future(
                _all([play.run() for play in plays[position * size : (position + 1) * size]])
            )
            for position in range(len(task.groups))
        }
        try:
            while groups:
                await asyncio.wait(groups.values(), timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if (counts := open_now.changed()) is not None:
                    yield Output(open=counts)
                for position in [position for position in groups if task.groups[position] in context.cancelled]:
                    running = groups.pop(position)
                    running.cancel()
                    await asyncio.gather(running, return_exceptions=True)
                    cut = await turns.given_up(task.groups[position])
                    longest = max(
                        play.tokens + cut.get(play.name, 0) for play in plays[position * size : (position + 1) * size]
                    )
                    times = {i: plays[i].times for i in range(position * size, (position + 1) * size)}
                    left = open_now.remove(plays[i] for i in times)
                    yield Output(cancelled={position: longest}, times=times, open=left)
                for position in [position for position, running in groups.items() if running.done()]:
                    made = groups.pop(position).result()
                    index = list(range(position * size, (position + 1) * size))
                    columns, metrics = played_columns(made), _metrics(made)
                    if kept is not None and not kept.is_empty:
                        metrics["turns_found"] = sum(turns.found[names[i]] for i in index) / size
                        metrics["differed"] = sum(names[i] in kept.differed for i in index) / size
                    times = {i: plays[i].times for i in index}
                    left = open_now.remove(plays[i] for i in index)
                    yield Output(
                        columns=columns, metrics=metrics, index=index, times=times, at_once=self.at_once, open=left
                    )
        finally:
            open_now.remove(plays)
            for running in groups.values():
                running.cancel()
            await asyncio.gather(*groups.values(), return_exceptions=True)
            await turns.close()


def _joins(context: StageContext) -> bool:
    """Whether the worker's engine takes further samples into a running batch."""
    return bool(context.group.description and context.group.description.joins)


async def _all(plays: Sequence[Coroutine[Any, Any, Played]]) -> list[Played]:
    """Play a group; if one play raises or is cancelled, all are."""
    running = [asyncio.ensure_future(play) for play in plays]
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
    return metrics | ends(made)


def ends(made: Sequence[Played]) -> dict[str, float]:
    """The fraction of episodes with each kind of end, as metrics."""
    kinds = [one.end.partition(":")[0] for one in made]
    return {f"end_{kind}": kinds.count(kind) / len(made) for kind in ENDS}
