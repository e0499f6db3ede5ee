"""Fixtures shared by the tests of vLLM engines."""

from collections.abc import Iterator

import pytest

from tests.optional import need


@pytest.fixture(scope="session")
def prepared() -> Iterator[None]:
    """vLLM engines start within two seconds in this module."""
    need("vllm", "vllm")
    from tests.engines.prepared import imported_once

    with imported_once():
        yield
