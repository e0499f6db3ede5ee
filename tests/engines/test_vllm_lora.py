"""Adapters in a vLLM engine: each version under a number of its own, beside those that running samples use."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ops.refit.share import Share, digest_of
from pipeline import Model, StageError
from pipeline.declare.columns import Ragged
from stages import LoRA
from stages.backends import Decoded, Sampling
from stages.backends.model.adapters import attach, sharing
from stages.backends.model.names import in_folder
from stages.backends.model.weights import weights
from stages.backends.torch.engine import TorchEngine
from tests.engines import vllm_models as tiny
from tests.engines.prepared import engines, kill
from tests.engines.refit_case import CONFIGS, made
from tests.optional import need, since_vllm
from tests.shares import shares_of

need("vllm", "vllm")

GROUPS = (0, 1)
SAMPLING = Sampling(max_tokens=48)
NEAR = 1e-5
LORAS = {1: LoRA(rank=12, targets=("q_proj", "down_proj")), 2: LoRA(rank=8, alpha=16)}


@pytest.fixture(scope="module")
def adapted(model: Model) -> Model:
    """The module's model with an adapter on all layers."""
    return replace(model, lora=LORAS[2])


@pytest.fixture(scope="module")
def backend(root: Path, prepared: None) -> Iterator[Any]:
    from stages.backends.vllm.engine import open_engine

    opened = open_engine(replace(tiny.context(root), max_staleness=1))
    yield opened
    opened.close()


@lru_cache
def trained(model: Model, version: int) -> Any:
    """Return the network of a version, whose adapter changes its distributions a lot."""
    network = sharing(base_of(model))
    attach(network, model.lora, seed=version, where="here")
    random = torch.Generator().manual_seed(version)
    for name, parameter in network.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=random) * 0.2)
    return network


@lru_cache
def base_of(model: Model) -> Any:
    return tiny.reference(replace(model, lora=None))


def sent(model: Model, version: int) -> list[Share]:
    network = trained(model, version)
    return shares_of({in_folder(network, name): tensor for name, tensor in weights(network).items()})


def prompts(backend: Any, model: Model) -> Ragged:
    return backend.encode(model, tiny.texts(GROUPS))  # type: ignore[no-any-return]


def has(backend: Any, model: Model) -> set[int]:
    """Return the numbers of the adapters in the engine."""
    client = backend.client(model)
    return set(client.call(client._llm.list_loras()))


def test_samples_and_logprobs_are_those_of_the_trainer_and_only_the_adapter_is_sent(
    backend: Any, adapted: Model
) -> None:
    prompt_ids, torch_backend = prompts(backend, adapted), TorchEngine(torch.device("cpu"), torch.float32)
    made = backend.generate(adapted, prompt_ids, SAMPLING, tiny.draws(GROUPS))
    base = base_of(adapted)
    assert tiny.farthest(made, tiny.logprobs(base, prompt_ids, made, 1.0)) < NEAR, "before the first version"
    for version in (0, 1):
        shares = sent(adapted, version)
        served = backend.serve(adapted, shares, version)
        assert served.sha256 == digest_of(shares) == torch_backend.serve(adapted, shares, version).sha256
        assert served.record["received_bytes"] == shares[0].model_bytes < 100_000
        made = backend.generate(adapted, prompt_ids, SAMPLING, tiny.draws(GROUPS))
        same = torch_backend.generate(adapted, prompt_ids, SAMPLING, tiny.draws(GROUPS))
        assert made.response_ids.values.equal(same.response_ids.values)
        assert tiny.farthest(made, tiny.logprobs(trained(adapted, version), prompt_ids, made, 1.0)) < NEAR
        assert tiny.farthest(made, tiny.logprobs(base, prompt_ids, made, 1.0)) > 0.1
        assert set(made.versions.values.tolist()) == {version}


def test_versions_in_flight_coexist_and_those_that_nothing_uses_are_forgotten(backend: Any, adapted: Model) -> None:
    """Samples of three versions run together, in two slots. Each goes on with the adapter that it began with."""
    sampling = replace(SAMPLING, max_tokens=400, greedy=True)  # greedy decoding loops up to max_tokens
    prompt_ids, client = prompts(backend, adapted), backend.client(adapted)
    spans: dict[int, set[int | None]] = {}

    async def collected() -> list[Any]:
        stream = backend.stream(adapted, prompt_ids, sampling, None, group_size=4)
        return [event async for event in stream]

    async def run() -> list[list[Any]]:
        streams = []
        for version in (1, 2, 3):
            backend.serve(adapted, sent(adapted, version), version)
            streams.append(asyncio.ensure_future(collected()))
            await asyncio.sleep(0.1)
            spans[version] = {request.adapter for request in list(client._live.values())}
        return await asyncio.gather(*streams)

    for version, events in zip((1, 2, 3), asyncio.run(run())):
        network = trained(adapted, version)
        for event in events:
            assert isinstance(event, Decoded)
            ids = Ragged.of([prompt_ids.rows()[group * 4 + i] for group in event.groups for i in range(4)])
            assert set(event.made.versions.values.tolist()) == {version}
            assert tiny.farthest(event.made, tiny.logprobs(network, ids, event.made, 1.0)) < NEAR
    assert [len(running) for running in spans.values()] == [1, 2, 3], "they did not run together"
    assert spans[3] <= has(backend, adapted)
    for version in (4, 5):
        backend.serve(adapted, sent(adapted, version), version)
    assert len(has(backend, adapted)) == 2 and not has(backend, adapted) & spans[3]


def test_a_prompt_that_the_engine_remembers_is_computed_again_with_a_new_adapter(backend: Any, adapted: Model) -> None:
    """It is longer than a cache block. The same version may also be served twice, with other weights. vLLM itself moves
    the first two adapters into the slots; the others take their memory and places."""
    prompt_ids, by_vllm = backend.encode(adapted, ["0123456789 abcdefghij + " * 12] * 4), []
    for seed in (6, 7, 6, 8):
        by_vllm.append(backend.serve(adapted, sent(adapted, seed), 6).record["moved_by_vllm"])
        made = backend.generate(adapted, prompt_ids, SAMPLING, tiny.draws((0,)))
        assert tiny.farthest(made, tiny.logprobs(trained(adapted, seed), prompt_ids, made, 1.0)) < NEAR
    assert by_vllm[2:] == [0, 0]


def test_weights_of_another_kind_are_refused_and_change_nothing(backend: Any, model: Model, adapted: Model) -> None:
    backend.serve(adapted, sent(adapted, 1), 1)
    with pytest.raises(StageError, match="no such tensor"):
        backend.serve(adapted, tiny.shares(model), 2)
    with pytest.raises(StageError, match=r"lora_A.weight.*\[8, 128\] and receives float32 \[12, 128\]"):
        backend.serve(adapted, shares_of(weights(trained(replace(adapted, lora=replace(LORAS[2], rank=12)), 1))), 2)
    made = backend.generate(adapted, prompts(backend, adapted), SAMPLING, tiny.draws(GROUPS))
    assert set(made.versions.values.tolist()) == {1}


def test_an_engine_that_slept_or_died_serves_the_same_adapter(backend: Any, adapted: Model) -> None:
    backend.serve(adapted, sent(adapted, 8), 8)
    backend.sleep()
    backend.wake()
    network, prompt_ids = trained(adapted, 8), prompts(backend, adapted)
    for die in (False, True):
        if die:
            kill(engines())
        made = backend.generate(adapted, prompt_ids, SAMPLING, tiny.draws(GROUPS))
        assert tiny.farthest(made, tiny.logprobs(network, prompt_ids, made, 1.0)) < NEAR
        assert set(made.versions.values.tolist()) == {8}
    assert backend.client(adapted).starts == 2


def test_two_tensor_parallel_ranks_divide_an_adapter_of_some_layers(
    prepared: None, root: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.backends.vllm.engine import open_engine

    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    adapted = replace(model, lora=LORAS[1])
    opened = open_engine(tiny.context(root, replace(tiny.GROUP, workers=2, tensor_parallel=2)))
    try:
        prompt_ids = prompts(opened, adapted)
        for version in (1, 2, 3):
            served = opened.serve(adapted, sent(adapted, version), version)
            assert served.record["moved_by_vllm"] == (version < 3), "vLLM moves the first two itself"
            made = opened.generate(adapted, prompt_ids, SAMPLING, tiny.draws(GROUPS))
            assert tiny.farthest(made, tiny.logprobs(trained(adapted, version), prompt_ids, made, 1.0)) < NEAR
    finally:
        opened.close()


@pytest.mark.parametrize(
    ("ranks", "groups", "lora"),
    [
        pytest.param(1, 1, LORAS[2], marks=pytest.mark.search),
        (2, 2, LORAS[2]),
        (2, 1, LoRA(rank=8, targets=("q_proj", "o_proj", "out_proj", "up_proj", "down_proj"))),
    ],
)
def test_layers_of_nemotron_h_have_adapters(
    prepared: None, root: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, groups: int, lora: LoRA
) -> None:
    """Attention, Mamba and feed-forward. Ranks have their rows of each of the five parts of `in_proj`; where they copy
    the only group of Mamba heads, that target is refused."""
    from stages.backends.vllm.engine import open_engine

    since_vllm("0.32", "NemotronH on a CPU")
    if ranks > 1:
        monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    monkeypatch.setitem(CONFIGS, "nemotron_h", CONFIGS["nemotron_h"] | {"n_groups": groups})
    adapted = replace(made(root / f"{ranks} {groups}", "nemotron_h", 0), lora=lora)
    opened = open_engine(tiny.context(root, replace(tiny.GROUP, workers=ranks, tensor_parallel=ranks)))
    try:
        if groups < ranks:
            with pytest.raises(StageError, match=r"an adapter of 'in_proj': vLLM copies the only group"):
                opened.load(replace(adapted, lora=LORAS[2]))
        prompt_ids = prompts(opened, adapted)
        for version in (1, 2):
            opened.serve(adapted, sent(adapted, version), version)
            found = opened.generate(adapted, prompt_ids, SAMPLING, tiny.draws(GROUPS))
            assert tiny.farthest(found, tiny.logprobs(trained(adapted, version), prompt_ids, found, 1.0)) < NEAR
            assert tiny.farthest(found, tiny.logprobs(base_of(adapted), prompt_ids, found, 1.0)) > 0.1
    finally:
        opened.close()
