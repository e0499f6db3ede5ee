"""What a parameter of a description may be: questions that many checks ask. Knows no description."""

from __future__ import annotations

import math


def is_whole(value: object, least: int) -> bool:
    """Whether it is a whole number of at least this; a truth value is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> bool:
    """Whether it is a finite number; a truth value is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
