"""Paths that the file system refuses, of runs, graph files, data and models: one problem each, with something to do."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli.command import exit_code
from pipeline.record.runs import list_runs, open_run
from pipeline.web import pages
from tests.conftest import REPOSITORY
from tests.errors.harness import DEF, LINES, PROBLEM, TOP, command, graph_text, live_text
from tests.unit.damage import answered, damaged

LOCAL = ("--executor", "local", "--run-dir", "run")
LONG = "x" * 300
SETPRIV = ("setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner")  # root as other users are
PARAMETERS = DEF.replace(") ->", ', data: str = "data", model: str = "model") ->')
NAMED = graph_text(TOP, PARAMETERS, LINES | {"source": "Prompts(data, batch=batch)", "policy": "Model(model)"})


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ran")
    (folder / "graph.py").write_text(live_text())
    (folder / "named.py").write_text(NAMED)
    assert command(folder, "graph.py", *LOCAL)[0] == 0
    return folder


@pytest.mark.parametrize(
    "line",
    [
        f"view {LONG} --no-open", f"analyse {LONG}", f"analyse run --compare {LONG}", f"export {LONG} --html a.html",
        f"export run --html {LONG}.html", f"export run --csv {LONG}", f"export run --model {LONG}", f"simulate {LONG}",
        f"run {LONG} --check", f"run --list {LONG}", f"run graph.py --executor local --run-dir {LONG} --resume",
        f"run graph.py --executor local --run-dir {LONG}", f"run graph.py --replay {LONG}", f"new {LONG}",
        f"mirror {LONG} mirrored", f"mirror --fetch mirrored {LONG}", f"forward {LONG} --tensorboard tb",
    ],
)  # fmt: skip
def test_a_name_that_is_too_long(ran: Path, line: str) -> None:
    program, *words = line.split()
    code, err = answered(ran, *words, program=program)
    assert code == 2 and LONG in err and "Fix: " in err


def test_data_and_a_model_with_names_that_are_too_long(ran: Path) -> None:
    code, err = answered(ran, "named.py", "--data", f"{LONG}.jsonl", "--model", f"./{LONG}", "--check")
    assert code == 2 and err.count("File name too long; a name has at most 255 bytes") == len(err.splitlines()) == 2


SENT = ("events.jsonl", "metrics.jsonl", "run.json", "graph.py", "samples/step_000001.jsonl")


@pytest.mark.parametrize("name", [*SENT, "checkpoints/step_000001/manifest.json"])
def test_a_pipe_in_a_run_is_not_waited_for(ran: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(ran / "run", tmp_path / "run")
    with damaged(tmp_path / "run" / name, ("pipe", 0)):
        assert answered(tmp_path, "run", "mirrored", program="mirror")[0] == 2
        if name in SENT[:3]:
            assert answered(tmp_path, "run", "--tensorboard", "tb", program="forward")[0] == 2


SCRIPT = """
import json, sys
from pathlib import Path
from pipeline.errors import GraphError
from pipeline.record.runs import open_run
from pipeline.web import pages
from tests.errors.harness import command

here = Path.cwd()
said = [[line, *command(here, *line.split()[1:], program=line.split()[0])] for line in json.loads(sys.argv[1])]
try:
    open_run(Path("run"))
except GraphError as error:
    said.append(["open_run", 2, "", f"{error}\\n"])
print(json.dumps([said, pages.runs(here)]))
"""
READING = (
    "view run --no-open", "export run --html a.html", "analyse run", "simulate run", "mirror run mirrored",
    "forward run --tensorboard tb", "run graph.py --executor local --run-dir run --resume --steps 9", "run --list run",
    "run graph.py --replay run/failures/x", "view run/logs --no-open",
)  # fmt: skip
CHECKING = ("run named.py --data data/train.jsonl --check", "run named.py --data data --check", "run named.py --check")


def test_what_this_user_may_not_read(ran: Path, tmp_path: Path) -> None:
    as_root = os.geteuid() == 0
    if as_root and not shutil.which(SETPRIV[0]):
        pytest.skip("root reads everything, and there is no setpriv")
    shutil.copytree(ran, tmp_path, dirs_exist_ok=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    shut = [tmp_path / "run", tmp_path / "data" / "train.jsonl", tmp_path / "model"]
    shut[2].mkdir()
    for path in shut:
        path.chmod(0)
    try:
        found, listed = _said(tmp_path, as_root, [*READING, *CHECKING, "run --list ."])
        (_, code, told, _), (_, _, _, opened) = found[-2:]
        assert code == 0 and ["run", "unreadable"] in [line.split() for line in told.splitlines()]
        assert {(run["name"], run["state"]) for run in listed} == {(name, "unreadable") for name in ("run", "model")}
        for line, code, _, err in (*found[: len(READING)], ["open_run", 2, "", opened]):
            assert code == 2 and PROBLEM.fullmatch(err.strip()), (line, err)
            assert err.endswith("Permission denied; the mode of run keeps even its owner out. Fix: chmod -R u+rX run\n")
        for line, code, _, err in found[len(READING) : -2]:
            problems = err.splitlines()
            assert code == 2 and len(problems) == 2 and all(map(PROBLEM.fullmatch, problems)), (line, err)
            assert "'data/train.jsonl' cannot be read: Permission denied" in problems[0], line
            assert "'model/config.json' cannot be read: Permission denied" in problems[1], line
        if as_root:
            os.chown(tmp_path / "run", 65534, -1)
            (_, _, _, err), _ = _said(tmp_path, as_root, ["analyse run"])[0]
            assert err.endswith("run belongs to another user. Fix: ask its owner for access: chmod -R go+rX run\n")
        fix = "chmod -R u+rX run"
        subprocess.run(shlex.split(fix), cwd=tmp_path, check=True)
        assert open_run(tmp_path / "run").state == "finished"
    finally:
        for path in shut:
            path.chmod(0o700)


def _said(folder: Path, as_root: bool, lines: list[str]) -> tuple[list[list], list[dict]]:
    """Run commands in a process that may not read what its user may not read."""
    command = [*(SETPRIV if as_root else ()), sys.executable, "-c", SCRIPT, json.dumps(lines)]
    path = os.pathsep.join([REPOSITORY, *sys.path])
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_folder_in_the_place_of_a_file(ran: Path, tmp_path: Path) -> None:
    shutil.copytree(ran / "run", tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    (tmp_path / "run" / "run.json").mkdir()
    assert [run.name for run in list_runs(tmp_path)] == [run["name"] for run in pages.runs(tmp_path)] == ["run"]


def test_an_error_of_the_users_code_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_opens.py").write_text("def it(argv):\n    open(argv[0])\n")
    import mine_opens  # type: ignore[import-not-found]

    with pytest.raises(FileNotFoundError):
        exit_code(mine_opens.it, ["nowhere"])
