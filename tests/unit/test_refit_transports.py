"""Between real processes, every transport delivers what vLLM's own loader would produce from the trainer's folder."""

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ops.comm.stateless_group import CHECKED, GroupError, StatelessGroup
from ops.refit.layout import Layout, Tensor, dense, whole
from ops.refit.transports.broadcast import Buckets, _in_turns
from tests.forked import Command
from tests.refit_ranks import CASES, IN_SUITE, ONCE, SEARCHED, SIZE, TRANSPORTS
from tests.unit.refit_models import SERVING

DEADLINE_S = 240
ROOT = Path(__file__).resolve().parents[2]


def free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports, below those that Linux gives to outgoing connections: another
    process would take one of these before it is used."""
    for first in range(20000 + os.getpid() % 12000, 32768 - count, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise OSError("no free ports")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results that each rank reported."""
    return reported(tmp_path_factory.mktemp("refit"))


def reported(folder: Path, *more: str) -> list[dict[str, Any]]:
    """Run all ranks and return what each reported."""
    port = free_ports(1 + (1 << SIZE))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ranks = [
        Command(
            "-m", "tests.refit_ranks", str(rank), str(port), str(folder), *more,
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(SIZE)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=DEADLINE_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * SIZE, "\n".join(text[-2000:] for text in said)
    return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(SIZE)]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("case", [" ".join(case) for case in CASES])
def test_every_receiver_has_the_bytes_of_the_golden_way(found: Any, case: str, transport: str) -> None:
    assert [rank[case][transport] for rank in found] == [[]] * SIZE


def test_all_pairs_of_layouts_were_carried_out(found: Any) -> None:
    dense = dict.fromkeys(("llama", "qwen2, uneven"), 12)
    once = dict.fromkeys(ONCE | IN_SUITE, 3)
    assert Counter(family for family, _, _ in CASES) == dense | {"qwen3_moe": 21} | once
    assert Counter(family for family, _, _ in SEARCHED) == dict.fromkeys(IN_SUITE, 9)
    assert all(len(rank) == len(CASES) for rank in found) and {"TP1", "TP2", "DP2"} <= SERVING.keys()


@pytest.mark.search
def test_in_every_other_layout_too(tmp_path: Path) -> None:
    ranks = reported(tmp_path, "searched")
    assert {tuple(case[name]) for rank in ranks for case in rank.values() for name in TRANSPORTS} == {()}
    assert all(len(rank) == len(SEARCHED) for rank in ranks)


class Wire:
    """A communicator that delivers wrong values."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        tensor.fill_(7)


class Store(dict[str, str]):
    """An in-process store through which ranks exchange values."""

    def set(self, key: str, value: str) -> None:
        self[key] = value


@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_that_does_not_carry_what_it_is_given_is_refused(rank: int) -> None:
    store = Store({CHECKED: "12345"})
    store.get = store.__getitem__  # type: ignore[method-assign]
    group = StatelessGroup(Wire(), store, rank, 2, torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.raises(
        GroupError, match=rf"rank {rank} of 2: the first broadcast delivered \[7, 7\].*'first broadcast'"
    ):
        group.check()


def test_the_random_numbers_of_the_process_are_left_alone() -> None:
    store, seed = Store(), torch.initial_seed()
    store.get = store.__getitem__  # type: ignore[method-assign]
    with pytest.raises(GroupError):
        StatelessGroup(Wire(), store, 0, 2, torch.device("cpu")).check()  # type: ignore[arg-type]
    assert torch.initial_seed() == seed


def test_it_is_refused_also_where_assertions_are_off() -> None:
    test = test_a_group_that_does_not_carry_what_it_is_given_is_refused.__name__
    code = f"import tests.unit.test_refit_transports as tests; tests.{test}(1)"
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_ranks_that_do_not_come_are_told() -> None:
    port = free_ports(1)
    with pytest.raises(GroupError, match=rf"rank 1 did not meet the other 1 at 127.0.0.1:{port}"):
        StatelessGroup.join("127.0.0.1", port, rank=1, ranks=2, device=torch.device("cpu"), deadline_s=1)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 4), st.integers(1, 2), st.integers(1, 20),
)  # fmt: skip
def test_pipeline_stages_keep_to_their_streams(
    drawn: list[tuple[int, int]], streams: int, data: int, limit: int
) -> None:
    """Each of the `data` replicas of a pipeline stage holds the whole stage."""
    stage_of = {f"t{i}": stage for i, (stage, _) in enumerate(drawn)}
    tensors = {f"t{i}": Tensor((size,), "uint8") for i, (_, size) in enumerate(drawn)}
    ranks = [
        [
            dense(name, whole(tensor.shape), 1, name)
            for name, tensor in tensors.items()
            if stage_of[name] == rank // data
        ]
        for rank in range(4 * data)
    ]
    buckets = list(_in_turns(Layout(tensors, ranks), tensors, limit, streams))
    assert sorted(placed.name for bucket in buckets for placed in bucket.tensors) == sorted(tensors)
    used: dict[int, set[int]] = {}
    for bucket in buckets:
        assert bucket.stream < streams
        (stage,) = {stage_of[placed.name] for placed in bucket.tensors}
        used.setdefault(stage, set()).add(bucket.stream)
    if len(used) <= streams:
        assert sum(map(len, used.values())) == len(set().union(*used.values()))
    else:
        assert all(len(streams_of) == 1 for streams_of in used.values())
    assert len({stage_of[bucket.tensors[0].name] for bucket in buckets[: len(used)]}) == len(used), "they take turns"


@pytest.mark.parametrize("sizes", [{"bucket_bytes": "abc"}, {"bucket_bytes": 0}, {"buckets": -1}, {"buckets": True}])
def test_sizes_that_are_none_are_refused(sizes: Any) -> None:
    layout = Layout({"t": Tensor((4,), "float32")}, [[dense("t", whole((4,)), 4, "b")]])
    buffers = {"b": torch.zeros(16, dtype=torch.uint8)}
    with pytest.raises(ValueError, match="must be a whole number"):
        Buckets(layout, layout, number=0, receives=True, buffers=buffers, senders=None, receivers=None, **sizes)
