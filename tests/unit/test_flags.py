"""Command-line flags: switches, help lines, and error messages for mistakes."""

import re
from dataclasses import replace

import msgspec
import pytest

from pipeline import GraphError, analyse, export, forward, run, simulate, view
from pipeline.cli.command import Parser, default_of, graph_named, number, one_of, whole
from pipeline.cli.flags import Flag, add_flags, as_flag, named_by_flag, spelled
from pipeline.cli.load import load
from pipeline.errors import Problem

GRAPH = '''from typing import Literal

from pipeline import Graph, Schedule, Stage


def graph(
    colocated: bool = False,
    warm: bool = True,
    cold: bool | None = None,
    task: Literal["sort", "reverse"] = "sort",
    max_staleness: int = 0,  # versions that a sample may be older
    lr: float = 1e-6,  # learning rate
    name: str = "a name that is longer than the column of defaults",
) -> Graph:
    """Does it.

    colocated  the same GPUs
               for both
    warm:      starts warm
    lr         what the docstring says
    """
    return Graph(name="g", source=Stage(), stages=(), schedule=Schedule(steps=1))
'''


SEE = "see python -m pipeline.run g.py --help"


def parser_of(tmp_path, text=GRAPH):
    path = tmp_path / "g.py"
    path.write_text(text)
    parser = Parser(prog="python -m pipeline.run")
    parser.graph_file = "g.py"
    parser.add_argument("graph", nargs="?")
    parser.add_argument("--gpus", type=whole, metavar="N")
    parser.add_argument("--folder", metavar="DIR")
    parser.add_argument("--wait", type=number, default=1.5)
    parser.add_argument("--stale", **one_of("wait", "drop"))
    parser.add_argument("--executor", **one_of("ray", "local"), default="ray")
    add_flags(parser, load(path).flags)
    return parser


def given(tmp_path, *argv):
    values = vars(parser_of(tmp_path).parse_args(argv))
    return {name.removeprefix("graph."): value for name, value in values.items() if name.startswith("graph.")}


def refused(parser, *argv):
    with pytest.raises(GraphError) as error:
        parser.parse_args(argv)
    return [(problem.where, problem.what, problem.fix) for problem in error.value.problems]


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        (["--colocated"], {"colocated": True}),
        (["--no-colocated"], {"colocated": False}),
        (["--colocated", "true"], {"colocated": True}),
        (["--colocated", "false"], {"colocated": False}),
        (["--colocated=no"], {"colocated": False}),
        (["--colocated", "--no-warm"], {"colocated": True, "warm": False}),
        (["--colocated", "g.py"], {"colocated": True, "graph": "g.py"}),
        (["--warm", "--no-warm"], {"warm": False}),
        (["--cold"], {"cold": True}),
        (["--cold", "none"], {"cold": None}),
    ],
    ids=" ".join,
)
def test_a_switch_as_it_may_be_typed(tmp_path, argv, values):
    options = vars(parser_of(tmp_path).parse_args(argv))
    assert {name: options.get(f"graph.{name}", options.get(name)) for name in values} == values


def test_the_words_of_a_value_give_that_value(tmp_path):
    values = {"colocated": True, "warm": False, "cold": None, "task": "reverse", "max_staleness": 2, "lr": 1e-3}
    words = [word for name, value in values.items() for word in spelled(name, value)]
    assert words[:3] == ["--colocated", "--no-warm", "--cold"]
    assert given(tmp_path, *words) == values


@pytest.mark.parametrize(
    ("fix", "expected"),
    [
        ("lr=1e-6", "--lr 1e-6"),
        ("max_staleness=2 or 4", "--max-staleness 2 or 4"),
        ("max_staleness=0, or another schedule", "--max-staleness 0, or another schedule"),
        ("task='sort'", "--task sort"),
        ("task='other'", "task='other'"),
        ("warm=False", "--no-warm"),
        ("colocated=True", "--colocated"),
        ("cold=None", "--cold none"),
        ("lr=None", "lr=None"),
        ("max_staleness=0.5", "max_staleness=0.5"),
        ("lr=Schedule(1)", "lr=Schedule(1)"),
        ("use lr=1e-6", "use lr=1e-6"),
        ("threads=1", "threads=1"),
    ],
)
def test_a_fix_is_a_flag_if_that_was_given(tmp_path, fix, expected):
    path = tmp_path / "g.py"
    path.write_text(GRAPH)
    flags = load(path).flags
    problem = Problem(where="here", what="it is wrong", why="it is", fix=fix)
    assert as_flag(problem, flags, {flag.name for flag in flags} | {"threads"}).fix == expected
    assert as_flag(problem, flags, {}) == problem


@pytest.mark.parametrize(
    ("what", "where"),
    [
        ("'train.jsonl' does not exist", "here (--data)"),
        ("'folder/a/train.jsonl' does not exist", "here (--folder)"),
        ("the folder 'folder' has no config.json", "here (--folder)"),
        ("'folders' does not exist, and 'folder' does", "here"),
        ("the task 'sort' is unknown", "here"),
        ("'' is no text", "here"),
        ("train.jsonl does not exist", "here"),
    ],
)
def test_a_problem_with_the_text_of_a_flag_names_it(what, where):
    texts = {"data": "train.jsonl", "folder": "folder/", "task": "sort", "empty": "", "none": None, "steps": 3}
    flags = [Flag(name=name, type=int if name == "steps" else str, default="x") for name in texts]
    flags[2] = replace(flags[2], choices=("sort", "reverse"))
    problem = Problem(where="here", what=what, why="it is", fix="write another")
    assert named_by_flag(problem, flags, texts) == msgspec.structs.replace(problem, where=where)


def test_each_parameter_has_a_line_of_its_own_and_defaults_are_in_one_column(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    shown = parser_of(tmp_path).format_help().partition("parameters of graph():\n")[2].splitlines()
    column = shown[0].index("off")
    assert shown[0][:column].strip() == "--colocated, --no-colocated"
    assert shown[0].endswith("the same GPUs for both")
    defaults = [line[column:].split()[0] for line in shown[:6]]
    assert defaults == ["off", "on", "none", "sort", "0", "1e-06"]
    helps = [re.split(r" {2,}", line[column:])[1:] for line in shown[:6]]
    assert [text for line in helps for text in line if text] == [
        "the same GPUs for both", "starts warm", "versions that a sample may be older", "what the docstring says",
    ]  # fmt: skip
    assert shown[3][:column].strip() == "--task {sort,reverse}"
    assert shown[6][column:] == "a name that is longer than the column of defaults"


def test_a_default_is_shown_where_there_is_one(tmp_path):
    actions = {action.dest: default_of(action) for action in parser_of(tmp_path)._actions}
    assert (actions["gpus"], actions["wait"], actions["executor"], actions["help"]) == ("", "1.5", "ray", "")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--max-stalenes", "2"], ("--max-stalenes", "there is no such flag", "did you mean --max-staleness?")),
        (["--staleness=2"], ("--staleness=2", "there is no such flag", "did you mean --max-staleness?")),
        (["--max"], ("--max", "there is no such flag", "did you mean --max-staleness?")),
        (["--no-colocate"], ("--no-colocate", "there is no such flag", "did you mean --no-colocated?")),
        (["--zzz"], ("--zzz", "there is no such flag", SEE)),
        (["-t", "sort"], ("-t", "there is no such flag", "did you mean --task?")),
        (["-c"], ("-c", "there is no such flag", "did you mean --cold or --colocated?")),
        (["--Task", "sort"], ("--Task", "there is no such flag", "did you mean --task?")),
        (["--TASK=sort"], ("--TASK=sort", "there is no such flag", "did you mean --task?")),
        (["\u2014task", "sort"], ("\u2014task", "there is no such flag", "did you mean --task?")),
        (["g.py", "\u2013tsk=sort"], ("\u2013tsk=sort", "there is no such flag", "did you mean --task?")),
        (["g.py", "-"], ("-", "there is no such flag", SEE)),
        (["g.py", "--", "--task", "sort"], ("--", "it ends the flags", "leave out --")),
        (["--folder", ""], ("--folder", "its value is empty", "--folder DIR")),
        (["--folder= "], ("--folder", "its value is empty", "--folder DIR")),
        ([""], ("command line", "argument graph: its value is empty", SEE)),
        (["g.py", "h.py"], ("command line", "unexpected argument 'h.py'", SEE)),
        (["--task", "srot"], ("--task", "expected one of sort, reverse, got 'srot'", "--task sort")),
        (["--task", "x"], ("--task", "expected one of sort, reverse, got 'x'", "--task sort")),
        (["--stale", "x"], ("--stale", "expected one of wait, drop, got 'x'", "--stale wait")),
        (["--executor", "foo"], ("--executor", "expected one of ray, local, got 'foo'", "--executor ray")),
        (["--executor", "rai"], ("--executor", "expected one of ray, local, got 'rai'", "--executor ray")),
        (["--max-staleness"], ("--max-staleness", "its value is missing", "--max-staleness INT")),
        (["--gpus", "many"], ("--gpus", "expected a whole number, got 'many'", SEE)),
        (["--wait", "x"], ("--wait", "expected a number, got 'x'", "--wait 1.5")),
        (["--colocated", "maybe"], ("--colocated", "expected true or false, got 'maybe'",
                                    "--colocated off")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_mistake_names_the_flag_that_it_resembles_or_what_is_allowed(tmp_path, argv, expected):
    assert refused(parser_of(tmp_path), *argv) == [expected]


def test_a_dash_that_an_editor_put_in_the_place_of_hyphens_is_named_before_it_is_taken_for_a_file(tmp_path):
    with pytest.raises(GraphError, match="a flag begins with --, not with \u2014"):
        parser_of(tmp_path).parse_known_args(["\u2014task", "sort", "g.py"])


def test_a_text_of_the_graph_may_be_empty(tmp_path):
    assert given(tmp_path, "--name", "") == {"name": ""}


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (run, ("run-dir", "address", "replay", "resume", "list", "tensorboard", "wandb", "mlflow")),
        (simulate, ("groups", "workers", "speed", "stage")),
        (analyse, ("compare",)),
        (export, ("perfetto", "csv")),
        (forward, ("tensorboard", "wandb", "mlflow")),
    ],
    ids=lambda value: value.__name__ if hasattr(value, "main") else "",
)
def test_no_command_takes_an_empty_value(tmp_path, capsys, command, flags):
    (tmp_path / "g.py").write_text(GRAPH)
    for flag in flags:
        assert command.main([str(tmp_path / "g.py"), f"--{flag}", ""]) == 2
        assert capsys.readouterr().err.startswith(f"--{flag}: its value is empty; this flag needs one. Fix: --{flag} ")


def test_every_unknown_flag_is_named(tmp_path):
    assert [where for where, _, _ in refused(parser_of(tmp_path), "--zzz", "1", "--taks=sort")] == [
        "--zzz",
        "--taks=sort",
    ]


def test_a_graph_file_may_come_after_flags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "g.py").write_text(GRAPH)
    assert graph_named(["--lr", "1", "g.py"], "1") == "g.py"
    assert graph_named(["g.py", "h.py"], "g.py") == "g.py"
    assert graph_named(["nowhere"], "nowhere") == "nowhere"
    assert graph_named([], None) is None


@pytest.mark.parametrize(
    ("command", "argv", "where", "fix"),
    [
        (run, ["--exeutor", "local", "{graph}"], "--exeutor", "did you mean --executor?"),
        (simulate, ["{graph}", "--max-stalenes", "1"], "--max-stalenes", "did you mean --max-staleness?"),
        (view, ["--prot", "1"], "--prot", "did you mean --port?"),
        (analyse, ["--stpe", "1"], "--stpe", "did you mean --step?"),
        (export, ["--csb", "x"], "--csb", "did you mean --csv?"),
        (forward, ["--tensorbord", "x"], "--tensorbord", "did you mean --tensorboard?"),
    ],
    ids=lambda value: value.__name__ if hasattr(value, "main") else "",
)
def test_all_commands_answer_alike(tmp_path, capsys, command, argv, where, fix):
    (tmp_path / "g.py").write_text(GRAPH)
    assert command.main([word.format(graph=tmp_path / "g.py") for word in argv]) == 2
    assert capsys.readouterr().err == f"{where}: there is no such flag; --help lists the flags. Fix: {fix}\n"


def test_a_switch_that_takes_no_value_says_so(tmp_path):
    assert refused(parser_of(tmp_path), "--no-colocated=true") == [
        ("--no-colocated", "it was given a value", "--no-colocated, or --colocated=false")
    ]


def test_an_underscore_at_the_end_is_not_part_of_the_flag(tmp_path):
    """`class` is a word of Python, so the parameter is `class_`."""
    parser = parser_of(
        tmp_path, GRAPH.replace("colocated: bool", "class_: int = 1, for_: bool = False, colocated: bool")
    )
    values = vars(parser.parse_args(["--class", "3", "--for"]))
    assert (values["graph.class_"], values["graph.for_"]) == (3, True)
    assert refused(parser, "--class-=3") == [("--class-=3", "there is no such flag", "did you mean --class?")]
    assert spelled("class_", 3) + spelled("for_", False) == ["--class", "3", "--no-for"]
    assert spelled("max_staleness", 1) == ["--max-staleness", "1"]


@pytest.mark.parametrize(
    ("parameter", "flag", "why"),
    [
        ("lr_", "--lr", "parameter 'lr' has a flag of that name"),
        ("gpus_", "--gpus", "the command already has a flag of that name"),
    ],
)
def test_two_names_of_one_flag_are_refused(tmp_path, parameter, flag, why):
    with pytest.raises(GraphError) as error:
        parser_of(tmp_path, GRAPH.replace("    name: str", f"    {parameter}: int = 1,\n    name: str"))
    (problem,) = error.value.problems
    assert problem.what == f"parameter {parameter!r} of graph() would be the flag {flag}" and problem.why == why
