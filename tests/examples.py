"""The number of Hypothesis examples per property, scaled by the active profile.

@settings(max_examples=few(250))
"""

from __future__ import annotations

from hypothesis import settings

ORDINARY = 100  # Hypothesis' default


def few(examples: int) -> int:
    """Return this number scaled by the profile: unchanged if the profile tries 100 examples, half if it tries 50."""
    return max(1, examples * settings.default.max_examples // ORDINARY)
