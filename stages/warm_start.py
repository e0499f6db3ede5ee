"""Supervised training before the graph runs: GRPO needs a model that is sometimes right.

task = Generated("reverse")
Model("tiny", config=..., alphabet=task.alphabet, warm_start=Supervised(task, steps=200, until=0.4))
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pipeline.declare.parameters import is_whole
from pipeline.errors import shown
from stages.tasks import Calculated, Generated, Programmed

if TYPE_CHECKING:
    from pipeline.declare.columns import Ragged

WINDOW = 4  # batches that `until` averages over


@dataclass(frozen=True)
class Supervised:
    """Next-token cross-entropy on the answers of training prompts; AdamW with a constant learning rate.

    source  training prompts and answers, or what a Calculated or Programmed task shows; held-out ones are
            not used
    steps   maximum number of updates
    until   stop once this fraction of the answers in the last 4 batches was entirely right under greedy decoding. How
            fast a model learns varies with the seed; this makes the starting points alike. None runs all steps
    batch   examples per update
    lr      learning rate
    """

    source: Generated | Calculated | Programmed
    _: KW_ONLY
    steps: int = 60
    until: float | None = None
    batch: int = 64
    lr: float = 3e-3

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Problems of the description, as (what, why, fix)."""
        if not isinstance(self.source, Generated | Calculated | Programmed):
            what = f"Supervised has the source {shown(self.source)}"
            yield what, "a warm start trains on the answers of a Generated task", "Supervised(Generated('reverse'))"
        for name, least, default in (("steps", 0, 60), ("batch", 1, 64)):
            value = getattr(self, name)
            if not is_whole(value, least):
                why = f"{name} must be a whole number, {least} or more"
                yield f"Supervised has {name}={value!r}", why, f"{name}={default}"
        if self.until is not None and not (isinstance(self.until, int | float) and 0 <= self.until <= 1):
            what = f"Supervised has until={self.until!r}"
            yield what, "it must be a fraction of the answers, 0 to 1, or None", "until=0.25"
        if not (isinstance(self.lr, int | float) and 0 <= self.lr < float("inf")):
            yield f"Supervised has lr={self.lr!r}", "the learning rate must be 0 or more", "lr=3e-3"

    def run(self, model: Any, tokenizer: Any, seed: int) -> None:
        """Train `model`, a transformers model, in place. Deterministic in the seed, which orders the examples."""
        import torch

        from ops.logprobs import selected_logprobs
        from pipeline.declare.sharding import Microbatch
        from stages.backends.torch.score import predict

        optimizer = torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=0.0, fused=True)
        right: deque[float] = deque(maxlen=WINDOW)
        for step in range(self.steps):
            pairs = [self.source.train(step * self.batch + i, order=seed) for i in range(self.batch)]
            prompts = _encode(tokenizer, [prompt for prompt, _ in pairs], closing=[])
            answers = _encode(tokenizer, [answer for _, answer in pairs], closing=[tokenizer.eos_token_id])
            all_of_it = Microbatch(tuple(range(self.batch)), max(prompts.lengths), max(answers.lengths))
            made = predict(model, prompts, answers, all_of_it, temperature=1.0, pad=tokenizer.pad_token_id)
            logits_NTV, ids_NT, real_NT = made.logits, made.ids, made.mask_NT
            # If every argmax is right given the answer so far, greedy decoding gives exactly this answer.
            right.append(((logits_NTV.argmax(-1) == ids_NT) | ~real_NT).all(1).float().mean().item())
            if self.until is not None and len(right) == WINDOW and fmean(right) >= self.until:
                return
            loss = -selected_logprobs(logits_NTV, ids_NT)[real_NT].mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def _encode(tokenizer: Any, texts: list[str], closing: list[int]) -> Ragged:
    import torch

    from pipeline.declare.columns import Ragged

    return Ragged.of([torch.tensor(tokenizer(text).input_ids + closing) for text in texts])
