"""Refits into vLLM on the CPU, for every kind of model: weights are served, and loader fallbacks are reported."""

from pathlib import Path
from typing import Any

import pytest

from tests.engines.refit_case import refit
from tests.optional import need, since_vllm

need("vllm", "vllm")

NEAR = 1e-5


@pytest.fixture
def several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine start its ranks as processes; this process has been prepared for engines of one rank."""
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)


@pytest.fixture(scope="module")
def golden(prepared: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two versions of a mixture of experts on two ranks, by the golden way."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
        return refit(tmp_path_factory.mktemp("golden"), "qwen3_moe", 2, ("golden", "golden"))


def test_a_llama_is_written_by_the_table(prepared: None, tmp_path: Path) -> None:
    found = refit(tmp_path, "llama", 1, ("pull",))
    assert max(found["far"]) < NEAR and found["loaded"] == []


def test_a_model_with_a_table_is_written_by_it(prepared: None, several_ranks: None, tmp_path: Path) -> None:
    found = refit(tmp_path, "qwen2", 2, ("pull", "messages", "gloo", "gloo"))
    assert max(found["far"]) < NEAR and found["loaded"] == []
    assert found["records"][1]["lookups"] == 2  # the second version arrived as bytes: another plan, other memory
    carried = [record for record in found["records"] if "meet_ms" in record]
    assert [record["lookups"] > 0 for record in carried] == [True, True]  # memory alternates between versions


def test_modules_that_are_not_as_in_the_table_go_through_the_loader_and_the_rest_does_not(
    prepared: None, several_ranks: None, golden: dict[str, Any], tmp_path: Path
) -> None:
    """Both give what the golden way gives, byte for byte."""
    wrong = (
        "model.embed_tokens.weight",  # tied to the output embedding
        "model.layers.0.mlp.experts.w13_weight",  # with the rest of its module
        "model.layers.1.self_attn.qkv_proj.weight",  # three tensors
        "model.norm.weight",
    )
    found = refit(tmp_path, "qwen3_moe", 2, ("pull", "gloo"), wrong)
    assert found["loaded"] == [
        "model.embed_tokens.weight",
        *(f"model.layers.0.mlp.experts.*.{part}_proj.weight" for part in ("down", "gate", "up")),
        *(f"model.layers.1.self_attn.{part}_proj.weight" for part in "kqv"),
        "model.norm.weight",
    ]
    assert all(0 < record["loader_bytes"] < record["received_bytes"] for record in found["records"])
    assert max(found["far"]) < NEAR
    assert found["computed"] == golden["computed"]


def test_a_model_without_a_table_goes_through_the_loader_and_is_counted(prepared: None, tmp_path: Path) -> None:
    found = refit(tmp_path, "mistral", 1, ("pull", "messages"))
    assert max(found["far"]) < NEAR and found["loaded"] == found["tensors"]
    assert found["records"][1]["through_loader"] == len(found["tensors"])


@pytest.mark.parametrize(
    ("family", "ranks", "ways", "loaded"),
    [("glm4_moe", 1, ("pull",), 0), ("deepseek_v3", 2, ("pull", "gloo"), 21)],
)
def test_a_mixture_routed_by_sigmoids_is_served_with_the_bias_of_its_experts(
    prepared: None, several_ranks: None, tmp_path: Path, family: str, ranks: int, ways: tuple[str, ...], loaded: int
) -> None:
    """The second model has another bias. Latent attention goes through the loader, which multiplies its matrices."""
    found = refit(tmp_path, family, ranks, ways)
    assert max(found["far"]) < NEAR
    assert len(found["loaded"]) == loaded and all(".self_attn." in name for name in found["loaded"])


def test_the_states_of_mamba_layers_are_served(prepared: None, several_ranks: None, tmp_path: Path) -> None:
    """vLLM computes the decay of states from A_log, and keeps a view of the convolution: both go through its loader."""
    since_vllm("0.32", "NemotronH on a CPU")
    found = refit(tmp_path, "nemotron_h", 2, ("pull", "gloo"))
    assert max(found["far"]) < NEAR
    assert {name.split(".mixer.")[1] for name in found["loaded"]} == {
        "A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias",
    }  # fmt: skip


def test_fused_experts_and_attention_sinks_are_served(prepared: None, tmp_path: Path) -> None:
    """gpt-oss has no table, and vLLM's own reload keeps the old ones of both."""
    since_vllm("0.32", "gpt-oss")
    found = refit(tmp_path, "gpt_oss", 1, ("pull",))
    assert max(found["far"]) < NEAR and found["loaded"] == found["tensors"]
    assert {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.self_attn.sinks"} <= set(found["tensors"])


def test_the_golden_way_is_that_of_the_loader(golden: dict[str, Any]) -> None:
    """A tied output embedding and experts included, although the CPU build packs them apart."""
    assert max(golden["far"]) < NEAR and golden["loaded"] == golden["tensors"]
    assert all(record["received_bytes"] > 0 and record["lookups"] == 0 for record in golden["records"])
