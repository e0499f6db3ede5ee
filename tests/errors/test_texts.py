"""Command-line output for broken inputs: the exit code, the place, and the whole text.

UPDATE_GOLDEN=1 rewrites golden.txt; read the diff before keeping it.
"""

import difflib
import os
import re
from pathlib import Path

import pytest

from pipeline.record import trace
from stages.backends import is_installed
from tests.errors import (
    cases,
    cases_adapters,
    cases_data,
    cases_episodes,
    cases_filter,
    cases_groups,
    cases_images,
    cases_losses,
    cases_names,
    cases_records,
    cases_rewards,
    cases_running,
    cases_schedule,
    resumes,
)
from tests.errors.harness import PROBLEM, command, normal
from tests.optional import need

GOLDEN = Path(__file__).with_name("golden.txt")
SUBJECTS = (
    cases_losses,
    cases_groups,
    cases_data,
    cases_images,
    cases_adapters,
    cases_rewards,
    cases_filter,
    cases_episodes,
    cases_running,
    cases_schedule,
    cases_records,
    cases_names,
)
BY_SUBJECT = [case for subject in SUBJECTS for case in subject.CASES]
ALL = [*cases.CHECKED, *cases.RUNNING, *BY_SUBJECT, *resumes.CASES]
NEEDS = {  # by prefix of the name
    "jsonl_named_parquet": ("data", "pyarrow"),
    "math_verify": ("math", "math_verify"),
    "junk_for_an_image": ("vision", "PIL"),
}
WAY_ON = ("replay: ", "resume: ")
ABSENT = re.compile(r".*, which needs the package '([\w.]+)'; it is not installed\. Fix: .*\n")
OF_A_MACHINE = re.compile(r" at 0x[0-9a-f]+|REPO|site-packages|lib/python|/tmp/")


def sections(text):
    """Return the bodies of a golden file by name."""
    parts = [part.partition("\n") for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]]
    return {name: body.rstrip("\n") for name, _, body in parts}


@pytest.fixture(scope="module")
def golden():
    """The golden texts by case, and a dict `new`, which is written to the file if UPDATE_GOLDEN is set."""
    new: dict[str, str] = {}
    yield sections(GOLDEN.read_text() if GOLDEN.exists() else ""), new
    if os.environ.get("UPDATE_GOLDEN") == "1" and len(new) == len(ALL):
        GOLDEN.write_text("\n".join(f"## {case.name}\n{new[case.name]}\n" for case in ALL))


def as_if_installed(stderr):
    """Leave out the problems of engines that this machine lacks: the golden file has those of one that has all."""
    return "".join(
        line
        for line in stderr.splitlines(keepends=True)
        if not ((lacks := ABSENT.fullmatch(line)) and not is_installed(lacks[1]))
    )


def assert_nothing_is_lost(folder, problems, stderr):
    """Check that the run directory records why the run ended and keeps its graph, its log and the failed inputs."""
    run, printed = folder / "run", stderr.splitlines()
    last = [event for _, event in trace.read(run / "events.jsonl")][-1]
    assert isinstance(last, trace.Failed)
    assert [" ".join(problem.replace(f"{folder}/", "").splitlines()) for problem in last.problems] == problems
    assert (run / "run.json").is_file() and (run / "graph.py").read_bytes() == (folder / "graph.py").read_bytes()
    steps = sorted(int(path.name[5:]) for path in (run / "checkpoints").iterdir())
    at = f"from step {steps[-1]}" if steps else "from the start: no checkpoint was written yet"
    assert printed[-1].startswith("resume: ") and printed[-1].endswith(f"--run-dir run --resume   ({at})")
    saved = [line.rpartition(" ")[2] for line in printed if line.startswith("replay: ")]
    assert [str(path.relative_to(folder)) for path in (run / "failures").iterdir()] == saved
    assert all((folder / name / "task.json").is_file() for name in saved)
    assert not saved or "Error: " in "".join(log.read_text() for log in (run / "logs").iterdir())


@pytest.mark.journal_expected("I8", "record")  # damaged run directories
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_text(case, golden, tmp_path, finished_run):
    for start, package in NEEDS.items():
        if case.name.startswith(start):
            need(*package)
    places = case.write(tmp_path)
    if isinstance(case, resumes.ResumeCase):
        case.damage(finished_run, tmp_path)
    argv = ([case.graph] if case.graph else []) + list(case.args)
    code, _, stderr = command(tmp_path, *argv, program=case.program)
    assert "Traceback" not in stderr
    assert code == case.code, stderr
    stderr = as_if_installed(stderr)
    lines = [line for line in stderr.splitlines() if not line.startswith(WAY_ON)]
    parsed = [PROBLEM.fullmatch(line) for line in lines]
    assert parsed and all(parsed), f"not of the form 'where: what; why. Fix: how':\n{stderr}"
    assert len(set(lines)) == len(lines), f"one problem is told twice:\n{stderr}"
    assert not OF_A_MACHINE.search(normal(stderr, tmp_path)), stderr
    assert code or all(match["warning"] for match in parsed)
    wheres = " ".join(match["where"] for match in parsed if not (code and match["warning"]))
    for place in places:
        assert re.search(rf"{re.escape(place)}(?!\d)", wheres), f"no problem points at {place}:\n{stderr}"
    if case in cases_running.CASES:
        assert_nothing_is_lost(tmp_path, [line for line in lines if "warning: " not in line], stderr)
    known, new = golden
    text = (
        f"$ {' '.join([f'python -m pipeline.{case.program}', *argv])}\nexit {code}\n{normal(stderr, tmp_path)}".rstrip(
            "\n"
        )
    )
    new[case.name] = text
    if os.environ.get("UPDATE_GOLDEN") != "1":
        expected = known.get(case.name, "")
        shown = "\n".join(difflib.unified_diff(expected.splitlines(), text.splitlines(), "golden", "now", lineterm=""))
        assert text == expected, f"UPDATE_GOLDEN=1 accepts this text:\n{shown}"


def test_golden_has_every_case_and_no_other():
    known = sections(GOLDEN.read_text())
    assert list(known) == [case.name for case in ALL]
    problems = {PROBLEM.fullmatch(line)["what"] for body in known.values() for line in body.splitlines()[2:]
                if not line.startswith(WAY_ON)}  # fmt: skip
    assert len(known) >= 400
    assert len(problems) >= 350


def test_every_case_has_a_name_and_a_text_of_its_own():
    known = sections(GOLDEN.read_text())
    assert len({case.name for case in ALL}) == len(ALL)
    told: dict[str, str] = {}
    for case in BY_SUBJECT:
        text = "\n".join(line for line in known[case.name].splitlines()[2:] if not line.startswith(WAY_ON))
        assert told.setdefault(re.sub(r"\.py:\d+", "", text), case.name) == case.name
