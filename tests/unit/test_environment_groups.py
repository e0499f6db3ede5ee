"""Environments of a worker group: the same episodes as beside the worker, keys, times, and workers that are lost."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from pipeline import StageContext, StageError, WorkerGroup
from pipeline.declare.task import ServerAddress
from pipeline.declare.times import ENVIRONMENT, PROCESS, SampleTimes
from pipeline.plan.planner import plan
from pipeline.record import trace
from stages import Evaluate, Generated, Reply
from stages.episode import environment_client, environment_server, processes
from stages.episode.admission import admits
from stages.episode.attempts import Attempts, EpisodeLostError
from stages.episode.environment_client import ServedEnvironments
from stages.episode.environment_server import EnvironmentServer
from stages.episode.frames import HostCall
from stages.episode.host import Host
from stages.episode.processes import EnvironmentFailedError, PlaceLostError, Processes
from tests.doors import REPOSITORY
from tests.unit.environments import Echo, Faulty, Sleeping, Uneven
from tests.unit.test_episode import (
    FAST,
    SAMPLER,
    Worker,
    episode,
    execute,
    is_running,
    published,
    run_graph,
    same,
)
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("forked_environments")

ENVS = WorkerGroup("envs", workers=2)
HERE = "127.0.0.1"
ROW = {"row": {"prompt": "1"}, "seed": (4,)}


def serving(stage: Any, count: int = 2) -> list[StageContext]:
    """The contexts of workers of a group that serves this stage."""
    return [StageContext(group=ENVS, rank=rank, seed=3, group_size=2, run_dir=None, shared={}) for rank in range(count)]


@contextmanager
def served(stage: Any, count: int = 2) -> Iterator[Worker]:
    """A worker that samples, whose environments are on that many others."""
    worker, contexts = Worker(), serving(stage, count)
    worker.context.servers[:] = [stage.serve(context, HERE) for context in contexts]
    assert [stage.serve(context, HERE) for context in contexts] == worker.context.servers, "asked again"
    try:
        yield worker
    finally:
        worker.close()
        for held in [held for context in contexts for held in context.shared.values()]:
            held.close()


@contextmanager
def server(environment: Any) -> Iterator[tuple[EnvironmentServer, ServerAddress]]:
    """One worker of a group, in this process."""
    made = EnvironmentServer(Processes(environment, count=1, log=None))
    try:
        yield made, made.listen(HERE)
    finally:
        made.close()


@contextmanager
def client(environment: Any, addresses: list[ServerAddress], first: int = 0) -> Iterator[ServedEnvironments]:
    made = ServedEnvironments(environment, addresses, first=first)
    try:
        yield made
    finally:
        made.close()


WORKER = """
import sys, time
import msgspec
from stages.episode.environment_server import EnvironmentServer
from stages.episode.processes import Processes
from tests.unit.environments import Echo, Sleeping
made = EnvironmentServer(Processes(eval(sys.argv[1]), count=1, log=None))
print(msgspec.json.encode(made.listen("127.0.0.1")).decode(), flush=True)
print(made._processes.place()._process.pid, flush=True)
time.sleep(600)
"""


@contextmanager
def far(environment: Any) -> Iterator[tuple[ServerAddress, int, int]]:
    """One worker of a group, in a process of its own: its address and pid, and the pid of its process."""
    words = [sys.executable, "-c", WORKER, repr(environment)]
    with subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        address = msgspec.json.decode(process.stdout.readline(), type=ServerAddress)
        pid = int(process.stdout.readline())
        try:
            yield address, process.pid, pid
        finally:
            process.kill()
    until(lambda: not is_running(pid))


def test_a_run_with_a_group_is_that_with_processes_beside_the_sampler(tmp_path: Path) -> None:
    """With an evaluation by the same environment. The record has the workers, the logs have what the processes print,
    and the plan has the group apart from those that run stages."""
    found = []
    for name, environments in (("beside", 2), ("there", replace(ENVS, cpus=0.25))):
        graph = run_graph(Echo(), environments=environments)
        one = graph.stages[0]
        task = Generated("reverse", digits=2, held_out=20)
        judged = Evaluate(one.model, task, on=one.on, every=1, prompts=4, episode=one)
        events = execute(tmp_path / name, replace(graph, stages=(*graph.stages, judged)))
        scores = [event.metrics for event in events if isinstance(event, trace.Ran) and event.stage == "evaluate"]
        found.append((published(events), scores))
    assert found[0] == found[1] and len(found[0][0]) == 3 and found[0][1]
    placed = {(event.group, event.worker) for event in events if isinstance(event, trace.Placed)}
    assert {("envs", 0), ("envs", 1)} <= placed
    logs = {path.name for path in (tmp_path / "there" / "logs").iterdir()}
    assert {"episode-envs-0-0.log", "episode-envs-1-0.log"} <= logs
    made = plan(replace(graph, stages=(*graph.stages, judged)))[0]
    assert [(each.name, each.workers, each.serves) for each in made.servers] == [("envs", 2, ("episode", "evaluate"))]
    assert "envs" not in {each.name for each in made.groups}


@pytest.mark.parametrize("fault", ["raise", "hang", "kill"])
def test_faults_end_as_beside_the_sampler(fault: str, tmp_path: Path) -> None:
    """At the second turn: once, which changes nothing; and whenever it comes again, which the policy has caused."""
    mark = tmp_path / "mark"
    deadlines = replace(FAST, turn_s=3.0)
    environment = Faulty(fault=fault, at=1, mark=str(mark), of="ab", once=True)
    worker = Worker()
    mark.touch()
    wanted = worker.columns(episode(environment))
    worker.close()
    mark.unlink()
    stage = episode(environment, environments=ENVS, deadlines=deadlines)
    with served(stage) as worker:
        assert same(wanted, worker.columns(stage))
        stage = episode(replace(environment, once=False), environments=ENVS, deadlines=deadlines)
    with served(stage) as worker:
        end = {"raise": "failed:1:OSError", "hang": "deadline", "kill": "failed:1:died"}[fault]
        assert worker.columns(stage)["end"] == ["answered"] * 4 + [end] * 2 + ["answered"] * 2
        opened, closed = opened_and_closed(mark)
        assert closed and not set(closed) - set(opened)


def opened_and_closed(mark: Path) -> tuple[list[str], list[str]]:
    lines = [line.split() for line in Path(f"{mark}.log").read_text().splitlines()]
    return [text for word, text in lines if word == "open"], [text for word, text in lines if word == "close"]


def test_an_environment_that_cannot_be_loaded_there_says_so() -> None:
    class Missing(Echo):
        def __reduce__(self) -> Any:
            return (__import__, ("no_module_of_this_name",))

    stage = episode(Missing(), environments=ENVS)
    with served(stage) as worker, pytest.raises(StageError, match=r"cannot be loaded .* ModuleNotFoundError"):
        worker.columns(stage)


def test_only_who_knows_the_key_is_served() -> None:
    """Nobody else starts a process, and who serves with another key is not asked."""
    with server(Echo()) as (made, address), client(Echo(), [replace_key(address)]) as stranger:
        waiting = stranger.place().start("open", 0, 20.0, **ROW)
        with socket.create_connection((HERE, address.port)) as silent:
            assert len(silent.recv(64)) == 32
            silent.sendall(bytes(64))
            assert silent.recv(64) == b"", "the connection ends"
        assert not waiting.done() and not made._processes._all
        stranger.addresses[0] = address  # type: ignore[index]
        assert waiting.result(20.0).said == "1"

    async def answers_anything(reader: Any, writer: Any) -> None:
        writer.write(bytes(32))
        await reader.readexactly(64)
        writer.write(bytes(32))
        asked.append(await reader.read(1))

    async def run() -> None:
        listening = await asyncio.start_server(answers_anything, HERE, 0)
        port = listening.sockets[0].getsockname()[1]
        with client(Echo(), [ServerAddress(host=HERE, port=port, key=bytes(32))]) as made:
            made.place().start("open", 0, 20.0, **ROW)
            while not asked:
                await asyncio.sleep(0.01)
        listening.close()

    asked: list[bytes] = []
    asyncio.run(run())
    assert set(asked) == {b""}


def test_a_reset_is_reported_nowhere(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """By either end, before it knows the other one and after. asyncio's streams hide a reset that nobody has seen, but
    only if they are collected before their futures."""
    monkeypatch.delattr(asyncio.StreamReaderProtocol, "__del__")
    known: list[bool] = []

    async def resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        known.append(len(known) > 0 and await admits(bytes(32), reader, writer))
        reset(writer.get_extra_info("socket"))
        writer.transport.abort()

    async def run() -> None:
        listening = await asyncio.start_server(resets, HERE, 0)
        here = ServerAddress(host=HERE, port=listening.sockets[0].getsockname()[1], key=bytes(32))
        with client(Echo(), [here]) as made, pytest.raises(PlaceLostError):
            await asyncio.wrap_future(made.place().start("open", 0, 20.0, **ROW))
        listening.close()

    asyncio.run(run())
    assert known == [False, True]
    with server(Echo()) as (made, address):
        with socket.create_connection((HERE, address.port)) as silent:
            assert len(silent.recv(64)) == 32
            reset(silent)
        until(lambda: "_serve" not in str(asyncio.all_tasks(made._processes.loop._loop)))
    gc.collect()
    assert "never retrieved" not in caplog.text


def reset(connection: socket.socket) -> None:
    """Let a connection end with a reset once it is closed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def replace_key(address: ServerAddress) -> ServerAddress:
    return msgspec.structs.replace(address, key=bytes(32))


def test_what_cannot_be_sent_fails_at_once_and_others_go_on() -> None:
    with server(Echo()) as (_, address), client(Echo(), [address]) as made:
        place = made.place()
        for row in ({"prompt": "\ud800"}, {"prompt": 1 << 70}):
            with pytest.raises(EnvironmentFailedError, match="open: unsendable: "):
                place.start("open", 0, 20.0, row=row, seed=(1,)).result(20.0)
        assert place.start("open", 1, 20.0, **ROW).result(20.0).said == "1"


def test_calls_wait_in_order_and_the_other_worker_says_how_long_they_took() -> None:
    """Of one process: three turns of 0.2 s each, one by one. The rest of their time they waited for it."""
    times = [SampleTimes() for _ in range(3)]
    environment = Echo(sleep_s=0.2)
    with server(environment) as (_, address), client(environment, [address]) as made:

        async def run() -> None:
            place = made.place()
            for n in range(3):
                await place.ask("open", n, 20.0, row={"prompt": "1"}, seed=(4,))
            await asyncio.gather(*(place.ask("turn", n, 20.0, times[n], reply=Reply("1")) for n in range(3)))

        asyncio.run(run())
    spent = [
        {name: end_s - start_s for (name, end_s), start_s in zip(one.parts, [one.start_s, *ends(one)])} for one in times
    ]
    slept_s = 0.2 * draw()
    assert all(each[ENVIRONMENT] >= slept_s for each in spent)
    assert sorted(each[PROCESS] for each in spent)[2] >= 2 * slept_s
    assert spent[0][PROCESS] + spent[0][ENVIRONMENT] < spent[2][PROCESS] + spent[2][ENVIRONMENT]


def ends(times: SampleTimes) -> list[float]:
    return [end_s for _, end_s in times.parts]


def draw() -> float:
    return Random(repr((4,))).random()


def test_a_group_is_shared_by_the_workers_that_sample() -> None:
    """Each begins with another of its workers, and goes on with the one with the fewest episodes."""
    with (
        server(Echo()) as (_, one), server(Echo()) as (_, two),
        client(Echo(), [one, two]) as made, client(Echo(), [one, two], first=1) as other,
    ):  # fmt: skip
        first = made.place()
        first.episodes.add(1)
        assert made.place().episodes is not first.episodes and made.fresh().episodes is not first.episodes
        assert other.place()._link._at == 1 and first._link._at == 0
    shared = episode(Echo(), environments=WorkerGroup("envs", workers=5))
    assert shared.at_once == {ENVIRONMENT: 5}
    assert replace(shared, on=replace(SAMPLER, workers=2)).at_once == {ENVIRONMENT: 3}
    assert not episode(Sleeping(), environments=ENVS).at_once


def test_a_worker_is_not_asked_before_it_answers_or_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither if it never has, nor if its connection has ended, nor after an answer that cannot be read; whatever
    others have to do."""

    async def unwanted(place: Any, episode: int) -> bool:
        return place.start("open", episode, 20.0, **ROW).cancel()

    with server(Echo()) as (_, other), server(Echo()) as (_, good):
        addresses = [replace_key(other), good]
        with client(Echo(), addresses) as made:
            until(lambda: made._links[1]._writer)
            made._links[1].episodes.add(1)
            until(lambda: made.place()._link._at == 1)
            addresses[0] = other
            until(lambda: made._links[0]._writer)
            with monkeypatch.context() as patch:
                patch.setattr(environment_server, "send", lambda writer, answer: writer.write(b"\1\0\0\0\xc1"))
                gone = made.place()
                assert made.loop.run(unwanted(gone, 8)).result(20.0), "which is in nobody's way"
                with pytest.raises(PlaceLostError):
                    gone.start("open", 0, 20.0, **ROW).result(20.0)
            addresses[0] = replace_key(other)
            until(lambda: made._links[0].is_lost)
            with pytest.raises(PlaceLostError):
                gone.start("open", 0, 20.0, **ROW).result(20.0)
            assert [made.place()._link._at for _ in range(3)] == [1] * 3 and made._links[0].is_doubtful
            addresses[0] = other
            until(lambda: made._links[0]._writer)
            place = made.place()
            assert place._link._at == 0 and made.loop.run(unwanted(place, 2)).result(20.0)
            assert place.start("open", 3, 20.0, **ROW).result(20.0).said == "1", "after an answer that nobody wants"
            for writer in (made._links[0]._writer, made._links[1]._writer):
                made.loop.soon(writer.close)
            until(lambda: all(link.is_lost for link in made._links))
            assert made.place().start("open", 4, 20.0, **ROW).result(20.0).said == "1"


def test_calls_that_are_not_wanted_before_there_is_a_connection_are_not_made(tmp_path: Path) -> None:
    """Of an episode that is given up while its worker cannot be reached, and of one with a process for itself."""
    mark = tmp_path / "mark"
    environment = Faulty(method="none", mark=str(mark))
    with server(environment) as (made, address):
        addresses = [replace_key(address)]
        with client(environment, addresses) as there:
            asked = there.place().start("open", 2, 20.0, row={"prompt": "a"}, seed=(1,))
            left = []
            for number, place in enumerate((there.fresh(), there.place())):
                left.append(place.start("open", number, 20.0, row={"prompt": "b"}, seed=(1,)))
                left += [place.start("close", number, 20.0)] if number else []
                place.kill()
            for call in left:
                with pytest.raises(PlaceLostError):
                    call.result(20.0)
            addresses[0] = address
            assert asked.result(20.0).said == "a" and len(made._processes._all) == 1
            assert opened_and_closed(mark) == (["a"], [])


def test_a_worker_that_was_never_reached_fails_every_call_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that waited, and what its episode asks later: a turn, and to be closed."""
    monkeypatch.setattr(environment_client, "REACH_S", 0.5)
    with server(Echo()) as (_, address), client(Echo(), [replace_key(address)]) as there:
        place = there.place()
        for method in ("open", "turn", "close"):
            with pytest.raises(PlaceLostError):
                place.start(method, 0, 20.0, **(ROW if method == "open" else {})).result(5.0)


def test_episodes_of_a_worker_that_dies_go_on_elsewhere() -> None:
    """In the middle of a turn: with the same bits, and without a process of their own. Where no run has started the
    group, as when one episode is played again, its processes are beside the worker."""
    stage, worker = episode(Sleeping(0.5), environments=ENVS), Worker()
    wanted = worker.columns(stage)
    assert isinstance(stage.places(worker.context), Processes)
    worker.close()
    with far(Sleeping(0.5)) as (address, pid, below), served(stage, 1) as worker:
        worker.context.servers.append(address)
        asked = environment_client.ServedPlace.ask

        async def ask(self: Any, method: str, *given: Any, **named: Any) -> Any:
            if method == "turn" and self._link._at == 1 and is_running(pid):
                asyncio.get_running_loop().call_later(0.1, os.kill, pid, signal.SIGKILL)
            return await asked(self, method, *given, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(environment_client.ServedPlace, "ask", ask)
            outputs = worker.outputs(stage)
        until(lambda: not is_running(below))
        assert sum(output.metrics["retried"] * 2 for output in outputs) == 4, "half of the episodes were there"
        assert same(wanted, worker.columns(stage)) and set(wanted["end"]) == {"answered"}


def test_the_loss_of_a_place_is_never_the_policys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it comes again at the same turn. A worker that takes the place of another is asked as soon as it listens,
    and one that cannot be reached is given up."""
    monkeypatch.setattr(environment_client, "REACH_S", 1.0)
    addresses: list[ServerAddress] = []
    with far(Sleeping(30.0)) as (address, pid, _), far(Sleeping(0.0)) as (other, *_):
        addresses.append(address)
        with client(Sleeping(), addresses) as made:

            async def run() -> str:
                attempts = Attempts(made, {"prompt": "1"}, (0,), FAST, 1)
                opening = asyncio.ensure_future(attempts.open())
                await asyncio.sleep(0.5)
                os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0.3)
                addresses[0] = other
                assert await opening == "1" and attempts.retried == 1
                assert (await attempts.turn(Reply("1"))).kind == "answered"
                await attempts.close()
                addresses[0] = address
                made._links[0]._writer.close()
                with pytest.raises(EpisodeLostError, match="lost:open:unreachable"):
                    await Attempts(made, {"prompt": "1"}, (0,), FAST, 1).open()
                return "over"

            assert asyncio.run(run()) == "over"

    class Lost:
        """A place that is lost at each turn."""

        closes, episodes = False, set[int]()

        def number(self) -> int:
            return 1

        def place(self) -> Any:
            return self

        async def ask(self, method: str, *given: Any, **named: Any) -> Any:
            if method == "open":
                return processes.HostAnswer(number=0, said="1")
            raise PlaceLostError(method)

        def start(self, *given: Any, **named: Any) -> None:
            """Nothing is there."""

    async def plays() -> None:
        attempts = Attempts(Lost(), {}, (0,), FAST, 3)
        await attempts.open()
        await attempts.turn(Reply("1"))

    with pytest.raises(EpisodeLostError, match="lost:turn:unreachable"):
        asyncio.run(plays())


def test_an_episode_whose_worker_is_gone_is_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The connection ends, and with it the processes that were for one episode alone. What was being closed has no
    answer, and nothing is said about that."""
    mark = tmp_path / "mark"
    environment = Faulty(method="none", mark=str(mark))
    with server(environment) as (made, address):
        with client(environment, [address]) as there:
            asyncio.run(there.place().ask("open", 1, 20.0, row={"prompt": "a"}, seed=(1,)))
            asyncio.run(there.fresh().ask("open", 2, 20.0, row={"prompt": "b"}, seed=(1,)))
            assert len(made._processes._all) == 2
        until(lambda: opened_and_closed(mark) == (["a", "b"], ["a"]) and len(made._processes._all) == 1)
        with client(environment, [address]) as there:

            async def run() -> None:
                places = [there.place() for _ in range(10)]
                for n, place in enumerate(places):
                    await place.ask("open", n, 20.0, row={"prompt": "c"}, seed=(1,))
                for n, place in enumerate(places):
                    place.start("close", n, 20.0)

            asyncio.run(run())
        until(lambda: opened_and_closed(mark)[1] == ["a", *("c" * 10)])
    assert not caplog.records


def test_a_process_whose_worker_is_gone_says_nothing() -> None:
    """Nobody reads its answer."""
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        asyncio.run(Host(Echo(), ours)._answer(HostCall(number=0, episode=1, method="open", **ROW), None))


def test_the_worker_of_the_group_ends_what_is_overdue_or_not_wanted(tmp_path: Path) -> None:
    """A process that hangs is killed at the deadline, and the turn of an episode that is given up is cancelled."""
    log = tmp_path / "log"
    environment = Uneven(of="r", slow_s=60.0, log=str(log))

    async def run(made: EnvironmentServer, there: ServedEnvironments) -> None:
        attempts = Attempts(there, {"prompt": "r"}, (4,), FAST, 0)
        await attempts.open()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await attempts.turn(Reply("1"))
        attempts.give_up()
        while not log.read_text().endswith("close\n"):
            await asyncio.sleep(0.01)
        assert [line.split()[1] for line in log.read_text().splitlines()] == ["open", "turn", "over", "close"]
        process = made._processes.place()
        os.kill(process._process.pid, signal.SIGSTOP)
        with pytest.raises(EnvironmentFailedError, match=r"open: deadline: it took longer than 0\.3 s"):
            await there.place().ask("open", 7, 0.3, row={"prompt": "1"}, seed=(4,))
        assert not is_running(process._process.pid)

    with server(environment) as (made, address), client(environment, [address]) as there:
        asyncio.run(run(made, there))


def test_a_call_that_is_not_wanted_before_it_was_made_leaves_nothing() -> None:
    """Of two turns that run one by one, the second one's episode is closed meanwhile, and at last
    the connection."""

    async def unanswered() -> int:
        return sum("_answer" in repr(task) for task in asyncio.all_tasks())

    async def run(place: Any) -> None:
        for n in (1, 2):
            await place.ask("open", n, 20.0, **ROW)
        for n in (1, 2):
            place.start("turn", n, 20.0, reply=Reply("1"))
        place.start("close", 2, 20.0)
        await place.ask("open", 3, 20.0, **ROW)
        guests = [each for each in gc.get_objects() if isinstance(each, environment_server._Guest)]
        assert [set(each._open) for each in guests if each._processes is made._processes] == [{1, 3}]

    with server(Echo(sleep_s=0.3)) as (made, address):
        with client(Echo(), [address]) as there:
            asyncio.run(run(there.place()))
            until(lambda: not made._processes.loop.run(unanswered()).result(5.0), 5.0)
            for n in (1, 3):
                there.place().start("turn", n, 20.0, reply=Reply("1"))
            until(lambda: made._processes.loop.run(unanswered()).result(5.0) == 2, 5.0)
        until(lambda: not made._processes.loop.run(unanswered()).result(5.0), 5.0)
