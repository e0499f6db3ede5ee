"""The colors of stages and series are distinguishable in both themes, also with color vision deficiencies.

Distances are Euclidean in Oklab (B. Ottosson, "A perceptual color space for image processing", 2020), where 0.02 is
just noticeable. Deficiencies of each cone type are simulated with Machado, Oliveira and Fernandes, "A
Physiologically-based Model for Simulation of Color Vision Deficiency" (2009), severity 1.0. Contrast follows WCAG 2.2.
"""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import pipeline.web

STYLE = (Path(pipeline.web.__file__).parent / "static" / "style.css").read_text()
SEEN = {
    "all": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
OKLAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]


def theme(name: str) -> dict[str, np.ndarray]:
    """Return the colors of a theme as linear RGB."""
    block = re.search(r":root\s*\{(.*?)\}" if name == "light" else r'data-theme="dark"\]\s*\{(.*?)\}', STYLE, re.S)
    assert block
    found = re.findall(r"--([\w-]+): #([0-9a-f]{6});", block[1])
    return {key: linear(np.array([int(text[i : i + 2], 16) / 255 for i in (0, 2, 4)])) for key, text in found}


def linear(colour: np.ndarray) -> np.ndarray:
    return np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)


def contrast(one: np.ndarray, other: np.ndarray) -> float:
    low, high = sorted(float(colour @ [0.2126, 0.7152, 0.0722]) + 0.05 for colour in (one, other))
    return high / low


@pytest.mark.parametrize("name", ["light", "dark"])
@pytest.mark.parametrize("seen", SEEN)
def test_no_two_are_alike(name, seen):
    colours = theme(name)
    where = [np.asarray(OKLAB) @ np.cbrt(CONES @ np.clip(SEEN[seen] @ colours[f"c{n}"], 0, 1)) for n in range(10)]
    for a, b in combinations(range(10), 2):
        assert np.linalg.norm(where[a] - where[b]) > (0.06 if b < 6 else 0.045), (a, b)


@pytest.mark.parametrize("name", ["light", "dark"])
def test_they_stand_out_and_their_labels_can_be_read(name):
    colours = theme(name)
    for n in range(10):
        assert contrast(colours[f"c{n}"], colours["panel"]) >= 3
        assert contrast(colours[f"c{n}"], colours["on-c"]) >= 4.5
