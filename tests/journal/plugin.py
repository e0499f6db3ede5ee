"""A pytest plugin: after a passed test, every run below its `tmp_path` is checked.

    pytest_plugins = ["tests.journal.plugin"]                 # in tests/conftest.py

    @pytest.mark.journal_expected("I5", "record")             # a test that breaks its run in these ways, on purpose
    @pytest.mark.journal_expected                             # a test whose runs are not checked

A session fixture keeps its run elsewhere: check it with `assert_sound(run_dir)`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.journal.checker import check

SHOWN = 20


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers", "journal_expected(*invariants): the runs of this test break these; without any, they are not judged"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Check the runs that a test has left, unless it raised an error."""
    result = yield
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    marker = item.get_closest_marker("journal_expected")
    if isinstance(folder, Path) and (marker is None or marker.args):
        for run_dir in run_dirs(folder):
            assert_sound(run_dir, expected=marker.args if marker else ())
    return result


def run_dirs(folder: Path) -> list[Path]:
    """Return the run directories in and below a folder."""
    return sorted(path.parent for path in folder.rglob("events.jsonl") if (path.parent / "plan.json").is_file())


def assert_sound(run_dir: Path, *, expected: Iterable[str] = ()) -> None:
    """Raise AssertionError if the record of a run breaks an invariant that is not in `expected`."""
    allowed = set(expected)
    violations = [violation for violation in check(run_dir) if violation.invariant not in allowed]
    if violations:
        lines = [f"{run_dir}: {len(violations)} violations", *map(str, violations[:SHOWN])]
        raise AssertionError("\n  ".join(lines))
