"""What the tests of open doors share: the code of a page of docs/, and a run of it from outside the repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def page_code(page: str) -> str:
    """The first Python block of a page in docs/."""
    found = re.search(r"^```python\n(.*?)^```$", (REPOSITORY / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)
    assert found, f"docs/{page} has no Python block"
    return found.group(1)


def write(folder: Path, code: str, name: str = "mine.py") -> Path:
    """A user's file in a folder that is no part of the repository."""
    assert not folder.is_relative_to(REPOSITORY)
    (folder / name).write_text(code)
    return folder / name


def command(file: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """`python -m pipeline.run FILE ...` in the folder of the file."""
    return subprocess.run(
        [sys.executable, "-m", "pipeline.run", file.name, *flags],
        cwd=file.parent,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
