"""Ranks agree on the outcome of a wave: all get the same state even if a rank is late, silent or lost."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ops.comm.stateless_group import GroupError
from ops.refit import agreement
from ops.refit.agreement import Agreement
from ops.refit.waves import TRAINER, RankReport, State

SENDERS = 1
WAIT_S = 20.0


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def settle(
    store: dist.Store, stage: str, *said: tuple[int, RankReport], wait_s: float = WAIT_S, **options: Any
) -> list[Any]:
    """Return what each rank gets when these reports are made at the same time; an error is returned as a value."""

    def one(rank: int, report: RankReport) -> Any:
        unheard = options.get("unheard", {}).get(rank, ())
        try:
            mine = options.get("ranks", {}).get(rank) or Agreement(store, "t", rank, SENDERS)
            return mine.settle(
                stage, State(), options.get("expected", range(3)), report, unheard=unheard, wait_s=wait_s
            )
        except (GroupError, ValueError) as error:
            return error

    with ThreadPoolExecutor(len(said)) as pool:
        return list(pool.map(lambda pair: one(*pair), said))


def test_all_have_the_state_that_all_reported(store: dist.Store) -> None:
    said = [(0, RankReport(0)), (1, RankReport(1, holds=True)), (2, RankReport(2, lost=(1,)))]
    assert settle(store, "1/0", *said) == [State((1,), (), ((2, 1),))] * 3


def test_who_does_not_report_in_time_is_gone_and_told_when_it_comes(store: dist.Store) -> None:
    began_s = time.monotonic()
    assert settle(store, "1/0", (0, RankReport(0)), (1, RankReport(1)), wait_s=2.0) == [State(gone=(2,))] * 2
    assert 2.0 <= time.monotonic() - began_s < WAIT_S
    (error,) = settle(store, "1/0", (2, RankReport(2)))
    assert isinstance(error, GroupError) and "refit, rank 2: the others continued without it" in str(error)
    (error,) = settle(store, "2/", (2, RankReport(2)), wait_s=0.1)  # no other rank is there any more
    assert isinstance(error, GroupError) and "continued without it" in str(error)


def test_who_is_lost_at_the_other_end_of_a_transfer_is_not_waited_for(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "GRACE_S", 0.2)
    said = [(0, RankReport(0)), (2, RankReport(2, lost=(1,)))]
    began_s = time.monotonic()
    assert settle(store, "1/0", *said, unheard={2: [1]}) == [State(gone=(1,))] * 2
    assert time.monotonic() - began_s < WAIT_S / 2
    (error,) = settle(store, "1/0", (1, RankReport(1)))
    assert isinstance(error, GroupError)


def test_who_says_that_it_is_there_is_waited_for(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "GRACE_S", 0.2)
    late = Agreement(store, "t", 0, SENDERS)
    late.here("1/0")
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(settle, store, "1/0", (1, RankReport(1)), (2, RankReport(2, lost=(0,))), unheard={2: [0]})
        time.sleep(0.6)
        assert late.settle("1/0", State(), range(3), RankReport(0), wait_s=WAIT_S) == State(failed=((2, TRAINER),))
        assert others.result() == [State(failed=((2, TRAINER),))] * 2


def test_the_state_that_is_written_first_holds(store: dist.Store) -> None:
    assert settle(store, "1/0", (0, RankReport(0)), wait_s=0.1) == [State(gone=(1, 2))]
    assert all(isinstance(each, GroupError) for each in settle(store, "1/0", (1, RankReport(1)), (2, RankReport(2))))
    assert settle(store, "1/0", (0, RankReport(0)), wait_s=0.1) == [State(gone=(1, 2))]


def test_ranks_that_plan_from_different_layouts_all_end(store: dist.Store) -> None:
    found = settle(
        store, "1/", (0, RankReport(0, plan="a")), (1, RankReport(1, plan="b")), (2, RankReport(2, plan="a"))
    )
    assert all(isinstance(each, ValueError) and "[0, 2] and [1]: they plan from" in str(each) for each in found)


def test_what_was_written_is_deleted_in_the_end(store: dist.Store) -> None:
    ranks = {rank: Agreement(store, "t", rank, SENDERS) for rank in range(3)}
    keys = []
    for version in range(6):
        for stage in (f"{version}/", f"{version}/0"):
            said = [(rank, RankReport(rank)) for rank in range(3)]
            assert settle(store, stage, *said, ranks=ranks) == [State()] * 3
            if stage.endswith("/"):
                for rank in ranks.values():
                    rank.forget()
        keys.append(store.num_keys())
    assert keys[2:] == [keys[2]] * 4


def test_a_store_that_is_lost_is_told() -> None:
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", served.port, is_master=False, timeout=timedelta(seconds=5))
    one = Agreement(client, "t", 0, SENDERS)
    one.here("1/0")
    del served
    with pytest.raises(GroupError, match=r"rank 0: lost the store that ranks agree through .* Fix: serve it from a"):
        one.settle("1/0", State(), range(2), RankReport(0), wait_s=WAIT_S)
