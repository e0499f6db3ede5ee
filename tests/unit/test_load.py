"""Graph files: their functions, the flags derived from them, and the locations that errors name."""

import argparse
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import GraphError
from pipeline.cli.command import Parser
from pipeline.cli.flags import Flag, add_flags
from pipeline.cli.load import load
from pipeline.errors import DataPlaneError, Problem
from tests.doors import forgotten

HEAD = """from typing import Literal, Optional
from pipeline import Graph, Schedule, Stage


class Source(Stage):
    pass


def made(**changes):
    return Graph(name="g", source=Source(), stages=(), schedule=Schedule(steps=1))


"""
ALL_TYPES = '''def graph(
    steps: int = 3,
    lr: float = 1,
    name: str = "50%",
    fast: bool = False,
    size: Literal["s", "l"] = "s",
    depth: Literal[1, 2] = 2,
    limit: int | None = None,
    label: Optional[str] = "x",
    plain=0.5,
):
    """Does it.

    steps, lr   how far, and how fast
    name        of the thing
    """
    return made(steps=steps)
'''


def written(folder, body, name="g.py"):
    path = folder / name
    path.write_text(HEAD + body)
    return path


def problems(folder, body, **values):
    """Return the problems raised by loading and building a file."""
    with pytest.raises(GraphError) as error, forgotten(folder):
        load(written(folder, body)).build(values)
    return error.value.problems


def parsed(file, *argv):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, file.flags)
    return {name.removeprefix("graph."): value for name, value in vars(parser.parse_args(argv)).items()}


def test_parameters_become_flags(tmp_path):
    flags = {flag.name: flag for flag in load(written(tmp_path, ALL_TYPES)).flags}
    types = {name: (flag.type, flag.choices, flag.optional) for name, flag in flags.items()}
    assert types == {
        "steps": (int, (), False),
        "lr": (float, (), False),
        "name": (str, (), False),
        "fast": (bool, (), False),
        "size": (str, ("s", "l"), False),
        "depth": (int, (1, 2), False),
        "limit": (int, (), True),
        "label": (str, (), True),
        "plain": (float, (), False),
    }
    assert {name: flag.default for name, flag in flags.items()} == {
        "steps": 3, "lr": 1, "name": "50%", "fast": False, "size": "s", "depth": 2, "limit": None, "label": "x",
        "plain": 0.5,
    }  # fmt: skip
    assert (flags["steps"].help, flags["lr"].help) == ("how far, and how fast",) * 2
    assert (flags["name"].help, flags["fast"].help) == ("of the thing", "")


def test_flags_are_parsed_and_absent_where_not_given(tmp_path):
    file = load(written(tmp_path, ALL_TYPES))
    assert parsed(file) == {}
    argv = ["--steps=5", "--lr=2e-3", "--name=7", "--fast=yes", "--depth=1", "--limit=4", "--label=none", "--plain=1"]
    assert parsed(file, *argv) == {
        "steps": 5, "lr": 2e-3, "name": "7", "fast": True, "depth": 1, "limit": 4, "label": None, "plain": 1.0,
    }  # fmt: skip
    assert parsed(file, "--limit", "None") == {"limit": None}


def test_help_shows_what_the_docstring_says_and_the_default(tmp_path):
    parser = Parser()
    add_flags(parser, load(written(tmp_path, ALL_TYPES)).flags)
    shown = " ".join(parser.format_help().split())
    assert "--steps INT 3 how far, and how fast --lr FLOAT 1 how far, and how fast" in shown
    assert "--name TEXT 50% of the thing" in shown
    assert "--fast, --no-fast off" in shown
    assert "--size {s,l} s --depth {1,2} 2 --limit INT none --label TEXT x" in shown


@pytest.mark.parametrize(
    ("flag", "text", "said"),
    [
        (Flag("a", int, 1), "2.0", "expected a whole number, got '2.0'"),
        (Flag("a", float, 1.0), "x", "expected a number, got 'x'"),
        (Flag("a", bool, True), "2", "expected true or false, got '2'"),
        (Flag("a", str, "s", ("s", "l")), "m", "expected one of s, l, got 'm'"),
        (Flag("a", int, 1), "none", "expected a whole number, got 'none'"),
    ],
)
def test_a_value_that_is_not_of_the_type(flag, text, said):
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        flag.parse(text)


@pytest.mark.parametrize("text", ["true", "True", "1", "yes", "false", "FALSE", "0", "no"])
def test_words_for_true_and_false(text):
    assert Flag("a", bool, True).parse(text) is (text.lower() in ("true", "1", "yes"))


def test_build_calls_graph_with_the_values(tmp_path):
    graph = "Graph(name='g', source=Source(), stages=(), schedule=Schedule(steps=steps))"
    file = load(written(tmp_path, f"def graph(steps: int = 1):\n    return {graph}\n"))
    assert file.build({"steps": 7}).schedule.steps == 7
    assert file.build({}).schedule.steps == 1


def test_a_path_relative_to_the_working_directory_is_pointed_at_with_its_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graphs").mkdir()
    path = written(tmp_path, "def graph():\n    values = []\n    return values[3]\n", "graphs/g.py").relative_to(
        tmp_path
    )
    with pytest.raises(GraphError) as error:
        load(path).build({})
    (problem,) = error.value.problems
    assert problem.where == f"graphs/g.py:{HEAD.count(chr(10)) + 3}"
    assert problem.what == "graph() raised IndexError: list index out of range"


def test_an_error_in_a_helper_points_at_its_line_and_names_the_line_of_the_graph(tmp_path):
    (tmp_path / "beside.py").write_text("def helper():\n    raise OSError('no disk')\n")
    (problem,) = problems(tmp_path, "from beside import helper\n\ndef graph():\n    return helper()\n")
    assert problem.where == f"{tmp_path}/beside.py:2" and "no disk" in problem.what
    assert problem.why.endswith(f", and {tmp_path}/g.py:{HEAD.count(chr(10)) + 4} calls that code")


def test_an_error_at_the_import_of_a_helper_does_so_too(tmp_path):
    (tmp_path / "broken_x.py").write_text("\nraise OSError('no disk')\n")
    (problem,) = problems(tmp_path, "import broken_x\n\ndef graph():\n    return made()\n")
    assert problem.where == f"{tmp_path}/broken_x.py:2" and "no disk" in problem.what
    assert problem.why.endswith(f", and {tmp_path}/g.py:{HEAD.count(chr(10)) + 1} imports that code")


MINE = """from dataclasses import dataclass

from ops.refit.transports import Transport
from pipeline import Stage


@dataclass(frozen=True, kw_only=True)
class Mine:
    strength: float = 1.0


class Half(Transport):
    pass


@dataclass(frozen=True)
class Judge(Stage):
    name = "judge"


def weak():
    return Mine(strenght=0.1)
"""


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("mine_x.Mine(strenght=2)", "did you mean strength? Otherwise, the parameter of Mine is strength"),
        ("M(\n        strenght=2)", "did you mean strength? Otherwise, the parameter of Mine is strength"),
        ("M(2)", "pass them by name; the parameter of Mine is strength"),
        ("replace(M(), strenght=2)", "did you mean strength? Otherwise, the parameter of Mine is strength"),
        ("mine_x.weak()", "did you mean strength? Otherwise, the parameter of Mine is strength"),
        ("mine_x.weak(3)", "weak takes no parameters: write weak()"),
        ("M().strenght", "did you mean strength?"),
        ("mine_x.Mien()", "did you mean Mine?"),
        ("mine_x.Judge(on=1)", "give class Judge @dataclass(frozen=True, kw_only=True), and in it on with a type"),
        ("mine_x.Half()", "define receiver, sender in class Half"),
        ("replace(Mixture(('a', 1)), parts=())", "pass parts by position: write Mixture(*parts)"),
        ("mad()", "did you mean made?"),
        ("setattr(M(), 'strength', 2)", "make a changed copy, with replace() of dataclasses"),
        ("__import__('mine_y')", "did you mean mine_x? Otherwise, install mine_y"),
        ("__import__('stages.vocabluary')", "did you mean stages.vocabulary?"),
        ("exec('from stages import Rewrd')", "did you mean Reward?"),
        ("exec('from stages import zzzzz')", "correct that line, or the flag that sets its value"),
    ],
)
def test_a_mistyped_name_gets_the_one_that_was_meant_from_whatever_module(tmp_path, line, fix):
    (tmp_path / "mine_x.py").write_text(MINE)
    top = "from dataclasses import replace\nfrom stages import Mixture\nimport mine_x\nfrom mine_x import Mine as M\n"
    (problem,) = problems(tmp_path, f"{top}\ndef graph():\n    return {line}\n")
    assert problem.fix == fix


def test_a_decorated_graph_is_found_behind_its_wrapper(tmp_path):
    body = """import functools

def logged(function):
    @functools.wraps(function)
    def inner(**values):
        return function(**values)
    return inner

@logged
def graph(steps: int = 4):
    return made()
"""
    file = load(written(tmp_path, body))
    assert [flag.name for flag in file.flags] == ["steps"]
    assert file.build({"steps": 1}).name == "g"


def test_an_error_of_ours_that_graph_raises_passes_unchanged(tmp_path):
    body = """from pipeline import DataPlaneError
from pipeline.errors import Problem

def graph():
    raise DataPlaneError(Problem(where="a", what="b", why="c", fix="d"))
"""
    with pytest.raises(DataPlaneError) as error:
        load(written(tmp_path, body)).build({})
    assert error.value.problems == (Problem(where="a", what="b", why="c", fix="d"),)


def test_every_bad_parameter_is_reported(tmp_path):
    found = problems(
        tmp_path, "def graph(a, b: list = [], c: int = 'x', *, d: Literal['s'] = 'l', **e):\n    return made()\n"
    )
    assert [problem.what for problem in found] == [
        "parameter 'a' of graph() has no default",
        "parameter 'b' of graph() has the type list",
        "parameter 'c' of graph() is int and has the default 'x'",
        "parameter 'd' of graph() is Literal['s'] and has the default 'l'",
        "graph() takes **e",
    ]
    assert {problem.where for problem in found} == {f"{tmp_path}/g.py:{HEAD.count(chr(10)) + 1}"}
    assert found[0].fix == "write a: int = 1"


@pytest.mark.parametrize("default", ["True", "None", "2.0"])
def test_a_default_of_another_type_is_refused(tmp_path, default):
    (problem,) = problems(tmp_path, f"def graph(steps: int = {default}):\n    return made()\n")
    assert problem.what == f"parameter 'steps' of graph() is int and has the default {default}"


def test_a_parameter_with_the_name_of_a_flag_of_the_command(tmp_path):
    file = load(written(tmp_path, "def graph(seed: int = 1, check: bool = True):\n    return made()\n"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--check")
    with pytest.raises(GraphError) as error:
        add_flags(parser, file.flags)
    (problem,) = error.value.problems
    assert (problem.where, problem.fix) == (file.flags[1].where, "rename the parameter")


def test_a_missing_file_names_one_that_is_near(tmp_path):
    written(tmp_path, "", "quickstart.py")
    with pytest.raises(GraphError) as error:
        load(tmp_path / "quickstrat.py")
    assert error.value.problems[0].fix == f"did you mean {tmp_path}/quickstart.py?"
    with pytest.raises(GraphError) as error:
        load(tmp_path / "graphs" / "code.py")
    assert error.value.problems[0].fix == "did you mean code?"
    with pytest.raises(GraphError) as error:
        load(Path("/nowhere/zzz.py"))
    assert error.value.problems[0].fix.startswith("choose a recipe: ")


def test_a_crash_in_c_prints_the_line_that_it_came_from(tmp_path):
    path = written(tmp_path, "import ctypes\nctypes.string_at(0)\n", "crash.py")
    command = [sys.executable, "-m", "pipeline.run", str(path), "--check"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == -signal.SIGSEGV
    assert re.search(rf'File "{re.escape(str(path))}", line \d+ in <module>', ended.stderr), ended.stderr
