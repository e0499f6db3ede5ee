"""Two GPUs with Transformer Engine's layers give the numbers of one, up to rounding in bfloat16.

Context-parallel ranks slice packed rows; experts are one grouped layer per rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.declare.ranks import RankLayout
from pipeline.declare.sharding import Packed
from stages.backends.megatron.slices import Slices
from tests.examples import few
from tests.gpu.ranks import Found, Measured, need_two, on_two_and_on_one
from tests.gpu.test_transformer_engine import MIXTURE, NEAR, SIZES
from tests.optional import need

CASES: dict[str, dict[str, Any]] = {
    "context": {"family": "qwen3", "layout": RankLayout(context=2)},
    "context, recomputed": {"family": "llama", "layout": RankLayout(context=2), "recompute": True},
    "context, experts": {"family": "qwen3_moe", "layout": RankLayout(context=2), "expert": 2},
    "experts": {"family": "qwen3_moe", "layout": RankLayout(data=2), "expert": 2},
    "tensor, experts divided": {"family": "qwen3_moe", "layout": RankLayout(tensor=2)},
}
FAMILIES = ("qwen3", "llama", "qwen3_moe")


def measured(groups: Any, folder: str, case: Any) -> Measured:
    """Measure bfloat16 weights in Transformer Engine's layers."""
    from tests.engines import megatron_cases as cases

    tensors, metrics = cases.measure(cases.MegatronEngine(groups), Path(folder) / case.family, case)
    return {name: tensor.float().cpu() for name, tensor in tensors.items()}, metrics


@pytest.fixture(scope="module")
def both(gpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Found], Found]:
    """The measurements of two ranks, and of one."""
    need("megatron", "megatron")
    need("transformer_engine", "transformer_engine")
    need_two(gpus)
    from tests.engines import megatron_cases as cases

    folder = tmp_path_factory.mktemp("sliced")
    for family in FAMILIES:
        cases.make_folder(family, folder / family, **(MIXTURE if "moe" in family else SIZES))
    of_two = {name: cases.Case(**case, microbatching=Packed(64)) for name, case in CASES.items()}
    of_one = {family: cases.Case(family, RankLayout(), microbatching=Packed(64)) for family in FAMILIES}
    return on_two_and_on_one(measured, of_two, of_one, str(folder), gpus)


@pytest.mark.parametrize("name", CASES)
def test_two_gpus_give_the_numbers_of_one(both: tuple[list[Found], Found], name: str) -> None:
    together, alone = both
    (tensors, metrics), (others, other_metrics) = (found[name] for found in together)
    wanted, wanted_metrics = alone[CASES[name]["family"]]
    assert metrics == other_metrics
    assert metrics["frozen is as before"] == metrics["trained is unchanged"] == 1.0
    made = tensors | others
    assert made.keys() == wanted.keys()
    assert all(torch.equal(tensors[key], others[key]) for key in tensors.keys() & others.keys())
    for kind, near in NEAR.items():
        names = [key for key in wanted if key.startswith(kind) or key.endswith(kind)]
        off = sum(float((made[key] - wanted[key]).square().sum()) for key in names)
        far = (off / sum(float(wanted[key].square().sum()) for key in names)) ** 0.5
        print(f"{name}: {kind} {far:.4f}")
        assert far < near, kind
    for key in ("0 kl", "0 ratio_mean", "0 grad_norm", "0 loss", "0 entropy"):
        print(f"{name}: {key} {metrics[key]:.5f} {wanted_metrics[key]:.5f}")
        assert metrics[key] == pytest.approx(wanted_metrics[key], rel=0.05, abs=0.01), key


@given(st.lists(st.integers(1, 300), min_size=1, max_size=9), st.integers(2, 8), st.data())
@settings(max_examples=few(120), deadline=None)
def test_the_rule_of_slices_is_that_of_transformer_engine(lengths: list[int], ranks: int, data: st.DataObject) -> None:
    need("transformer_engine", "transformer_engine")
    import transformer_engine.pytorch  # noqa: F401 - loads the library
    import transformer_engine_torch as tex

    cut = Slices(rank=data.draw(st.integers(0, ranks - 1)), ranks=ranks)
    padded = cut.padded(lengths)
    starts = torch.tensor([0, *padded]).cumsum(0).to(device="cuda", dtype=torch.int32)
    wanted = tex.thd_get_partitioned_indices(starts, sum(padded), ranks, cut.rank)
    assert cut.positions(padded).tolist() == wanted.tolist()
