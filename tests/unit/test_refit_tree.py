"""Between real processes, refits in waves deliver what vLLM's own loader would produce, even if ranks die midway."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ops.refit.layout import Layout, Tensor, dense
from ops.refit.transports.tree import Fanout
from tests.forked import Command
from tests.refit_tree_ranks import REPLICAS, SENDERS, SIZE, TREE_CASES

DEADLINE_S = 300
ROOT = Path(__file__).resolve().parents[2]

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The results that each rank reported; ranks 0, 1 and 2 were killed at the end."""
    folder = tmp_path_factory.mktemp("tree")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = ("-m", "tests.refit_tree_ranks", str(folder))
    done = Command(*words, env=environment, stderr=subprocess.PIPE, text=True)
    _, stderr = done.communicate(timeout=DEADLINE_S)
    said = json.loads((folder / "codes.json").read_text()) if done.returncode == 0 else None
    assert said == [-9, -9, -9, 0, 0, 0], stderr[-4000:]
    return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(SIZE)]


def of(found: Found, name: str) -> dict[int, list[dict[str, Any]]]:
    """Return the outcomes of a case's versions, by rank."""
    return {rank: own[name] for rank, own in enumerate(found) if own.get(name)}


@pytest.mark.parametrize("case", [" ".join(case) for case in TREE_CASES])
def test_every_receiver_has_the_bytes_of_the_golden_way(found: Found, case: str) -> None:
    ranks = of(found, case)
    assert all([version["wrong"] for version in own] == [[], []] for own in ranks.values())
    assert {version["waves"] for own in ranks.values() for version in own} == {2 if case.endswith("DP2") else 1}
    check_records(ranks)


@pytest.mark.parametrize("case", REPLICAS, ids=str)
def test_replicas_give_it_to_each_other(found: Found, case: tuple[str, str, tuple[int, int]]) -> None:
    family, training, (tensor, replicas) = case
    ranks = of(found, f"{family} {training} {replicas} of {tensor}")
    assert all([version["wrong"] for version in own] == [[]] * 3 for own in ranks.values())
    taking = [own for rank, own in ranks.items() if rank >= SENDERS]
    assert len(taking) == tensor * replicas
    assert {version["waves"] for own in taking for version in own} == {3 if replicas == 4 else 2}
    assert {own[0]["path"] for own in taking} == {"direct", "tree"}
    assert {own[0]["wave"] for own in taking} == set(range(taking[0][0]["waves"]))
    assert any(version["sent_bytes"] for own in taking for version in own)
    check_records(ranks)


def check_records(ranks: dict[int, list[dict[str, Any]]]) -> None:
    """Check that all bytes sent are received, only the first version needs lookups, and no rank was lost."""
    for version in range(len(next(iter(ranks.values())))):
        records = [own[version] for own in ranks.values()]
        assert sum(r["sent_bytes"] for r in records) == sum(r["received_bytes"] for r in records) > 0
        assert all((r["lookups"] > 0) == (version == 0) and r["replans"] == 0 for r in records)
        assert all(min(r["meet_ms"], r["move_ms"], r["agree_ms"]) >= 0 and r["meet_ms"] > 0 for r in records)
    for rank, own in ranks.items():
        assert {version["path"] for version in own} <= ({"trainer"} if rank < SENDERS else {"direct", "tree"})


def shown(own: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (version["path"], version["wave"], version["waves"], version["replans"], version["wrong"]) for version in own
    ]


def test_a_source_that_is_killed_in_a_wave_is_replaced(found: Found) -> None:
    ranks = of(found, "killed")
    assert {rank: shown(own) for rank, own in ranks.items() if rank >= SENDERS} == {
        3: [("tree", 2, 3, 1, []), *[("direct", 0, 2, 0, [])] * 2],  # a part from rank 2, then everything from rank 4
        4: [("direct", 1, 3, 1, []), *[("direct", 1, 2, 0, [])] * 2],
        5: [("direct", 2, 3, 1, []), *[("tree", 1, 2, 0, [])] * 2],
    }
    assert [[version["lookups"] > 0 for version in own] for own in ranks.values()] == [[True, True, False]] * 5


def test_a_source_that_is_silent_is_replaced_and_told(found: Found) -> None:
    ranks = of(found, "silent")
    assert [own[0]["replans"] for rank, own in ranks.items() if rank in (4, 5)] == [1, 1]
    assert [version["wrong"] for rank in (4, 5) for version in ranks[rank]] == [[]] * 4
    (outcome,) = ranks[3]
    assert outcome == {
        "error": "GroupError",
        "held": 1,
        "text": "refit, rank 2: the others continued without it because it did not answer in time; its weights may "
        "belong to no version. Fix: restart it, and refit with a new Tree",
    }


def test_where_no_source_is_left_all_are_told(found: Found) -> None:
    ranks = of(found, "no source")
    assert all(own[0]["wrong"] == [] for own in ranks.values())
    ended = {rank: own[1] for rank, own in ranks.items() if rank != 1}
    assert {rank: (own["error"], own["held"]) for rank, own in ended.items()} == {
        0: ("NoSourceError", None),
        4: ("NoSourceError", None),  # it has received part of version 2 already
        5: ("NoSourceError", 1),
    }
    assert "ranks [2, 3]: no rank is left to send them the version (gone: [1]; failed" in ended[4]["text"]


def test_receivers_go_on_without_the_trainer(found: Found) -> None:
    ranks = of(found, "no trainer")
    assert {rank: shown(own) for rank, own in ranks.items()} == {
        4: [("direct", 0, 3, 1, [])],
        5: [("tree", 2, 3, 1, [])],
    }


def test_what_the_trainer_does_not_have_is_refused_at_once() -> None:
    upper, all_of = (Layout({"w": Tensor((4, 4), "int8")}, [[dense("w", ((0, n), (0, 4)), 1, "w")]]) for n in (2, 4))
    buffers = {"w": torch.zeros(16, dtype=torch.uint8)}
    for number, receives in ((0, False), (0, True)):
        with pytest.raises(ValueError, match=r"no rank of the source holds \[\(2, 4\), \(0, 4\)\] of 'w'"):
            Fanout(upper, all_of, dist.HashStore(), number=number, receives=receives, buffers=buffers)
