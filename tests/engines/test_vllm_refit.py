"""vLLM on the CPU serves what it was given, of every kind of model, and says what it could not write in place."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.optional import need

need("vllm", "vllm")

NEAR = 1e-5
DEADLINE_S = 300


def refitted(family: str, ranks: int, folder: Path) -> dict[str, Any]:
    """What `tests.engines.refit_case` says."""
    command = [sys.executable, "-m", "tests.engines.refit_case", family, str(ranks), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("family", "ranks"), [("qwen2", 2), ("qwen3_moe", 1)])
def test_a_model_with_a_table_is_written_by_it(tmp_path: Path, family: str, ranks: int) -> None:
    found = refitted(family, ranks, tmp_path)
    assert max(found["far"]) < NEAR and found["loaded"] == []
    assert found["record"]["lookups"] == 1  # the second version came as bytes, so memory was another


def test_a_model_without_a_table_goes_through_the_loader_and_is_counted(tmp_path: Path) -> None:
    found = refitted("mistral", 1, tmp_path)
    assert max(found["far"]) < NEAR and found["loaded"] == found["tensors"]
    assert found["record"]["through_loader"] == len(found["tensors"])
