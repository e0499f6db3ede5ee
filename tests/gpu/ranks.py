"""Measure cases of tests/engines/megatron_cases.py on two GPUs, and on one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline.declare.ranks import open_store, reach_store
from tests.gpu.processes import each

DEADLINE_S = 150.0

Measured = tuple[dict[str, torch.Tensor], dict[str, float]]
Measure = Callable[[Any, str, Any], Measured]  # given process groups, the folder of the models, and a case
Found = dict[str, Measured]


def need_two(gpus: Sequence[str]) -> None:
    """Skip the test unless there are two GPUs."""
    if len(gpus) < 2:
        pytest.skip("this machine has one GPU")


def on_two_and_on_one(
    measure: Measure, of_two: Mapping[str, Any], of_one: Mapping[str, Any], folder: str, gpus: Sequence[str]
) -> tuple[list[Found], Found]:
    """Return what `measure` returns by case: on each of two ranks, and on a single rank."""
    store = open_store("127.0.0.1", 2, deadline_s=DEADLINE_S)
    (alone,) = each(_one, gpus[:1], measure, of_one, folder)
    together = each(_two, gpus[:2], measure, of_two, folder, store.port)
    for found in (alone, *together):
        if isinstance(found, Exception):
            raise found
    return together, alone


def _two(rank: int, measure: Measure, cases: Mapping[str, Any], folder: str, port: int) -> Found:
    from megatron.core import parallel_state

    from tests.engines import megatron_cases

    found: Found = {}
    store = reach_store("127.0.0.1", port, 2, deadline_s=DEADLINE_S)
    for name, case in cases.items():
        own = dist.PrefixStore(name, store)
        ranks = megatron_cases.Ranks.join(case.layout, rank, own, device="cuda", deadline_s=DEADLINE_S)
        groups = megatron_cases.join(ranks, case.expert, torch.device("cuda", 0), 0, case.expert_tensor)
        found[name] = measure(groups, folder, case)
        parallel_state.destroy_model_parallel()
        ranks.leave()
    return found


def _one(rank: int, measure: Measure, cases: Mapping[str, Any], folder: str) -> Found:
    from tests.engines import megatron_cases

    groups = megatron_cases.join(megatron_cases.Ranks(), 1, torch.device("cuda", 0), 0)
    return {name: measure(groups, folder, case) for name, case in cases.items()}
