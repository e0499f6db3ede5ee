"""The tokens of a conversation: those of its first prompt, and those that follow a reply. Knows no environments.

What the engine drew is never tokenized again. Of a chat, the text after a reply is what the model's chat template adds
to the text so far; a template that changes the text so far, as some do with earlier thoughts, is refused. A renderer,
in the place of the template, writes what follows after the tokens so far.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pipeline import StageError
from pipeline.declare.columns import Ragged
from pipeline.declare.group import Model
from pipeline.errors import Problem
from stages.episode.environment import Call, Reply, Said, Tool
from stages.episode.frames import packed
from stages.episode.renderer import ChatRenderer

SHOWN = 60  # characters of a text that differs
_NONE = torch.empty(0, dtype=torch.long)
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class UnwritableError(Exception):
    """What an environment has said has no tokens."""


@dataclass
class Conversation:
    """What was said so far: as messages, and, of a chat, as the template's text, or the tokens of a renderer; and the
    tools that it may call."""

    messages: list[Mapping[str, Any]] = field(default_factory=list)
    text: str = ""
    ids: list[int] = field(default_factory=list)
    tools: Sequence[Mapping[str, Any]] = ()


class Conversations:
    """Writes conversations with a model's tokenizer, as the backend has it."""

    def __init__(
        self, backend: Any, model: Model, *, chat: bool, tools: Sequence[Tool] = (), renderer: str | None = None
    ) -> None:
        self._backend, self._model, self._chat = backend, model, chat
        self._tools = [tool.schema for tool in tools]
        where = str(model.location)
        self._renderer = ChatRenderer(renderer, backend.tokenizer(model), where) if renderer else None

    def begin(self, said: Said, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[Conversation, torch.Tensor]:
        """Begin a conversation, with tools besides those of all. Returns the tokens of the prompt."""
        made = Conversation(self._as_messages(said), tools=[*self._tools, *tools])
        if not self._chat:
            return made, self._encoded(str(said))
        if self._renderer:
            made.ids = self._renderer.prompt(made.messages, made.tools)
            return made, torch.tensor(made.ids, dtype=torch.long)
        made.text = self._rendered(made.messages, made.tools)
        return made, self._tokens(made.text)

    def reply(self, so_far: Conversation, ids: torch.Tensor, *, truncated: bool, seen: int = 0) -> Reply:
        """Add what the policy wrote, with its closing token, after it has `seen` that many tokens."""
        (text,) = self._backend.decode(self._model, Ragged(ids, (len(ids),)))
        if not self._chat:
            so_far.messages.append({"role": "assistant", "content": text})
            return Reply(text, (), truncated, seen, len(ids))
        written = self._backend.written(self._model, ids if truncated else self._without_end(ids))
        so_far.messages.append({"role": "assistant", "content": written})
        return Reply(text, calls_in(text), truncated, seen, len(ids))

    def _without_end(self, ids: torch.Tensor) -> torch.Tensor:
        """The tokens without the special one that closes them, which templates write themselves."""
        (last,) = self._backend.decode(self._model, Ragged(ids[-1:], (1,)))
        return ids if last else ids[:-1]

    def answer(self, so_far: Conversation, ids: torch.Tensor, said: Said) -> torch.Tensor | None:
        """Add what the environment said after the policy's tokens `ids`. Returns its tokens, up to the next turn; None
        if a renderer has no way on from the policy's."""
        messages = self._as_messages(said)
        so_far.messages += messages
        if not self._chat:
            return self._encoded(str(said))
        if self._renderer:
            added = self._renderer.added(so_far.ids, ids.tolist(), messages, so_far.tools)
            so_far.ids += [*ids.tolist(), *(added or ())]
            return None if added is None else torch.tensor(added, dtype=torch.long)
        whole = self._rendered(so_far.messages, so_far.tools)
        before = so_far.text + self._backend.written(self._model, ids)
        if not whole.startswith(before):
            raise StageError(self._changed(before, whole))
        so_far.text = whole
        return self._tokens(whole[len(before) :])

    def _encoded(self, said: str) -> torch.Tensor:
        """The tokens of a text, none of an empty one. Raises UnwritableError for one that has none."""
        return _written(lambda: self._backend.encode(self._model, [said]).values) if said else _NONE

    def _tokens(self, text: str) -> torch.Tensor:
        """The tokens of a part of the template's text. Raises UnwritableError as `_encoded` does."""
        return _written(lambda: self._backend.tokens(self._model, text))

    def _rendered(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        """The template's text. Raises UnwritableError for messages that it refuses."""
        from jinja2 import TemplateError

        try:
            made: str = self._backend.rendered(self._model, messages, tools)
        except TemplateError as error:
            raise UnwritableError(f"the chat template refuses it: {error}") from error
        return made

    def _as_messages(self, said: Said) -> list[Mapping[str, Any]]:
        if isinstance(said, str) == self._chat:
            raise StageError(
                Problem(
                    where=str(self._model.location),
                    what=f"the environment said {said!r:.60}",
                    why="with chat=True it says lists of messages, and texts without it",
                    fix="Episode(..., chat=True)"
                    if not isinstance(said, str)
                    else 'say [{"role": ..., "content": ...}]',
                )
            )
        return [{"role": "user", "content": said}] if isinstance(said, str) else list(said)

    def _changed(self, before: str, whole: str) -> Problem:
        place = next((n for n, (one, two) in enumerate(zip(before, whole)) if one != two), min(len(before), len(whole)))
        return Problem(
            where=str(self._model.location),
            what=f"the chat template changes what was said: {before[place : place + SHOWN]!r} becomes "
            f"{whole[place : place + SHOWN]!r}",
            why="the next turn would see other tokens than those that were sampled",
            fix="a model whose template keeps earlier turns as they are",
        )


def _written(encode: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What `encode` returns. Raises UnwritableError if the tokenizer refuses the text."""
    try:
        return encode()
    except StageError as error:
        raise UnwritableError(str(error)) from error


def calls_in(text: str) -> tuple[Call, ...]:
    """The calls of tools in a reply, as Hermes and Qwen models write them: JSON between two <tool_call> tags. What
    cannot be read, or not be sent, is a call without a name."""
    found = []
    for written in CALL.findall(text):
        try:
            made = json.loads(written)
            packed(made)  # an environment gets it so
        except (ValueError, RecursionError):
            made = None
        name, arguments = (made.get("name"), made.get("arguments")) if isinstance(made, dict) else (None, None)
        found.append(Call(name if isinstance(name, str) else "", arguments if isinstance(arguments, dict) else None))
    return tuple(found)
