"""Notices that training diverges, from the metrics of each step. Pure; knows no model, no files and no clock.

    divergence = Divergence()
    for step, metrics in enumerate(steps):
        for notice in divergence.take(step, metrics): print(notice.problem())

Explosions are relative to the run's own history: `FACTOR` times the median of the last `WINDOW` steps, but at least
`FACTOR` times a floor, in two steps in a row. Healthy runs have outliers of one step. Each kind is noticed once.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from pipeline.errors import Problem, counted

WINDOW = 20  # steps whose median is what a metric was before
EARLY = 5  # steps until a metric without a natural scale has a history
FACTOR = 50.0
IN_A_ROW = 2  # steps of an explosion
STILL = 3  # steps without entropy or without a gradient
CONSTANT = 30  # steps with the same reward
ALIKE = 10  # steps in which all samples of each group have the same reward
NO_ENTROPY = 1e-4  # nat per token
NO_GRADIENT = 1e-9
SPREAD = 1e-3  # of the advantages; below it, there is nothing to learn from
SAME = 1e-9  # relative difference of equal rewards


@dataclass(frozen=True)
class DivergenceNotice:
    """One divergence, noticed at `step`. `before` is the metric's median in the steps before, if it has a history."""

    kind: str
    step: int
    metric: str
    value: float
    before: float | None
    what: str
    why: str
    fix: str

    def problem(self, *, warning: bool = True, saved: int | None = None) -> Problem:
        """Return the notice as a problem. `saved` is the step of the last checkpoint, 0 if there is none yet."""
        last = "" if saved is None else f" (last checkpoint: step {saved})" if saved else " (no checkpoint yet)"
        where, fix = f"step {self.step + 1}", f"{self.fix}{last}"
        return Problem(where=where, what=self.what, why=self.why, fix=fix, warning=warning)


@dataclass(frozen=True)
class _Watched:
    """A metric that may explode. `floor` is the least that its median counts as. A `relative` one has no scale of its
    own, and needs a history first."""

    kind: str
    floor: float
    relative: bool
    why: str
    fix: str


_LOWER = "a lower lr, a smaller clip_grad or a warmup in Train, from an earlier checkpoint"
_KEEP = "a higher temperature, a lower lr, or a loss that keeps entropy, from an earlier checkpoint"
_OTHER = "another reward, or prompts of another difficulty; if the policy has collapsed, a lower lr"
_SKIPPED = "their loss or gradient was not finite, so they changed nothing"
_NO_GRADIENT = "rewards differ, but nothing is learned from them: the weights are out of range"
_NO_ENTROPY = "the policy always says the same, so no sample teaches anything"
_NO_REWARD = "rewards that do not differ teach nothing"
_RUIN = "updates this large can ruin the policy"
_EXPLODING = {  # by the last part of the metric's name
    "loss": _Watched("loss", 0.1, True, _RUIN, _LOWER),
    "grad_norm": _Watched("gradient", 0.1, True, _RUIN, _LOWER),
    "kl": _Watched(
        "kl", 0.02, False, "the policy has left the reference model", "a lower lr, or a larger kl in the loss"
    ),
    "mismatch_kl": _Watched(
        "mismatch",
        0.02,
        False,
        "the sampler and the trainer no longer hold the same policy",
        "a lower lr, a smaller max_staleness, or a correction in the loss",
    ),
}


class Divergence:
    """The history of one run. Its size does not grow with the steps."""

    def __init__(self) -> None:
        self._history: dict[str, deque[float]] = {}
        self._rewards: deque[float] = deque(maxlen=CONSTANT)
        self._in_a_row: Counter[tuple[str, str]] = Counter()  # by kind and metric
        self._noticed: set[str] = set()
        self._odd: set[str] = set()  # metrics of this step that may show a divergence: not a part of the history

    def take(self, step: int, metrics: Mapping[str, float]) -> list[DivergenceNotice]:
        """Return what the metrics of a step show for the first time."""
        self._odd.clear()
        found = {notice.kind: notice for notice in reversed([*self._found(step, metrics)])}
        new = [notice for kind, notice in reversed(found.items()) if kind not in self._noticed]
        self._noticed.update(found)
        for name, value in metrics.items():
            if _part(name) in (*_EXPLODING, "entropy") and math.isfinite(value) and name not in self._odd:
                self._history.setdefault(name, deque(maxlen=WINDOW)).append(abs(value))
        return new

    def _found(self, step: int, metrics: Mapping[str, float]) -> Iterator[DivergenceNotice]:
        """Yield what holds at a step, noticed before or not."""
        spread = max((value for name, value in metrics.items() if _part(name) == "abs_mean"), default=0.0)
        for name, value in metrics.items():
            part = _part(name)
            if not math.isfinite(value):
                learned = part in (*_EXPLODING, "entropy", "reward") or name.startswith("reward/")
                own = f"correct what computes {name}, if that is yours; otherwise, {_LOWER}"
                kind, fix = ("not finite", _LOWER) if learned else ("other not finite", own)
                yield self._notice(kind, step, name, value, "what is computed from it means nothing", fix)
            elif part == "skipped" and value > 0:
                done = metrics.get(f"{name.removesuffix('skipped')}updates", 0.0)
                what = f"{value:g} of {value + done:g} updates were skipped"
                yield self._notice("not finite", step, name, value, _SKIPPED, _LOWER, what)
            elif part in _EXPLODING and self._explodes(name, value, _EXPLODING[part]):
                watched = _EXPLODING[part]
                yield self._notice(watched.kind, step, name, value, watched.why, watched.fix)
            elif part == "grad_norm" and self._lasts("still", name, value <= NO_GRADIENT and spread > SPREAD, STILL):
                yield self._notice("no gradient", step, name, value, _NO_GRADIENT, _LOWER)
            elif part == "entropy" and self._lasts("still", name, value < NO_ENTROPY, STILL):
                yield self._notice("entropy", step, name, value, _NO_ENTROPY, _KEEP)
            elif part == "zero_spread" and self._lasts("alike", name, value >= 1, ALIKE):
                what = f"all samples of each group have had the same reward for {ALIKE} steps"
                yield self._notice("reward", step, name, value, _NO_REWARD, _OTHER, what)
            elif name == "reward/mean" and self._constant(value):
                what = f"{name} has been {value:.4g} for {CONSTANT} steps"
                yield self._notice("reward", step, name, value, _NO_REWARD, _OTHER, what)

    def _notice(
        self, kind: str, step: int, name: str, value: float, why: str, fix: str, what: str = ""
    ) -> DivergenceNotice:
        history = self._history.get(name)
        before = median(history) if history else None
        if not what:
            what = f"{name} is {value:.4g}"
            if history:
                what += f", and was {before:.4g}, the median of {counted(len(history), 'step')} before"
        return DivergenceNotice(kind, step, name, value, before, what, why, fix)

    def _explodes(self, name: str, value: float, watched: _Watched) -> bool:
        history = self._history.get(name, ())
        early = len(history) < EARLY
        allowed = FACTOR * (watched.floor if early else max(median(history), watched.floor))
        return self._lasts("explodes", name, abs(value) > allowed and not (early and watched.relative), IN_A_ROW)

    def _constant(self, value: float) -> bool:
        self._rewards.append(value)
        lasts = len(self._rewards) == CONSTANT
        return lasts and max(self._rewards) - min(self._rewards) <= SAME * max(map(abs, self._rewards))

    def _lasts(self, what: str, name: str, holds: bool, steps: int) -> bool:
        """Return whether a condition has held for this many steps in a row."""
        self._in_a_row[what, name] = self._in_a_row[what, name] + 1 if holds else 0
        if holds:
            self._odd.add(name)
        return self._in_a_row[what, name] >= steps


def _part(name: str) -> str:
    return name.rpartition("/")[2]
