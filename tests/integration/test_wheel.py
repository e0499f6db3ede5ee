"""The wheel in an environment and an empty folder of its own: recipes by name, a copy to edit, run, view, export."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path
from urllib.request import HTTPCookieProcessor, build_opener

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ("--executor", "local", "--steps", "2", "--warm-start-steps", "5", "--prompts-per-step", "4", "--plain")


def bare() -> dict[str, str]:
    """Return the variables of this process, without those that lead to the repository."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Return the folder of an environment's programs: the wheel is installed there, and nothing of the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pipeline", "stages", "ops", "graphs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip"]
    offline = ["-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, "wheel", *offline, "--no-build-isolation", "-w", folder, source], check=True, cwd=folder)
    shutil.rmtree(source)
    venv.create(folder / "env", with_pip=False)
    into = [*pip, "--python", folder / "env" / "bin" / "python", "install", *offline]
    subprocess.run([*into, *folder.glob("*.whl")], check=True, env=bare())
    home = next((folder / "env" / "lib").glob("python*/site-packages"))
    (home / "others.pth").write_text(sysconfig.get_path("purelib"))  # Ray and the like; an editable Sluice is not found
    return folder / "env" / "bin"


@pytest.fixture
def typed(wheel, tmp_path):
    """Return a function that runs a command line in an empty folder, and returns its output."""
    here = tmp_path / "empty"
    here.mkdir()
    environment = bare() | {"PATH": f"{wheel}{os.pathsep}{os.environ['PATH']}"}

    def run(line: str) -> str:
        done = subprocess.run(
            shlex.split(line), cwd=here, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run.here, run.environment = here, environment
    return run


def test_a_recipe_by_name_a_copy_a_run_its_view_and_an_export(typed):
    assert "site-packages" in typed("python -c 'import pipeline; print(pipeline.__file__)'")
    assert re.search(r"^quickstart +GRPO on a small", typed("sluice run --list"), re.M)
    assert typed("python -m pipeline.run quickstart --check").startswith("quickstart: 9 stages")
    assert typed("sluice new mine --from quickstart").startswith("mine.py: a copy of the recipe quickstart")
    said = typed(f"python -m pipeline.run mine.py {' '.join(SMALL)} --run-dir runs/mine")
    assert re.search(r"^continue +python -m pipeline.run mine.py .*--resume --steps 4$", said, re.M)
    assert "spans.csv" in typed("sluice export runs/mine --csv tables")
    words = ("python", "-m", "pipeline.view", "runs/mine", "--no-open", "--while-stdin")
    given = {"cwd": typed.here, "env": typed.environment, "text": True}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **given) as view:
        address = view.stdout.readline().strip()
        with build_opener(HTTPCookieProcessor).open(address, timeout=30) as page:
            assert b"<title>" in page.read()
        view.stdin.close()
        assert view.wait(30) == 0


def test_messages_name_extras_that_there_are():
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = "".join(
        path.read_text()
        for folder in ("pipeline", "stages", "ops", "graphs", "docs")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md")
    )
    named = set(re.findall(rf"'{known['name']}\[(\w+)\]'", texts))
    assert named and named <= known["optional-dependencies"].keys()
    assert "'sluice[" not in texts and "pip install sluice " not in texts
