"""vLLM on the CPU serves what it was given, of every kind of model, and says what it could not write in place."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.optional import need

need("vllm", "vllm")

RANKS = {"qwen2": 2, "qwen3_moe": 1, "mistral": 1, "llama": 1}  # by family; mistral has no table
ROUTES = {"qwen2": ("pull", "messages", "gloo", "gloo"), "llama": ("golden", "golden")}
DEFAULT = ("pull", "messages")
NEAR = 1e-5
DEADLINE_S = 400


@pytest.fixture(scope="module")
def refitted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Processes that say what came of a refit; side by side, as most of their time is imports."""
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = {
        family: subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.engines.refit_case",
                family,
                str(ranks),
                str(tmp_path_factory.mktemp(family)),
                *ROUTES.get(family, DEFAULT),
            ],
            **pipe,
        )
        for family, ranks in RANKS.items()
    }
    yield processes
    for process in processes.values():
        process.kill()


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What `tests.engines.refit_case` says."""
    said, complained = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, complained[-3000:]
    return json.loads(said.splitlines()[-1])


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_a_model_with_a_table_is_written_by_it(refitted: Any, family: str) -> None:
    found = told(refitted[family])
    assert max(found["far"]) < NEAR and found["loaded"] == []
    assert found["records"][1]["lookups"] == 2  # the second version came as bytes: another plan, and other memory
    carried = [record for record in found["records"] if "meet_ms" in record]
    assert [record["lookups"] > 0 for record in carried] == [True, True][: len(carried)]  # of memory that takes turns


def test_a_model_without_a_table_goes_through_the_loader_and_is_counted(refitted: Any) -> None:
    found = told(refitted["mistral"])
    assert max(found["far"]) < NEAR and found["loaded"] == found["tensors"]
    assert found["records"][1]["through_loader"] == len(found["tensors"])


def test_the_golden_way_is_that_of_the_loader(refitted: Any) -> None:
    found = told(refitted["llama"])
    assert max(found["far"]) < NEAR and found["loaded"] == found["tensors"]
    assert all(record["received_bytes"] > 0 and record["lookups"] == 0 for record in found["records"])
