"""Chats written by the library renderers (https://github.com/PrimeIntellect-ai/renderers), by the family of a model.

What follows a reply is written after its tokens, which are not tokenized again. So a chat template that changes earlier
turns does no harm: the policy sees what it has drawn, thoughts included. Knows no environments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline import StageError
from pipeline.errors import Problem, message_of

ROLES = ("system", "user", "tool")  # of what can follow a reply
UNFIT = ("auto", "custom", "default")  # the last writes no turn after another


class ChatRenderer:
    """The renderer of one family of models, with a model's tokenizer. Raises StageError if the library is not there,
    knows no such family, or the tokenizer is of another one. `where` is for errors."""

    def __init__(self, family: str, tokenizer: Any, where: str) -> None:
        self._family, self._where = family, where
        try:
            from renderers import config_from_name, create_renderer
        except ModuleNotFoundError as error:
            raise self._error(
                message_of(error), "it is an extra of Sluice", "pip install 'sluice-rl[renderers]'"
            ) from None
        try:
            if family in UNFIT:
                raise ValueError(f"{family!r} stands for no family of models")
            kind: Any = type(config_from_name(family))
            self._made: Any = create_renderer(tokenizer, kind(thinking_retention="all"))
        except (AssertionError, AttributeError, TypeError, ValueError) as error:
            why = "a renderer is that of a model's family, whose special tokens its tokenizer has"
            raise self._error(message_of(error), why, "the family of this model, or renderer=None") from error

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of messages, up to the start of the policy's answer."""
        made: list[int] = self._made.render_ids(
            [dict(one) for one in messages], tools=[dict(tool) for tool in tools] or None, add_generation_prompt=True
        )
        return made

    def added(
        self,
        before: Sequence[int],
        drawn: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ) -> list[int] | None:
        """The tokens of messages that follow a reply, up to the start of the next; `before` are all tokens before the
        reply's, which are `drawn`. None if the family has no way on from this reply: it was closed within a thought, or
        has a mark of an end in its middle. Raises StageError for a message of a role that cannot follow."""
        if roles := [one["role"] for one in messages if one["role"] not in ROLES]:
            what = f"the environment said a message of the role {roles[0]!r}"
            raise self._error(what, "what follows a reply is not the policy's", f"one of the roles {', '.join(ROLES)}")
        asked = {"tools": [dict(tool) for tool in tools] or None}
        made = self._made.bridge_to_next_turn([*before], [*drawn], [dict(one) for one in messages], **asked)
        known = [*before, *drawn]
        if made is None or made.token_ids[: len(known)] != known:
            return None
        added: list[int] = made.token_ids[len(known) :]
        return added

    def _error(self, what: str, why: str, fix: str) -> StageError:
        return StageError(Problem(where=self._where, what=f"renderer={self._family!r}: {what}", why=why, fix=fix))
