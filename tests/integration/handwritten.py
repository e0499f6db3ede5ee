"""GRPO on a tiny model, written by hand: torch and transformers, one process, one loop.

The oracle for the stages: the same model, data, random numbers and hyperparameters give the same losses and weights,
bit for bit, with one thread. With `kl`, the loss has a KL term against the model before training. It imports nothing of
the engine or the stages. The random numbers are those of `ops.random` because they are part of the input.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from ops.random import uniform

PAD, EOS = 0, 1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of both sides of the comparison."""

    config: Mapping[str, Any]  # of transformers, and `embedding_std`
    alphabet: str
    example: Callable[[int], tuple[str, str]]  # training prompt and answer by number, all prompts of one length
    stream: int  # of the random numbers for sampling
    max_tokens: int
    warm_steps: int
    warm_batch: int
    warm_lr: float
    steps: int
    prompts: int
    samples: int
    lr: float
    minibatches: int
    seed: int
    clip: float = 0.2
    kl: float = 0.0  # weight of the divergence from the model before training; 0 needs no reference model


def run(s: Settings, on_step: Callable[[], None] = lambda: None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train, and return the mean loss of each step and the final weights."""
    ids_of = {character: i + 2 for i, character in enumerate(s.alphabet)}

    def encode(texts: list[str]) -> torch.Tensor:
        return torch.tensor([[ids_of[character] for character in text] for text in texts])

    def decode(ids: list[int]) -> str:
        return "".join(s.alphabet[i - 2] for i in ids if i not in (PAD, EOS))

    model = build(s.config, s.alphabet, s.seed)
    warm_start(model, s, encode)
    reference = copy.deepcopy(model).requires_grad_(False) if s.kl else None
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=s.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True
    )
    losses = []
    for step in range(s.steps):
        admissions = [step * s.prompts + i for i in range(s.prompts)]
        pairs = [s.example(i) for i in admissions]
        prompts = encode([prompt for prompt, _ in pairs])
        numbers = uniform(
            s.seed,
            s.stream,
            [a for a in admissions for _ in range(s.samples)],
            [i for _ in admissions for i in range(s.samples)],
            s.max_tokens,
        )
        responses, lengths = sample(model, prompts, s.samples, torch.as_tensor(numbers))
        texts = [decode(row[:length]) for row, length in zip(responses.tolist(), lengths.tolist())]
        answers = [answer for _, answer in pairs for _ in range(s.samples)]
        rewards = torch.tensor([right_digits(text, answer) for text, answer in zip(texts, answers)])
        advantages = torch.cat([relative(group) for group in rewards.split(s.samples)])
        inputs = prompts.repeat_interleave(s.samples, 0)
        with torch.no_grad():
            width = int(lengths.max())
            old = logprobs_of(model, inputs, responses[:, :width])
            ref = logprobs_of(reference, inputs, responses[:, :width]) if reference else None
        size = len(inputs) // s.minibatches
        total = 0.0
        for i in range(s.minibatches):
            part = slice(i * size, (i + 1) * size)
            width = int(lengths[part].max())
            mask = torch.arange(width) < lengths[part, None]
            new = logprobs_of(model, inputs[part], responses[part, :width])
            ratio = torch.exp(new - old[part, :width])
            weight = advantages[part, None]
            clipped = ratio.clamp(1 - s.clip, 1 + s.clip)
            per_token = -torch.min(ratio * weight, clipped * weight)
            if ref is not None:
                per_token = per_token + s.kl * k3(new - ref[part, :width])
            loss = torch.where(mask, per_token, 0.0).sum() / mask.sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            done = (step * s.minibatches + i) / (s.steps * s.minibatches)
            optimizer.param_groups[0]["lr"] = s.lr * 0.5 * (1 + math.cos(math.pi * done))
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        losses.append(total / s.minibatches)
        on_step()
    return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def build(config: Mapping[str, Any], alphabet: str, seed: int) -> Any:
    torch.manual_seed(seed)
    entries = dict(config)
    family, embedding_std = entries.pop("model_type"), entries.pop("embedding_std")
    made = AutoConfig.for_model(family, **entries, vocab_size=len(alphabet) + 2, pad_token_id=PAD, eos_token_id=EOS)
    model = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa").float().eval()
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=embedding_std)
    return model


def warm_start(model: Any, s: Settings, encode: Callable[[list[str]], torch.Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.warm_lr, weight_decay=0.0, fused=True)
    for step in range(s.warm_steps):
        pairs = [s.example(step * s.warm_batch + i) for i in range(s.warm_batch)]
        prompts = encode([prompt for prompt, _ in pairs])
        answers = torch.nn.functional.pad(encode([answer for _, answer in pairs]), (0, 1), value=EOS)
        loss = -logprobs_of(model, prompts, answers).flatten().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def logprobs_of(model: Any, prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
    """Return the logprobs of the response tokens, including trailing padding, which the caller masks."""
    inputs = torch.cat([prompts, responses[:, :-1]], dim=1)
    logits = model(input_ids=inputs, use_cache=False, logits_to_keep=responses.shape[1]).logits
    return selected(logits, responses)


def selected(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the logprob of each id."""
    return logits.gather(-1, ids[..., None])[..., 0] - logits.logsumexp(-1)


@torch.no_grad()
def sample(model: Any, prompts: torch.Tensor, count: int, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `count` responses per prompt: ids padded on the right, and lengths including the closing token."""
    cache = DynamicCache(config=model.config)
    logits = model(input_ids=prompts, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    cache.batch_repeat_interleave(count)
    logits = logits.repeat_interleave(count, 0)
    tokens = numbers.shape[1]
    responses = torch.full(numbers.shape, PAD)
    lengths = torch.full((len(numbers),), tokens)
    open_rows = torch.arange(len(numbers))  # rows that the cache holds
    for t in range(tokens):
        cumulative = logits.log_softmax(-1).exp().double().cumsum(-1)
        total = cumulative[:, -1:]
        target = torch.minimum(numbers[open_rows, t, None] * total, torch.nextafter(total, torch.zeros_like(total)))
        chosen = torch.searchsorted(cumulative, target, right=True)[:, 0]
        running = lengths[open_rows] == tokens
        responses[open_rows[running], t] = chosen[running]
        lengths[open_rows[running & (chosen == EOS)]] = t + 1
        running = (lengths[open_rows] == tokens) & (chosen != EOS)
        if t + 1 == tokens or not running.any():
            break
        if 2 * int(running.sum()) <= len(open_rows):
            keep = running.nonzero()[:, 0]
            cache.batch_select_indices(keep)
            open_rows, chosen = open_rows[keep], chosen[keep]
        logits = model(input_ids=chosen[:, None], past_key_values=cache, use_cache=True).logits[:, -1]
    return responses, lengths


def right_digits(text: str, answer: str) -> float:
    return sum(a == b for a, b in zip(text, answer)) / max(len(text), len(answer))


def k3(x: torch.Tensor) -> torch.Tensor:
    """Return exp(-x) + x - 1 for x = logprobs - reference logprobs: the KL term of GRPO (arXiv 2402.03300, eq. 4)."""
    return torch.expm1(-x) + x


def relative(rewards: torch.Tensor) -> torch.Tensor:
    if bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)
