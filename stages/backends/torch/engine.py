"""The torch engine of one worker: its models, by role, and what stages ask of them. Does not know the stages.

float32 on the CPU; bfloat16 on the GPU, with float32 master copies of what is trained. The copies of a model (trained,
served, frozen) come from one build, so they start equal, warm start included.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from pipeline import Model, StageContext, StageError
from pipeline.columns import Ragged
from pipeline.errors import Problem
from stages.backends import Generation, Optimization, Sampling
from stages.backends.torch import weights as weight_tools
from stages.backends.torch.generate import generate
from stages.backends.torch.memory import keep_freed_memory
from stages.backends.torch.models import closing_tokens, load_network, load_tokenizer
from stages.backends.torch.optimize import TorchLearner
from stages.backends.torch.score import score

Role = Literal["trained", "served", "frozen"]


def open_engine(context: StageContext) -> TorchEngine:
    """The engine of this worker. Raises StageError where its group asks for a GPU and torch sees none."""
    group = context.group
    if group.gpus > 0 and not torch.cuda.is_available():
        raise StageError(
            Problem(
                where=str(group.location),
                what=f"worker group {group.name!r} asks for {group.gpus} GPUs and torch sees none",
                why="a group with gpus above 0 computes on CUDA",
                fix="gpus=0 for the CPU, or a machine and a torch build with CUDA",
            )
        )
    if group.threads > 0:
        torch.set_num_threads(group.threads)
    keep_freed_memory()
    device = torch.device("cuda") if group.gpus > 0 else torch.device("cpu")
    return TorchEngine(device, torch.bfloat16 if group.gpus > 0 else torch.float32)


class TorchEngine:
    """`stages.backends.Engine` on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._builds: dict[Model, PreTrainedModel] = {}
        self._tokenizers: dict[Model, PreTrainedTokenizerBase] = {}
        self._networks: dict[tuple[Model, Role], PreTrainedModel] = {}
        self._learners: dict[Model, TorchLearner] = {}

    def network(self, model: Model, role: Role) -> PreTrainedModel:
        """The copy of the model that has this role; the same object at every call."""
        key = _identity(model)
        if (key, role) not in self._networks:
            network = self._fresh(key)
            if role != "trained":
                network.requires_grad_(False)
            self._networks[key, role] = network
        return self._networks[key, role]

    def tokenizer(self, model: Model) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        key = _identity(model)
        if key not in self._tokenizers:
            self._tokenizers[key] = load_tokenizer(key)
        return self._tokenizers[key]

    def encode(self, model: Model, texts: Sequence[str]) -> Ragged:
        """Token ids of each text. Raises StageError for a text that the tokenizer cannot say, or that is empty."""
        tokenizer = self.tokenizer(model)
        distinct = list(dict.fromkeys(texts))
        encoded = _encoded(tokenizer, model, distinct)
        rows = {text: torch.tensor(ids, dtype=torch.long) for text, ids in zip(distinct, encoded)}
        return Ragged.of([rows[text] for text in texts])

    def decode(self, model: Model, ids: Ragged) -> list[str]:
        """The texts, without special tokens."""
        rows = [tuple(row.tolist()) for row in ids.rows()]
        distinct = list(dict.fromkeys(rows))  # short answers repeat
        texts = self.tokenizer(model).batch_decode([list(row) for row in distinct], skip_special_tokens=True)
        text_of = dict(zip(distinct, texts))
        return [text_of[row] for row in rows]

    def generate(self, model: Model, prompt_ids: Ragged, sampling: Sampling, uniforms: np.ndarray | None) -> Generation:
        """Responses of the served copy."""
        network, tokenizer = self.network(model, _served(model)), self.tokenizer(model)
        stop = [_stop_token(tokenizer, text) for text in sampling.stop]
        closing = {*closing_tokens(network, tokenizer), *stop}
        return generate(network, prompt_ids, sampling, uniforms, closing=sorted(closing), pad=_pad(tokenizer))

    def score(
        self, model: Model, prompt_ids: Ragged, response_ids: Ragged, *, temperature: float, microbatch: int
    ) -> Ragged:
        """Logprobs of the response tokens, under the trained copy or that of a frozen model."""
        return score(
            self.network(model, "trained" if model.trainable else "frozen"),
            prompt_ids,
            response_ids,
            temperature=temperature,
            pad=_pad(self.tokenizer(model)),
            microbatch=microbatch,
        )

    def learner(self, model: Model, optimization: Optimization) -> TorchLearner:
        """The trained copy with an optimizer. Raises StageError where the model has one already."""
        key = _identity(model)
        if key in self._learners:
            raise StageError(
                Problem(
                    where=str(model.location),
                    what=f"two stages train the model {model.source!r}",
                    why="its optimizer has one state",
                    fix="one Train stage a model",
                )
            )
        pad = _pad(self.tokenizer(model))
        self._learners[key] = TorchLearner(self.network(model, "trained"), optimization, pad=pad)
        return self._learners[key]

    def trained_weights(self, model: Model) -> dict[str, torch.Tensor]:
        """A snapshot of the trained copy."""
        return weight_tools.weights(self.network(model, "trained"))

    def served_weights(self, model: Model) -> dict[str, torch.Tensor]:
        """A snapshot of the served copy."""
        return weight_tools.weights(self.network(model, _served(model)))

    def serve(self, model: Model, weights: Mapping[str, torch.Tensor]) -> None:
        """Load weights into the served copy."""
        weight_tools.load_weights(self.network(model, "served"), weights)

    def weight_hash(self, weights: Mapping[str, torch.Tensor]) -> str:
        """sha256 of weights."""
        return weight_tools.weight_hash(weights)

    def _fresh(self, key: Model) -> PreTrainedModel:
        """The model as it is before training. What is costly to make again is kept, on the CPU."""
        network: Any
        if key in self._builds:
            network = copy.deepcopy(self._builds[key])
            return network.to(self.device)
        network = load_network(key, self.tokenizer(key), dtype=self.dtype, device=self.device)
        if key.warm_start is not None:
            pristine: Any = copy.deepcopy(network)
            self._builds[key] = pristine.to("cpu")
        return network


def _identity(model: Model) -> Model:
    return model if model.trainable else replace(model, trainable=True)


def _served(model: Model) -> Role:
    return "served" if model.trainable else "frozen"


def _pad(tokenizer: PreTrainedTokenizerBase) -> int:
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0  # masked wherever it is used


def _encoded(tokenizer: PreTrainedTokenizerBase, model: Model, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text. Raises StageError for the first that has none, or a character outside the alphabet."""
    alphabet = set(model.alphabet or "") if model.config is not None else None
    for text in texts:
        unknown = sorted(set(text) - alphabet) if alphabet else []
        if unknown or not text:
            raise _cannot_say(model, text, unknown)
    encoded = tokenizer(list(texts)).input_ids
    for text, ids in zip(texts, encoded):
        if not ids:
            raise _cannot_say(model, text, [])
    return encoded


def _cannot_say(model: Model, text: str, unknown: list[str]) -> StageError:
    return StageError(
        Problem(
            where=f"prompt {text[:60]!r}",
            what=f"it has the characters {', '.join(map(repr, unknown))}" if unknown else "it has no token",
            why="the model's alphabet is " + repr(model.alphabet) if unknown else "a response needs a prompt",
            fix="a larger alphabet, or another prompt" if unknown else "a prompt that is not empty",
        )
    )


def _stop_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if len(ids) != 1:
        raise StageError(
            Problem(
                where=f"stop {text!r}",
                what=f"it is {len(ids)} tokens of this tokenizer",
                why="generation stops at single tokens",
                fix="a text that is one token",
            )
        )
    return ids[0]
