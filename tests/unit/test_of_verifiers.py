"""The command that plays environments of verifiers, with a library in its place that has the same few names.

The library itself is in `python -m benchmarks.verifiers`, and its kept result."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stages import Reply, verifiers_command
from stages.episode.endpoint.commands import Commands
from stages.episode.endpoint.of_verifiers import _NoEpisodeError, configuration, result, row
from stages.episode.processes import EnvironmentFailedError

PLACED = {"type": "docker"}
LIBRARY = {
    "v1/configs/agent.py": "class AgentConfig:\n    model_fields_set = set()",
    "v1/clients.py": """
from types import SimpleNamespace as EvalClientConfig, SimpleNamespace as ModelContext
""",
    "v1/utils/loaders.py": """
import json, os, random, sys, urllib.request
from contextlib import asynccontextmanager
from types import SimpleNamespace as Some
from verifiers.v1.configs.agent import AgentConfig

print("an environment prints")
assert not any(path.endswith("endpoint") for path in sys.path), "modules there have names of packages"

class Data:
    def __init__(self, **data):
        self.__dict__.update(data)
    def model_dump(self, **how):
        return vars(self)
    model_validate_json = staticmethod(lambda text: Data(**json.loads(text)))
    prompt_text = property(lambda self: self.prompt)

class Task:
    data_type = staticmethod(lambda: Data)
    def __init__(self, data, config):
        self.data, self.config = data, config

class Tasks:
    bounded = True
    task_type = staticmethod(lambda: Task)
    def __iter__(self):
        return iter(Task(Data(idx=i, prompt=prompt), None) for i, prompt in enumerate(("one", "")))

class Environment:
    taskset = Tasks()
    def __init__(self, config):
        self.config = Some(taskset=Some(task="easy"), **config)

    @asynccontextmanager
    async def serving(self):
        yield

    async def run_episode(self, task, policy):
        client = policy.client
        messages = [{"role": "user", "content": f"{task.data.prompt} {task.config} {random.random()}"}]
        key = {"Authorization": "Bearer " + os.environ[client.api_key_var]}
        body = json.dumps({"model": policy.model, "messages": messages}).encode()
        with urllib.request.urlopen(urllib.request.Request(client.base_url + "/chat/completions", body, key)) as answer:
            said = json.load(answer)["choices"][0]["message"]["content"]
        trace = Some(agent=Some(trainable=True), reward=float(said), stop_condition="user_closed", errors=[])
        return Some(ok=float(said) < 9, errors=[Some(type="TaskError", message="too much")], traces=[trace])

class Kind:
    model_fields = {"agent": Some(default=AgentConfig())}
    model_validate = staticmethod(lambda data: {"asked": data, "agent": data["agent"]})

def env_config_type(tasks, environment):
    return Kind

load_environment = Environment
""",
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the library."""
    folder = tmp_path_factory.mktemp("library")
    for name, text in LIBRARY.items():
        path = folder / "verifiers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


@pytest.fixture(scope="module")
def commands(library: str) -> Iterator[Commands]:
    command = verifiers_command(sys.executable, "counted", agent={"max_turns": 3})
    made = Commands(command, variables={"PYTHONPATH": library}, log=None, name="endpoint")
    yield made
    made.close()


def played(commands: Commands, given: dict[str, Any], reply: str = "0.5") -> list[Any]:
    """What an episode asks first, and how it ends after the reply."""

    async def talk() -> list[Any]:
        place = commands.place()
        opened = await place.ask("open", 0, 60.0, row=given, seed=(1, 2))
        answered = await place.ask("turn", 0, 60.0, reply=Reply(reply))
        await place.ask("close", 0, 5.0)
        return [opened.said, answered.end, answered.reward]

    return asyncio.run(talk())


def test_a_row_is_an_episode(commands: Commands) -> None:
    """With the configuration's task, and the same random numbers when it is played again."""
    first = played(commands, {"task": '{"idx": 4, "prompt": "what?"}'})
    assert first[0][0]["content"].startswith("what? easy 0.") and first[1:] == ["user_closed", 0.5]
    assert played(commands, {"task": '{"idx": 4, "prompt": "what?"}'}) == first


def test_an_episode_that_fails_says_why(commands: Commands) -> None:
    for given, text in (
        ({"task": '{"prompt": "?"}'}, "failed\nTaskError: too much"),
        ({"prompt": "?"}, 'no text "task"'),
    ):
        with pytest.raises(EnvironmentFailedError) as raised:
            played(commands, given, reply="9")
        assert raised.value.kind == "exit_1" and text in raised.value.text


def test_the_rows_of_all_tasks(library: str) -> None:
    command = [sys.executable, "-m", "stages.episode.endpoint.of_verifiers", "--python", sys.executable, "counted"]
    made = subprocess.run(
        command, env={"PYTHONPATH": f"{library}:{Path.cwd()}"}, capture_output=True, text=True, check=True
    )
    assert "an environment prints" in made.stderr and "Warning" not in made.stderr
    rows = [json.loads(line) for line in made.stdout.splitlines()]
    assert rows == [row({"idx": 0, "prompt": "one"}, "one"), row({"idx": 1, "prompt": ""}, "")]
    assert [one["prompt"] for one in rows] == ["one", "task 1"] and json.loads(rows[0]["task"]) == {
        "idx": 0,
        "prompt": "one",
    }
    assert row({"name": "knights"}, "")["prompt"] == "knights"


def test_a_command_names_files_that_are_found_from_any_folder() -> None:
    assert verifiers_command("python3", "counted")[0] == "python3"
    assert Path(verifiers_command("env/bin/python", "counted")[0]) == Path.cwd() / "env" / "bin" / "python"
    assert verifiers_command("python3", "counted", a={"b": 1})[-2:] == ("counted", '{"a": {"b": 1}}')


def test_a_python_without_the_library() -> None:
    made = subprocess.run(verifiers_command(sys.executable, "counted"), input="{}", capture_output=True, text=True)
    assert made.returncode == 1 and "No module named 'verifiers'" in made.stderr
    assert "pip install verifiers" in made.stderr and "Traceback" not in made.stderr


def test_agents_run_here_if_nobody_says_where() -> None:
    made = configuration("counted", {"taskset": {"task": {"x": 1}}, "a": {"max_turns": 2}, "b": {"runtime": PLACED}},
                         {"a": False, "b": False, "c": True})  # fmt: skip
    assert made == {
        "taskset": {"task": {"x": 1}, "id": "counted"},
        "a": {"max_turns": 2, "runtime": {"type": "subprocess"}},
        "b": {"runtime": PLACED},
        "c": {},
    }


def test_the_reward_is_that_of_the_agent_that_is_trained() -> None:
    def trace(trainable: bool, reward: float) -> Any:
        return SimpleNamespace(
            agent=SimpleNamespace(trainable=trainable), reward=reward, stop_condition=None, errors=[]
        )

    judged = SimpleNamespace(ok=True, errors=[], traces=[trace(False, 7.0), trace(True, 0.25)])
    assert result(judged) == {"reward": 0.25, "end": "answered"}
    judged.traces.append(trace(True, 1.0))
    with pytest.raises(_NoEpisodeError, match="2 agents"):
        result(judged)
