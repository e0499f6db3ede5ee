"""The pages of docs/: their code runs, their commands exist, and the site has all of them."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import graphs.quickstart
import ops.rewards
import ops.sandbox
import pipeline
import stages
import stages.vocabulary
from docs.site import generated
from docs.site.__main__ import not_in_navigation
from docs.site.__main__ import stage as staged
from docs.site.links import broken
from pipeline.__main__ import COMMANDS
from pipeline.cli.recipes import graph_path

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
BLOCK = re.compile(r"^```(python|bash)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SERVICES = ("openai", "rewards", "guess")  # packages and files of pages: that their code is Python is tested


def blocks(kind: str) -> list[Any]:
    """Return the blocks of a kind, each with its page and number."""
    return [
        pytest.param(found[2], id=f"{page.name}-{number}")
        for page in PAGES
        for number, found in enumerate(BLOCK.finditer(page.read_text()))
        if found[1] == kind
    ]


@pytest.mark.parametrize("code", blocks("python"))
def test_code_of_a_page_runs(code, tmp_path, monkeypatch):
    """Each block in the names of a graph file: what it declares is made, and no parameter is one that there is not."""
    code = code.replace("on=learner, ..., ", "on=learner, lr=1e-6, ")
    imported = {node.module for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)}
    if imported & {*SERVICES}:
        return
    monkeypatch.chdir(tmp_path)
    page = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", page)
    names = vars(page)
    for module in (pipeline, stages, stages.vocabulary, ops.rewards, ops.sandbox, graphs.quickstart):
        names |= {name: value for name, value in vars(module).items() if not name.startswith("_")}
    sampler, learner = pipeline.WorkerGroup("sampler", backend="torch"), pipeline.WorkerGroup("learner")
    policy = pipeline.Model("tiny", config=graphs.quickstart.TINY_QWEN3, alphabet="0123456789")
    names |= {"policy": policy, "sampler": sampler, "learner": learner, "torch": torch, "json": json}
    names |= {"dataclass": dataclass, "Sequence": Sequence, "Calculator": stages.Environment, "code": ""}
    for heavy in ("pipeline.data_plane.outside.OutsideProcess", "ops.sandbox.Sandbox"):
        monkeypatch.setattr(heavy, MagicMock())
    monkeypatch.setattr("ops.sandbox.containers.Containers.sandbox", MagicMock())
    exec(compile(code, "page", "exec"), names)


@pytest.mark.parametrize("text", blocks("bash"))
def test_commands_of_a_page_exist(text):
    """Each command line names a module that there is, and flags that it has."""
    for line in text.replace("\\\n", " ").splitlines():
        for words in _commands(shlex.split(line, comments=True)):
            module, *rest = words
            if module.startswith("pipeline."):
                command = module.removeprefix("pipeline.")
                assert command in COMMANDS, line
                graph = next(
                    (word for word in rest if (graph_path(word) if "/" not in word else ROOT / word).is_file()), None
                )
                helped = helped_of(command, graph)
                for word in rest if graph or not any(word.endswith(".py") for word in rest) else ():
                    flag = word.partition("=")[0]
                    assert not flag.startswith("--") or re.search(rf"(?<!\S){flag}(?![\w-])", helped), (line, word)
            elif module.startswith(("benchmarks", "stages", "tests", "docs")):
                path = ROOT / module.replace(".", "/")
                assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), line


def _commands(words: list[str]) -> Iterator[list[str]]:
    """Yield each module of ours that a line runs, with its words."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word in ("&&", "|", ";"):
            parts.append([])
        else:
            parts[-1].append(word)
    for part in parts:
        if "-m" in part:
            yield part[part.index("-m") + 1 :]


@cache
def helped_of(command: str, graph: str | None) -> str:
    return generated.helped(f"pipeline.{command}", *([graph] if graph else []))


def test_the_site_has_every_page_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(generated, "helped", lambda module, *words: "usage: ...")
    staged(tmp_path / "docs")
    assert [*not_in_navigation(tmp_path / "docs")] == []
    (tmp_path / "docs" / "new.md").write_text("# New")
    (tmp_path / "docs" / "start.md").unlink()
    assert [*not_in_navigation(tmp_path / "docs")] == [
        "zensical.toml lacks new.md",
        "zensical.toml has start.md, which is no page",
    ]
    text = (tmp_path / "docs" / "benchmarks.md").read_text()
    brought = re.findall(r"\]\((files/benchmarks/results/\S+\.json)\)", text)
    assert len(brought) > 20 and all((tmp_path / "docs" / file).is_file() for file in brought)


def test_a_broken_link_of_the_site_is_found(tmp_path):
    deep = (site := tmp_path / "site") / "deep"
    (deep / "folder").mkdir(parents=True)
    (deep / "a picture.png").touch()
    (deep / "folder" / "index.html").write_text('<a name="old"></a>')
    (site / "404.html").write_text('<link href="/deep/page.html#there"><script src="/nope.js"></script>')
    right = (
        "page.html",
        "#there",
        "#",
        "#top",
        "?q=1#there",
        "a%20picture.png",
        "folder/#old",
        "../404.html",
        "//x.org/a",
    )
    right += ("https://x.org/nope#a", "mailto:a@x.org", "data:image/png;base64,AAAA")
    wrong = ("nope.html", "#nope", "page.html#nope", "folder#older", "../../outside.py", "/page.html", "http://[x", "")
    links = "".join(f'<a href="{link}">x</a>' for link in right + wrong)
    (deep / "page.html").write_text(f'<h1 id="there">T</h1><meta name="nope">{links}<img src="nope.png">')
    (tmp_path / "outside.py").touch()
    found = [line.split(": ")[:2] for line in broken(site)]
    expected = [["deep/page.html", link or "an empty link"] for link in (*wrong, "nope.png")]
    assert found == [["404.html", "/nope.js"], *expected]


def test_generated_pages_have_every_error_result_and_name():
    errors, results, names = generated.errors(), generated.results(), generated.python()
    assert errors.count("\n| ") > 500 and "available fields" in errors
    for path in generated.RESULTS.glob("*.json"):
        assert f"\n## {path.stem}\n" in results
    for module in (pipeline, stages):
        assert all(f"### {name} {{ #{module.__name__}.{name} }}" in names for name in module.__all__)


def test_names_of_trl_are_those_of_its_configuration():
    trl = pytest.importorskip("trl")
    rows = (ROOT / "docs" / "coming-from.md").read_text().splitlines()
    cells = [row.split("|")[3] for row in rows if row.startswith("| ") and "Sluice" not in row and "---" not in row]
    named = {name.partition("=")[0] for cell in cells for name in re.findall(r"`([\w.=\"]+)`", cell)}
    of_the_trainer = {"reward_funcs", "tools", "AsyncGRPOConfig.max_staleness"}
    assert named - of_the_trainer <= {field.name for field in fields(trl.GRPOConfig)} and of_the_trainer <= named
