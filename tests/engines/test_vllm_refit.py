"""Refits into vLLM on the CPU, for every kind of model: weights are served, and loader fallbacks are reported."""

from pathlib import Path
from typing import Any

import pytest

from tests.engines.refit_case import refit
from tests.optional import need

need("vllm", "vllm")

NEAR = 1e-5


@pytest.fixture
def several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine start its ranks as processes; this process has been prepared for engines of one rank."""
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)


def check_written_by_table(found: dict[str, Any]) -> None:
    assert max(found["far"]) < NEAR and found["loaded"] == []
    assert found["records"][1]["lookups"] == 2  # the second version arrived as bytes: another plan, other memory


def test_a_model_with_a_table_is_written_by_it(prepared: None, several_ranks: None, tmp_path: Path) -> None:
    found = refit(tmp_path, "qwen2", 2, ("pull", "messages", "gloo", "gloo"))
    check_written_by_table(found)
    carried = [record for record in found["records"] if "meet_ms" in record]
    assert [record["lookups"] > 0 for record in carried] == [True, True]  # memory alternates between versions


def test_a_mixture_of_experts_is_written_by_its_table(prepared: None, tmp_path: Path) -> None:
    check_written_by_table(refit(tmp_path, "qwen3_moe", 1, ("pull", "messages")))


def test_a_model_without_a_table_goes_through_the_loader_and_is_counted(prepared: None, tmp_path: Path) -> None:
    found = refit(tmp_path, "mistral", 1, ("pull", "messages"))
    assert max(found["far"]) < NEAR and found["loaded"] == found["tensors"]
    assert found["records"][1]["through_loader"] == len(found["tensors"])


def test_the_golden_way_is_that_of_the_loader(prepared: None, tmp_path: Path) -> None:
    found = refit(tmp_path, "llama", 1, ("golden", "golden"))
    assert max(found["far"]) < NEAR and found["loaded"] == found["tensors"]
    assert all(record["received_bytes"] > 0 and record["lookups"] == 0 for record in found["records"])
