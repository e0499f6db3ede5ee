"""Two GPUs give the numbers of one, over NCCL and with Megatron-core's all-to-all of tokens; in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline.declare.ranks import open_store, reach_store
from tests.gpu.processes import each
from tests.optional import need

CASES = (
    "tensor",
    "tensor, 1 key-value head",
    "pipeline, 3 layers",
    "expert",
    "tensor, experts divided",
    "tensor, experts whole",
    "tensor, experts apart",
)
DEADLINE_S = 150.0
NEAR = 1e-4

Found = dict[str, tuple[dict[str, torch.Tensor], dict[str, float]]]


def two(rank: int, folder: str, port: int) -> Found:
    """Return what `megatron_cases.measure` returns on one of two ranks, by case."""
    from megatron.core import parallel_state

    from tests.engines import megatron_cases as cases

    found: Found = {}
    store = reach_store("127.0.0.1", port, 2, deadline_s=DEADLINE_S)
    for name in CASES:
        case, own = cases.CASES[name], dist.PrefixStore(name, store)
        ranks = cases.Ranks.join(case.layout, rank, own, device="cuda", deadline_s=DEADLINE_S)
        groups = cases.join(ranks, case.expert, torch.device("cuda", 0), 0, case.expert_tensor)
        found[name] = measured(groups, folder, case)
        parallel_state.destroy_model_parallel()
        ranks.leave()
    return found


def one(rank: int, folder: str) -> Found:
    """Return what it returns on a single rank, by family."""
    from tests.engines import megatron_cases as cases

    groups = cases.join(cases.Ranks(), 1, torch.device("cuda", 0), 0)
    families = {cases.CASES[name].family for name in CASES}
    return {family: measured(groups, folder, cases.Case(family, cases.Layout())) for family in families}


def measured(groups: Any, folder: str, case: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Measure float32 weights in Megatron-core's own layers."""
    from stages.backends.megatron import network
    from tests.engines import megatron_cases as cases

    network.has_transformer_engine = lambda groups: False  # type: ignore[assignment]
    engine = cases.MegatronEngine(groups)
    engine.dtype = torch.float32
    tensors, metrics = cases.measure(engine, Path(folder) / case.family, case)
    return {name: tensor.float().cpu() for name, tensor in tensors.items()}, metrics


@pytest.fixture(scope="module")
def both(gpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Found], Found]:
    """The measurements of two ranks, and of one."""
    need("megatron", "megatron")
    if len(gpus) < 2:
        pytest.skip("this machine has one GPU")
    from tests.engines import megatron_cases as cases

    folder = tmp_path_factory.mktemp("megatron")
    for name in CASES:
        cases.make_folder(cases.CASES[name].family, folder / cases.CASES[name].family)
    store = open_store("127.0.0.1", 2, deadline_s=DEADLINE_S)
    (alone,), together = each(one, gpus[:1], str(folder)), each(two, gpus[:2], str(folder), store.port)
    for found in (alone, *together):
        if isinstance(found, Exception):
            raise found
    return together, alone


@pytest.mark.parametrize("name", CASES)
def test_two_gpus_give_the_numbers_of_one(both: tuple[list[Found], Found], name: str) -> None:
    from tests.engines import megatron_cases as cases

    together, alone = both
    (tensors, metrics), (others, other_metrics) = (found[name] for found in together)
    wanted, wanted_metrics = alone[cases.CASES[name].family]
    assert metrics == other_metrics
    assert (tensors | others).keys() == wanted.keys()
    for key, tensor in wanted.items():
        made = (tensors | others)[key]
        far = (made - tensor).abs().max() if key.startswith("sample ") else (made - tensor).norm() / tensor.norm()
        assert float(far) < NEAR, key
    assert metrics == pytest.approx(wanted_metrics, rel=NEAR, abs=NEAR)
