"""Several ranks without Ray: results depend neither on the number of ranks nor on how the batch is split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import start_processes

from pipeline.declare.ranks import open_store
from tests.integration import rank_worker
from tests.integration.rank_worker import WAYS

SIZES = (1, 2, 4)


@pytest.fixture(scope="module", autouse=True)
def imported_once() -> Iterator[None]:
    """Fork ranks from a process that has imported torch, unless tests of vLLM have already started one."""
    if forkserver._forkserver._forkserver_pid is not None:
        yield
        return
    forkserver.set_forkserver_preload([rank_worker.__name__])
    yield
    forkserver._forkserver._stop()


def start(task: Callable[..., None], ranks: int, *args: Any) -> None:
    """Run a task on each rank, and wait for all."""
    start_processes(task, args, nprocs=ranks, start_method="forkserver")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The results by number of ranks and way of splitting."""
    out = tmp_path_factory.mktemp("ranks")
    for size in SIZES:
        store = open_store("127.0.0.1", size, deadline_s=rank_worker.DEADLINE_S)
        start(rank_worker.main, size, size, store.port, str(out))
    return {size: torch.load(out / f"{size}.pt", weights_only=False) | {"folder": out} for size in SIZES}


def close(found: torch.Tensor, expected: torch.Tensor, relative: float) -> None:
    assert (found - expected).abs().max() <= relative * expected.abs().max()


@pytest.mark.parametrize("way", [way.name for way in WAYS])
@pytest.mark.parametrize("size", SIZES)
def test_loss_and_gradients_do_not_depend_on_ranks_or_microbatches(results: Any, size: int, way: str) -> None:
    expected, found = results[1]["plain"], results[size][way]
    for name, gradient in expected["gradients"].items():
        close(found["gradients"][name], gradient, 1e-5)
    for ours, theirs in zip(found["metrics"], expected["metrics"]):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)
    for name, weight in expected["weights"].items():
        close(found["weights"][name], weight, 1e-4)


@pytest.mark.parametrize("way", [way.name for way in WAYS])
@pytest.mark.parametrize("size", SIZES)
def test_scores_come_back_to_their_samples(results: Any, size: int, way: str) -> None:
    torch.testing.assert_close(results[size][way]["logprobs"], results[1]["plain"]["logprobs"], atol=2e-4, rtol=0)


def test_state_is_the_same_files_for_any_number_of_ranks(results: Any) -> None:
    from safetensors.torch import load_file

    folder: Path = results[1]["folder"]
    for way in WAYS:
        states = [load_file(folder / f"state-{size}-{way.name}" / "optimizer.safetensors") for size in SIZES]
        for state in states[1:]:
            assert state.keys() == states[0].keys()
            assert all(state[name].shape == states[0][name].shape for name in state)


def spawned(task: Any, out: Path) -> list[str]:
    """Return what the two ranks of a task wrote."""
    store = open_store("127.0.0.1", 2, deadline_s=240.0)
    start(task, 2, 2, store.port, str(out))
    return [path.read_text() for path in sorted(out.iterdir())]


def test_ranks_that_pack_alone_wait_for_each_other_until_the_deadline(tmp_path: Path) -> None:
    texts = spawned(rank_worker.pack_alone, tmp_path)
    assert "done" not in texts
    assert all("timed out" in text.lower() or "connection closed" in text.lower() for text in texts), texts
    assert any("timed out" in text.lower() for text in texts)


def test_ranks_that_follow_the_driver_finish(tmp_path: Path) -> None:
    assert spawned(rank_worker.pack_together, tmp_path) == ["2", "2"]


def test_unequal_counts_are_an_error_before_any_exchange(tmp_path: Path) -> None:
    texts = spawned(rank_worker.ask_first, tmp_path)
    assert (
        texts[0]
        == texts[1]
        == (
            "stage 'train', step 1: the data-parallel ranks have different work (rank 0: 4 microbatches, rank 1: "
            "1 microbatches); they communicate once per microbatch, and a rank with fewer would leave the others "
            "waiting. Fix: shard the batch with pipeline.declare.sharding.shard_batch(..., equal=True)"
        )
    )


def test_one_sibling_fetches_for_all_and_tells_them_where_it_fails(tmp_path: Path) -> None:
    assert spawned(rank_worker.share_columns, tmp_path) == [
        "2 KeyError: 'no such row'",
        "0 StageError: rank 1: rank 0, which fetches for it, failed: KeyError: 'no such row'; one rank of a replica "
        "fetches for all. Fix: resolve the error of that rank",
    ]
