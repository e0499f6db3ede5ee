"""The admission rule, as a pure function. v is the published policy version, k max_staleness, B groups a step."""

from __future__ import annotations


def admissible(
    *, version: int, max_staleness: int, batch: int, capacity: int, trained: int, untrained: int, held: int
) -> int:
    """How many more groups may be admitted now. Never negative.

    `trained` groups are behind the published version and `untrained` were admitted and are not: together with the new
    ones they stay within (k + v + 1) * B. `held` groups lie in the data plane, some of them trained already and not
    yet cleared: with the new ones they stay within `capacity`.
    """
    by_version = (max_staleness + version + 1) * batch - trained - untrained
    return max(0, min(by_version, capacity - held))
