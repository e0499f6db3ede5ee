"""Two GPUs give the numbers of one, over NCCL and with Megatron-core's all-to-all of tokens; in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.ranks import Found, Measured, need_two, on_two_and_on_one
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
NEAR = 1e-4


def measured(groups: Any, folder: str, case: Any) -> Measured:
    """Measure float32 weights in Megatron-core's own layers."""
    from stages.backends.megatron import fused
    from tests.engines import megatron_cases as cases

    fused.fused_on = lambda groups: fused.Fused()  # type: ignore[assignment]
    engine = cases.MegatronEngine(groups)
    engine.dtype = torch.float32
    tensors, metrics = cases.measure(engine, Path(folder) / case.family, case)
    return {name: tensor.float().cpu() for name, tensor in tensors.items()}, metrics


@pytest.fixture(scope="module")
def both(gpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Found], Found]:
    """The measurements of two ranks, and of one."""
    need("megatron", "megatron")
    need_two(gpus)
    from tests.engines import megatron_cases as cases

    folder = tmp_path_factory.mktemp("megatron")
    of_two = {name: cases.CASES[name] for name in CASES}
    of_one = {case.family: cases.Case(case.family, cases.RankLayout()) for case in of_two.values()}
    for family in of_one:
        cases.make_folder(family, folder / family)
    return on_two_and_on_one(measured, of_two, of_one, str(folder), gpus)


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
