"""Messages of the Anthropic API (https://docs.anthropic.com/en/api/messages): requests and answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from stages.episode.endpoint.requests import (
    Answered,
    BadRequestError,
    Message,
    TurnRequest,
    assistant,
    listed,
    refuse,
    spoken,
    streamed,
    text_of,
    tool_name,
    whole,
)

_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}  # others: of the request
_ALLOWED = {"stop_sequences": (), "tool_choice": ({"type": "auto"},)}


class AnthropicApi:
    """Requests and answers of POST /v1/messages."""

    def asked(self, body: Mapping[str, Any]) -> TurnRequest:
        """Read a request. Raises BadRequestError."""
        refuse(body, _ALLOWED)
        system = text_of(body.get("system"))
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for message in listed(body, "messages"):
            messages += _messages(message)
        return TurnRequest(
            messages=messages,
            tools=[_tool(tool) for tool in listed(body, "tools")],
            most=whole(body, "max_tokens"),
            streams=body.get("stream") is True,
            counts=True,
            model=str(body.get("model", "")),
        )

    def answer(self, asked: TurnRequest, answered: Answered) -> dict[str, Any]:
        """A message."""
        made = _head(asked, answered)
        made["content"], made["stop_reason"] = _blocks(asked, answered), _reason(asked, answered)
        made["usage"]["output_tokens"] = answered.reply.drawn
        return made

    def events(self, asked: TurnRequest, answered: Answered) -> bytes:
        """The events of a message."""
        return b"".join(streamed(event, event["type"]) for event in _events(asked, answered))

    def error(self, status: int, text: str) -> dict[str, Any]:
        """The body of an error."""
        return {"type": "error", "error": {"type": _ERRORS.get(status, "invalid_request_error"), "message": text}}


def _events(asked: TurnRequest, answered: Answered) -> Iterator[dict[str, Any]]:
    yield {"type": "message_start", "message": _head(asked, answered)}
    for index, block in enumerate(_blocks(asked, answered)):
        if block["type"] == "text":
            empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty, delta = (
                block | {"input": {}},
                {"type": "input_json_delta", "partial_json": json.dumps(block["input"])},
            )
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": _reason(asked, answered), "stop_sequence": None}
    yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": answered.reply.drawn}}
    yield {"type": "message_stop"}


def _messages(given: dict[str, Any]) -> list[Message]:
    """The messages of one: results of tools come before what a user says with them."""
    role, content = given.get("role"), given.get("content")
    if role not in ("user", "assistant"):
        raise BadRequestError(f"a message has the role {role!r:.60}; known roles are user and assistant")
    blocks: Any = content if isinstance(content, list) else [{"type": "text", "text": text_of(content)}]
    apart = [block for block in blocks if isinstance(block, dict) and block.get("type") in ("tool_use", "tool_result")]
    text = text_of([block for block in blocks if block not in apart])
    if role == "assistant":
        return [assistant(text, [(tool_name(block.get("name")), block.get("input")) for block in apart])]
    results: list[Message] = [{"role": "tool", "content": text_of(block.get("content"))} for block in apart]
    return [*results, *([{"role": "user", "content": text}] if text or not results else [])]


def _tool(given: dict[str, Any]) -> dict[str, Any]:
    schema = given.get("input_schema")
    if not isinstance(schema, dict):
        raise BadRequestError(f"a tool is {given!r:.60}; it has a name and an input_schema")
    described = {"description": given["description"]} if isinstance(given.get("description"), str) else {}
    return {"type": "function", "function": {"name": tool_name(given.get("name")), **described, "parameters": schema}}


def _blocks(asked: TurnRequest, answered: Answered) -> list[dict[str, Any]]:
    text, calls = spoken(answered.reply, asked.tools)
    uses = [
        {"type": "tool_use", "id": f"toolu_{answered.number}_{i}", "name": call.name, "input": call.arguments}
        for i, call in enumerate(calls)
    ]
    return [*([{"type": "text", "text": text}] if text else []), *uses]


def _head(asked: TurnRequest, answered: Answered) -> dict[str, Any]:
    return {
        "id": f"msg_{answered.number}", "type": "message", "role": "assistant", "model": asked.model, "content": [],
        "stop_reason": None, "stop_sequence": None,
        "usage": {"input_tokens": answered.reply.seen, "output_tokens": 0},
    }  # fmt: skip


def _reason(asked: TurnRequest, answered: Answered) -> str:
    _, calls = spoken(answered.reply, asked.tools)
    return "tool_use" if calls else "max_tokens" if answered.reply.truncated else "end_turn"
