"""Makes a virtual environment that sees this one's packages and has modules of its own. Downloads nothing."""

from __future__ import annotations

import sys
import venv
from collections.abc import Mapping
from pathlib import Path


def other_python(folder: Path, modules: Mapping[str, str], *, sees_ours: bool = True) -> Path:
    """Create the environment with these modules (name -> text) and return its interpreter."""
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name, text in modules.items():
        (packages / f"{name}.py").write_text(text)
    if sees_ours:  # not this installation of Sluice: the .pth files of these folders are not read
        ours = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        (packages / "ours.pth").write_text("\n".join(ours))
    return folder / "bin" / "python"
