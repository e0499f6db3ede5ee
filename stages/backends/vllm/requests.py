"""Requests of samples that are passed between threads. Knows no engine and no model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from stages.backends.model.vision import Pictures
    from stages.backends.vllm.api import AsyncLLM


@dataclass(eq=False, kw_only=True)
class Request:
    """A sample in progress. `runs` are first token and number of tokens of each image in its prompt. `spans` are pairs
    (first token, version); version None means the folder's weights. `passes` of the model that it took part in are
    counted with speculation."""

    position: int
    name: str
    prompt: list[int]
    params: Any
    pictures: Pictures | None = None
    runs: list[tuple[int, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: np.ndarray | None = None  # float32, one per token; None if aborted
    passes: int = 0
    routes: np.ndarray | None = None  # experts, [tokens of the sample but the last, layers, experts chosen]
    ended: str | None = None
    unwanted: bool = False
    llm: AsyncLLM | None = None
    adapter: int | None = None  # its number
    following: asyncio.Task[None] | None = None
    spans: list[tuple[int, int | None]] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether it finished without being aborted."""
        return self.ended not in (None, "abort")

    def versions(self) -> list[int | None]:
        """The version of each token."""
        made: list[int | None] = []
        for start, version in self.spans:
            made[start:] = [version] * (len(self.tokens) - start)
        return made


Lot = Sequence[Request]
