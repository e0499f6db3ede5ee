"""The page for newcomers, as it is written: a reward, a data set and a graph of one's own, checked and run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEPS = 40


def test_the_files_of_the_page_learn(tmp_path):
    page = (ROOT / "docs" / "start.md").read_text()
    files = re.findall(r'^```python title="(\S+)"\n(.*?)^```', page, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in files] == ["rewards.py", "make.py", "mine.py"]
    for name, text in files:
        (tmp_path / name).write_text(text)
    lines = [
        line.partition("#")[0].split() for line in re.findall(r"^python [m-].*mine\.py.*|^python make\.py", page, re.M)
    ]
    assert [line[1:] for line in lines] == [
        ["make.py"],
        ["-m", "pipeline.run", "mine.py", "--check"],
        ["-m", "pipeline.run", "mine.py"],
    ]
    short = ["--executor", "local", "--steps", str(STEPS), "--run-dir", "run", "--plain"]
    for words in (*lines[:2], [*lines[2], *short]):
        given = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "timeout": 280}
        done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, check=False, **given)
        assert done.returncode == 0 and "warning" not in done.stderr, done.stdout + done.stderr
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    scores = [step["eval/close"] for step in steps if "eval/close" in step]
    assert scores[0] < 0.2 and scores[-1] > 0.25
