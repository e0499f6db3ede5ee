"""vLLM with images: it samples what the trainer scores, before and after refits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ops.refit.transports import TRANSPORTS
from stages.backends import Draws, Generation, Route, Sampling, one_shard
from stages.backends.torch.engine import TorchEngine
from tests import images
from tests.engines import vllm_models as vllm
from tests.optional import need

need("vllm", "vllm")
need("vision", "PIL")
torch.set_num_threads(1)
NEAR = 1e-4


@pytest.mark.parametrize("family", images.CONFIGS)
def test_samples_have_the_logprobs_of_the_trainer_before_and_after_refits(
    prepared: None, tmp_path: Path, family: str
) -> None:
    from stages.backends.vllm.engine import open_engine

    model, column = images.tiny(family), images.column()
    trainer, sampler = (
        TorchEngine(torch.device("cpu"), torch.float32, run_dir=tmp_path),
        open_engine(vllm.context(tmp_path)),
    )
    network: Any = trainer.network(model, "trained")
    prompt_ids = sampler.encode(model, images.TEXTS, images=column)
    assert prompt_ids.values.equal(trainer.encode(model, images.TEXTS, images=column).values)

    def far(made: Generation) -> float:
        shard = one_shard(prompt_ids, made.response_ids)
        scored = trainer.score(model, prompt_ids, made.response_ids, shard, temperature=1.0, images=column)
        return float((made.logprobs.values - scored.values).abs().max())

    def sampled() -> Generation:
        return sampler.generate(
            model, prompt_ids, Sampling(max_tokens=24), Draws(0, (0, 1, 2), (0, 0, 0)), images=column
        )

    assert far(before := sampled()) < NEAR
    images.sharpen(network)
    assert far(before) > 0.1
    for version in (1, 2):
        share = trainer.share(model, TRANSPORTS["pull"])
        served = sampler.serve(model, [share], version, Route(TRANSPORTS["pull"]))
        loaded = sampler.client(model).loaded
        assert all(".visual." in name for name in loaded) == (family == "qwen3_vl") and len(loaded) > 20
        assert served.record["loader_bytes"] < served.record["received_bytes"] or family != "qwen3_vl"
        assert far(sampled()) < NEAR
        with torch.no_grad():
            for parameter in network.parameters():  # vision too: vLLM must not keep what it computed of these images
                parameter.mul_(0.9)
    sampler.close()


def test_the_second_model_runner_is_refused(prepared: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stages.backends.vllm import api

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    with pytest.raises(ValueError, match="only the first model runner computes images"):
        api.open_llm(tmp_path, gpus=False, tensor_parallel=1, memory=0.5)
