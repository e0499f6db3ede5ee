"""Fits a line that is rewritten in place into one row of the terminal: a wrapped one could not be cleared.

fitted({"step": "step 3/9", "reward": "  reward 0.5", "left": "  5 s left"}, ("left", "reward"), columns=20)
# "step 3/9  reward 0.5": whole parts go first, the first of those named before the others
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_MORE = "..."


def fitted(parts: Mapping[str, str], gone_first: Sequence[str], columns: int) -> str:
    """Return the parts in their order, without as many of `gone_first` as it takes, and cut if that is not enough."""
    kept = dict(parts)
    for name in gone_first:
        if sum(map(len, kept.values())) <= columns:
            break
        kept.pop(name, None)
    return cut("".join(kept.values()), columns)


def cut(text: str, columns: int) -> str:
    """Return the text, or its start and dots."""
    if len(text) <= columns:
        return text
    return f"{text[: max(0, columns - len(_MORE))]}{_MORE}"[: max(0, columns)]
