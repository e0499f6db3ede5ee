"""Training with clients that nobody here wrote: what is trained is what the engine drew, token by token."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
import torch

from pipeline import Graph
from stages import End, Endpoint, Environment, Episode, Messages, Reply
from stages.episode.turns import EpisodeName, NextTurn, TurnSampler
from stages.train import TrainRunner
from tests.doors import REPOSITORY
from tests.unit.test_endpoint import TEMPLATE, command
from tests.unit.test_episode import FAST, execute, published, run_graph

torch.set_num_threads(1)
STEPS = 10


class Spied:
    """What the engine drew, by episode and place, and what was trained."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.drawn: dict[tuple[int, int], dict[int, list[int]]] = {}
        self.trained: dict[tuple[int, int], dict[int, list[int]]] = {}
        sample, train = TurnSampler.sample, TrainRunner.__call__

        async def sampled(turns: TurnSampler, episode: EpisodeName, turn: NextTurn, *times: Any) -> Any:
            made = await sample(turns, episode, turn, *times)
            of = self.drawn.setdefault((episode.group, episode.sample), {})
            of[turn.place] = made.response_ids.values.tolist()
            return made

        def trained(runner: TrainRunner, columns: Any, task: Any) -> Any:
            size = len(columns["response_ids"].lengths) // len(task.groups)
            for row, (ids, versions) in enumerate(
                zip(columns["response_ids"].rows(), columns["token_versions"].rows())
            ):
                of = self.trained.setdefault((task.groups[row // size], row % size), {})
                start = None
                for place, (token, version) in enumerate(zip(ids.tolist(), versions.tolist())):
                    start = None if version < 0 else place if start is None else start
                    if start is not None:
                        of.setdefault(start, []).append(token)
            return train(runner, columns, task)

        patch.setattr(TurnSampler, "sample", sampled)
        patch.setattr(TrainRunner, "__call__", trained)


def with_chat(graph: Graph, stage: Any) -> Graph:
    """The graph with this stage in the place of its episodes, and a policy that reads messages."""
    policy = replace(graph.stages[0].model, chat_template=TEMPLATE)
    _, *rest = graph.stages
    rest = [replace(one, model=policy) if hasattr(one, "model") else one for one in rest]
    stages = (stage(policy, graph.stages[0].on), *rest)
    return replace(graph, source=replace(graph.source, batch=1), stages=stages)  # each sample is a process


def test_openais_client_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stage(policy: Any, sampler: Any) -> Endpoint:
        given = {"turns": 3, "tokens": 40, "turn_tokens": 4, "deadlines": FAST, "samples_per_prompt": 2}
        return Endpoint(policy, on=sampler, command=command("openai_talk"), **given)

    spied = Spied(monkeypatch)
    graph = with_chat(run_graph(MCPTool(), steps=STEPS), stage)
    assert len(published(execute(tmp_path / "run", graph))) == STEPS + 1
    assert spied.drawn == spied.trained and spied.drawn
    assert all(len(turns) == 2 for turns in spied.trained.values())


class Connection:
    """An MCP server, and the session with it, in a task of their own. One for all episodes of a process."""

    made: ClassVar[Connection | None] = None

    def __init__(self) -> None:
        self.asked: asyncio.Queue[Any] = asyncio.Queue()
        self.task = asyncio.ensure_future(self._serve())

    async def _serve(self) -> None:
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import stdio_client

        server = StdioServerParameters(command=sys.executable, args=[str(REPOSITORY / "tests" / "tool_server.py")])
        async with stdio_client(server) as streams, ClientSession(*streams) as session:
            await session.initialize()
            while True:
                name, arguments, answer = await self.asked.get()
                answer.set_result(await session.call_tool(name, arguments))

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        answer = asyncio.get_running_loop().create_future()
        self.asked.put_nowait((name, arguments, answer))
        await asyncio.wait([answer, self.task], return_when=asyncio.FIRST_COMPLETED)
        return json.dumps(answer.result().structured_content)


@dataclass(frozen=True)
class MCPTool(Environment):
    """Asks the MCP server how long each reply was."""

    async def open(self, row: Any, draw: Random) -> Any:
        Connection.made = Connection.made or Connection()
        return [], [{"role": "user", "content": row["prompt"]}]

    async def turn(self, state: Any, reply: Reply) -> Messages | End:
        assert Connection.made is not None
        found = json.loads(await Connection.made.call("count", {"text": reply.text}))
        state.append(found["result"])
        if found["result"] != len(reply.text):
            raise ValueError(found)
        return End() if len(state) == 2 else Messages([{"role": "tool", "content": str(state[-1])}])


def test_a_tool_of_an_mcp_server_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stage(policy: Any, sampler: Any) -> Episode:
        given = {"turns": 3, "tokens": 40, "turn_tokens": 4, "deadlines": FAST, "samples_per_prompt": 2}
        return Episode(policy, MCPTool(), on=sampler, chat=True, environments=1, **given)

    spied = Spied(monkeypatch)
    graph = with_chat(run_graph(MCPTool(), steps=STEPS), stage)
    assert len(published(execute(tmp_path / "run", graph))) == STEPS + 1
    assert spied.drawn == spied.trained and spied.drawn
    assert all(len(turns) == 2 for turns in spied.trained.values())
