"""Shared fixtures, and which tests run concurrently.

Three pytest processes share the tests, as many of them wait. All tests that start Ray form one unit and run one after
the other: two clusters are too much for two cores. All other tests are distributed module by module. Ray is started
once, on a loopback address, and only if a test needs it.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.forked import Command, forked_workers

REPOSITORY = str(Path(__file__).resolve().parents[1])
if REPOSITORY not in sys.path:
    sys.path.insert(0, REPOSITORY)

# Ray reads these on import, which test modules that import vLLM trigger.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(16)
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # waiting threads leave the cores to the other process

pytest_plugins = [
    "tests.journal.plugin",  # checks the record of every real run in a test
    "tests.selection",
]

SEEDS = "tests/integration/test_unruly.py"
STORAGE_UNITS = 2  # of the TransferQueue that tests share
SHARES_RAY = re.compile(r"ray_session|RayExecutor")
STARTS_RAY = re.compile(rf"{SHARES_RAY.pattern}|pipeline\.run\b|two_nodes")


def starts_ray(test: str) -> bool:
    """Return whether the test with this id needs the cluster that tests share, or stands among tests that do. Modules
    that only run commands, each with a Ray of its own, go to whichever process is free."""
    module, _, name = test.partition("::")
    folder = Path(module).parent.name
    if folder == "contract":  # its conftest starts Ray
        return True
    return folder in ("integration", "engines") and re.split(r"\W", name)[0] in starting_ray(module)


@functools.cache
def starting_ray(module: str) -> set[str]:
    """Return names in a module that start Ray: functions, fixtures, commands, and all that uses them indirectly."""
    text = Path(REPOSITORY, module).read_text()
    if not SHARES_RAY.search(text):
        return set()
    source: dict[str, str] = {}
    for node in ast.parse(text).body:
        match node:
            case ast.FunctionDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
                source[name] = ast.get_source_segment(text, node) or ""
    found = {name for name, text in source.items() if STARTS_RAY.search(text)}
    while more := {name for name, text in source.items() if found & set(re.findall(r"\w+", text))} - found:
        found |= more
    return found


class Shared(LoadScopeScheduling):
    """Scheduling for pytest-xdist that keeps Ray tests together and other tests by module, but for hundreds of seeds,
    which mostly wait for deadlines."""

    def _split_scope(self, nodeid: str) -> str:
        if starts_ray(nodeid):
            return "ray"
        module = nodeid.partition("::")[0]
        return nodeid if module == SEEDS else module


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the pages: the last modules are short, so that at the end no process waits long for another."""
    items.sort(key=lambda item: item.path.parent.name != "web")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Shared:
    """Return the scheduler that pytest-xdist uses."""
    return Shared(config, log)


class SessionStore:
    """The TransferQueue that every run in this process uses while it is open; each run removes its rows at its end."""

    def open(self) -> None:
        """Start it."""
        from pipeline.data_plane.transfer_queue import TransferQueuePlane
        from pipeline.executors.ray import RayExecutor

        self.plane = TransferQueuePlane.create(storage_units=STORAGE_UNITS)
        RayExecutor.store = self.plane.settings

    def close(self) -> None:
        """Stop it."""
        from pipeline.executors.ray import RayExecutor

        RayExecutor.store = None
        self.plane.close()


@pytest.fixture(autouse=True)
def own_search_path() -> Iterator[None]:
    """Remove the folders of graph files that a test has loaded: the next test may have a module of the same name."""
    before = sys.path[:]
    yield
    sys.path[:] = before


@pytest.fixture(scope="session")
def session_store(cluster: Any) -> Iterator[SessionStore]:
    """The TransferQueue of the cluster."""
    store = SessionStore()
    store.open()
    yield store
    store.close()


@pytest.fixture(scope="session")
def ray_session(cluster: Any, session_store: SessionStore) -> Any:
    """The `ray` module, connected to a cluster of this session that has a TransferQueue."""
    return cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The `ray` module, connected to a cluster of this session: 8 logical CPUs for tests, loopback, token required."""
    from pipeline.data_plane.transfer_queue import environment

    os.environ.update(environment())
    import ray

    from pipeline.executors.placement import worker_environment

    variables = {**worker_environment(), "PYTHONPATH": REPOSITORY}
    with forked_workers(tmp_path_factory.mktemp("workers") / "socket", variables) as executable:
        ray.init(
            address="local",
            num_cpus=8 + 1 + STORAGE_UNITS,
            num_gpus=0,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=256 * 2**20,
            _node_ip_address="127.0.0.2",
            runtime_env={"env_vars": variables, "py_executable": executable},
            _system_config={"kill_worker_timeout_milliseconds": 500},  # a stopped process does not end by itself
        )
        yield ray
        ray.shutdown()


@pytest.fixture
def signals_are_not_ignored() -> Iterator[None]:
    """SIGHUP is under nohup, and SIGINT in the background of a script. Processes inherit that."""
    own = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def forked_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes beside a worker, so that they start without their imports; tests of runs start real ones."""
    from stages.episode import companion

    def forked(command: list[str], **given: Any) -> Command:
        return Command("-m", command[2], "3", **given)

    monkeypatch.setattr(companion, "subprocess", SimpleNamespace(Popen=forked, DEVNULL=subprocess.DEVNULL))
