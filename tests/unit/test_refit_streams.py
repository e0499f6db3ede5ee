"""Which CUDA stream waits for which: the order of copies and transfers of a slot on a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ops.refit.move import Moves
from ops.refit.streams import Slot, Streams, in_order


class Stream:
    """Fake stream that records its calls. Its events are numbered in order of recording."""

    def __init__(self, name: str, told: list[tuple[str, str, Any]]) -> None:
        self.name, self._told, self._events = name, told, 0

    def wait_event(self, event: str) -> None:
        self._told.append((self.name, "waits for", event))

    def wait_stream(self, other: Stream) -> None:
        self._told.append((self.name, "waits for all of", other.name))

    def record_event(self) -> str:
        self._events += 1
        self._told.append((self.name, "reaches", f"{self.name} {self._events}"))
        return f"{self.name} {self._events}"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Any]]:
    found: list[tuple[str, str, Any]] = []
    current = Stream("current", found)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    return found


def streams(told: list[tuple[str, str, Any]]) -> Streams:
    made: Any = Streams(torch.device("cpu"))
    made.copies, made.transfers = Stream("copies", told), Stream("transfers", told)
    return made  # type: ignore[no-any-return]


def test_each_step_of_a_slot_waits_for_the_one_before(told: list[tuple[str, str, Any]]) -> None:
    slot, nothing = Slot(streams(told)), [Moves([], lambda _: torch.empty(0), lambda _: torch.empty(0))]
    slot.copy(nothing)
    with slot.transfer():
        told.append(("", "sends", ""))
    slot.copy([])
    slot.copy(nothing)
    assert told == [
        ("copies", "reaches", "copies 1"),
        ("transfers", "waits for", "copies 1"),
        ("", "sends", ""),
        ("transfers", "reaches", "transfers 1"),
        ("copies", "waits for", "transfers 1"),
        ("copies", "reaches", "copies 2"),
    ]


def test_slots_of_the_same_streams_wait_each_for_its_own(told: list[tuple[str, str, Any]]) -> None:
    both = streams(told)
    slots = [Slot(both), Slot(both)]
    for slot in slots * 2:
        with slot.transfer():
            pass
    assert [event for _, what, event in told if what == "waits for"] == ["transfers 1", "transfers 2"]


def test_all_is_between_what_the_current_stream_has_and_gets(told: list[tuple[str, str, Any]]) -> None:
    both = streams(told)
    with in_order([Slot(both), Slot(both)]):
        told.append(("", "work", ""))
    assert told == [
        ("copies", "waits for all of", "current"),
        ("transfers", "waits for all of", "current"),
        ("", "work", ""),
        ("current", "waits for all of", "copies"),
        ("current", "waits for all of", "transfers"),
    ]
