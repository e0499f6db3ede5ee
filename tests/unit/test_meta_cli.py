"""The command line of a graph: flags and help, output, exit codes, and what it records."""

import json
import os
import re
import subprocess
import sys

import pytest

from pipeline import DataPlaneError, StageError, run
from pipeline.engine.driver import Driver
from pipeline.errors import CheckpointError, DataPlaneLost, GraphError, Problem
from tests.errors.harness import DEF, LINES, REPOSITORY, TOP, command, graph_text, live_text

LOCAL = ("--executor", "local", "--run-dir", "run")
HELP = """\
A small graph.

positional arguments:
  graph                   a Python file with a function graph(), or the name of a recipe

options:
"""
PARAMETERS = """\
parameters of graph():
  --steps INT             2
  --batch INT             4
  --seed INT              0
"""


@pytest.fixture
def live(tmp_path):
    """A folder with a graph that runs without a model."""
    (tmp_path / "graph.py").write_text(live_text())
    return tmp_path


def help_of(capsys, *argv):
    with pytest.raises(SystemExit) as ended:
        run.main([*argv, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("run_dir", [(), ("--run-dir", "a/b/c"), ("--run-dir", ".")], ids=" ".join)
@pytest.mark.parametrize("mode", ["--check", "--plan"])
def test_a_check_leaves_no_folder(live, mode, run_dir):
    assert command(live, "graph.py", mode, *run_dir)[0] == 0
    assert [path.name for path in live.iterdir() if path.name != "__pycache__"] == ["graph.py"]


def test_help_has_the_docstring_and_the_parameters(live, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    shown = help_of(capsys, str(live / "graph.py"))
    assert HELP in shown
    assert f"{PARAMETERS}\nexit codes: " in shown


def test_help_without_a_graph_has_the_flags_of_the_command(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    shown = help_of(capsys)
    for flag in ("--check", "--plan", "--resume [STEP]", "--replay FOLDER", "--run-dir DIR", "--gpus N"):
        assert flag in shown
    assert "parameters of graph()" not in shown


def test_check_starts_nothing_and_says_so(live):
    assert command(live, "graph.py", "--check") == (0, "graph.py: 4 stages, 6 edges, no problem found\n", "")
    assert {path.name for path in live.iterdir()} <= {"graph.py", "__pycache__"}


def test_flags_of_the_graph_reach_it(live):
    code, out, _ = command(live, "graph.py", "--plan", "--steps", "7", "--batch", "3")
    assert (code, out.splitlines()[0]) == (0, "live  7 steps of 3 prompts x 1 samples")


def test_a_graph_with_a_model_is_checked_and_drawn_without_running_it(tmp_path):
    (tmp_path / "graph.py").write_text(graph_text(TOP, DEF, LINES))
    assert command(tmp_path, "graph.py", "--check") == (
        0, "graph.py: 9 stages, 23 edges, no problem found\n", "",
    )  # fmt: skip
    code, out, err = command(tmp_path, "graph.py", "--plan")
    assert (code, err) == (0, "")
    assert "[ refit ] on learner -> sampler  <-  train(trained_weights)" in out


def test_warnings_are_printed_and_do_not_stop(tmp_path):
    loud = '(Step("loud", reads=rollout.writes[1:2], writes=(Field("noise", dtype="float32", dims="N T"),)),)'
    (tmp_path / "graph.py").write_text(graph_text(TOP, DEF, LINES | {"extra": loud}))
    code, _, err = command(tmp_path, "graph.py", "--check")
    assert code == 0
    assert re.fullmatch(r"graph\.py:\d+: warning: field 'noise' of 'loud' is not read by any stage; .*\n", err)


def test_a_run_records_what_it_was_and_ends_with_the_next_commands(live):
    code, out, err = command(live, "graph.py", *LOCAL, "--batch", "2")
    assert (code, err) == (0, "")
    record = json.loads((live / "run/run.json").read_bytes())
    assert record["args"] == {"steps": 2, "batch": 2, "seed": 0}
    assert (record["graph"], record["executor"], record["seed"]) == ("live", "local", 0)
    assert record["command"] == ["python", "-m", "pipeline.run", "graph.py", *LOCAL, "--batch", "2"]
    assert (live / "run/graph.py").read_text() == (live / "graph.py").read_text()
    assert json.loads((live / "run/plan.json").read_bytes())["name"] == "live"
    assert len((live / "run/metrics.jsonl").read_text().splitlines()) == 2
    assert len((live / "run/samples/step_000002.jsonl").read_text().splitlines()) == 2
    assert "python -m pipeline.run graph.py --executor local --run-dir run --resume --steps 4" in out


def test_a_resumed_run_has_the_recorded_flags_and_drops_the_lines_after_its_checkpoint(live):
    assert command(live, "graph.py", *LOCAL, "--batch", "2", "--steps", "3")[0] == 0
    whole = (live / "run/metrics.jsonl").read_text().splitlines()
    with (live / "run/metrics.jsonl").open("a") as file:
        file.write('{"step":4,"half')  # as a killed run leaves it
    code, out, err = command(live, "graph.py", *LOCAL, "--resume", "1")
    assert code == 0 and err.startswith("--resume 1: warning: there are later checkpoints (step 2, 3); ")
    aside = {path.name for path in (live / "run/before-1/checkpoints").iterdir()}
    assert aside == {"step_000002", "step_000003"}
    assert "live: 2 steps of 2 x 1 samples" in out
    again = [json.loads(line) for line in (live / "run/metrics.jsonl").read_text().splitlines()]
    untimed = [{k: v for k, v in line.items() if not k.startswith(("time/", "stored/"))} for line in again]
    assert untimed == [
        {k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "stored/"))} for line in whole
    ]  # fmt: skip


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(live):
    assert command(live, "graph.py", *LOCAL)[0] == 0
    (live / "run/checkpoints/step_000002/count/count.json").write_text("3")
    code, out, _ = command(live, "graph.py", *LOCAL, "--resume")
    assert code == 0
    assert out.startswith("live: 1 step of 4 x 1 samples")


def test_a_run_without_a_folder_makes_one_of_its_name(live):
    assert command(live, "graph.py", "--executor", "local")[0] == 0
    (folder,) = (live / "runs").iterdir()
    assert re.fullmatch(r"live-\d{8}-\d{6}", folder.name)


PROBLEM = Problem(where="a", what="b", why="c", fix="d")


@pytest.mark.parametrize(
    ("error", "code"),
    [(GraphError, 2), (StageError, 3), (DataPlaneError, 4), (DataPlaneLost, 5), (CheckpointError, 6)],
)
def test_each_kind_of_error_has_its_exit_code(live, monkeypatch, error, code):
    def execute(self):
        raise error(PROBLEM)

    monkeypatch.setattr(Driver, "execute", execute)
    ended, _, err = command(live, "graph.py", *LOCAL)
    way_on = err.splitlines()[-1]
    assert way_on.endswith(" --resume   (from the start: no checkpoint was written yet)")
    assert (ended, err) == (code, f"{PROBLEM}\n{way_on}\n")
    assert re.search(rf"\b{code}\b", run.__doc__)


def test_an_interrupted_run_says_how_to_go_on(live, monkeypatch):
    assert command(live, "graph.py", *LOCAL)[0] == 0

    def execute(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Driver, "execute", execute)
    code, _, err = command(live, "graph.py", *LOCAL, "--resume", "--steps", "5")
    assert code == 130
    resume = "resume: python -m pipeline.run graph.py --executor local --run-dir run --resume   (from step 2)"
    assert err.splitlines() == [resume, "interrupted"]


@pytest.mark.usefixtures("signals_are_not_ignored")
@pytest.mark.parametrize("words", [["-m", "pipeline.run"], ["sluice", "run"]], ids=" ".join)
@pytest.mark.parametrize("caught", [False, True], ids=["while modules are imported", "in the graph file"])
def test_an_interrupt_while_a_command_starts_is_no_traceback(tmp_path, words, caught):
    interrupt = "import os, signal, time\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(60)\n"
    (tmp_path / "ours").mkdir()
    file = "graph.py" if caught else "ours/difflib.py"  # a module that commands import
    (tmp_path / file).write_text(f"{interrupt}finally:\n    print('its end')\n")
    (tmp_path / "sluice").write_text("from pipeline.__main__ import script\nscript()\n")
    path = os.pathsep.join([str(tmp_path / "ours"), str(REPOSITORY)])
    done = subprocess.run(
        [sys.executable, *words, "graph.py"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, text=True,
        capture_output=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr, done.stdout) == (130, "interrupted\n", "its end\n" * caught)


def test_an_argument_of_none_reaches_the_graph(tmp_path):
    define = "def graph(steps: int = 2, batch: int = 4, seed: int = 0, limit: int | None = 3):"
    text = live_text(made="print(limit) or " + LINES["made"].replace("stages=stages", "stages=(reward, count)"))
    (tmp_path / "graph.py").write_text(
        text.replace(text[text.index("def graph(") : text.index("\n    source")], define)
    )
    assert command(tmp_path, "graph.py", "--check", "--limit", "none")[1].startswith("None\n")
    assert command(tmp_path, "graph.py", "--check")[1].startswith("3\n")


def test_no_colour_where_there_is_no_terminal(live):
    code, out, _ = command(live, "graph.py", *LOCAL)
    assert code == 0
    assert "\x1b" not in out
    assert not os.path.exists(live / "runs")


def test_a_reader_that_leaves_gets_no_traceback():
    command = [sys.executable, "-m", "pipeline"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, cwd=REPOSITORY, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
