"""The pages for newcomers, as they are written: files of one's own, checked and run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "files", "commands", "steps", "score"),
    [
        ("start", ["rewards.py", "make.py", "mine.py"], ["make.py", "mine.py --check", "mine.py"], 40, "eval/close"),
        (
            "your-own-environment",
            ["guess.py", "play.py", "guessing.py"],
            ["play.py", "guessing.py --check", "guessing.py"],
            20,
            "eval/found",
        ),
    ],
)
def test_the_files_of_a_page_learn(tmp_path, name, files, commands, steps, score):
    page = (ROOT / "docs" / f"{name}.md").read_text()
    found = re.findall(r'^```python title="(\S+)"\n(.*?)^```', page, re.MULTILINE | re.DOTALL)
    assert [file for file, _ in found] == files
    for file, text in found:
        (tmp_path / file).write_text(text)
    lines = re.findall(r"^python ((?:-m pipeline\.run )?\w+\.py(?: --check)?)", page, re.MULTILINE)
    assert [line.removeprefix("-m pipeline.run ") for line in lines] == commands
    short = ["--executor", "local", "--steps", str(steps), "--run-dir", "run", "--plain"]
    for words in (*map(str.split, lines[:2]), [*lines[2].split(), *short]):
        given = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "timeout": 280}
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, **given)
        assert done.returncode == 0 and "warning" not in done.stderr, done.stdout + done.stderr
    steps_of = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    scores = [step[score] for step in steps_of if score in step]
    assert scores[0] < 0.2 and scores[-1] > scores[0] + 0.1
