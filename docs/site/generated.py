"""The pages that are written from the code, from the texts of its errors and from kept results."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from docs.site.curves import drawing
from pipeline.__main__ import COMMANDS
from pipeline.cli.recipes import recipes
from tests.errors.harness import PROBLEM

ROOT = Path(__file__).resolve().parents[2]
ERRORS, RESULTS = ROOT / "tests" / "errors", ROOT / "benchmarks" / "results"
MODULES = (
    *("pipeline", "stages", "stages.vocabulary", "ops.rewards"),
    *("ops.sandbox", "ops.sandbox.containers", "ops.refit.transports"),
)
CURVES = RESULTS / "recipes.json"
SHOWN = {  # of each recipe: what to look at, and how it was run if it has no curve
    "quickstart": "`eval/exact_match` and `reward/mean` rise together; `train/entropy` falls. On the view's page "
    "Samples, compare the last step with step 1.",
    "tool": "`episode/turns` rises from 1 to 2: the policy learns to call before it answers. Samples shows the calls, "
    "and in grey what the calculator said.",
    "code": "`reward/passes_tests` and `eval/passes_tests`; on Samples, programs with `*x*x` take the place of those "
    "without.",
    "gsm8k": "`eval/math_verify`, and `rollout/truncated`, which must not grow.\n\n**Not shown "
    "that it learns**: that takes a pretrained model, and none could be had where these results were made. Its tests "
    "run it with a tiny random model (`tests/integration/test_gsm8k.py`), and with the whole calculator chat it ran on "
    "an H200 with a model of 89 M parameters that was trained from random weights, which did not learn it "
    "([gpu.calculator](results.md#gpucalculator)).",
    "grpo": "`eval/...` and `train/mismatch_kl`. Its curve is that of your model and data; its speed is measured "
    "([benchmarks](../benchmarks.md)). Tests run it with tiny models.",
    "grpo_async": "`train/staleness_mean` and, on the view's page Staleness, samples by age. What it gains is "
    "measured ([benchmarks](../benchmarks.md)).",
    "dapo": "`filter/acceptance`: the fraction of groups whose samples differ, which are those that can teach "
    "something. Tests run it with tiny models.",
    "harness": "`episode/end_...` and `reward/mean`; what the agent printed is in `logs/`. Tests run it with a tiny "
    "model.",
}
WIDTH = "100"  # of the help of commands, in characters


def pages() -> Iterator[tuple[str, str]]:
    """Yield the path of each page below docs/, and its text."""
    yield "reference/commands.md", commands()
    yield "reference/recipes.md", of_recipes()
    yield "reference/python.md", python()
    yield "reference/errors.md", errors()
    yield "reference/results.md", results()


def commands() -> str:
    """The page of the commands, from their --help."""
    parts = ["# Commands", "`sluice COMMAND` is `python -m pipeline.COMMAND`. What follows is what `--help` prints."]
    for name, says in COMMANDS.items():
        parts += [f"## {name}", f"{says[0].upper()}{says[1:]}.", _fenced(helped(f"pipeline.{name}"))]
    return "\n\n".join(parts) + "\n"


def of_recipes() -> str:
    """The page of the recipes, from their docstrings and the help of their flags."""
    parts = [
        "# Recipes",
        "`python -m pipeline.run NAME` runs one, and `python -m pipeline.new mine --from NAME` copies it to edit.",
    ]
    kept = json.loads(CURVES.read_text()) if CURVES.exists() else {"rows": []}
    curves = {row["recipe"]: row for row in kept["rows"]}
    for path, says in recipes():
        own = helped("pipeline.run", path.stem).partition("flags of graph()")
        parts += [
            f"## {path.stem}",
            says,
            _fenced(inspect.cleandoc(ast.get_docstring(ast.parse(path.read_text())) or "")),
        ]
        parts += [_fenced("".join(own[1:]))] if own[2] else []
        if row := curves.get(path.stem):
            parts += [_learned(row, kept["hardware"]), drawing(row)]
        parts += [f"**What to look at**: {SHOWN[path.stem]}"]
        parts += ['???+ note "The file"\n\n' + _indented(_fenced(path.read_text().rstrip(), "python"))]
    return "\n\n".join(parts) + "\n"


def _learned(row: Mapping[str, Any], hardware: Mapping[str, Any]) -> str:
    """What a kept curve says."""
    return (
        f"**It learns**: `{row['score']}` from {row['before']} to {row['after']} in {row['steps']} steps and "
        f"{row['wall s']:.0f} s on {hardware['cores']} cores ({hardware['processor']}), medians of {row['seeds']} "
        f"seeds; the worst ends at {row['worst after']:g} (`python -m benchmarks.recipes`). A line is a seed:"
    )


def python() -> str:
    """The page of the public names, from their signatures and docstrings."""
    parts = ["# Python", "Every public name, as its docstring has it."]
    for name in MODULES:
        module = importlib.import_module(name)
        first = inspect.cleandoc(module.__doc__ or "").partition("\n\n")[0]
        parts += [f"## {name}", " ".join(first.split())]
        for public in getattr(module, "__all__", [each for each in vars(module) if _is_own(module, each)]):
            parts += [*_described(name, public, getattr(module, public))]
    return "\n\n".join(parts) + "\n"


def errors() -> str:
    """The page of errors, from the golden texts, by the subject of the tests."""
    texts = dict(
        re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", (ERRORS / "golden.txt").read_text(), re.MULTILINE | re.DOTALL)
    )
    parts = [
        "# Errors",
        "Every error says where, what, why, and what to write instead. These are the ones that tests hold, word by "
        "word (`tests/errors/golden.txt`), in the words of a small graph file. Search this page for yours.",
    ]
    for file in sorted(ERRORS.glob("*.py")):
        tree, named = ast.parse(file.read_text()), dict.fromkeys(re.findall(r'"(\w+)"', file.read_text()))
        rows = dict.fromkeys(row for name in named if name in texts for row in _problems(texts.pop(name)))
        if rows:
            subject = " ".join((ast.get_docstring(tree) or "").partition("\n\n")[0].split())
            parts += [f"## {subject.rstrip('.')}", "\n".join(["| what | why | fix |", "|---|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


def results() -> str:
    """The page of kept results: each with its command, hardware and versions."""
    parts = [
        "# Kept results",
        "What `benchmarks/results` has: each table with the command that made it. [Benchmarks](../benchmarks.md) says "
        "what they mean.",
    ]
    for path in sorted(RESULTS.glob("*.json")):
        kept = json.loads(path.read_text())
        hardware = kept["hardware"]
        machine = ", ".join([f"{hardware['cores']} cores, {hardware['memory_gib']} GiB", *hardware.get("gpus", [])])
        versions = ", ".join(f"{name} {number}" for name, number in kept["versions"].items())
        parts += [
            f"## {path.stem}",
            f"`{kept['command']}`",
            f"{kept['notes']}",
            f"{machine}; {versions}.",
            _table(kept),
        ]
    return "\n\n".join(parts) + "\n"


def helped(module: str, *words: str) -> str:
    """What a command prints for --help."""
    printed = io.StringIO()
    with patch.dict(os.environ, {"COLUMNS": WIDTH, "NO_COLOR": "1"}), redirect_stdout(printed), suppress(SystemExit):
        importlib.import_module(module).main([*words, "--help"])
    return printed.getvalue().rstrip()


def _is_own(module: Any, name: str) -> bool:
    """Return whether a module without __all__ defines this public name."""
    value = getattr(module, name)
    return not name.startswith("_") and getattr(value, "__module__", None) == module.__name__


def _described(module: str, name: str, value: Any) -> Iterator[str]:
    """Yield the parts of a name's description."""
    yield f"### {name} {{ #{module}.{name} }}"
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        yield f"`{value!r:.300}`"
        return
    try:
        signature = re.sub(r": '([^']*)'", r": \1", str(inspect.signature(value)).replace("<factory>", "..."))
        signature = re.sub(r" -> '?([^']*)'?$", r" -> \1", signature).removesuffix(" -> None")
    except ValueError:  # a builtin
        signature = ""
    yield _fenced(f"from {module} import {name}\n\n{name}{_wrapped(signature)}", "python")
    if said := inspect.getdoc(value) if value.__doc__ else "":
        yield _fenced(said)


def _wrapped(signature: str) -> str:
    """A signature with one parameter per line, if it is long."""
    if len(signature) < 90:
        return signature
    parts, depth, at = [], 0, 1
    end = signature.rindex(")")
    for i, letter in enumerate(signature):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or i == end:
            parts.append(signature[at:i].strip())
            at = i + 1
    return "(\n" + "".join(f"    {part},\n" for part in parts if part) + ")" + signature[end + 1 :]


def _problems(text: str) -> Iterator[str]:
    """Yield the rows of the problems in the output of a command."""
    for line in text.splitlines()[2:]:
        if found := PROBLEM.fullmatch(line):
            yield "| " + " | ".join(_cell(found[part]) for part in ("what", "why", "fix")) + " |"


def _table(kept: Mapping[str, Any]) -> str:
    """The rows of a result as a table."""
    columns = kept["columns"]
    rows = ["| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |" for row in kept["rows"]]
    return "\n".join(["| " + " | ".join(map(_cell, columns)) + " |", "|---" * len(columns) + "|", *rows])


def _cell(value: object) -> str:
    """A value as the text of a cell: nothing in it is Markdown or HTML."""
    return re.sub(r"([\\`*_{}\[\]<>|~^=#$])", r"\\\1", str(value)).replace("\n", " ")


def _fenced(text: str, kind: str = "text") -> str:
    return f"````{kind}\n{text}\n````"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.splitlines())
