"""Endpoint: a program's requests are turns, to the bit those of an environment; failures, and foreign clients."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from pipeline import Model
from stages import Deadlines, End, Endpoint, Environment, Episode, Messages, Reply
from stages.episode.conversation import calls_in
from stages.episode.endpoint import server
from stages.episode.endpoint.commands import Commands, filled, result_in
from stages.episode.endpoint.requests import TurnRequest
from stages.episode.endpoint.session import REWRITTEN, Session, SessionOverError
from stages.episode.loop_thread import LoopThread
from stages.episode.processes import EnvironmentFailedError
from tests.doors import REPOSITORY
from tests.unit.test_episode import FAST, SAMPLER, Worker, is_running, same
from tests.unit.tiny import QWEN3
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("forked_environments")

AGENT = REPOSITORY / "tests" / "agent.py"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
POLICY = Model("tiny", config=QWEN3, alphabet="0123456789abc", chat_template=TEMPLATE)
TEXTS = ["1", "0123"]


def command(kind: str, argument: object = "") -> tuple[str, ...]:
    return sys.executable, str(AGENT), kind, str(argument)


def endpoint(kind: str, argument: object = "", **settings: Any) -> Endpoint:
    given = {"turns": 4, "tokens": 60, "turn_tokens": 6, "deadlines": FAST, "retries": 1, "commands": 4}
    return Endpoint(POLICY, command=command(kind, argument), on=SAMPLER, samples_per_prompt=2, **given | settings)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


class Counting(Environment):
    """What tests/agent.py does in `talk`."""

    def open(self, row: Any, draw: Random) -> Any:
        return {"turns": 0}, [{"role": "user", "content": row["prompt"]}]

    def turn(self, state: Any, reply: Reply) -> Messages | End:
        state["turns"] += 1
        if state["turns"] == 3:
            return End("done", 0.5)
        return Messages([{"role": "user", "content": str(len(reply.text))}])


def test_a_program_is_an_environment_to_the_bit(worker: Worker) -> None:
    given = {"turns": 4, "tokens": 60, "turn_tokens": 5, "deadlines": FAST, "chat": True}
    environment = Episode(POLICY, Counting(), on=SAMPLER, samples_per_prompt=2, **given)
    made = worker.columns(endpoint("talk"), TEXTS)
    assert same(made, worker.columns(environment, TEXTS))
    assert set(made["end"]) == {"done"} and {rewards.tolist()[-1] for rewards in made["turn_rewards"]} == {0.5}


def test_blocks_of_programs_do_not_depend_on_their_time(worker: Worker) -> None:
    one = worker.columns(endpoint("talk", commands=3), TEXTS)
    assert same(one, worker.columns(endpoint("talk", 0.2, commands=3), TEXTS))


def test_a_rewritten_history_ends_the_episode(worker: Worker, tmp_path: Path) -> None:
    said = tmp_path / "said"
    made = worker.columns(endpoint("rewrite", said), TEXTS)
    assert set(made["end"]) == {"rewritten"} and {len(ends) for ends in made["turn_ends"]} == {1}
    told = [path.read_text() for path in tmp_path.iterdir()]
    assert len(told) == 4 and all("410" in text and "does not continue" in text for text in told)


def test_a_request_that_is_repeated_gets_the_same_answer(worker: Worker) -> None:
    made = worker.columns(endpoint("repeat"), TEXTS)
    assert set(made["end"]) == {"answered"} and {len(ends) for ends in made["turn_ends"]} == {2}


def test_what_a_client_must_not_ask_for_is_refused(worker: Worker) -> None:
    made = worker.columns(endpoint("refused", retries=0), TEXTS[:1])
    assert set(made["end"]) == {"lost:open:exit_3"}, "it got as far as its last line"


@pytest.mark.parametrize(("kind", "end"), [("fail", "failed:0:exit_1"), ("die", "failed:0:signal_9")])
def test_a_failure_that_comes_again_is_the_policys(worker: Worker, kind: str, end: str, tmp_path: Path) -> None:
    assert set(worker.columns(endpoint(kind), TEXTS[:1])["end"]) == {end}
    once = endpoint(kind, tmp_path / "once")
    first = worker.columns(once, TEXTS[:1])
    assert set(first["end"]) == {"answered"} and len(list(tmp_path.iterdir())) == 2, "each has failed once"
    assert same(first, worker.columns(once, TEXTS[:1])), "now none fails"


def test_a_program_that_hangs_ends_at_its_deadline(worker: Worker) -> None:
    fast = Deadlines(open_s=20.0, turn_s=1.0, episode_s=100.0, close_s=1.0)
    assert set(worker.columns(endpoint("hang", deadlines=fast), TEXTS[:1])["end"]) == {"deadline"}


@pytest.mark.parametrize(
    ("kind", "argument", "end"),
    [("silent", "", "lost:open:no_request"), ("lie", "", "failed:0:result"), ("differ", "mark", "lost:open:differed")],
)
def test_programs_without_a_result(worker: Worker, kind: str, argument: str, end: str, tmp_path: Path) -> None:
    made = worker.columns(endpoint(kind, argument and tmp_path / argument), TEXTS[:1])
    assert set(made["end"]) == {end}


def test_a_program_that_is_not_there_is_lost(worker: Worker) -> None:
    stage = endpoint("talk", retries=0)
    object.__setattr__(stage, "command", ("no-such-program",))
    assert set(worker.columns(stage, TEXTS[:1])["end"]) == {"lost:open:exit_127"}


TURNS = (
    ('<tool_call>{"name": "double", "arguments": {"a": 4}}</tool_call>', False),
    ('again <tool_call>{"name": "double", "arguments": {"a": 21}}</tool_call>', False),
    ("<tool_call>no json</tool_call>", True),
)


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_clients_of_others_call_tools(client: str) -> None:
    """What the client gets and what the policy sees: tools, calls, results, streams, tokens, reasons."""

    async def talk(commands: Commands) -> list[Any]:
        place = commands.place()
        opened = await place.ask("open", 0, 60.0, row={"prompt": "twice 4?"}, seed=(1, 2, 3))
        found: list[Any] = [opened.said, opened.tools, opened.most]
        for turn, (text, truncated) in enumerate(TURNS):
            reply = Reply(text, calls_in(text), truncated, seen=30, drawn=7 + turn)
            answer = await place.ask("turn", 0, 60.0, reply=reply)
            found.append(answer.said if answer.said is not None else (answer.end, answer.reward))
        await place.ask("close", 0, 5.0)
        return found

    commands = Commands(command(client), variables={}, log=None, name="endpoint")
    try:
        first, tools, most, *rest = asyncio.run(talk(commands))
    finally:
        commands.close()
    assert first == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "twice 4?"}]
    assert tools[0]["function"]["name"] == "double" and most == 9
    assert rest == [[{"role": "tool", "content": "8"}], [{"role": "tool", "content": "42"}], (TURNS[-1][0], 1.0)]


def test_what_is_not_served_is_refused_in_the_form_of_its_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown paths, other methods, and bodies that are too large."""
    monkeypatch.setattr(server, "MOST_BYTES", 1 << 20)
    large = bytes((1 << 20) + 1)

    async def run() -> None:
        served = server.EndpointServer()
        served.sessions["sk-1"] = Session()
        await served.start()
        try:
            async with aiohttp.ClientSession(
                f"http://{server.HOST}:{served.port}", headers={"x-api-key": "sk-1"}
            ) as asking:
                for method, path, body, status, kind in (
                    ("POST", "/v1/responses", b"{}", 404, "invalid_request_error"),
                    ("GET", "/v1/chat/completions", b"", 405, "invalid_request_error"),
                    ("POST", "/v1/models", b"", 405, "invalid_request_error"),
                    ("POST", "/v1/chat/completions", large, 413, "invalid_request_error"),
                    ("POST", "/v1/messages/count_tokens", b"{}", 404, "not_found_error"),
                    ("GET", "/v1/messages", b"", 405, "invalid_request_error"),
                    ("POST", "/v1/messages", large, 413, "request_too_large"),
                ):
                    async with asking.request(method, path, data=body) as answer:
                        made, allow = await answer.json(), answer.headers.get("Allow", "")
                    assert answer.status == status and (made.get("type") == "error") == ("/messages" in path)
                    assert made["error"]["type"] == kind and bool(allow) == (status == 405)
                    what = (
                        "more than 1 MiB" if status == 413 else f"{method} {path} is not served; this endpoint has POST"
                    )
                    assert what in made["error"]["message"]
        finally:
            await served.stop()

    asyncio.run(run())


@pytest.mark.parametrize("streams", [False, True])
def test_of_a_client_that_leaves_nothing_is_said(
    streams: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of its request, before its turn is there, and in the middle of its stream."""
    monkeypatch.setattr(server, "BEAT_S", 0.1)
    body = json.dumps({"messages": [{"role": "user", "content": "1"}], "stream": streams})
    request = f"POST /v1/messages HTTP/1.1\r\nHost: a\r\nx-api-key: sk-1\r\nContent-Length: {len(body)}\r\n\r\n{body}"

    async def run() -> None:
        handled: list[Any] = []
        answer = server._ApiRoute.answer
        monkeypatch.setattr(server._ApiRoute, "answer", lambda *given: handled.append(answer(*given)) or handled[-1])
        served = server.EndpointServer()
        await served.start()
        for sent, beats in ((request[:-1], False), (request, False), *([(request, True)] if streams else [])):
            for over in (False, True):
                session = served.sessions["sk-1"] = Session()
                reader, writer = await asyncio.open_connection(server.HOST, served.port)
                writer.write(sent.encode())
                if sent == request:
                    await session.events.get()
                    if beats:
                        await reader.readuntil(b": the policy is writing")
                writer.close()
                await asyncio.sleep(0.05)
                if sent == request:
                    session.end() if over else session.reply(Reply("2"))
                while len(handled) and handled[-1].cr_frame is not None:
                    await asyncio.sleep(0.01)
        assert len(handled) == (6 if streams else 4)
        await served.stop()

    asyncio.run(run())
    assert not caplog.records


def test_commands_end_also_if_what_keeps_them_is_stuck(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """And what comes after their end is not wanted any more."""
    monkeypatch.setattr("stages.episode.endpoint.commands.CLOSE_S", 0.3)
    commands = Commands(command("leave", tmp_path / "pids"), variables={}, log=None, name="endpoint")
    place = commands.place()
    asyncio.run(place.ask("open", 0, 60.0, row={"prompt": "1"}, seed=()))
    left = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert commands._keeper
    os.kill(commands._keeper[0].pid, signal.SIGSTOP)
    commands.close()
    until(lambda: not any(map(is_running, left)))
    place.kill()
    assert place.start("turn", 0, 5.0, reply=Reply("1")).cancelled() and not caplog.records


def test_a_loop_that_ends_leaves_no_task(caplog: pytest.LogCaptureFixture) -> None:
    """One that is begun by a task that is cancelled has ended too, and what comes later does not begin."""
    loop, seen = LoopThread("loop"), list[Any]()

    async def sleeps(name: str, then: Any = None) -> None:
        try:
            seen.append(name)
            await asyncio.sleep(60.0)
        finally:
            seen.append(f"{name} over")
            if then:
                seen.append(asyncio.ensure_future(then()))

    loop.run(sleeps("one", lambda: sleeps("two")))
    loop.run(asyncio.sleep(0)).result(5.0)
    loop.close()
    loop.soon(seen.append, "late")
    assert loop.run(sleeps("late")).cancelled()
    task = seen.pop(2)
    assert seen[:2] == ["one", "one over"] and "late" not in seen and task.done()
    loop.close()
    gc.collect()
    assert not caplog.records


def test_commands_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Also those that have left their session, and if it was killed."""
    pids = tmp_path / "pids"
    code = f"""
import asyncio
from stages.episode.endpoint import server
from stages.episode.endpoint.commands import Commands
commands = Commands({command("leave", pids)!r}, variables={{}}, log=None, name="endpoint")
asyncio.run(commands.place().ask("open", 0, 60.0, row={{"prompt": "1"}}, seed=()))
print("open", flush=True)
import time; time.sleep(100)
"""
    made = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=REPOSITORY)
    assert made.stdout is not None and made.stdout.readline() == b"open\n"
    left = [int(pid) for pid in pids.read_text().split()]
    assert len(left) == 2 and all(map(is_running, left))
    os.kill(made.pid, signal.SIGKILL)
    made.wait()
    until(lambda: not any(map(is_running, left)))


def test_what_fails_is_in_the_log_and_variables_are_few(tmp_path: Path) -> None:
    os.environ["SECRET_OF_THE_RUN"] = "1"
    shell = ("sh", "-c", 'env >&2; echo "$0" >&2; exit 4', "{prompt}")
    commands = Commands(shell, variables={"MODE": "train"}, log=tmp_path, name="endpoint")
    try:
        with pytest.raises(EnvironmentFailedError) as raised:
            asyncio.run(commands.place().ask("open", 0, 60.0, row={"prompt": "what it asks"}, seed=(1,)))
    finally:
        commands.close()
        del os.environ["SECRET_OF_THE_RUN"]
    assert raised.value.kind == "exit_4"
    written = (tmp_path / "endpoint.log").read_text()
    assert "MODE=train" in written and "SLUICE_SEED=" in written and "what it asks" in written
    assert "SECRET_OF_THE_RUN" not in written


def test_a_command_gets_fields_and_says_a_result() -> None:
    given = {"prompt": "{answer}", "answer": 3}
    assert filled(["a", "{prompt}{answer}", "{other}"], given) == ["a", "{answer}3", "{other}"]
    assert result_in("") == ("answered", 0.0) == result_in("5\nno JSON")
    assert result_in('{"end": "given up"}\n') == ("given up", 0.0) and result_in('a\n{"reward": 2}') == (
        "answered",
        2.0,
    )
    for wrong in ('{"end": 3}', '{"end": ""}', '{"reward": true}', '{"end": "lost:open"}', '{"reward": NaN}'):
        with pytest.raises(ValueError):
            result_in(wrong)


def test_two_different_requests_at_once_are_no_conversation() -> None:
    """The second does not continue what is still being said. The same request twice has one answer."""

    def asked(*texts: str) -> TurnRequest:
        messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), texts)]
        return TurnRequest(messages=messages, tools=[], most=0, streams=False, counts=False, model="policy")

    async def run() -> None:
        session = Session()
        first = asyncio.ensure_future(session.ask(asked("1")))
        await session.events.get()
        session.reply(Reply("2", (), False, 1, 1))
        assert (await first).reply.text == "2"
        waiting = [asyncio.ensure_future(session.ask(asked("1", "2", "3"))) for _ in range(2)]
        await session.events.get()
        with pytest.raises(SessionOverError, match="does not continue the conversation"):
            await session.ask(asked("1", "2", "4"))
        assert session.events.get_nowait() == REWRITTEN
        session.reply(Reply("5", (), False, 1, 1))
        assert [(await one).reply.text for one in waiting] == ["5", "5"]

    asyncio.run(run())
