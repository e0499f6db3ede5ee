"""Draws the kept curves of a recipe as SVG: one line per seed, the held-out score from 0 to 1 by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 220, 40, 12, 12, 32
TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)


def drawing(row: Mapping[str, Any]) -> str:
    """The SVG of a row of `benchmarks.recipes`. It takes the colors of the text around it."""
    last = max(step for curve in row["curves"] for step, _ in curve)
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(step: float, score: float) -> str:
        return f"{LEFT + width * step / last:.1f},{TOP + height * (1 - score):.1f}"

    grid = [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at(0, tick).split(",")[1]}" y2="{at(0, tick).split(",")[1]}" '
        f'stroke="currentColor" stroke-opacity="0.15"/><text x="{LEFT - 6}" y="{at(0, tick).split(",")[1]}" '
        f'text-anchor="end" dominant-baseline="middle">{tick:g}</text>'
        for tick in TICKS
    ]
    steps = [
        f'<text x="{at(step, 0).split(",")[0]}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step:g}</text>'
        for step in (0, last // 2, last)
    ]
    lines = [
        f'<polyline points="{" ".join(at(step, score) for step, score in curve)}" fill="none" '
        f'stroke="var(--md-accent-fg-color, #2563eb)" stroke-width="1.5" stroke-opacity="0.8"/>'
        for curve in row["curves"]
    ]
    says = f"{row['score']} by step, {row['seeds']} seeds: from {row['before']} to {row['after']}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" style="max-width:100%" role="img" aria-label="{says}" '
        f'font-size="12" fill="currentColor">{"".join([*grid, *steps, *lines])}</svg>'
    )
