"""Distributions of seconds as a user writes them, and random numbers that depend only on their purpose.

    parse("lognormal(1.0, 0.8)")              mean 1 s, sigma 0.8 of the logarithm
    parse("0.2 + 0.001/sample @ 2")           0.2 s and 1 ms per sample, on two cores
    parse("uniform(0.1, 0.3) + 0.05/group")

Terms are added. A number or a distribution is in seconds per task; for a stream, in seconds until a group is finished.
`@ CORES` means that the task computes on that many cores; without it, the task spends the time waiting. Nothing is
evaluated as code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from statistics import NormalDist

import msgspec

_MASK = (1 << 64) - 1
_NORMAL = NormalDist()
_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+)"
_CALL = re.compile(r"([a-z]+)\(([^()]*)\)\Z")
_SHARE = re.compile(_NUMBER + r"\s*(?:/\s*(sample|group))?\Z")
MOST_S = 1_000_000_000  # no duration is longer than thirty years
GRAMMAR = "0.2 + 0.001/sample + lognormal(MEAN, SIGMA) @ CORES"


def uniform(seed: int, *counters: int) -> float:
    """Return a number in (0, 1) that depends only on the arguments (splitmix64; Steele, Lea and Flood, 2014)."""
    state = seed & _MASK
    for counter in counters:
        state = (_mixed(state) ^ counter) + 0x9E3779B97F4A7C15 & _MASK
    return ((_mixed(state) >> 11) + 0.5) / (1 << 53)


def _mixed(state: int) -> int:
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
    return state ^ (state >> 31)


def _constant(u: float, value: float) -> float:
    return value


def _uniform(u: float, low: float, high: float) -> float:
    return low + (high - low) * u


def _exponential(u: float, mean: float) -> float:
    return -mean * math.log(u)


def _lognormal(u: float, mean: float, sigma: float) -> float:
    return mean * math.exp(sigma * _NORMAL.inv_cdf(u) - sigma * sigma / 2)


KINDS: dict[str, tuple[Callable[..., float], tuple[str, ...]]] = {
    "constant": (_constant, ("seconds",)),
    "uniform": (_uniform, ("low", "high")),
    "exponential": (_exponential, ("mean",)),
    "lognormal": (_lognormal, ("mean", "sigma")),
}


class Term(msgspec.Struct, frozen=True):
    """One random summand."""

    kind: str
    parameters: tuple[float, ...]

    def draw(self, u: float) -> float:
        """Return the value at the quantile `u`, in seconds."""
        return KINDS[self.kind][0](u, *self.parameters)


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """A sum of terms. `cores` is the number of cores kept busy; 0 means that the time is spent waiting."""

    terms: tuple[Term, ...]
    per_sample_s: float = 0.0
    per_group_s: float = 0.0
    cores: float = 0.0

    def draw(self, *, groups: int, samples: int, seed: int, counters: tuple[int, ...]) -> float:
        """Return the seconds for these numbers of groups and samples; `seed` and `counters` fix the random numbers."""
        took_s = self.per_sample_s * samples + self.per_group_s * groups
        for i, term in enumerate(self.terms):
            took_s += term.parameters[0] if term.kind == "constant" else term.draw(uniform(seed, *counters, i))
        return took_s


def parse(text: str) -> Distribution:
    """Parse a distribution. Raises ValueError if the text is not one."""
    body, at, cores_text = text.partition("@")
    cores = 0.0
    if at:
        if not re.fullmatch(_NUMBER, cores_text.strip()) or float(cores_text) <= 0:
            raise ValueError(f"{cores_text.strip()!r} after @ is not a number of cores above 0")
        cores = float(cores_text)
    terms: list[Term] = []
    shares = {"sample": 0.0, "group": 0.0}
    for part in (part.strip() for part in re.split(r"\+(?![^(]*\))", body)):
        if call := _CALL.match(part):
            terms.append(_term(call[1], call[2]))
        elif share := _SHARE.match(part):
            if share[2]:
                shares[share[2]] += float(share[1])
            else:
                terms.append(Term("constant", (float(share[1]),)))
        else:
            raise ValueError(f"{part!r} is neither a number of seconds nor a distribution")
    numbers = [cores, *shares.values(), *(number for term in terms for number in term.parameters)]
    if max(numbers) > MOST_S:
        raise ValueError(f"a number is too large, above {MOST_S:,}")
    return Distribution(terms=tuple(terms), per_sample_s=shares["sample"], per_group_s=shares["group"], cores=cores)


def _term(kind: str, arguments: str) -> Term:
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not one of {', '.join(KINDS)}")
    names = KINDS[kind][1]
    given = [argument.strip() for argument in arguments.split(",")]
    if len(given) != len(names) or not all(re.fullmatch(_NUMBER, argument) for argument in given):
        raise ValueError(f"{kind} takes {len(names)} numbers: {kind}({', '.join(names)})")
    values = tuple(map(float, given))
    if kind == "uniform" and values[0] > values[1]:
        raise ValueError(f"uniform({arguments}) has its low above its high")
    return Term(kind, values)
