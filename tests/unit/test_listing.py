"""Output of --list: every recipe with a sentence, and the runs in a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from pipeline import run
from pipeline.cli.recipes import RECIPES, recipes


def test_every_recipe_says_what_it_is():
    found = recipes()
    assert [path.name for path, _ in found] == sorted(p.name for p in RECIPES.glob("*.py") if p.stem != "__init__")
    for path, says in found:
        assert says.endswith(".") and 20 < len(says) < 140, path


def test_what_is_no_recipe_is_left_out(tmp_path):
    (tmp_path / "helper.py").write_text('"""Helps. A lot."""\ndef help(): ...\n')
    (tmp_path / "mine.py").write_text('"""Mine v1.5 is\nfast. And good."""\nasync_ = 1\ndef graph(): ...\n')
    (tmp_path / "bare.py").write_text("graph = lambda: None\n")
    assert [(path.name, says) for path, says in recipes(tmp_path)] == [
        ("bare.py", ""),
        ("mine.py", "Mine v1.5 is fast."),
    ]


def test_the_command_lists_recipes_and_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run.main(["--list"]) == 0
    assert "quickstart " in (out := capsys.readouterr().out) and "no run in runs" in out
    (tmp_path / "runs" / "mine-1").mkdir(parents=True)
    described = {"graph": "mine", "started": "2026-01-01T00:00:00+0000"}
    (tmp_path / "runs" / "mine-1" / "run.json").write_text(json.dumps(described))
    (tmp_path / "runs" / "mine-1" / "plan.json").write_text('{"steps": 9}')
    assert run.main(["--list"]) == 0
    told = capsys.readouterr().out
    assert "runs/mine-1" in told and "0 of 9" in told and "unfinished" in told
    (tmp_path / "empty").mkdir()
    assert run.main(["--list", "empty"]) == 0 and "no run in empty" in capsys.readouterr().out
    assert run.main(["--list", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("--list nowhere: there is no such folder; ")


def test_exit_codes_are_documented(capsys):
    with pytest.raises(SystemExit):
        run.main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    for code in (
        "0 done",
        "2 the graph",
        "3 a stage",
        "4, 5 the data plane",
        "6 a checkpoint",
        "130 stopped by Ctrl-C (143 SIGTERM",
    ):
        assert code in told


@pytest.mark.parametrize(
    ("environment", "coloured"), [({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)]
)
def test_no_color_is_honoured(environment, coloured):
    base = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "FORCE_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "from pipeline.cli.console import console\nconsole().print('[red]red[/]')"],
        env=base | environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ("\x1b[31m" in done.stdout) == coloured
