"""Recipes by name, and copies of them."""

from __future__ import annotations

import ast
import resource
from pathlib import Path

import pytest

from pipeline import __main__ as sluice
from pipeline import new, run, simulate
from pipeline.cli.load import load
from pipeline.cli.recipes import RECIPES, graph_path, names


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("recipe", names())
def test_every_recipe_is_found_by_its_name_and_copied_as_a_graph_of_its_own(recipe, capsys):
    assert new.main(["mine", "--from", recipe]) == 0
    assert capsys.readouterr().out.endswith(
        f"mine.py: a copy of the recipe {recipe}; its first lines say how to run it\n"
    )
    text = Path("mine.py").read_text()
    assert "python -m pipeline.run mine.py" in ast.get_docstring(ast.parse(text)) and f"graphs/{recipe}.py" not in text
    if recipe != "grpo_async":  # its graph is that of grpo
        assert load("mine.py").build({}).name == "mine" != load(recipe).build({}).name


def test_a_file_has_precedence_over_a_recipe_and_a_recipe_over_a_folder(tmp_path):
    assert graph_path("tool") == RECIPES / "tool.py" and str(graph_path("tools")) == "tools"
    (tmp_path / "tool").mkdir()
    assert graph_path("tool") == RECIPES / "tool.py" and str(graph_path("./tool")) == "tool"
    (tmp_path / "code").write_text("")
    assert str(graph_path("code")) == "code"
    assert load("tool").named == "tool"


def test_a_recipe_after_flags(capsys):
    assert run.main(["--steps", "3", "quickstart", "--check"]) == 0
    assert capsys.readouterr().out.startswith("quickstart: 9 stages, ")
    assert simulate.main(["quickstart", "--on", "h200:0"]) == 2
    assert run.main(["quikstart", "--check"]) == 2
    assert capsys.readouterr().err.endswith("Fix: did you mean quickstart?\n")


def test_a_file_is_never_written_over(tmp_path, capsys):
    (tmp_path / "there.py").write_text("mine")
    (tmp_path / "there_2.py").symlink_to("nowhere")
    assert new.main(["there"]) == 2 and (tmp_path / "there.py").read_text() == "mine"
    assert capsys.readouterr().err.endswith("Fix: choose another name, such as there_3.py\n")


def test_nothing_is_left_of_a_file_that_cannot_be_written_whole(tmp_path, capsys):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        code = new.main(["mine"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert capsys.readouterr().err.startswith("mine.py: it cannot be written: File too large; ")
    assert new.main(["mine"]) == 0


def test_the_command_sluice_copies_too(capsys):
    assert sluice.main(["new", "mine.py", "--from", "graphs/tool.py"]) == 0
    assert 'name="mine"' in Path("mine.py").read_text()
