"""8-bit weights in vLLM's own modules: its loader, a refit in place and a refit through its loader give equal bytes."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline import Model, StageError
from stages.backends.model.quantized_folder import quantized_folder
from tests.engines import vllm_models as tiny
from tests.engines.quantized_case import refitted
from tests.optional import need
from tests.shares import shares_of

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
    for way in ("in place", "loader"):  # an 8-bit cache has the same scales at start and after a refit
        assert found[f"{way}, bounds"] == found[f"{way}, bounds of the folder"] and len(found[f"{way}, bounds"]) == 2
    assert found["in place, bounds"] != found["loader, bounds"]
    if mixture:
        assert found["wrong with routers"] == (
            "'model.layers.0.mlp.gate.weight' is an 8-bit float, and only the matrices of q_proj, k_proj, v_proj, "
            "o_proj, gate_proj, up_proj, down_proj may be"
        )


def test_the_engine_starts_from_the_quantized_copy(
    prepared: None, model: Model, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.backends.vllm import client
    from stages.backends.vllm.engine import VllmEngine

    started: list[Any] = []

    class Started:
        def __init__(self, setup: Any) -> None:
            self.setup = setup
            started.append(setup)

        def longest(self) -> int:
            return 8

    monkeypatch.setattr(client, "Client", Started)
    eight = replace(tiny.GROUP, gpus=1, weights="fp8")
    backend = VllmEngine(eight, root)
    backend.load(model)
    assert started[0].folder == quantized_folder(Path(model.source), root) != Path(model.source)
    plain = shares_of({name: weight.bfloat16() for name, weight in tiny.weights_of(model).items()})
    with pytest.raises(StageError, match=r"this model has float8_e4m3fn .* and receives bfloat16"):
        backend.serve(model, plain, 1)


def test_an_engine_that_quantizes_what_it_must_not_is_refused(
    prepared: None, model: Model, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.backends.vllm import api
    from stages.backends.vllm.engine import open_engine

    async def refused(llm: Any) -> str:
        assert await asked(llm) == ""
        return "'lm_head.weight' is an 8-bit float"

    asked = api.refused
    monkeypatch.setattr(api, "refused", refused)
    backend = open_engine(tiny.context(root))
    try:
        with pytest.raises(
            StageError, match=r"in the vLLM engine of .*, 'lm_head.weight' is an 8-bit float; embeddings"
        ):
            backend.load(model)
    finally:
        backend.close()
