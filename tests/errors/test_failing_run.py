"""A reward that raises in the middle of a run: the error text, what is kept, and how to replay or resume."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from pipeline.record import trace
from tests.errors import cases_running
from tests.errors.harness import PROBLEM, REPOSITORY, command, live_text

RUN = ("graph.py", "--executor", "local", "--steps", "3", "--run-dir", "run")
GOOD = """def score(prompt: str, answer: str) -> float:
    return 1.0 / len(prompt)


"""


def failing(prompt):
    """Return a reward that raises at one prompt."""
    check = f"    if prompt == {prompt!r}:\n        raise RuntimeError('no unit')\n"
    return GOOD.replace("    return", f"{check}    return")


def argv_after(label, stderr):
    """Return the arguments of the command that a failed run printed."""
    line = next(line for line in stderr.splitlines() if line.startswith(label))
    words = shlex.split(line.removeprefix(label).partition("   (")[0])
    assert words[:3] == ["python", "-m", "pipeline.run"]
    return words[3:]


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """A run of three steps whose reward raises at the third prompt of the second step: folder, prompt, code, stderr."""
    folder = tmp_path_factory.mktemp("failed")
    (folder / "graph.py").write_text(live_text(GOOD))
    code, _, stderr = command(folder, *RUN[:-1], "whole")
    assert code == 0, stderr
    lines = (folder / "whole/samples/step_000002.jsonl").read_text().splitlines()
    prompt = re.search(r'"prompt":"(.*?)"', lines[2])[1]
    (folder / "graph.py").write_text(live_text(failing(prompt)))
    code, _, stderr = command(folder, *RUN)
    return folder, prompt, code, stderr


def test_the_error_names_step_sample_and_inputs(failed):
    _, prompt, code, stderr = failed
    assert code == 3
    found = PROBLEM.fullmatch(stderr.splitlines()[0])
    assert found and re.fullmatch(r"graph\.py:\d+", found["where"])
    failed = "reward score raised RuntimeError: no unit for sample 2 of step 2 (group 6, member 0)"
    assert found["what"].startswith(failed)
    assert f"prompt={prompt!r}" in found["what"]


def test_the_run_directory_tells_of_the_failure(failed):
    folder, *_ = failed
    assert "RuntimeError: no unit" in (folder / "run/logs/host-0.log").read_text()
    assert {path.name for path in (folder / "run/failures").iterdir()} == {"step_000002_reward"}
    last = [event for _, event in trace.read(folder / "run/events.jsonl")][-1]
    assert isinstance(last, trace.Failed)
    assert "no unit for sample 2 of step 2" in last.problems[0]


def test_replay_repeats_the_failure_and_passes_once_mended(failed):
    folder, prompt, _, stderr = failed
    argv = argv_after("replay: ", stderr)
    (folder / "graph.py").write_text(live_text(failing(prompt)))
    code, _, again = command(folder, *argv)
    assert (code, again.splitlines()[0]) == (3, stderr.splitlines()[0])
    (folder / "graph.py").write_text(live_text(GOOD))
    code, out, again = command(folder, *argv)
    assert (code, again) == (0, "")
    assert f"score {1 / len(prompt):g}" in out
    assert out.splitlines()[-1] == "run/failures/step_000002_reward: the task passes now; it returned reward"


@pytest.mark.parametrize("case", [case for case in cases_running.STAGES if case.code == 4], ids=lambda case: case.name)
def test_a_replay_checks_what_a_put_checks(tmp_path, case):
    case.write(tmp_path)
    code, _, stderr = command(tmp_path, "graph.py", *case.args)
    problem = stderr.splitlines()[0]
    assert code == 4 and "put into 'live'" in problem
    code, out, again = command(tmp_path, *argv_after("replay: ", stderr))
    assert (code, out, again.splitlines()) == (4, "", [problem])


def test_a_failure_of_an_earlier_command_is_not_the_one_to_replay(failed, tmp_path):
    folder, *_ = failed
    shutil.copytree(folder / "run", tmp_path / "run")
    (tmp_path / "graph.py").write_text(live_text(GOOD).replace("return Counter()", "return Counter(1)"))
    code, _, stderr = command(tmp_path, "graph.py", "--executor", "local", "--run-dir", "run", "--resume")
    assert code == 3 and "stage 'count' setup failed" in stderr
    assert "step_000002_reward" not in stderr
    assert (tmp_path / "run/failures/step_000002_reward").is_dir()


def test_resume_goes_on_from_the_last_checkpoint_to_the_same_end(failed):
    folder, _, _, stderr = failed
    argv = argv_after("resume: ", stderr)
    assert stderr.splitlines()[-1].endswith("(from step 1)")
    (folder / "graph.py").write_text(live_text(GOOD))
    code, _, again = command(folder, *argv)
    assert code == 0, again
    counts = [(folder / run / "checkpoints/step_000003/count/count.json").read_text() for run in ("run", "whole")]
    assert counts[0] == counts[1]


def in_a_process(folder, *argv):
    """Run the command as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "pipeline.run", *argv],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("score", "argv", "code"),
    [(GOOD, ("--steps", "x"), 2), ("def score(prompt):\n    return None\n\n\n", ("--executor", "local"), 3)],
)
def test_as_a_process(tmp_path, score, argv, code):
    (tmp_path / "graph.py").write_text(live_text(score))
    done = in_a_process(tmp_path, "graph.py", *argv)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert PROBLEM.fullmatch(done.stderr.splitlines()[0])
