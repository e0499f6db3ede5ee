"""Titles and explanations of the metrics in metrics.jsonl."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec


class Words(msgspec.Struct, frozen=True, kw_only=True):
    """Title, section and explanation (`read`) of a metric. `unit` is "" for a plain number, "%" for a share shown in
    percent, "s" or "bytes"."""

    title: str
    section: str
    unit: str
    read: str


def _words(title: str, section: str, read: str, unit: str = "") -> Words:
    return Words(title=title, section=section, unit=unit, read=read)


LEARNING, TEXTS, UPDATE, APART, TIME, OTHER = "Learning", "Responses", "Update", "Sampler and trainer", "Time", "Other"
SECTIONS = (LEARNING, TEXTS, UPDATE, APART, TIME, OTHER)
KNOWN: tuple[tuple[str, Words], ...] = (
    ("reward/mean", _words("Reward", LEARNING, "Should rise. If flat from the start, the task is too hard or the reward is uninformative.")),
    ("reward/std", _words("Reward, spread", LEARNING, "Within a batch. Near 0, the samples no longer differ.")),
    (r"reward/(?!mean|std)(.+)", _words("Reward: {}", LEARNING, "One component of the reward, before weighting.")),
    ("advantage/zero_spread", _words("Groups without spread", LEARNING, "All samples of a group have the same reward, so they teach nothing. High early: too hard; high late: solved.", "%")),
    ("advantage/abs_mean", _words("Advantage, size", LEARNING, "How much the rewards within a group differ.")),
    (r"eval/(?!count|length_mean|truncated|end_)(.+)", _words("Held out: {}", LEARNING, "On prompts that are never trained on. If it falls while reward rises: overfitting or reward hacking.")),
    ("rollout/length_mean", _words("Response length", TEXTS, "Tokens. A slow rise is normal when longer reasoning pays off; a jump is not.")),
    ("rollout/truncated", _words("Truncated", TEXTS, "Responses that hit max_tokens. Above a few percent, the limit distorts learning.", "%")),
    ("rollout/tokens_per_pass", _words("Tokens per pass", TEXTS, "That a sample gains in one pass of the model. 1 if no drafted token is right; speculate + 1 if all are.")),
    ("eval/length_mean", _words("Held out: length", TEXTS, "Tokens.")),
    ("eval/truncated", _words("Held out: truncated", TEXTS, "Responses that hit the limit.", "%")),
    ("eval/end_lost", _words("Held out: lost episodes", TEXTS, "Machines have failed them, and no score counts them. Investigate anything but 0.", "%")),
    (r"eval/end_(.+)", _words("Held out: end {}", TEXTS, "Episodes that ended this way.", "%")),
    ("train/loss", _words("Loss", UPDATE, "Not a measure of learning here: its mean is near 0 by construction.")),
    ("train/grad_norm", _words("Gradient norm", UPDATE, "Before clipping. Lasting spikes suggest bad samples or a high learning rate.")),
    ("train/entropy", _words("Entropy", UPDATE, "Exact, per token. A fast drop to 0 means that all samples are alike and exploration has ended.")),
    ("train/kl", _words("KL to the reference", UPDATE, "How far the policy has moved from its start.")),
    ("train/clip_fraction", _words("Clipped tokens", UPDATE, "Tokens whose gradient is clipped. 0 with one update per step; above 20 %, updates are too large.", "%")),
    ("train/clip_high", _words("Clipped above", UPDATE, "Clipped because the ratio was too high.", "%")),
    ("train/ratio_mean", _words("Ratio, mean", UPDATE, "New over previous probability. Near 1.")),
    ("train/ratio_max", _words("Ratio, largest", UPDATE, "Of any token.")),
    ("train/lr", _words("Learning rate", UPDATE, "As scheduled.")),
    ("train/skipped", _words("Skipped updates", UPDATE, "Updates with a non-finite loss. Investigate anything but 0.")),
    ("train/staleness_mean", _words("Staleness", APART, "Versions between sampling and training, mean over tokens.")),
    ("train/staleness_max", _words("Staleness, largest", APART, "Never above max_staleness.")),
    ("train/mismatch_kl", _words("Mismatch KL", APART, "Between sampler and trainer on the same tokens. Above 1e-2 without staleness, the engines disagree.")),
    ("train/token_mult_prob_error", _words("Token probability error", APART, "Mean factor between a token's two probabilities, whichever is larger. 1 if sampler and trainer agree; NeMo-RL's name and formula.")),
    ("train/mismatch_ratio_max", _words("Mismatch, largest ratio", APART, "The token on which they differ most.")),
    ("train/mismatch_ess", _words("Effective sample size", APART, "Share of the batch that counts after correction. 1 if nothing is stale.", "%")),
    ("train/is_weight", _words("Correction weight", APART, "Mean importance weight. Near 1.")),
    ("train/is_changed", _words("Corrected tokens", APART, "Tokens whose weight was capped or masked.", "%")),
    (r"dropped/(.+)", _words("Dropped: {}", APART, "Groups that were sampled but not trained.")),
    ("stored/peak_bytes", _words("Data plane, peak", TIME, "Most bytes of samples in all partitions since the step before. Schedule(capacity_bytes=...) bounds it.", "bytes")),
    (r"stored/peak_bytes_(.+)", _words("Data plane, peak: {}", TIME, "Most bytes in this partition, which is cleared after the stages that it is named by.", "bytes")),
    ("time/step_s", _words("Step", TIME, "From the first admission to the end of the step; steps overlap when the run is ahead.", "s")),
    (r"time/(.+)_s", _words("{}", TIME, "Seconds of all its tasks in the step.", "s")),
    (r"(\w+)/padding", _words("Padding: {}", TIME, "Share of the computed tokens that is padding. Above 10 %, use Dynamic or Packed, or a smaller budget of tokens.", "%")),
    (r"(\w+)/shared", _words("Shared prompts: {}", TIME, "Share of the samples' tokens that is not computed: Packed rows compute the prompt of a group once where that pays.", "%")),
    (r"(\w+)/imbalance", _words("Imbalance: {}", TIME, "Cost of the slowest worker over the mean; the others wait for it. Near 1. Attention counts where the model's shape is known.")),
    (r"(\w+)/microbatches", _words("Microbatches: {}", TIME, "Passes of each worker per epoch. Few and full ones are faster.")),
    (r"(\w+)/utilization", _words("Model FLOP utilization: {}", TIME, "Share of the GPU's peak while the stage runs.", "%")),
    (r"(\w+)/tflops_per_s", _words("Speed: {}", TIME, "TFLOP/s per rank.")),
    ("data/requests", _words("Data plane, requests", TIME, "Sent to TransferQueue by the workers in the step.")),
    ("data/cache_hits", _words("Data plane, cache hits", TIME, "Share of the columns read that a worker still had.", "%")),
    (r"data/bytes_(.+)", _words("Data plane: {}", TIME, "Bytes that this reader got from this writer in the step, from its cache too.", "bytes")),
    (r"refit/(.+)_ms", _words("Refit: {}", TIME, "Milliseconds.")),
    (r"refit/path_(.+)", _words("Refit by {}", TIME, "1 if the version arrived by this transport.")),
    ("refit/lookups", _words("Refit: lookups", TIME, "New plans, tables, buffers and connections. 0 after the first refit.")),
    ("refit/quant_error", _words("Quantization error", APART, "Of the sampler's 8-bit weights: norm of the error over that of the weights, mean over the layers. About 2.6 % for e4m3 in blocks.", "%")),
    ("refit/quant_error_worst", _words("Quantization error, worst layer", APART, "Far above the mean: a few large weights set the scale of a block.", "%")),
    (r"refit/quant_error_layer_(.+)", _words("Quantization error, layer {}", APART, "Norm of the error over that of the layer's weights.", "%")),
    (r"refit/cache_scale_(.+)", _words("Scale of the 8-bit cache: {}", APART, "Of queries (q), keys (k) or values (v), smallest or largest over the layers: a power of two, from a bound of the weights. It grows with the weights.")),
    (r"refit/kept_bytes_(.+)", _words("Refit, kept: {}", TIME, "Memory of a worker of this side that stays allocated between refits: the published copy, messages and tables.", "bytes")),
    (r"refit/peak_bytes_(.+)", _words("Refit, peak: {}", TIME, "The most of that memory during a refit.", "bytes")),
    (r"refit/(.+)_bytes", _words("Refit: {}", TIME, "Moved in the step.", "bytes")),
)  # fmt: skip


def in_order(names: Iterable[str]) -> list[str]:
    """Sort names in the order listed above, unknown ones last in alphabetical order."""
    places = {
        name: next((n for n, (pattern, _) in enumerate(KNOWN) if re.fullmatch(pattern, name)), len(KNOWN))
        for name in names
    }
    return sorted(places, key=lambda name: (places[name], name))


def words(name: str) -> Words:
    """Return the words for a metric. An unknown metric keeps its name as title."""
    for pattern, known in KNOWN:
        found = re.fullmatch(pattern, name)
        if found:
            part = found[1].replace("_", " ") if found.groups() else ""
            return msgspec.structs.replace(known, title=known.title.format(part))
    return Words(title=name, section=OTHER, unit="", read="")
