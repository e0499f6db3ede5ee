"""Fixtures shared by several integration tests."""

from __future__ import annotations

import pytest

from tests.integration.test_async import QUICKSTART, execute, weights
from tests.integration.test_lost_workers import FLAGS


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights after all steps if no worker is lost; from an in-process run, which Ray repeats bit for bit."""
    return weights(execute(QUICKSTART, FLAGS, tmp_path_factory.mktemp("undisturbed") / "run"), 8)
