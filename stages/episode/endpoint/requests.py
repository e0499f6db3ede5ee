"""What clients ask for, in one form for all APIs. Knows neither HTTP nor episodes.

Messages are as chat templates have them: a role, a text, and the calls of tools of an assistant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from stages.episode.conversation import CALL
from stages.episode.environment import Call, Reply

Message = dict[str, Any]


class BadRequestError(Exception):
    """A request that is not understood, or asks for what the endpoint does not do. The text is for the client."""


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """A request for one turn: all messages so far, the tools as schemas, and the most tokens (0: no limit). The rest is
    how it wants its answer: as a stream, with the number of tokens, and under which name of the model."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    most: int
    streams: bool
    counts: bool
    model: str

    def is_same(self, other: TurnRequest) -> bool:
        """Whether the same turn is asked for, as when a client repeats a request whose answer it did not get."""
        return self.messages == other.messages and self.tools == other.tools


@dataclass(frozen=True)
class Answered:
    """The policy's turn: its number in the episode, and what it wrote."""

    number: int
    reply: Reply


class Api(Protocol):
    """The form of requests and answers of one API."""

    def asked(self, body: Mapping[str, Any]) -> TurnRequest:
        """Read a request. Raises BadRequestError."""

    def answer(self, asked: TurnRequest, answered: Answered) -> dict[str, Any]:
        """The body of an answer."""

    def events(self, asked: TurnRequest, answered: Answered) -> bytes:
        """An answer as server-sent events."""

    def error(self, status: int, text: str) -> dict[str, Any]:
        """The body of an error."""


def spoken(reply: Reply, tools: list[dict[str, Any]]) -> tuple[str, tuple[Call, ...]]:
    """The text of a reply without calls, and the calls, if all are calls of these tools; else all of its text."""
    names = {tool["function"]["name"] for tool in tools}
    if not reply.calls or any(call.arguments is None or call.name not in names for call in reply.calls):
        return reply.text, ()
    return CALL.sub("", reply.text).strip(), reply.calls


def said_by(reply: Reply, tools: list[dict[str, Any]]) -> Message:
    """The message that a client has of a reply, when it comes back."""
    text, calls = spoken(reply, tools)
    return assistant(text, [(call.name, call.arguments) for call in calls])


def assistant(text: str, calls: list[tuple[str, Any]]) -> Message:
    """A message of the assistant with calls of tools by name."""
    made: Message = {"role": "assistant", "content": text}
    if calls:
        made["tool_calls"] = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    return made


def text_of(content: Any) -> str:
    """The text of a message's content: a text, nothing, or a list of parts. Raises BadRequestError for other parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequestError(f"content is {content!r:.60}; it is a text or a list of parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise BadRequestError(f"a part of a message is {kind!r:.60}; this endpoint has texts only")
    return "".join(part["text"] for part in content)


def whole(body: Mapping[str, Any], name: str) -> int:
    """A whole number of a request, 0 if it has none. Raises BadRequestError."""
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise BadRequestError(f"{name} is {value!r:.60}; it is a whole number above 0")
    return value or 0


def listed(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of objects of a request. Raises BadRequestError."""
    value = body.get(name) or []
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise BadRequestError(f"{name} is {value!r:.60}; it is a list of objects")
    return value


def refuse(body: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise BadRequestError for a parameter that has another value than these, none, or an empty one."""
    for name, values in allowed.items():
        value = body.get(name)
        if value and value not in values:
            raise BadRequestError(
                f"{name}={json.dumps(value)[:60]} is not supported; the graph says how turns are sampled"
            )


def streamed(event: dict[str, Any], name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(event)}\n\n".encode()


def tool_name(name: object) -> str:
    """The name of a tool. Raises BadRequestError."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", name):
        raise BadRequestError(f"a tool has the name {name!r:.60}")
    return name
