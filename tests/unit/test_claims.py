"""docs/claims.md: every quote is in the README or a page that it names, and every test that it names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = re.findall(r"^\| (.+) \| (.+) \|$", (ROOT / "docs" / "claims.md").read_text(), re.MULTILINE)[1:]

WITHOUT_A_TEST = ("On GPUs, a trainer rank keeps one version", "Linux only.")  # needs two GPUs; a statement of support


def plain(text: str) -> str:
    """Return a text without emphasis and line breaks."""
    return re.sub(r"\s+", " ", text.replace("**", ""))


def test_every_quote_is_there() -> None:
    pages = (ROOT / "README.md", *(ROOT / "docs" / name for name in ("running.md", "limits.md", "design.md")))
    texts = plain(" ".join(path.read_text() for path in pages))
    assert len(ROWS) > 20
    assert not [quote for quote, _ in ROWS if plain(quote) not in texts]


def test_every_limit_has_a_row() -> None:
    limits = plain((ROOT / "docs" / "limits.md").read_text()).partition("# Limits - ")[2]
    bullets = re.split(r" - (?=[A-Z`])", limits)
    bare = [one for one in bullets if not any(plain(quote) in one for quote, _ in ROWS)]
    assert len(bullets) > 10 and [one for one in bare if not one.startswith(WITHOUT_A_TEST)] == []


def test_every_test_is_there() -> None:
    named = [test.split("::") for _, tests in ROWS for test in re.findall(r"`(tests/[^`]+)`", tests)]
    assert len(named) > 30
    missing = [f"{path}::{name}" for path, name in named if f"def {name}(" not in (ROOT / path).read_text()]
    assert not missing
