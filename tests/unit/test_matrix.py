"""The page of faults and threats: its tests are there, and a row does not hold by words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import matrix
from tests.matrix import FAULTS, ROOT, THREATS, Result, page, read, state

ROWS = (*FAULTS, *THREATS)


def test_every_test_of_the_page_is_there() -> None:
    for row in ROWS:
        for test in row.tests:
            file, _, name = test.partition("::")
            assert re.search(rf"def {name}\(", (ROOT / "tests" / file).read_text()), test
    assert len({row.event for row in ROWS}) == len(ROWS)


def test_a_row_holds_if_all_its_tests_passed() -> None:
    row = FAULTS[0]
    good = {test: Result(passed=1) for test in row.tests}
    assert state(row, good) == "holds"
    for change, says in ((Result(passed=1, failed=1), "failed"), (Result(skipped=1), "skipped"), (Result(), "not run")):
        assert state(row, good | {row.tests[1]: change}).endswith(says)


def test_a_report_is_read_by_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _, name = FAULTS[0].tests[0].partition("::")
    module = "tests." + file.removesuffix(".py").replace("/", ".")
    case = '<testcase classname="{}" name="{}" time="{}">{}</testcase>'
    cases = [case.format(module, f"{name}[{i}]", i, "<failure/>" if i == 3 else "") for i in (1, 2, 3)]
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    assert read(report) == {FAULTS[0].tests[0]: Result(passed=2, failed=1, longest_s=3.0)}
    monkeypatch.setattr("sys.argv", ["matrix", str(report), "--out", str(tmp_path / "page.md")])
    assert matrix.main() == 1 and not (tmp_path / "page.md").exists()


def test_the_page_of_the_docs_has_every_row() -> None:
    """Its figures are those of the last run before a release; its rows are today's."""
    kept, made = ((ROOT / "docs" / "fault-matrix.md").read_text(), page({}, {}))
    figures = re.compile(r" (\d+ \| [\d.]+ s|- \| -) \| \S+( s)? \|$", re.M)
    assert figures.sub("", kept) == figures.sub("", made)


def test_seconds_of_recovery_reach_the_page() -> None:
    seconds = matrix.measured()
    assert {row.measured for row in ROWS if row.measured} <= seconds.keys()
    assert f"| {seconds['sampler killed']:.1f} s |" in page({}, seconds)
