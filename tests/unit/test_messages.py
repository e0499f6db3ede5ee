"""Requests of one turn of a loop share a message; a refused one harms no other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from pipeline.data_plane.messages import SharedMessages


class Peer:
    """Answers each request with its double, refuses those below 0, and keeps the messages."""

    def __init__(self) -> None:
        self.sent: list[list[int]] = []
        self.open = asyncio.Event()
        self.open.set()

    async def send(self, requests: Sequence[int]) -> list[int]:
        self.sent.append([*requests])
        await self.open.wait()
        if refused := [request for request in requests if request < 0]:
            raise (LookupError if refused[0] == -1 else RuntimeError)(str(refused[0]))
        if 13 in requests:
            raise TimeoutError
        return [2 * request for request in requests]


async def has_sent(peer: Peer, messages: int = 1) -> None:
    """Wait until this many messages have been sent."""
    while len(peer.sent) < messages:
        await asyncio.sleep(0)


def run(work: Callable[[Peer, SharedMessages], Awaitable[Any]]) -> tuple[Any, list[list[int]]]:
    """Return the result, and the messages that were sent."""

    async def whole() -> tuple[Any, list[list[int]]]:
        peer = Peer()
        return await asyncio.wait_for(work(peer, SharedMessages(peer.send)), 10), peer.sent

    return asyncio.run(whole())


async def all_of(messages: SharedMessages, *requests: int) -> list[Any]:
    return await asyncio.gather(*map(messages.ask, requests), return_exceptions=True)


def test_requests_of_a_turn_share_a_message():
    async def work(_: Peer, messages: SharedMessages) -> list[Any]:
        first = await all_of(messages, 1, 2, 3)
        return [*first, await messages.ask(4)]

    assert run(work) == ([2, 4, 6, 8], [[1, 2, 3], [4]])


def test_a_message_does_not_wait_for_the_one_before():
    async def work(peer: Peer, messages: SharedMessages) -> list[Any]:
        peer.open.clear()
        first = asyncio.ensure_future(messages.ask(1))
        await has_sent(peer)
        second = asyncio.ensure_future(messages.ask(2))
        await has_sent(peer, 2)
        peer.open.set()
        return [await first, await second]

    assert run(work) == ([2, 4], [[1], [2]])


def test_a_refused_request_harms_no_other():
    answers, sent = run(lambda _, messages: all_of(messages, 1, -1, 2, -2))
    assert answers[0] == 2 and answers[2] == 4
    assert isinstance(answers[1], LookupError) and isinstance(answers[3], RuntimeError) and str(answers[3]) == "-2"
    assert sent == [[1, -1, 2, -2], [1], [-1], [2], [-2]], "alone once each, and no more"


def test_another_error_is_told_to_all_at_once():
    answers, sent = run(lambda _, messages: all_of(messages, 13, 1))
    assert [type(answer) for answer in answers] == [TimeoutError, TimeoutError] and sent == [[13, 1]]


def test_who_gave_up_is_left_out():
    async def work(peer: Peer, messages: SharedMessages) -> Any:
        peer.open.clear()
        late, kept = (asyncio.ensure_future(messages.ask(n)) for n in (-1, 5))
        await has_sent(peer)
        late.cancel()
        await asyncio.sleep(0)
        peer.open.set()
        with pytest.raises(asyncio.CancelledError):
            await late
        return await kept

    assert run(work) == (10, [[-1, 5], [5]])


def test_what_nobody_waits_for_is_given_up():
    async def work(peer: Peer, messages: SharedMessages) -> list[int]:
        peer.open.clear()
        others = asyncio.all_tasks()
        asked = [asyncio.ensure_future(messages.ask(n)) for n in (1, 2)]
        await has_sent(peer)
        left = []
        for one in asked:
            one.cancel()
            await asyncio.sleep(0.01)
            left.append(len(asyncio.all_tasks() - others - {*asked}))
        return left

    assert run(work)[0] == [1, 0], "it goes on for the other one"


def test_an_ended_loop_leaves_nobody_waiting():
    async def work(peer: Peer, messages: SharedMessages) -> list[Any]:
        peer.open.clear()
        others = asyncio.all_tasks()
        asked = asyncio.ensure_future(messages.ask(1))
        await has_sent(peer)
        for task in asyncio.all_tasks() - others - {asked}:
            task.cancel()
        return await asyncio.gather(asked, return_exceptions=True)

    (answer,), _ = run(work)
    assert isinstance(answer, asyncio.CancelledError)
