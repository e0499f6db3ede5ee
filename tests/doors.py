"""User code outside the repository: files in a folder of their own, and the command that runs them.

folder = user_folder(tmp_path, {"losses.py": snippet("your-own-loss.md")}, quickstart("losses", "TrustRegion()"))
code, out, err = command(folder, "graph.py", "--check")
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
QUICKSTART = (REPOSITORY / "graphs" / "quickstart.py").read_text()
FEW_STEPS = ("--steps", "2", "--prompts-per-step", "4", "--samples-per-prompt", "4", "--warm-start-steps", "20")
FEW_STEPS += ("--evaluate-every", "2", "--threads", "1")


def snippet(page: str, number: int = 0) -> str:
    """Return a Python block of a page in docs/, so that tests run the code that the page shows."""
    return re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / page).read_text(), re.DOTALL)[number]


def quickstart(imports: str, *changes: tuple[str, str]) -> str:
    """Return graphs/quickstart.py with an additional import line and these pieces of text replaced."""
    text = QUICKSTART.replace("from ops.rewards", f"{imports}\nfrom ops.rewards", 1)
    for old, new in changes:
        assert text.count(old) == 1, f"graphs/quickstart.py no longer holds {old!r} once"
        text = text.replace(old, new)
    return text


def user_folder(folder: Path, files: Mapping[str, str]) -> Path:
    """Write these files to a folder outside the repository."""
    assert not folder.resolve().is_relative_to(REPOSITORY)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        sys.modules.pop(Path(name).stem, None)  # of another test's folder
    return folder


@contextmanager
def forgotten(folder: Path) -> Iterator[None]:
    """Unload the folder's modules at the end, because the next test may have another file of the same name."""
    try:
        yield
    finally:
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(f"{folder}/"):
                del sys.modules[name]


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["step"] > 0]
