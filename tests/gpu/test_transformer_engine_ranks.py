"""Two GPUs with Transformer Engine's layers give the numbers of one, up to rounding in bfloat16.

Context-parallel ranks slice packed rows; experts are one grouped layer per rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.declare.ranks import Layout, open_store, reach_store
from pipeline.declare.sharding import Packed
from stages.backends.megatron.slices import Slices
from tests.gpu.processes import each
from tests.gpu.test_transformer_engine import MIXTURE, NEAR, SIZES
from tests.optional import need

CASES: dict[str, dict[str, Any]] = {
    "context": {"family": "qwen3", "layout": Layout(context=2)},
    "context, recomputed": {"family": "llama", "layout": Layout(context=2), "recompute": True},
    "context, experts": {"family": "qwen3_moe", "layout": Layout(context=2), "expert": 2},
    "experts": {"family": "qwen3_moe", "layout": Layout(data=2), "expert": 2},
    "tensor, experts divided": {"family": "qwen3_moe", "layout": Layout(tensor=2)},
}
FAMILIES = ("qwen3", "llama", "qwen3_moe")
DEADLINE_S = 150.0

Found = dict[str, tuple[dict[str, torch.Tensor], dict[str, float]]]


def two(rank: int, folder: str, port: int) -> Found:
    """Return what `megatron_cases.measure` returns on one of two ranks, by case."""
    from megatron.core import parallel_state

    from tests.engines import megatron_cases as cases

    found: Found = {}
    store = reach_store("127.0.0.1", port, 2, deadline_s=DEADLINE_S)
    for name, given_ in CASES.items():
        case = cases.Case(**given_, microbatching=Packed(64))
        ranks = cases.Ranks.join(case.layout, rank, dist.PrefixStore(name, store), device="cuda", deadline_s=DEADLINE_S)
        groups = cases.join(ranks, case.expert, torch.device("cuda", 0), 0, case.expert_tensor)
        found[name] = measured(groups, folder, case)
        parallel_state.destroy_model_parallel()
        ranks.leave()
    return found


def one(rank: int, folder: str) -> Found:
    """Return what it returns on a single rank, by family."""
    from tests.engines import megatron_cases as cases

    groups = cases.join(cases.Ranks(), 1, torch.device("cuda", 0), 0)
    wanted = {family: cases.Case(family, Layout(), microbatching=Packed(64)) for family in FAMILIES}
    return {family: measured(groups, folder, case) for family, case in wanted.items()}


def measured(groups: Any, folder: str, case: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Measure bfloat16 weights in Transformer Engine's layers."""
    from tests.engines import megatron_cases as cases

    tensors, metrics = cases.measure(cases.MegatronEngine(groups), Path(folder) / case.family, case)
    return {name: tensor.float().cpu() for name, tensor in tensors.items()}, metrics


@pytest.fixture(scope="module")
def both(gpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Found], Found]:
    """The measurements of two ranks, and of one."""
    need("megatron", "megatron")
    need("transformer_engine", "transformer_engine")
    if len(gpus) < 2:
        pytest.skip("this machine has one GPU")
    from tests.engines import megatron_cases as cases

    folder = tmp_path_factory.mktemp("sliced")
    for family in FAMILIES:
        cases.make_folder(family, folder / family, **(MIXTURE if "moe" in family else SIZES))
    store = open_store("127.0.0.1", 2, deadline_s=DEADLINE_S)
    (alone,), together = each(one, gpus[:1], str(folder)), each(two, gpus[:2], str(folder), store.port)
    for found in (alone, *together):
        if isinstance(found, Exception):
            raise found
    return together, alone


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
    for key in ("sum kl", "sum ratio_mean", "0 grad_norm", "0 loss", "0 entropy"):
        print(f"{name}: {key} {metrics[key]:.5f} {wanted_metrics[key]:.5f}")
        assert metrics[key] == pytest.approx(wanted_metrics[key], rel=0.05, abs=0.01), key


@given(st.lists(st.integers(1, 300), min_size=1, max_size=9), st.integers(2, 8), st.data())
@settings(max_examples=60, deadline=None)
def test_the_rule_of_slices_is_that_of_transformer_engine(lengths: list[int], ranks: int, data: st.DataObject) -> None:
    need("transformer_engine", "transformer_engine")
    import transformer_engine.pytorch  # noqa: F401 - loads the library
    import transformer_engine_torch as tex

    cut = Slices(rank=data.draw(st.integers(0, ranks - 1)), ranks=ranks)
    padded = cut.padded(lengths)
    starts = torch.tensor([0, *padded]).cumsum(0).to(device="cuda", dtype=torch.int32)
    wanted = tex.thd_get_partitioned_indices(starts, sum(padded), ranks, cut.rank)
    assert cut.positions(padded).tolist() == wanted.tolist()
