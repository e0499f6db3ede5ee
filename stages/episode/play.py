"""Plays one episode: turns of the policy and of its environment, until one of them ends it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pipeline.declare.columns import Columns, Ragged
from pipeline.declare.times import SampleTimes
from stages.backends import Generation
from stages.episode.attempts import Attempts, EpisodeLostError
from stages.episode.conversation import Conversation, Conversations, UnwritableError
from stages.episode.environment import End
from stages.episode.processes import EnvironmentFailedError
from stages.episode.turns import EpisodeName, NextTurn, TurnSampler
from stages.vocabulary import (
    CONVERSATION,
    END,
    LOST,
    PROMPT_IDS,
    RESPONSE,
    RESPONSE_IDS,
    ROLLOUT_LOGPROBS,
    TOKEN_VERSIONS,
    TRUNCATED,
    TURN_ENDS,
    TURN_REWARDS,
)

if TYPE_CHECKING:
    from stages.episode.attempts import Places
    from stages.episode.doors import Doors
    from stages.episode.turn_stage import TurnStage

INSERTED = -1  # the version of a token that the policy did not draw
CUT = ("turns", "tokens", "deadline")  # ends of episodes that were not over
NOTHING = torch.zeros(1, dtype=torch.long)  # stands for the tokens of an episode that was lost before it had any


@dataclass
class Played:
    """An episode: the first prompt, and per token of the response its id, logprob and version."""

    prompt_ids: torch.Tensor
    ids: torch.Tensor
    logprobs: torch.Tensor
    versions: torch.Tensor
    turn_ends: list[int]
    turn_rewards: list[float]
    messages: list[Mapping[str, Any]]
    response: str
    end: str
    truncated: bool
    retried: int
    times: SampleTimes

    @property
    def drawn(self) -> int:
        """The tokens that the policy drew."""
        return int((self.versions != INSERTED).sum())

    @property
    def is_lost(self) -> bool:
        """Whether machines have failed it, so that it is no sample of the policy."""
        return self.end.startswith(LOST)


class Play:
    """An episode that is being played."""

    def __init__(
        self,
        stage: TurnStage,
        name: EpisodeName,
        row: Mapping[str, Any],
        turns: TurnSampler,
        doors: Doors,
        conversations: Conversations,
        places: Places,
        seed: int,
    ) -> None:
        self.name, self._stage, self._turns, self._doors, self._conversations = name, stage, turns, doors, conversations
        seeds = (seed, name.group, name.sample)
        self.times = SampleTimes()
        self._attempts = Attempts(places, row, seeds, stage.deadlines, stage.retries, self.times)
        self._so_far = Conversation()
        self._prompt = NOTHING
        self._parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # ids, logprobs, versions
        self._ends: list[int] = []
        self._rewards: list[float] = []
        self._reply = ""
        self._cut = False  # whether the last reply has no closing token
        self.tokens = 0  # of the response
        self.is_over = False

    async def run(self) -> Played:
        """Play to the end."""
        try:
            await self._doors.enter(self.name)
            async with asyncio.timeout(self._stage.deadlines.episode_s):
                end = await self._played()
        except TimeoutError:
            end = "deadline" if self._parts else f"{LOST}open:deadline"  # what has no token of the policy is no sample
        except EpisodeLostError as error:
            end = error.end
        except asyncio.CancelledError:
            self._attempts.give_up()
            raise
        finally:
            self._doors.leave(self.name)
        await self._attempts.close()
        self.is_over = True
        return self._made(end)

    async def _played(self) -> str:
        """Returns the word for the end."""
        said = await self._attempts.open()
        try:
            self._so_far, self._prompt = self._conversations.begin(said, self._attempts.tools)
        except UnwritableError as error:
            raise self._unusable("unwritable", str(error)) from error
        room = self._stage.positions - len(self._prompt)
        if room < 1 or not len(self._prompt):
            kind = "too_long" if room < 1 else "empty"
            raise self._unusable(kind, f"it has {len(self._prompt)} tokens, of the model's {self._stage.positions:,}")
        room = min(room, self._stage.tokens)
        for turn in range(self._stage.turns):
            most = min(self._stage.turn_tokens, room - self.tokens, self._attempts.most or sys.maxsize)
            ids = self._ids()
            made = await self._turns.sample(self.name, NextTurn(ids, self.tokens, most, turn), self.times)
            drawn = self._drawn(made)
            reply = self._conversations.reply(self._so_far, drawn, truncated=self._cut, seen=len(ids))
            self._reply = reply.text
            found = await self._attempts.turn(reply)
            self._rewards[-1] = found.reward
            if isinstance(found, End):
                return found.kind
            try:
                inserted = self._conversations.answer(self._so_far, drawn, found.said)
            except UnwritableError as error:
                self._note(str(error))
                return f"failed:{turn}:unwritable"
            if inserted is None:
                return f"failed:{turn}:malformed"
            if turn + 1 == self._stage.turns:
                break
            if self.tokens + len(inserted) >= room:
                return "tokens"
            self._add(inserted, torch.zeros(len(inserted)), torch.full((len(inserted),), INSERTED, dtype=torch.int32))
        return "turns"

    def _unusable(self, kind: str, why: str) -> EpisodeLostError:
        """What open() said is nothing that the policy can go on from."""
        self._note(why)
        return EpisodeLostError(EnvironmentFailedError("open", kind))

    def _note(self, why: str) -> None:
        """Say in the log of the worker why what the environment said is not used."""
        print(f"group {self.name.group}, sample {self.name.sample}: {why}", file=sys.stderr, flush=True)

    def _ids(self) -> torch.Tensor:
        return torch.cat([self._prompt, *(ids for ids, _, _ in self._parts)])

    def _drawn(self, made: Generation) -> torch.Tensor:
        """Add the tokens of a turn."""
        self._add(made.response_ids.values, made.logprobs.values, made.versions.values)
        self._ends.append(self.tokens)
        self._rewards.append(0.0)
        self._cut = bool(made.truncated[0])
        return made.response_ids.values

    def _add(self, ids: torch.Tensor, logprobs: torch.Tensor, versions: torch.Tensor) -> None:
        self._parts.append((ids, logprobs, versions))
        self.tokens += len(ids)

    def _made(self, end: str) -> Played:
        unread = NOTHING, torch.zeros(1), torch.full((1,), self._turns.version, dtype=torch.int32)
        parts = self._parts or [unread]
        ids, logprobs, versions = (torch.cat([part[n] for part in parts]) for n in range(3))
        return Played(
            prompt_ids=self._prompt,
            ids=ids,
            logprobs=logprobs,
            versions=versions,
            turn_ends=self._ends or [len(ids)],
            turn_rewards=self._rewards or [0.0],
            messages=self._so_far.messages,
            response=self._reply,
            end=end,
            truncated=self._cut or end in CUT,
            retried=self._attempts.retried,
            times=self.times,
        )


def played_columns(made: Sequence[Played]) -> Columns:
    """The columns of these episodes."""
    return {
        PROMPT_IDS.name: Ragged.of([one.prompt_ids for one in made]),
        RESPONSE.name: [one.response for one in made],
        RESPONSE_IDS.name: Ragged.of([one.ids for one in made]),
        ROLLOUT_LOGPROBS.name: Ragged.of([one.logprobs.float() for one in made]),
        TOKEN_VERSIONS.name: Ragged.of([one.versions for one in made]),
        TRUNCATED.name: torch.tensor([one.truncated for one in made]),
        TURN_ENDS.name: Ragged.of([torch.tensor(one.turn_ends) for one in made]),
        TURN_REWARDS.name: Ragged.of([torch.tensor(one.turn_rewards, dtype=torch.float32) for one in made]),
        CONVERSATION.name: [json.dumps(one.messages) for one in made],
        END.name: [one.end for one in made],
    }
