"""User folders and files with the name of a module of Sluice, of Python or of an installed package.

Runs real commands in a process of their own, from the user's folder."""

import importlib
import os
import re
import subprocess
import sys
import sysconfig
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from pipeline import precedence
from pipeline.__main__ import COMMANDS, main
from pipeline.errors import mistaken_import, user_error
from tests.doors import forgotten
from tests.errors.harness import REPOSITORY, live_text
from tests.errors.harness import command as called

RAISES = "raise RuntimeError('the wrong module was imported')\n"
OURS = "from ops.rewards import exact_match\nfrom stages.vocabulary import REWARD\nfrom graphs import grpo\n\n"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}


def written(folder, **files):
    """Write Python files under `folder`. In a name, __ stands for /, and .py is appended."""
    for name, text in files.items():
        path = folder / name.replace("__init", "INIT").replace("__", "/").replace("INIT", "/__init__").replace(
            "//", "/"
        )
        path = path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def command(folder, *argv, module="pipeline.run", flags=()):
    """Return the exit code, stdout and stderr of `python -m` in a folder."""
    done = subprocess.run(
        [sys.executable, *flags, "-m", module, *argv],
        cwd=folder,
        env=ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def checked(folder, *argv, **settings):
    return command(folder, *argv, "--check", **settings)


@pytest.mark.parametrize("is_package", [True, False], ids=["package", "folder"])
@pytest.mark.parametrize("name", ["stages", "ops", "graphs"])
def test_ours_win_over_a_folder_of_the_same_name(tmp_path, name, is_package):
    written(tmp_path, graph=OURS + live_text(), **{f"{name}/mine": RAISES, f"{name}/other": RAISES})
    if is_package:
        (tmp_path / name / "__init__.py").write_text(RAISES)
    assert checked(tmp_path, "graph.py") == (0, "graph.py: 4 stages, 6 edges, no problem found\n", "")
    (tmp_path / "elsewhere").mkdir()
    code, _, stderr = checked(tmp_path / "elsewhere", "../graph.py")
    assert (code, stderr) == (0, "")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from stages.mine import Shout", "stages.mine"),
        ("from stages import mine", "stages.mine"),
        ("import stages.mine", "stages.mine"),
        ("from stages.reward import Reward", "stages.reward"),  # both have it; one never stands in for the other
    ],
)
@pytest.mark.parametrize("folder", ["", "elsewhere"], ids=["from its folder", "from elsewhere"])
def test_what_a_graph_imports_from_a_hidden_folder_is_refused(tmp_path, line, name, folder):
    written(tmp_path, graph=f"{line}\n" + live_text(), stages__mine="Shout = 1\n", stages__reward="Reward = 1\n")
    (tmp_path / "elsewhere").mkdir()
    code, _, stderr = called(tmp_path / folder, str(tmp_path / "graph.py"), "--check")
    assert code == 2
    assert stderr.replace(f"{tmp_path}/", "") == (
        f"graph.py:1: it imports {name!r}, and the folder stages is hidden; 'stages' is a module of Sluice, "
        "which takes precedence over the user's. Fix: rename stages, and import it by its new name\n"
    )


DEEP = {"kit__init__": "", "kit__first": "from .second import x\n", "kit__second": "def late():\n    import {}.mine\n"}


@pytest.mark.parametrize("name", ["ops", "stages", "graphs", "pipeline"])
@pytest.mark.parametrize(
    ("line", "files", "where"),
    [
        ("import near", {"near": "from {} import mine\n"}, "near.py:1"),
        ("import near", {"near": "import json, far\n", "far": "\nfrom {}.mine import x\n"}, "far.py:2"),
        ("from kit import first", DEEP, "kit/second.py:2"),
        ("def late(): import kit.first", DEEP, "kit/second.py:2"),
        ("from kit import *", DEEP | {"kit__init__": "import kit.second\n"}, "kit/second.py:2"),
        ("from space import near", {"space__near": "from {} import mine\n"}, "space/near.py:1"),
    ],
    ids=["module", "second module", "package", "later", "star", "folder"],
)
def test_so_is_what_the_users_modules_import_at_any_depth(tmp_path, name, line, files, where):
    files = {file: text.format(name) for file, text in files.items()}
    written(tmp_path, graph=f"{line}\n" + live_text(), **files, **{f"{name}__mine": "x = 1\n"})
    code, _, stderr = called(tmp_path, "graph.py", "--check")
    assert code == 2
    assert stderr.startswith(f"{where}: it imports '{name}.mine") and stderr.count("\n") == 1
    assert stderr.endswith(f"Fix: rename {name}, and import it by its new name\n")


def test_the_users_modules_are_read_and_not_imported_to_find_that(tmp_path):
    files = {"heavy_of_it": RAISES, "torch": RAISES, "ops__mine": RAISES, "stages__mine": ""}
    later = "def late():\n    import heavy_of_it, torch\n    from stages import Reward\n"
    written(tmp_path, graph="import later_of_it\n" + live_text(), later_of_it=later, **files)
    with forgotten(tmp_path):
        assert called(tmp_path, "graph.py", "--check")[::2] == (0, "")
    written(tmp_path, heavy_of_it=RAISES + "from ops.mine import x\n")
    code, _, stderr = called(tmp_path, "graph.py", "--check")
    assert code == 2 and stderr.startswith("heavy_of_it.py:2: it imports 'ops.mine', and the folder ops is hidden; ")


@pytest.mark.parametrize(
    ("name", "owner"), [("ops", "Sluice"), ("statistics", "Python"), ("networkx", "an installed package")]
)
def test_a_file_beside_the_graph_is_hidden_and_refused_where_it_is_meant(tmp_path, name, owner):
    written(tmp_path, graph=live_text(), **{name: "raise RuntimeError\n"})
    assert checked(tmp_path, "graph.py")[0] == 0
    written(tmp_path, graph=f"from {name} import mine\n" + live_text())
    code, _, stderr = checked(tmp_path, "graph.py")
    assert code == 2
    assert stderr.startswith(f"graph.py:1: it imports '{name}")
    assert (
        f"'{name}' is a module of {owner}, which takes precedence over the user's. Fix: rename {name}.py, and" in stderr
    )


def test_a_name_that_a_module_of_the_users_lacks_is_no_collision(tmp_path):
    written(tmp_path, graph="from helper_x import nothing\n" + live_text(), helper_x="", stages__mine="")
    code, _, stderr = called(tmp_path, "graph.py", "--check")
    assert code == 2
    assert stderr.startswith("graph.py:1: the graph file does not import: ImportError: cannot import name 'nothing'")


def test_a_run_where_files_are_named_like_modules_of_pythons_and_of_torchs(tmp_path):
    names = ("random", "statistics", "queue", "datasets", "stages__init__", "ops__init__", "utils__init__")
    written(tmp_path, graph=live_text(), **dict.fromkeys(names, RAISES))
    code, _, stderr = command(
        tmp_path, "graph.py", "--executor", "local", "--run-dir", "run", "--steps", "1", "--plain"
    )
    assert (code, stderr) == (0, "")
    assert (tmp_path / "run/metrics.jsonl").read_text().count("\n") == 1


@pytest.mark.skipif(find_spec("triton") is not None, reason="triton is installed")
def test_a_file_that_torch_takes_for_a_package_that_is_not_installed_is_named(tmp_path, monkeypatch):
    (tmp_path / "triton.py").write_text("\nraise OSError('no disk')\n")
    monkeypatch.syspath_prepend(tmp_path)
    looks = importlib.import_module("torch.utils._triton").has_triton_package
    looks.cache_clear()
    with pytest.raises(OSError, match="no disk") as found:
        looks()
    wrapped = ModuleNotFoundError("Could not import module 'PreTrainedModel'.")
    wrapped.__cause__ = found.value
    stage = user_error(wrapped, stage="rollout", where="graph.py:3", when="setup failed").problems
    assert [mistaken_import(found.value)] == list(stage)
    assert (stage[0].where, stage[0].fix) == (f"{tmp_path}/triton.py:2", f"rename {tmp_path}/triton.py")
    assert stage[0].what.startswith("OSError: no disk, when ")
    assert stage[0].what.endswith("/torch/utils/_triton.py imported it as the package 'triton'")
    assert mistaken_import(ValueError()) is None


def test_what_lies_beside_the_graph_and_in_the_working_directory_is_reachable(tmp_path):
    top = "import beside\nfrom here.deeper import there\n\n"
    written(tmp_path, project__graph=top + live_text(), project__beside="", here__deeper="there = 1\n")
    assert checked(tmp_path, "project/graph.py")[0] == 0


def test_a_package_that_would_replace_an_installed_one_without_init_is_refused(tmp_path):
    written(tmp_path, graph=live_text(), google__init__="", opentelemetry__mine="")
    code, _, stderr = checked(tmp_path, "graph.py")
    assert code == 2
    assert (
        stderr.startswith("google: it replaces the installed package 'google'; ") and "Fix: rename google\n" in stderr
    )
    (tmp_path / "google/__init__.py").unlink()
    assert checked(tmp_path, "graph.py")[0] == 0, "both are found in a folder without __init__.py"


def test_the_graphs_folder_comes_before_the_working_directory(tmp_path):
    written(tmp_path, project__graph="import both\n" + live_text(), project__both="", both=RAISES)
    assert checked(tmp_path, "project/graph.py") == (0, "project/graph.py: 4 stages, 6 edges, no problem found\n", "")


def test_a_folder_named_pipeline_changes_nothing(tmp_path):
    written(tmp_path, graph=live_text(), pipeline__mine=RAISES)
    assert checked(tmp_path, "graph.py")[0] == 0


def test_a_package_named_pipeline_hides_ours_unless_python_is_safe(tmp_path):
    written(tmp_path, graph=live_text(), pipeline__init__="", pipeline__run="print('theirs')\n")
    assert checked(tmp_path, "graph.py")[:2] == (0, "theirs\n")  # none of our code runs
    assert checked(tmp_path, "graph.py", flags=["-P"])[0] == 0


@pytest.mark.parametrize("name", ["pipeline__init__", "pipeline"])
def test_another_pipeline_in_which_python_finds_our_modules_is_named(tmp_path, name):
    """As with an editable install, whose finder gives our modules to whatever package has their name."""
    written(tmp_path, graph=live_text(), **{name: ""})
    finder = (
        "import sys; from importlib.machinery import PathFinder\n"
        "class Editable:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        home, *inside = name.split('.')[:-1] or ['']\n"
        f"        folder = '/'.join([{str(REPOSITORY)!r}, home, *inside])\n"
        "        return PathFinder.find_spec(name, [folder]) if home == 'pipeline' else None\n"
        "sys.meta_path.append(Editable); sys.path.insert(0, '')\n"
        "import pipeline; pipeline.__path__ = getattr(pipeline, '__path__', [])\n"
        "from pipeline.run import main; sys.exit(main(['graph.py', '--check']))\n"
    )
    done = subprocess.run([sys.executable, "-c", finder], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    theirs = tmp_path / ("pipeline" if name == "pipeline__init__" else "pipeline.py")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"{theirs.name}: it takes the place of Sluice's package 'pipeline'; ")
    assert done.stderr.endswith("Fix: rename it, or use the command sluice, as in sluice run graph.py\n")


SLUICE = Path(sysconfig.get_path("scripts")) / "sluice"


def sluice(folder, *argv, **variables):
    """Run the installed command `sluice`. Returns exit code, stdout and stderr."""
    environment = ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)} | variables
    done = subprocess.run([SLUICE, *argv], cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def test_the_command_sluice_runs_ours_beside_a_package_named_pipeline(tmp_path):
    theirs = {"pipeline__init__": RAISES, "pipeline__run": RAISES, "stages__init__": RAISES}
    written(tmp_path, project__graph="import here\n" + live_text(), here="", **theirs)
    settings = ("--executor", "local", "--run-dir", "run", "--steps", "1", "--plain", "--view")
    code, stdout, stderr = sluice(tmp_path, "run", "project/graph.py", *settings)
    assert (code, stderr) == (0, "") and "http://127.0.0.1:" in stdout  # a process of ours that the run started
    assert re.search(r"^continue +sluice run project/graph.py --executor local --run-dir run --resume", stdout, re.M)


def test_the_command_sluice_says_what_it_is(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/bin/sluice"])
    for argv in ([], ["help"], ["-h"], ["--help"], ["help", "help"]):
        assert main(argv) == 0
        assert capsys.readouterr().out.startswith("usage: sluice COMMAND [flags]\n")
    for argv in (["--version"], ["-V"], ["version"]):
        assert main(argv) == 0
        assert capsys.readouterr().out == f"sluice {metadata.version('sluice-rl')}\n"
    for argv in (["help", "export"], ["--help", "export"], ["export", "-h"]):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == 0 and capsys.readouterr().out.startswith("usage: sluice export RUN")


@pytest.mark.parametrize(
    ("argv", "fix"),
    [
        (["Run", "graph.py"], "did you mean sluice run?"),
        (["graph.py", "--steps", "3"], "did you mean sluice run graph.py --steps 3?"),
        (["help", "exprot"], "did you mean sluice export?"),
        ([""], "sluice run GRAPH, or sluice help"),
        (["--steps"], "sluice run GRAPH, or sluice help"),
    ],
)
def test_a_command_that_the_command_sluice_lacks(argv, fix, capsys):
    assert main(argv) == 2
    assert capsys.readouterr().err.endswith(f" Fix: {fix}\n")


def test_the_command_sluice_has_every_command(tmp_path):
    code, stdout, stderr = sluice(tmp_path)
    assert (code, stderr) == (0, "")
    assert all(re.search(rf"^  {name} +\w", stdout, re.M) for name in COMMANDS)
    for name in COMMANDS:
        assert sluice(tmp_path, name, "--help")[1].startswith(f"usage: sluice {name} ")
    assert sluice(tmp_path, "rum")[::2] == (
        2,
        "command line: there is no command 'rum'; the commands are run, new, view, analyse, simulate, export, "
        "forward, mirror. Fix: "
        "did you mean sluice run?\n",
    )


@pytest.mark.parametrize("module", ["view", "analyse", "simulate", "export", "forward", "mirror"])
def test_every_command_searches_the_working_directory_last(tmp_path, module):
    written(tmp_path, **dict.fromkeys(("stages__init__", "ops__init__", "msgspec", "argparse"), RAISES))
    code, _, stderr = command(tmp_path, "nowhere", module=f"pipeline.{module}")
    assert code == 2
    assert "Traceback" not in stderr and " Fix: " in stderr


def test_a_script_that_imports_pipeline_first_gets_our_stages(tmp_path):
    written(tmp_path, stages__init__=RAISES, ops__init__=RAISES, script="import pipeline\nimport ops, stages.reward\n")
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY)}, timeout=60
    )
    assert done.returncode == 0


def test_a_process_of_ours_is_as_safe_as_this_one(monkeypatch):
    assert precedence.command("pipeline.view", "run") == [sys.executable, "-m", "pipeline.view", "run"]
    monkeypatch.setattr(sys, "flags", type("Flags", (), {"safe_path": True}))
    assert precedence.command("pipeline.view", "run") == [sys.executable, "-P", "-m", "pipeline.view", "run"]


def test_folders_are_searched_last_and_once(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/a", "/b", "/a"])
    precedence.search_last(["/a", "/c"])
    assert sys.path == ["/b", "/a", "/c"]


def test_modules_of_the_users_travel_from_both_folders(tmp_path, monkeypatch):
    from pipeline.executors.sent import user_folders, user_modules

    made = {}
    for name, file in {
        "graph_x": "project/graph.py", "beside_x": "project/beside.py", "here_x": "here_x.py",
        "package_x": "package_x/__init__.py", "package_x.deep": "package_x/deep.py", "other_x.deep": "other/x/deep.py",
        "stages.mine_x": "project/stages/mine.py", "installed_x": "site-packages/installed_x.py",
    }.items():  # fmt: skip
        made[name] = ModuleType(name)
        made[name].__file__ = str(tmp_path / file)
        monkeypatch.setitem(sys.modules, name, made[name])
    monkeypatch.chdir(tmp_path)
    found = {module.__name__ for module in user_modules(made["graph_x"])}
    assert found == {"graph_x", "beside_x", "here_x", "package_x", "package_x.deep"}
    assert user_folders([made["graph_x"]]) == [tmp_path / "project", Path(tmp_path)]
