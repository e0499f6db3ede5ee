"""The rows of an evaluation: which fields they have, and what an environment and reward functions read of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline import Field
from pipeline.declare.columns import plain_values
from pipeline.declare.fields import ANY
from pipeline.errors import Problem
from stages.episode.turn_stage import TurnStage
from stages.reward import function_problems, reads_of
from stages.scoring import RewardFunction, name_of, where_of
from stages.sources.values import column_of
from stages.vocabulary import CONVERSATION, END, RESPONSE, TRUNCATED, TURN_REWARDS

if TYPE_CHECKING:
    from stages.episode.play import Played

OF_EPISODES = (END, TURN_REWARDS, CONVERSATION)  # that rewards read besides the response


def environment_problems(
    episode: TurnStage, fields: Sequence[Field], where: str, says: str, *, columns: bool
) -> Iterator[Problem]:
    """Check that held-out rows of these fields have all that an environment reads; `columns` says whether they come
    from data, which may have more."""
    names = [made.name for made in fields]
    if unknown := [name for name in episode.asks if name not in names]:
        yield Problem(
            where=where,
            what=f"the environment of {says} reads {_listed(unknown)}",
            why=f"its held-out rows have {_listed(names)}",
            fix=_fix(unknown, "an environment that reads only these", columns=columns),
        )


def reward_problems(
    functions: Sequence[RewardFunction],
    fields: Sequence[Field],
    where: str,
    says: str,
    *,
    columns: bool,
    episodes: bool,
    typed: bool,
) -> Iterator[Problem]:
    """Check that each function can be called with what is known of a held-out row and its response. If the
    data cannot be read, the types of its columns are not known: not `typed`."""
    known = {made.name: made for made in (*fields, RESPONSE, TRUNCATED, *(OF_EPISODES if episodes else ()))}
    for function in functions:
        found = list(function_problems(function, where))
        yield from found
        if found:
            continue
        reads = [made for made in reads_of(function) if made]
        at = where_of(function) or where
        if unknown := [made.name for made in reads if made.name not in known]:
            yield Problem(
                where=at,
                what=f"reward {name_of(function)} reads {_listed(unknown)}",
                why=f"{says} has the fields {_listed([*known])}",
                fix=_fix(unknown, "a reward that reads only these", columns=columns),
            )
        for made in reads:
            has = known.get(made.name, made)
            if typed and made.dtype not in (ANY, has.dtype):
                yield Problem(
                    where=at,
                    what=f"reward {name_of(function)} reads {made.name} as {made.dtype}",
                    why=f"{says} has it as {has.dtype}",
                    fix=f"leave out the type of the parameter {made.name}, so that it takes any",
                )


def read_of(played: Sequence[Played]) -> dict[str, list[Any]]:
    """What rewards may read of episodes, besides the response."""
    from stages.episode.play import played_columns

    columns = played_columns(played)
    return {made.name: plain_values(columns[made.name]) for made in OF_EPISODES}


def plain(rows: Sequence[Mapping[str, Any]], fields: Sequence[Field]) -> dict[str, list[Any]]:
    """The values of each field, as a reward function gets them."""
    return {made.name: plain_values(column_of(made, [row[made.name] for row in rows], 1)) for made in fields}


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _fix(unknown: Sequence[str], otherwise: str, *, columns: bool) -> str:
    """How to bring these columns along."""
    if not columns or any(made.name in unknown for made in OF_EPISODES):  # of rows that are no episodes
        return f"use {otherwise}"
    return f"Evaluate(..., extra={tuple(unknown)!r}) if the data has that, or {otherwise}"
