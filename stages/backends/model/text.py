"""Converts texts to tokens and back with a model's tokenizer. Knows Hugging Face tokenizers; computes nothing.

All backends share it, so a text has the same tokens in sampling and training.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from pipeline import Model, StageError
from pipeline.declare.columns import Ragged
from pipeline.errors import Problem, message_of
from stages.backends.model.build import BYTES, SEEING_TOKENS, load_tokenizer
from stages.backends.model.vision import Pictures, Vision, load_vision
from stages.images import MARK

_SEEING = re.compile("|".join(map(re.escape, SEEING_TOKENS)))


class Tokenizers:
    """The tokenizers of a worker's models."""

    def __init__(self) -> None:
        self._tokenizers: dict[Model, PreTrainedTokenizerBase] = {}
        self._visions: dict[Model, Vision] = {}

    def tokenizer(self, model: Model) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        key = identity(model)
        if key not in self._tokenizers:
            self._tokenizers[key] = load_tokenizer(key)
        return self._tokenizers[key]

    def vision(self, model: Model) -> Vision:
        """How the model sees images."""
        key = identity(model)
        if key not in self._visions:
            self._visions[key] = load_vision(key, self.tokenizer(key))
        return self._visions[key]

    def pictures(self, model: Model, images: Ragged | None) -> list[Pictures] | None:
        """The images of each prompt; None if prompts have none."""
        if images is None:
            return None
        vision = self.vision(model)
        return [vision.pictures(row.numpy().tobytes()) for row in images.rows()]

    def encode(self, model: Model, texts: Sequence[str], *, chat: bool = False, images: Ragged | None = None) -> Ragged:
        """Token ids of each text. Raises StageError for a text that is empty or that the tokenizer cannot encode, for
        messages without a chat template, and for prompts with other places for images than images."""
        tokenizer, seen = self.tokenizer(model), self.pictures(model, images)
        pairs: list[tuple[str, Pictures | None]] = [
            (text, None if seen is None else seen[n]) for n, text in enumerate(texts)
        ]
        distinct = [*dict.fromkeys(pairs)]  # pictures are the same object if their files are equal
        places = [text if images is None else self._places(model, text, images, chat) for text, images in distinct]
        encoded = _templated(tokenizer, model, places) if chat else _encoded(tokenizer, model, places)
        if seen is not None:
            encoded = [self._expanded(model, pair, ids) for pair, ids in zip(distinct, encoded)]
        rows = {pair: torch.tensor(ids, dtype=torch.long) for pair, ids in zip(distinct, encoded)}
        return Ragged.of([rows[pair] for pair in pairs])

    def _places(self, model: Model, text: str, images: Pictures, chat: bool) -> str:
        vision = self.vision(model)
        return vision.placed_messages(text, len(images)) if chat else vision.placed(text, len(images))

    def _expanded(self, model: Model, pair: tuple[str, Pictures | None], ids: Sequence[int]) -> list[int]:
        text, images = pair
        assert images is not None
        try:
            return self.vision(model).expanded(ids, images)
        except ValueError as error:
            raise StageError(
                Problem(
                    where=f"prompt {text[:60]!r}",
                    what=f"it {error}",
                    why=f"each image has one place, which {MARK} marks, and no other text stands for one",
                    fix=f"write {MARK} once for each image, or nowhere",
                )
            ) from error

    def rendered(self, model: Model, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        """The text of messages in the model's chat template, up to the start of the assistant's answer. Raises
        StageError without a template."""
        tokenizer = self.tokenizer(model)
        _check_template(tokenizer, model)
        made: Any = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=True,
            tokenize=False,
        )
        return made

    def tokens(self, model: Model, text: str) -> torch.Tensor:
        """Token ids of a rendered text, which has its special tokens already. Raises StageError for one that the
        tokenizer cannot encode."""
        (ids,) = _ids(self.tokenizer(model), model, [text], add_special_tokens=False)
        return torch.tensor(ids, dtype=torch.long)

    def written(self, model: Model, ids: torch.Tensor) -> str:
        """The text of tokens, with special tokens."""
        made: Any = self.tokenizer(model).decode(ids.tolist(), skip_special_tokens=False)
        return made

    def decode(self, model: Model, ids: Ragged) -> list[str]:
        """The texts, without special tokens."""
        rows = [tuple(row.tolist()) for row in ids.rows()]
        distinct = list(dict.fromkeys(rows))  # short responses repeat
        texts = self.tokenizer(model).batch_decode([list(row) for row in distinct], skip_special_tokens=True)
        text_of = dict(zip(distinct, texts))
        return [text_of[row] for row in rows]

    def pieces(self, model: Model) -> list[bytes]:
        """The bytes that each token adds to a text, by id."""
        return pieces(self.tokenizer(model))


def identity(model: Model) -> Model:
    """The identity that a model shares with its frozen copy."""
    return model if model.trainable else replace(model, trainable=True)


def pieces(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """The UTF-8 bytes that each token adds to a text, by id: none for special tokens, sometimes part of a character."""
    names = [name or "" for name in tokenizer.convert_ids_to_tokens([*range(len(tokenizer))])]
    core = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {}
    made = _of_bytes(tokenizer, names) if "ByteLevel" in str(core.get("decoder")) else _of_texts(tokenizer, names)
    special = set(tokenizer.all_special_ids)
    return [b"" if n in special else piece for n, piece in enumerate(made)]


def _of_bytes(tokenizer: PreTrainedTokenizerBase, names: list[str]) -> list[bytes]:
    """For byte-level tokenizers, which write each byte as a letter."""
    byte_of, added = {letter: byte for byte, letter in bytes_to_unicode().items()}, set(tokenizer.added_tokens_decoder)
    return [
        bytes(byte_of[letter] for letter in name) if n not in added and byte_of.keys() >= set(name) else name.encode()
        for n, name in enumerate(names)
    ]


def _of_texts(tokenizer: PreTrainedTokenizerBase, names: list[str]) -> list[bytes]:
    """For tokenizers whose tokens are texts: decode after another token, as a leading token may lose its space."""
    alone = tokenizer.batch_decode([[n] for n in range(len(names))])
    first = next((n for n, text in enumerate(alone) if text.isalnum() and n not in tokenizer.all_special_ids), None)
    if first is None:
        return [text.encode() for text in alone]
    behind = tokenizer.batch_decode([[first, n] for n in range(len(names))])
    bytes_of = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
    return [bytes_of.get(name, text[len(alone[first]) :].encode()) for name, text in zip(names, behind)]


def _encoded(tokenizer: PreTrainedTokenizerBase, model: Model, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text. Raises StageError for an empty one, or a character outside the alphabet."""
    alphabet = set(model.alphabet or "") if model.config is not None and model.alphabet != BYTES else None
    for text in texts:
        unknown = sorted(set(_SEEING.sub("", text)) - alphabet) if alphabet else []
        if unknown or not text:
            raise _cannot_say(model, text, unknown)
    encoded = _ids(tokenizer, model, texts)
    for text, ids in zip(texts, encoded):
        if not ids:
            raise _cannot_say(model, text, [])
    return encoded


def _ids(tokenizer: PreTrainedTokenizerBase, model: Model, texts: Sequence[str], **options: bool) -> list[list[int]]:
    """What the tokenizer makes of each text. Raises StageError with its words if it has no token for a character."""
    try:
        made: list[list[int]] = tokenizer(list(texts), **options).input_ids
    except Exception as error:
        raise StageError(
            Problem(
                where=str(model.location),
                what=f"the tokenizer of {model.source!r} refuses a text: {message_of(error)}",
                why="each character needs a token",
                fix="a tokenizer with a token for unknown characters, or other texts",
            )
        ) from error
    return made


def _templated(tokenizer: PreTrainedTokenizerBase, model: Model, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of message lists, up to the start of the assistant's answer."""
    _check_template(tokenizer, model)
    made: Any = [
        tokenizer.apply_chat_template(json.loads(text), add_generation_prompt=True, return_dict=False) for text in texts
    ]
    return made


def _check_template(tokenizer: PreTrainedTokenizerBase, model: Model) -> None:
    if not tokenizer.chat_template:
        raise StageError(
            Problem(
                where=str(model.location),
                what=f"the tokenizer of {model.source!r} has no chat template",
                why="the model's template turns messages into a prompt",
                fix="a chat model, or chat=False",
            )
        )


def _cannot_say(model: Model, text: str, unknown: list[str]) -> StageError:
    return StageError(
        Problem(
            where=f"prompt {text[:60]!r}",
            what=f"it has the characters {', '.join(map(repr, unknown))}" if unknown else "it has no token",
            why="the model's alphabet is " + repr(model.alphabet) if unknown else "a response needs a prompt",
            fix="a larger alphabet, or another prompt" if unknown else "a prompt that is not empty",
        )
    )
