"""Supervised training before the graph runs: GRPO needs a model that is right now and then.

task = Generated("reverse")
Model("tiny", config=..., alphabet=task.alphabet, warm_start=Supervised(task, steps=60))
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from stages.tasks import Generated

if TYPE_CHECKING:
    from pipeline.columns import Ragged


@dataclass(frozen=True)
class Supervised:
    """Next-token cross-entropy on the answers of training prompts, AdamW at a constant rate.

    source  training prompts and answers; held-out ones are not touched
    steps   updates
    batch   examples an update
    lr      learning rate
    """

    source: Generated
    _: KW_ONLY
    steps: int = 60
    batch: int = 64
    lr: float = 3e-3

    def run(self, model: Any, tokenizer: Any, seed: int) -> None:
        """Trains `model`, of transformers, in place. A function of the seed, which orders the examples."""
        import torch

        from ops.logprobs import selected_logprobs
        from stages.backends.torch.score import response_logits

        optimizer = torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=0.0, fused=True)
        for step in range(self.steps):
            pairs = [self.source.train(step * self.batch + i, order=seed) for i in range(self.batch)]
            prompts = _encode(tokenizer, [prompt for prompt, _ in pairs], closing=[])
            answers = _encode(tokenizer, [answer for _, answer in pairs], closing=[tokenizer.eos_token_id])
            logits_NTV, ids_NT, real_NT = response_logits(
                model, prompts, answers, temperature=1.0, pad=tokenizer.pad_token_id
            )
            loss = -selected_logprobs(logits_NTV, ids_NT)[real_NT].mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def _encode(tokenizer: Any, texts: list[str], closing: list[int]) -> Ragged:
    import torch

    from pipeline.columns import Ragged

    return Ragged.of([torch.tensor(tokenizer(text).input_ids + closing) for text in texts])
