"""The admission rule, as a pure function. v is the published policy version, k max_staleness, B groups a step."""

from __future__ import annotations


def admissible(*, version: int, max_staleness: int, batch: int, capacity: int, trained: int, in_flight: int) -> int:
    """How many more groups may be admitted now: trained + in flight stays within (k + v + 1) * B and capacity.

    `trained` counts the groups behind published versions since the run's first step, `in_flight` those admitted and
    not yet trained. Never negative.
    """
    by_version = (max_staleness + version + 1) * batch - trained - in_flight
    return max(0, min(by_version, capacity - in_flight))
