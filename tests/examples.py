"""How many examples a property is tried with: as many as the profile of Hypothesis says, in proportion.

@settings(max_examples=few(250))
"""

from __future__ import annotations

from hypothesis import settings

ORDINARY = 100  # what Hypothesis tries by itself


def few(examples: int) -> int:
    """This number where the profile tries 100 examples of a property; half of it where that tries 50."""
    return max(1, examples * settings.default.max_examples // ORDINARY)
