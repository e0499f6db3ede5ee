"""Fixtures that all suites share. Ray is started once a session, on a loopback address, and only where a test asks."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = str(Path(__file__).resolve().parents[1])
if REPOSITORY not in sys.path:
    sys.path.insert(0, REPOSITORY)

# Ray reads these while it is imported, which a test module does that imports vLLM.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(16)
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

pytest_plugins = ["tests.journal.plugin"]  # every real run of a test is judged by its record


@pytest.fixture(scope="session")
def ray_session() -> Iterator[Any]:
    """The `ray` module, connected to a cluster of this session: 8 logical CPUs, loopback, token required.

    A TransferQueue is started by the suite that needs one, and closed by it: a cluster holds one at a time.
    """
    from pipeline.data_plane.transfer_queue import environment

    os.environ.update(environment())
    import ray

    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=256 * 2**20,
        _node_ip_address="127.0.0.2",
        runtime_env={"env_vars": {**environment(), "PYTHONPATH": REPOSITORY}},
    )
    yield ray
    ray.shutdown()
