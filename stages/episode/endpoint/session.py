"""The requests of one episode: each of them continues the one before, or the episode is over. Knows no HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from stages.episode.endpoint.requests import Answered, Message, TurnRequest, said_by
from stages.episode.environment import Reply

REWRITTEN = "rewritten"


class SessionOverError(Exception):
    """The episode of a request is over. The text is for the client."""


@dataclass(frozen=True)
class NextRequest:
    """A request that continues the episode, and the messages that it adds."""

    asked: TurnRequest
    added: list[Message]


@dataclass(frozen=True)
class CommandEnded:
    """The command has ended, with this code (negative: by a signal), and what it printed last."""

    code: int
    printed: str = ""
    errors: str = ""


@dataclass
class Session:
    """What one client asks for. `events` are what the episode waits for: requests, the word "rewritten", or the end of
    the command, which sets `has_ended` too."""

    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    events: asyncio.Queue[NextRequest | CommandEnded | str] = field(default_factory=asyncio.Queue)
    _said: list[Message] = field(default_factory=list)
    _last: TurnRequest | None = None
    _answer: asyncio.Future[Answered] | None = None
    _turns: int = 0
    _over: str = ""

    async def ask(self, asked: TurnRequest) -> Answered:
        """The policy's turn. The same request again gets the same answer. Raises SessionOverError."""
        if self._over:
            raise SessionOverError(self._over)
        if self._last is None or not asked.is_same(self._last):
            added = self._added(asked)
            if added is None:
                self._over = "this request does not continue the conversation so far, which ended the episode"
                self.events.put_nowait(REWRITTEN)
                raise SessionOverError(self._over)
            self._last, self._answer = asked, asyncio.get_running_loop().create_future()
            self.events.put_nowait(NextRequest(asked, added))
        assert self._answer is not None
        answer = self._answer  # the next request has another
        await asyncio.wait([answer])
        if answer.cancelled():
            raise SessionOverError(self._over)
        return answer.result()

    def reply(self, reply: Reply) -> None:
        """Answer the last request."""
        assert self._last is not None and self._answer is not None
        self._said = [*self._last.messages, said_by(reply, self._last.tools)]
        if not self._answer.done():
            self._answer.set_result(Answered(self._turns, reply))
        self._turns += 1

    def end(self) -> None:
        """The episode is over, and so is what waits for it."""
        self._over = self._over or "the episode of this key is over"
        if self._answer is not None:
            self._answer.cancel()

    def _added(self, asked: TurnRequest) -> list[Message] | None:
        """The messages that a request adds to the conversation; None if it does not continue it."""
        if self._last is None:
            return asked.messages or None
        if self._answer is not None and not self._answer.done():
            return None  # it was asked beside the last one
        so_far, added = asked.messages[: len(self._said)], asked.messages[len(self._said) :]
        continues = self._said and so_far == self._said and asked.tools == self._last.tools
        return added if continues and added and all(one["role"] != "assistant" for one in added) else None
