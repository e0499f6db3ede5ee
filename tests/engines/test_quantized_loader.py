"""8-bit weights in vLLM's own modules: its loader, a refit in place and a refit through its loader give equal bytes."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.engines.quantized_case import refitted
from tests.optional import need

need("vllm", "vllm")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("mixture", [False, True])
def test_a_refit_writes_what_the_loader_would(prepared: None, mixture: bool, tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        found = pool.submit(refitted, tmp_path, mixture).result()
    assert found["loaded"] == [] and len(found["other folder"]) > 4, "vLLM's loader is as the table says"
    assert found["wrong"] == ""
    assert (found["in place"], found["in place, by the loader"], found["moved"]) == ([], 0, [])
    assert (found["loader"], found["loader, by the loader"]) == ([], found["tensors"])
    assert found["in place, bytes"] == found["loader, bytes"] > 0
    if mixture:
        assert found["wrong with routers"] == (
            "'model.layers.0.mlp.gate.weight' is an 8-bit float, and only the matrices of q_proj, k_proj, v_proj, "
            "o_proj, gate_proj, up_proj, down_proj may be"
        )
