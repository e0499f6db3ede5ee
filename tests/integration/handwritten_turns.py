"""GRPO on conversations of several turns, written by hand: torch and transformers, one process, one loop.

The oracle for episodes whose turns have advantages of their own. Each episode is sampled alone, without a cache, and
its environment is called here. It imports nothing of the engine or the stages; the random numbers are part of the
input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from ops.random import uniform
from tests.integration.handwritten import EOS, PAD, build, logprobs_of


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of both sides of the comparison. `play` begins an episode: given the prompt and its random numbers,
    a function that takes a reply and returns what is said next, None at the end, and the reward of the turn."""

    config: Mapping[str, Any]
    alphabet: str
    example: Callable[[int], str]  # prompts by number, all of one length
    play: Callable[[str, Random], Callable[[str], tuple[str | None, float]]]
    stream: int  # of the random numbers for sampling
    turn_tokens: int
    tokens: int
    steps: int
    prompts: int
    samples: int
    minibatches: int
    lr: float
    discount: float
    seed: int
    clip: float = 0.2


@dataclass
class Talk:
    """An episode: all tokens after the prompt, and of which turn each is, -1 if the policy did not draw it."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


def run(s: Settings) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train, and return the mean loss of each step and the final weights."""
    model = build(s.config, s.alphabet, s.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.lr, weight_decay=0.0, fused=True)
    losses = []
    for step in range(s.steps):
        groups = [step * s.prompts + i for i in range(s.prompts)]
        talks = [talk(model, s, group, i) for group in groups for i in range(s.samples)]
        advantages = []
        for first in range(0, len(talks), s.samples):
            advantages += of_group(talks[first : first + s.samples], s.discount)
        prompts = torch.tensor([each.prompt for each in talks])
        ids, weight = padded([each.ids for each in talks], PAD), padded(advantages, 0.0)
        mask = padded([[turn >= 0 for turn in each.turns] for each in talks], False)
        with torch.no_grad():
            old = logprobs_of(model, prompts, ids)
        size, total = len(talks) // s.minibatches, 0.0
        for i in range(s.minibatches):
            part = slice(i * size, (i + 1) * size)
            ratio = torch.exp(logprobs_of(model, prompts[part], ids[part]) - old[part])
            gain, drawn = weight[part], mask[part]
            per_token = -torch.min(ratio * gain, ratio.clamp(1 - s.clip, 1 + s.clip) * gain)
            loss = torch.where(drawn, per_token, 0.0).sum() / drawn.sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        losses.append(total / s.minibatches)
    return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def padded(rows: list[list[Any]], fill: Any) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])


@torch.no_grad()
def talk(model: Any, s: Settings, group: int, sample: int) -> Talk:
    """Sample an episode."""
    ids_of = {character: i + 2 for i, character in enumerate(s.alphabet)}
    numbers = torch.as_tensor(uniform(s.seed, s.stream, [group], [sample], s.tokens))[0]
    prompt = s.example(group)
    answer = s.play(prompt, Random(repr((s.seed, group, sample))))
    made, said = Talk([ids_of[character] for character in prompt]), ""
    turn = 0
    while said is not None:
        made.ids += [ids_of[character] for character in said]
        made.turns += [-1] * len(said)
        reply = ""
        for _ in range(s.turn_tokens):
            logits = model(input_ids=torch.tensor([made.prompt + made.ids]), use_cache=False).logits[0, -1]
            cumulative = logits.log_softmax(-1).exp().double().cumsum(-1)
            target = torch.minimum(
                numbers[len(made.ids)] * cumulative[-1],
                torch.nextafter(cumulative[-1], torch.zeros_like(cumulative[-1])),
            )
            chosen = int(torch.searchsorted(cumulative, target, right=True))
            made.ids.append(chosen)
            made.turns.append(turn)
            if chosen == EOS:
                break
            reply += s.alphabet[chosen - 2] if chosen != PAD else ""
        said, reward = answer(reply)
        made.rewards.append(reward)
        turn += 1
    return made


def of_group(talks: list[Talk], discount: float) -> list[list[float]]:
    """The advantage of each token. A sample's reward is the sum of its turns, and is added to the last of them."""
    turns = [torch.tensor(each.rewards) for each in talks]
    for rewards in turns:
        rewards[-1] += torch.tensor(math.fsum(rewards.tolist()))
    every = torch.cat(turns)
    equal = bool((every == every[0]).all())
    normal = torch.zeros_like(every) if equal else (every - every.mean()) / (every.std() + 1e-6)
    found = []
    for each, row in zip(talks, normal.split([len(rewards) for rewards in turns])):
        sums = row.tolist()
        later = torch.tensor(0.0)
        for u in reversed(range(len(sums))):
            later = row[u] + discount * later if u + 1 < len(sums) else row[u]
            sums[u] = later.item()
        found.append([sums[turn] if turn >= 0 else 0.0 for turn in each.turns])
    return found
