"""The README matches the repository: its tree, its graph and its commands."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def block(start: str) -> str:
    """Return the fenced block that contains `start`."""
    return next(text for text in re.findall(r"```\w*\n(.*?)```", README, re.DOTALL) if start in text)


def test_the_tree_names_folders_that_are_there():
    tree = block("graphs/          recipes")
    named = {name for line in tree.splitlines() for name in re.findall(r"(?<!\S)(\w+)/", line)}
    missing = {
        name
        for name in named
        if not any(path.is_dir() for path in (ROOT / name, ROOT / "pipeline" / name)) and not [*ROOT.glob(f"*/{name}")]
    }
    assert not missing
    rooms = {path.parent.name for path in (ROOT / "pipeline").glob("*/__init__.py")}
    assert rooms <= named, "every room of the engine is named"


def test_the_graph_is_that_of_the_recipe():
    recipe = (ROOT / "graphs" / "grpo.py").read_text()
    without_docstrings = re.sub(r'""".*?"""\n\s*', "", recipe, flags=re.DOTALL)
    assert re.sub(r"\s+", " ", block("def graph(")).strip() == re.sub(r"\s+", " ", without_docstrings).strip()


def test_the_errors_name_the_lines_of_the_recipe():
    lines = (ROOT / "graphs" / "grpo.py").read_text().splitlines()
    texts = README + (ROOT / "docs" / "foretell.md").read_text()
    found = re.findall(r"^graphs/grpo\.py:(\d+): (\S+)", texts, re.MULTILINE)
    assert len(found) == 4
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
