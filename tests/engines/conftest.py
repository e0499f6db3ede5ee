"""Fixtures shared by the tests of vLLM engines."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import Model
from tests.engines import vllm_models as tiny
from tests.optional import need


@pytest.fixture(scope="session")
def prepared() -> Iterator[None]:
    """vLLM engines start within two seconds in this module."""
    need("vllm", "vllm")
    from tests.engines.prepared import imported_once

    with imported_once():
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a module's models."""
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def model(root: Path) -> Model:
    """A tiny model, in a folder."""
    return tiny.folder(root, 0)


@pytest.fixture(scope="module")
def other(root: Path) -> Model:
    """The same with other weights."""
    return tiny.folder(root, 1)
