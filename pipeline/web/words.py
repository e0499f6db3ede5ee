"""What each number of a step is called and how to read it. The names are those of metrics.jsonl."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec


class Words(msgspec.Struct, frozen=True, kw_only=True):
    """`unit` is empty for a plain number, "%" for a share that is shown in percent, "s" or "bytes"."""

    title: str
    section: str
    unit: str
    read: str


def _words(title: str, section: str, read: str, unit: str = "") -> Words:
    return Words(title=title, section=section, unit=unit, read=read)


LEARNING, TEXTS, UPDATE, APART, TIME, OTHER = "Learning", "Responses", "Update", "Sampler and trainer", "Time", "Other"
SECTIONS = (LEARNING, TEXTS, UPDATE, APART, TIME, OTHER)
KNOWN: tuple[tuple[str, Words], ...] = (
    ("reward/mean", _words("Reward", LEARNING, "Should rise. Flat from the start: too hard, or rewards that say nothing.")),
    ("reward/std", _words("Reward, spread", LEARNING, "Within a batch. Near 0 there is nothing left to tell apart.")),
    (r"reward/(?!mean|std)(.+)", _words("Reward: {}", LEARNING, "One part of the reward, before weights.")),
    ("advantage/zero_spread", _words("Groups without spread", LEARNING, "All samples of a group have one reward: they teach nothing. High early: too hard; high late: solved.", "%")),
    ("advantage/abs_mean", _words("Advantage, size", LEARNING, "How much samples of a group differ.")),
    (r"eval/(?!count|length_mean|truncated)(.+)", _words("Held out: {}", LEARNING, "On prompts that are never trained. Falls while reward rises: overfitting, or a reward that is gamed.")),
    ("rollout/length_mean", _words("Response length", TEXTS, "Tokens. A slow climb is usual when reasoning pays; a jump is not.")),
    ("rollout/truncated", _words("Truncated", TEXTS, "Responses that hit max_tokens. Above a few percent, the limit shapes what is learned.", "%")),
    ("eval/length_mean", _words("Held out: length", TEXTS, "Tokens.")),
    ("eval/truncated", _words("Held out: truncated", TEXTS, "Responses that hit the limit.", "%")),
    ("train/loss", _words("Loss", UPDATE, "Not a measure of learning here: its mean is near 0 by construction.")),
    ("train/grad_norm", _words("Gradient norm", UPDATE, "Before clipping. Spikes that last point at bad samples or a high learning rate.")),
    ("train/entropy", _words("Entropy", UPDATE, "Exact, per token. A fast fall to 0 means that samples are all alike and exploration is over.")),
    ("train/kl", _words("KL to the reference", UPDATE, "How far the policy has moved from where it began.")),
    ("train/clip_fraction", _words("Clipped tokens", UPDATE, "Tokens whose gradient is cut. 0 with one update a step; above 20 %, steps are too large.", "%")),
    ("train/clip_high", _words("Clipped above", UPDATE, "Of these, where the ratio was too high.", "%")),
    ("train/ratio_mean", _words("Ratio, mean", UPDATE, "New over previous probability. Near 1.")),
    ("train/ratio_max", _words("Ratio, largest", UPDATE, "Of any token.")),
    ("train/lr", _words("Learning rate", UPDATE, "As scheduled.")),
    ("train/skipped", _words("Skipped updates", UPDATE, "Updates whose loss was not finite. Anything but 0 needs a look.")),
    ("train/staleness_mean", _words("Age of what is trained", APART, "Versions between sampling and training, mean over tokens.")),
    ("train/staleness_max", _words("Age, largest", APART, "Never above max_staleness.")),
    ("train/mismatch_kl", _words("Mismatch KL", APART, "Between sampler and trainer on the same tokens. Above 1e-2 without staleness, the engines compute differently.")),
    ("train/mismatch_ratio_max", _words("Mismatch, largest ratio", APART, "The token on which they differ most.")),
    ("train/mismatch_ess", _words("Effective sample size", APART, "Share of the batch that counts after correction. 1 where nothing is stale.", "%")),
    ("train/is_weight", _words("Correction weight", APART, "Mean importance weight. Near 1.")),
    ("train/is_changed", _words("Corrected tokens", APART, "Whose weight was capped or masked.", "%")),
    (r"dropped/(.+)", _words("Dropped: {}", APART, "Groups that were sampled and not trained.")),
    ("time/step_s", _words("Step", TIME, "From the first admission to the end of the step; steps overlap when the run is ahead.", "s")),
    (r"time/(.+)_s", _words("{}", TIME, "Seconds of all its tasks in the step.", "s")),
    ("train/utilization", _words("Model FLOP utilisation", TIME, "Of the GPU's peak, while training.", "%")),
    ("train/tflops_per_s", _words("Training speed", TIME, "TFLOP/s of all ranks.")),
    (r"refit/(.+)_ms", _words("Refit: {}", TIME, "Milliseconds.")),
    (r"refit/path_(.+)", _words("Refit by {}", TIME, "1 where the version came by this transport.")),
    ("refit/lookups", _words("Refit: look-ups", TIME, "Plans, tables, memory and connections that were not there before. 0 once it is warm.")),
    (r"refit/(.+)_bytes", _words("Refit: {}", TIME, "Moved in the step.", "bytes")),
)  # fmt: skip


def in_order(names: Iterable[str]) -> list[str]:
    """Names in the order in which they are listed above, the unknown ones last and by letter."""
    places = {
        name: next((n for n, (pattern, _) in enumerate(KNOWN) if re.fullmatch(pattern, name)), len(KNOWN))
        for name in names
    }
    return sorted(places, key=lambda name: (places[name], name))


def words(name: str) -> Words:
    """What a metric is called. One that is not known keeps its name."""
    for pattern, known in KNOWN:
        found = re.fullmatch(pattern, name)
        if found:
            part = found[1].replace("_", " ") if found.groups() else ""
            return msgspec.structs.replace(known, title=known.title.format(part))
    return Words(title=name, section=OTHER, unit="", read="")
