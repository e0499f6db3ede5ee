"""Chat completions of the OpenAI API (https://platform.openai.com/docs/api-reference/chat): requests and answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
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

_ALLOWED = {
    "n": (1,), "stop": (), "logprobs": (), "logit_bias": (), "functions": (), "tool_choice": ("auto",),
    "response_format": ({"type": "text"},), "modalities": (["text"],),
}  # fmt: skip
_ROLES = {"system": "system", "developer": "system", "user": "user", "tool": "tool"}


class OpenAIApi:
    """Requests and answers of POST /v1/chat/completions."""

    def asked(self, body: Mapping[str, Any]) -> TurnRequest:
        """Read a request. Raises BadRequestError."""
        refuse(body, _ALLOWED)
        options = body.get("stream_options")
        return TurnRequest(
            messages=[_message(message) for message in listed(body, "messages")],
            tools=[_tool(tool) for tool in listed(body, "tools")],
            most=whole(body, "max_completion_tokens") or whole(body, "max_tokens"),
            streams=body.get("stream") is True,
            counts=isinstance(options, dict) and options.get("include_usage") is True,
            model=str(body.get("model", "")),
        )

    def answer(self, asked: TurnRequest, answered: Answered) -> dict[str, Any]:
        """A chat completion."""
        text, calls = _said(asked, answered)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _reason(answered, calls)}
        return _head(asked, answered, "chat.completion") | {"choices": [choice], "usage": _usage(answered)}

    def events(self, asked: TurnRequest, answered: Answered) -> bytes:
        """The chunks of a chat completion: the message, the reason of its end, and the tokens if they are asked for."""
        text, calls = _said(asked, answered)
        delta: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        head = _head(asked, answered, "chat.completion.chunk")
        chunks = [
            head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            head | {"choices": [{"index": 0, "delta": {}, "finish_reason": _reason(answered, calls)}]},
        ]
        if asked.counts:
            chunks.append(head | {"choices": [], "usage": _usage(answered)})
        return b"".join(map(streamed, chunks)) + b"data: [DONE]\n\n"

    def error(self, status: int, text: str) -> dict[str, Any]:
        """The body of an error."""
        return {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": str(status)}}


def _message(given: dict[str, Any]) -> Message:
    role = given.get("role")
    if role == "assistant":
        calls = [_call(call) for call in listed(given, "tool_calls")]
        return assistant(text_of(given.get("content")), calls)
    if role not in _ROLES:
        raise BadRequestError(f"a message has the role {role!r:.60}; known roles are assistant, {', '.join(_ROLES)}")
    return {"role": _ROLES[role], "content": text_of(given.get("content"))}


def _call(given: dict[str, Any]) -> tuple[str, Any]:
    function: Any = given.get("function")
    if not isinstance(function, dict):
        raise BadRequestError(f"a call is {given!r:.60}; it has a function")
    written = function.get("arguments")
    try:
        return tool_name(function.get("name")), json.loads(written) if isinstance(written, str) else written
    except ValueError:
        return tool_name(function.get("name")), written


def _tool(given: dict[str, Any]) -> dict[str, Any]:
    function: Any = given.get("function")
    if given.get("type") != "function" or not isinstance(function, dict):
        raise BadRequestError(f"a tool is {given!r:.60}; it is a function")
    tool_name(function.get("name"))
    return {"type": "function", "function": function}


def _said(asked: TurnRequest, answered: Answered) -> tuple[str, list[dict[str, Any]]]:
    text, calls = spoken(answered.reply, asked.tools)
    return text, [
        {
            "id": f"call_{answered.number}_{i}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for i, call in enumerate(calls)
    ]


def _head(asked: TurnRequest, answered: Answered, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answered.number}", "object": kind, "created": 0, "model": asked.model}


def _reason(answered: Answered, calls: list[dict[str, Any]]) -> str:
    return "tool_calls" if calls else "length" if answered.reply.truncated else "stop"


def _usage(answered: Answered) -> dict[str, int]:
    seen, drawn = answered.reply.seen, answered.reply.drawn
    return {"prompt_tokens": seen, "completion_tokens": drawn, "total_tokens": seen + drawn}
