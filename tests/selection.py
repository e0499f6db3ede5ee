"""Which tests a command runs: `-m quick`, `-m search`, `--changed`, or all but the searches.

    python -m pytest               all but searches
    python -m pytest -m quick      the inner loop: starts no Ray, no engine, no browser
    python -m pytest -m search     searches: every property test with many examples, mutants, many seeds
    python -m pytest --changed     tests that a change since the last such run can affect

`--changed` uses pytest-testmon, which tracks the lines that a test runs in its own process. Tests that start other
processes run if any file of the product has changed, and tests that read documents or the view's files if one of those
has.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("pipeline", "stages", "ops", "graphs")
SEARCHED = 20  # times as many examples as Hypothesis tries by default, 40 times as many as in the suite

QUICK = ("contract", "errors", "journal", "numerics", "unit")
SLOW = {  # modules of these folders that take more than three seconds
    "contract/test_canary.py", "contract/test_merged_calls.py", "contract/test_outside_process.py",
    "contract/test_transfer_queue_plane.py", "errors/test_failing_run.py", "journal/test_checker.py",
    "journal/test_live_runs.py", "numerics/test_metamorphic.py", "numerics/test_mutations.py",
    "numerics/test_refit_rules.py", "numerics/test_trl.py", "unit/test_checkpoint_disk.py", "unit/test_collisions.py",
    "unit/test_colocated.py", "unit/test_damaged_files.py", "unit/test_doors.py", "unit/test_doors_backend.py",
    "unit/test_doors_pages.py", "unit/test_doors_transport.py", "unit/test_findings.py", "unit/test_forwarders.py",
    "unit/test_images.py", "unit/test_imports.py", "unit/test_in_flight.py", "unit/test_math_reward.py",
    "unit/test_meta_cli.py", "unit/test_mirror.py", "unit/test_patience.py", "unit/test_refit_agreement.py",
    "unit/test_kernels_interpreted.py", "unit/test_refit_plan.py", "unit/test_refit_sums.py",
    "unit/test_refit_transports.py", "unit/test_refit_tree.py", "unit/test_reward_calls.py",
    "unit/test_scheduler_machine.py", "unit/test_simulated_journal.py", "unit/test_torch_parity.py",
}  # fmt: skip
CLUSTER = {"ray_session", "transfer_queue", "uncached"}  # fixtures, and one fixture's parameter
PROCESSES = re.compile(r"subprocess|multiprocessing|os\.fork|ray_session|RayExecutor")
DOCUMENTS = re.compile(r"README|\bdocs\b|golden\.txt|pyproject|\.ci\b|results|\bstatic\b|tests/web/")

hypothesis.settings.register_profile("suite", max_examples=50, deadline=None)
hypothesis.settings.register_profile("search", max_examples=100 * SEARCHED, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--changed`."""
    parser.addoption("--changed", action="store_true", help="run what a change since the last such run can reach")


def only(config: pytest.Config, name: str) -> bool:
    """Return whether only the tests of a marker are selected."""
    return config.getoption("markexpr") == name


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Configure before testmon reads its options."""
    hypothesis.settings.load_profile("search" if only(config, "search") else "suite")
    if config.getoption("changed"):
        config.option.testmon = True
        config.option.testmon_forceselect = True  # even if -m, which the default command has, selects tests


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip importing modules without quick tests."""
    if only(config, "quick") and collection_path.suffix == ".py" and collection_path.name.startswith("test_"):
        return None if is_quick(collection_path) else True
    return None


def is_quick(module: Path) -> bool:
    """Return whether the tests of a module are quick, apart from those that start Ray."""
    return module.parent.name in QUICK and f"{module.parent.name}/{module.name}" not in SLOW


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add markers before pytest evaluates them."""
    searches = only(config, "search")
    for item in items:
        if searches and getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("search")
        cluster = CLUSTER & {*getattr(item, "fixturenames", ()), *re.split(r"[^\w]+", item.name)}
        if is_quick(item.path) and not cluster:
            item.add_marker("quick")
    if not config.getoption("markexpr") and not any("::" in argument for argument in config.args):
        left = [item for item in items if item.get_closest_marker("search")]
        if left:
            items[:] = [item for item in items if not item.get_closest_marker("search")]
            config.hook.pytest_deselected(items=left)


# --changed


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Stop testmon from deselecting tests that a change reaches in a way that it does not see."""
    select = session.config.pluginmanager.get_plugin("TestmonSelect")
    for name, (content, words) in UNSEEN.items():
        if select and session.config.cache.get(f"changed/{name}", "") != content():
            select.deselected_tests = [test for test in select.deselected_tests if not has(words, test)]
            select.deselected_files = [file for file in select.deselected_files if not has(words, file)]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remember the hashes after a complete run in which everything passed."""
    config = session.config
    chosen = config.args_source != pytest.Config.ArgsSource.TESTPATHS or config.getoption("markexpr")
    chosen = chosen or config.getoption("keyword") or hasattr(config, "workerinput")
    if config.getoption("changed") and exitstatus == 0 and not chosen:
        for name, (content, _) in UNSEEN.items():
            config.cache.set(f"changed/{name}", content())


@functools.cache
def product() -> str:
    """Return the hash of the product's modules."""
    return _hash(path for package in PRODUCT for path in (ROOT / package).rglob("*.py"))


@functools.cache
def documents() -> str:
    """Return the hash of what tests read beside modules: documents, golden texts, the view's files, settings."""
    folders = ("docs", ".ci", "benchmarks/results", "pipeline/web/static", "tests/errors")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix not in (".py", ".pyc")]
    return _hash([ROOT / "README.md", ROOT / "pyproject.toml", *(path for path in found if path.is_file())])


def _hash(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()


UNSEEN = {"product": (product, PROCESSES), "documents": (documents, DOCUMENTS)}


@functools.cache
def has(words: re.Pattern[str], test: str) -> bool:
    """Return whether the module of a test, or a test module that it imports, has one of these words in its path or
    text."""
    module = test.partition("::")[0]
    seen, to_read = set(), [module]
    while to_read:
        path = ROOT / to_read.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        text = path.read_text()
        if words.search(f"{path}\n{text}"):
            return True
        to_read += [
            name.replace(".", "/") + ".py" for name in re.findall(r"^\s*(?:from|import) (tests\.[\w.]+)", text, re.M)
        ]
    return False
