"""What the command line says about a broken input: the exit code, the place, and the whole text.

UPDATE_GOLDEN=1 rewrites golden.txt; read the difference before keeping it.
"""

import difflib
import os
from pathlib import Path

import pytest

from tests.errors import cases, resumes
from tests.errors.harness import PROBLEM, command, normal

GOLDEN = Path(__file__).with_name("golden.txt")
ALL = [*cases.CHECKED, *cases.RUNNING, *resumes.CASES]
WAY_ON = ("replay: ", "resume: ")


def sections(text):
    """name -> body of a golden file."""
    parts = [part.partition("\n") for part in text.split("## ")[1:]]
    return {name: body.rstrip("\n") for name, _, body in parts}


@pytest.fixture(scope="module")
def golden():
    """The texts by case; what the tests put into `new` is written where the environment asks for it."""
    new: dict[str, str] = {}
    yield sections(GOLDEN.read_text() if GOLDEN.exists() else ""), new
    if os.environ.get("UPDATE_GOLDEN") == "1" and len(new) == len(ALL):
        GOLDEN.write_text("\n".join(f"## {case.name}\n{new[case.name]}\n" for case in ALL))


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_text(case, golden, tmp_path, finished_run):
    places = case.write(tmp_path)
    if isinstance(case, resumes.ResumeCase):
        case.damage(finished_run, tmp_path)
    argv = ([case.graph] if case.graph else []) + list(case.args)
    code, _, stderr = command(tmp_path, *argv)
    assert "Traceback" not in stderr
    assert code == case.code != 0, stderr
    lines = [line for line in stderr.splitlines() if not line.startswith(WAY_ON)]
    parsed = [PROBLEM.fullmatch(line) for line in lines]
    assert parsed and all(parsed), f"not of the form 'where: what; why. Fix: how':\n{stderr}"
    wheres = " ".join(match["where"] for match in parsed if not match["warning"])
    for place in places:
        assert f"{place} " in wheres + " ", f"no problem points at {place}:\n{stderr}"
    known, new = golden
    text = f"$ {' '.join(['python -m pipeline.run', *argv])}\nexit {code}\n{normal(stderr, tmp_path)}".rstrip("\n")
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
    assert len(known) >= 40
    assert len(problems) >= 30
