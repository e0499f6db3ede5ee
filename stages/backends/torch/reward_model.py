"""A reward model: a Hugging Face sequence classification model with one label, and its tokenizer.

    judge = open_reward_model(Model("folder"), dtype=torch.bfloat16, device=torch.device("cuda"))
    judge.scores(["1+1="], ["2"], chat=True, microbatch=16)          # float32 [1], on the CPU

Knows texts and scores, not the policy. Legend: N samples of a pass, S tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from pipeline import Model, StageError
from pipeline.declare.columns import Ragged
from pipeline.errors import Problem
from stages.backends.model.build import build, load_tokenizer, not_loaded, plain, refuse_loaded, trust
from stages.backends.model.padding import pad_right
from stages.model_weights import first_of


def open_reward_model(model: Model, *, dtype: torch.dtype, device: torch.device) -> RewardModelOnDevice:
    """Load or build a reward model, in eval mode. Raises StageError if it cannot be loaded or has not exactly one
    label."""
    tokenizer = load_tokenizer(model)
    network: Any
    if model.config is not None:
        network = build(model, tokenizer, AutoModelForSequenceClassification, num_labels=1)
    else:
        try:
            config = AutoConfig.from_pretrained(model.source, trust_remote_code=model.trust_remote_code)
            network, found = AutoModelForSequenceClassification.from_pretrained(
                model.source, config=plain(config), dtype=dtype, output_loading_info=True, **trust(model)
            )
        except (OSError, ValueError) as error:
            raise StageError(not_loaded(model, error, "sequence classification model")) from error
        refuse_loaded(model)
        if lacking := sorted(found["missing_keys"]):
            raise StageError(
                _problem(
                    model,
                    f"the model {model.source!r} has no weights {first_of(lacking)}",
                    "a head that was not loaded scores at random",
                )
            )
    if network.config.num_labels != 1:
        raise StageError(
            _problem(
                model,
                f"the model {model.source!r} has {network.config.num_labels} labels",
                "the reward is one number per sample",
            )
        )
    return RewardModelOnDevice(model, network.to(device=device, dtype=dtype).eval().requires_grad_(False), tokenizer)


@dataclass(frozen=True, eq=False)
class RewardModelOnDevice:
    """The network and its tokenizer."""

    model: Model
    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @torch.no_grad()
    def scores(self, prompts: Sequence[str], responses: Sequence[str], *, chat: bool, microbatch: int) -> torch.Tensor:
        """One float32 score per sample, in order.

        A pass holds samples of similar length; right padding is masked, so a score does not depend on `microbatch` (0
        means all at once) except for rounding. A model without a padding token in its config cannot tell padding from
        text: its samples are scored one by one. Raises StageError for a text that exceeds the model's length limit.
        """
        rows = self._encoded(prompts, responses, chat)
        pad = self.network.config.get_text_config().pad_token_id
        size = 1 if pad is None else microbatch or max(1, len(rows))
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        made = torch.empty(len(rows), dtype=torch.float32)
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            made[chosen] = self._pass([rows[i] for i in chosen], 0 if pad is None else pad)
        return made

    def _pass(self, rows: list[torch.Tensor], pad: int) -> torch.Tensor:
        column = Ragged.of(rows)
        ids_NS = pad_right(column, pad).to(self.network.device)
        lengths_N1 = torch.tensor(column.lengths, device=ids_NS.device)[:, None]
        mask_NS = (torch.arange(ids_NS.shape[1], device=ids_NS.device) < lengths_N1).long()
        logits_N1 = self.network(input_ids=ids_NS, attention_mask=mask_NS).logits
        return logits_N1[:, 0].float().cpu()

    def _encoded(self, prompts: Sequence[str], responses: Sequence[str], chat: bool) -> list[torch.Tensor]:
        if chat and not self.tokenizer.chat_template:
            raise StageError(
                _problem(
                    self.model, f"the tokenizer of {self.model.source!r} has no chat template", "chat=True uses it"
                )
            )
        texts = [
            str(self.tokenizer.apply_chat_template(_conversation(*pair), tokenize=False)) if chat else "".join(pair)
            for pair in zip(prompts, responses)
        ]
        encoded = self.tokenizer(texts, add_special_tokens=not chat).input_ids if texts else []
        longest = getattr(self.network.config.get_text_config(), "max_position_embeddings", None)
        for i, ids in enumerate(encoded):
            if not ids or (longest is not None and len(ids) > longest):
                raise StageError(_unfit(self.model, i, texts[i], len(ids), longest))
        return [torch.tensor(ids, dtype=torch.long) for ids in encoded]


def _conversation(prompt: str, response: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def _problem(model: Model, what: str, why: str) -> Problem:
    fix = "a reward model saved with its head, num_labels=1 and, for chat=True, a chat template"
    return Problem(where=str(model.location), what=what, why=why, fix=fix)


def _unfit(model: Model, index: int, text: str, tokens: int, longest: int | None) -> Problem:
    return Problem(
        where=f"sample {index} of the task, {text[:60]!r}",
        what=f"prompt and response have {tokens} tokens for the reward model {model.source!r}",
        why=f"it accepts 1 to {longest} tokens" if longest is not None else "it needs at least 1 token",
        fix="a smaller max_tokens in the rollout, or a reward model for longer texts",
    )
