"""Scales of an 8-bit cache inside vLLM: its own attention layers, and an engine that is refitted. The CPU build
computes with such a cache, if the processor has AVX-512."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import Model, StageError
from stages import LoRA
from stages.backends.model.adapters import attach, sharing
from stages.backends.model.cache_bounds import largest
from stages.backends.model.weights import weights
from stages.backends.vllm.cache_scales import record_of, scales_of
from stages.backends.vllm.limits import SCALED
from tests.engines import vllm_models as tiny
from tests.engines.cache_case import attention, bounds, sampled
from tests.engines.refit_case import TOKENS
from tests.optional import lacking, need, since_vllm
from tests.shares import shares_of

need("vllm", "vllm")
AVX512 = "avx512" in Path("/proc/cpuinfo").read_text()
if not AVX512:
    since_vllm("0.32", "an 8-bit cache on this CPU")


@pytest.fixture(scope="module")
def known(prepared: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What `attention` finds of all families."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        return pool.submit(attention, tmp_path_factory.mktemp("attention"), SCALED).result()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("family", SCALED)
def test_every_attention_layer_of_a_family_gets_scales_in_place(known: dict[str, dict[str, Any]], family: str) -> None:
    found = known[family]
    attending = [2] if family == "nemotron_h" else [0, 1, 2] if family == "glm4_moe" else [0, 1]
    assert found["is 8 bit"] and found["layers"] == attending == sorted(found["bounds"])
    assert largest(found["halves"]) == found["bounds"], "ranks read the layers of a folder in turn"
    assert found["before"] == {number: [1.0] * 8 for number in attending}
    for number, (q, k, v) in found["scales"].items():
        assert found["after"][number] == [1.0, k, v, k, v, 1.0, k, v], "queries keep their format here"
        assert found["with queries"][number] == [q, k, v, k, v, q, k, v]
    assert not found["moved"] and found["not in place"] == "" and found["elsewhere"] == "FLASHINFER"
    assert found["amplitude"] == pytest.approx(1.3466 if family == "gpt_oss" else 1.0, rel=1e-4)
    assert found["refused"].startswith("the attention of layer 99 has no scales")
    assert found["kept"] == found["with queries"]


@pytest.mark.timeout(180)
def test_an_engine_scales_its_cache_at_start_and_at_each_refit(
    prepared: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's 8-bit cache needs AVX-512")
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    found = sampled(tmp_path, 2)
    wanted = {name: scales_of(bounds) for name, bounds in found["bounds"].items()}
    for name, scales in wanted.items():
        (first, its), (second, others) = found["layers"][name]
        assert first == second == {n: [1.0, k, v, k, v, 1.0, k, v] for n, (_, k, v) in scales.items()}, "of all ranks"
        assert (its, others) == tuple(each[1] for each in found["layers"]["folder"]), "in place"
    assert wanted["pull"] != wanted["folder"] != wanted["messages"] != wanted["pull"]
    for record, name in zip(found["records"], ("pull", "messages")):
        metrics = {metric: value for metric, value in record.items() if metric.startswith("cache_scale_")}
        assert metrics == record_of(wanted[name]) and len(metrics) == 6 and record["bound_ms"] > 0
    assert found["records"][1]["through_loader"] == 3, "and vLLM then sets all scales to 1"
    print({name: f"{far:.3g}" for name, far in found["far"].items()})
    close = max(found["far"][name] for name in wanted)
    assert close < 0.1 and found["far"]["ones"] > 5 * close


def test_an_attention_that_would_keep_its_scales_is_refused(
    prepared: None, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.backends.vllm import api, client

    ended: list[float] = []

    class Opened:
        errored = False
        shutdown = staticmethod(ended.append)

    async def refused(llm: Any) -> str:
        return ""

    async def not_in_place(llm: Any) -> str:
        return "FLASHINFER"

    for name, instead in (
        ("open_llm", lambda *_, **__: Opened()),
        ("refused", refused),
        ("not_in_place", not_in_place),
    ):
        monkeypatch.setattr(api, name, instead)
    setup = client.Setup(
        folder=Path(model.source), gpus=False, tensor_parallel=1, memory=0.5, where="graph.py:7", cache="fp8"
    )
    opened = client.Client(setup)
    with pytest.raises(
        StageError, match=r"graph.py:7: cache='fp8', and vLLM computes attention with FLASHINFER on this"
    ):
        opened.longest()
    opened.close()
    assert len(ended) == 1, "the engine is given up"


def test_adapters_share_scales_that_leave_them_room(
    prepared: None, model: Model, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions of an adapter are computed together, from one cache."""
    if not AVX512:
        lacking("avx512", "vLLM computes with an 8-bit cache only on CPUs with AVX-512 or AMX")
    from stages.backends.vllm import client
    from stages.backends.vllm.engine import open_engine

    setup, adapted = client.Setup, replace(model, lora=LoRA(rank=8, alpha=16))
    monkeypatch.setattr(client, "Setup", lambda **given: setup(**given | {"cache": "fp8"}))
    network, trained = tiny.reference(model), sharing(tiny.reference(model))
    attach(trained, adapted.lora, seed=1, where="here")
    random = torch.Generator().manual_seed(1)
    for name, parameter in trained.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=random) * 0.2)
    backend = open_engine(tiny.context(root))
    own = backend.client(adapted)
    wanted = scales_of(bounds(network), 2.0)
    assert own._scales == wanted != scales_of(bounds(network))
    served = backend.serve(adapted, shares_of(weights(trained)), 0)
    assert own._scales == wanted and not any("scale" in name or "bound" in name for name in served.record)
    prompt_ids = backend.encode(adapted, tiny.texts((0, 1)))
    made = backend.generate(adapted, prompt_ids, TOKENS, tiny.draws((0, 1)))
    (now, base) = (torch.cat(tiny.logprobs(each, prompt_ids, made, 1.0)) for each in (trained, network))
    far, from_base = (float((made.logprobs.values - each).abs().mean()) for each in (now, base))
    backend.close()
    assert far < 0.1 and from_base > 3 * far


def test_a_family_without_scales_is_refused_before_an_engine_starts(root: Path) -> None:
    """Also where `--check` does not know the model's config."""
    from stages.backends.vllm.engine import VllmEngine

    folder = root / "latent"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "deepseek_v3", "kv_lora_rank": 32}')
    with pytest.raises(StageError, match="cache='fp8', and the model is a 'deepseek_v3'"):
        VllmEngine(replace(tiny.GROUP, gpus=1, cache="fp8"), root).load(Model(str(folder)))


def test_metrics_are_over_the_layers() -> None:
    scales = {0: (1.0, 2.0, 4.0), 7: (0.5, 8.0, 4.0)}
    assert record_of(scales) == {
        "cache_scale_q_min": 0.5, "cache_scale_q_max": 1.0, "cache_scale_k_min": 2.0, "cache_scale_k_max": 8.0,
        "cache_scale_v_min": 4.0, "cache_scale_v_max": 4.0,
    }  # fmt: skip
    assert scales_of({3: (448.0, 100.0, 0.0)}, 2.0) == {3: (4.0, 1.0, 1.0)}
