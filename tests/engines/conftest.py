"""What the tests of vLLM's engines share."""

from collections.abc import Iterator

import pytest

from tests.optional import need


@pytest.fixture(scope="session")
def prepared() -> Iterator[None]:
    """Engines of vLLM start within two seconds from here on."""
    need("vllm", "vllm")
    from tests.engines.prepared import imported_once

    with imported_once():
        yield
