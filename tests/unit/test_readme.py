"""The README and the pages of docs/ match the repository: its tree, a graph, its commands."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
MOST_LINES = 180


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def block(start: str, text: str) -> str:
    """Return the fenced block of a text that contains `start`."""
    return next(found for found in re.findall(r"```[^\n]*\n(.*?)```", text, re.DOTALL) if start in found)


def test_the_readme_is_short():
    assert len(README.splitlines()) <= MOST_LINES


def test_the_tree_names_folders_that_are_there():
    tree = block("graphs/          recipes", page("design"))
    named = {name for line in tree.splitlines() for name in re.findall(r"(?<!\S)(\w+)/", line)}
    missing = {
        name
        for name in named
        if not any(path.is_dir() for path in (ROOT / name, ROOT / "pipeline" / name)) and not [*ROOT.glob(f"*/{name}")]
    }
    assert not missing
    rooms = {path.parent.name for path in (ROOT / "pipeline").glob("*/__init__.py")}
    assert rooms <= named, "every room of the engine is named"


def test_the_graph_is_that_of_the_page_for_newcomers():
    assert block("def graph(", README) == block("def graph(", page("start"))


def test_the_errors_name_the_lines_of_the_recipe():
    lines = (ROOT / "graphs" / "grpo.py").read_text().splitlines()
    texts = README + page("running") + page("foretell")
    found = re.findall(r"^graphs/grpo\.py:(\d+)(?: \(--data\))?: (\S+)", texts, re.MULTILINE)
    assert len(found) == 7
    for number, what in found:
        assert ("Train(" if what in ("stage", "worker") else "Prompts(") in lines[int(number) - 1]


def test_the_gate_runs_the_commands_that_install():
    commands = re.findall(r"^pip install -e (.*?) && ([^#\n]*)", README, re.MULTILINE)
    assert [(what, then.strip()) for what, then in commands] == [
        (".", "python -m pipeline.run graphs/quickstart.py"),
        ("'.[test]'", "python -m pytest"),
        ("'.[megatron]'", "python -m stages.backends.vllm.install_cpu"),
    ]
    gate = (ROOT / ".ci" / "run").read_text()
    assert [part in gate for part in (r"readme_command '\.'", "[test\\]", "[megatron\\]")] == [True] * 3


def test_nothing_is_left_to_fill_in():
    assert "@@" not in README
