"""Plays a kept episode again: with its recorded replies, or with the policy. Knows the fields of an episode.

With recorded replies no model is needed, only its tokenizer. An environment that answers otherwise than before is found
at the turn where it does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pipeline import StageContext
from pipeline.declare.columns import Ragged
from pipeline.declare.handle import group_of, index_of
from stages.backends import Generation
from stages.backends.model.text import Tokenizers
from stages.episode.turns import EpisodeName, NextTurn
from stages.vocabulary import CONVERSATION, END, RESPONSE_IDS, ROLLOUT_LOGPROBS, TOKEN_VERSIONS, TURN_ENDS, TURN_REWARDS

if TYPE_CHECKING:
    from stages.episode.play import Played
    from stages.episode.turn_stage import TurnStage

SHOWN = 300  # characters of what was said


class DifferedError(Exception):
    """What the policy sees in this turn is not what it saw in the recorded episode."""

    def __init__(self, turn: int) -> None:
        super().__init__(turn)
        self.turn = turn


class RecordedTurns:
    """The turns of one episode that was kept, in the place of a TurnSampler."""

    def __init__(self, sample: Mapping[str, Any], is_closed: Any) -> None:
        self._ids: list[int] = sample[RESPONSE_IDS.name]
        self._logprobs: list[float] = sample[ROLLOUT_LOGPROBS.name]
        self._versions: list[int] = sample[TOKEN_VERSIONS.name]
        self._ends: list[int] = sample[TURN_ENDS.name]
        self._is_closed = is_closed
        self._turn = 0
        self.version = max(self._versions)

    def enter(self, episode: EpisodeName) -> None:
        """Nothing: there is one episode."""

    def leave(self, episode: EpisodeName) -> None:
        """Nothing: there is one episode."""

    async def sample(self, episode: EpisodeName, turn: NextTurn, times: Any = None) -> Generation:
        """The recorded tokens of the next turn. Raises DifferedError if it does not begin where it did, or there was
        none."""
        if self._turn == len(self._ends):
            raise DifferedError(self._turn)
        end = self._ends[self._turn]
        start = next((n + 1 for n in range(end - 1, -1, -1) if self._versions[n] < 0), 0)
        if turn.place != start or turn.ids[len(turn.ids) - start :].tolist() != self._ids[:start]:
            raise DifferedError(self._turn)
        self._turn += 1
        ids = torch.tensor(self._ids[start:end])
        cut = len(ids) == turn.most and not self._is_closed(ids)
        return Generation(
            Ragged(ids, (len(ids),)),
            Ragged(torch.tensor(self._logprobs[start:end]), (len(ids),)),
            torch.tensor([cut]),
            Ragged(torch.tensor(self._versions[start:end], dtype=torch.int32), (len(ids),)),
        )


def replayed(stage: TurnStage, sample: Mapping[str, Any], context: StageContext) -> tuple[list[str], bool]:
    """Play a kept episode against its environment, with the recorded replies. Returns lines that say how it went, and
    whether it went as before."""
    written = Tokenizers()
    stops = set(stage.stop)

    def is_closed(ids: torch.Tensor) -> bool:
        (last,) = written.decode(stage.model, Ragged(ids[-1:], (1,)))
        return not last or any(last.endswith(stop) for stop in stops)

    turns = RecordedTurns(sample, is_closed)
    try:
        made = _played(stage, sample, context, turns, written)
    except DifferedError as differed:
        return [
            f"its environment: differs before turn {differed.turn}",
            *_said(json.loads(sample[CONVERSATION.name])),
        ], False
    before = {END.name: sample[END.name], TURN_REWARDS.name: sample[TURN_REWARDS.name]}
    now = {END.name: made.end, TURN_REWARDS.name: [round(reward, 3) for reward in made.turn_rewards]}
    before |= {CONVERSATION.name: json.loads(sample[CONVERSATION.name])}
    now |= {CONVERSATION.name: [dict(message) for message in made.messages]}
    other = [name for name in before if before[name] != now[name]]
    lines = [f"its environment: {name} was {before[name]!r:.{SHOWN}} and is {now[name]!r:.{SHOWN}}" for name in other]
    return lines or [f"its environment: {len(made.turn_ends)} turns and {made.end!r}, as before"], not other


def live(stage: TurnStage, sample: Mapping[str, Any], context: StageContext) -> list[str]:
    """Sample the episode again, with the model as it is before training. Returns what was said."""
    made = stage.played(stage.opened(context), context, [sample], names=[_name(sample)], greedy=False)[0]
    return [f"with the model before training: {made.end!r} after {len(made.turn_ends)} turns", *_said(made.messages)]


def _played(stage: TurnStage, sample: Mapping[str, Any], context: StageContext, turns: Any, written: Any) -> Played:
    async def run() -> Played:
        (play,) = stage.plays(written, context, turns, [_name(sample)], [sample], joins=True)
        return await play.run()

    return asyncio.run(run())


def _name(sample: Mapping[str, Any]) -> EpisodeName:
    return EpisodeName(group_of(sample["key"]), index_of(sample["key"]))


def _said(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"  {message['role']}: {message.get('content', '')!r:.{SHOWN}}" for message in messages]
