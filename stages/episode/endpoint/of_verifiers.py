"""Environments of the library verifiers (https://github.com/PrimeIntellect-ai/verifiers, 0.4) as commands of Endpoint.

    Endpoint(policy, command=verifiers_command("/home/me/env/bin/python", "gsm8k"), given=("task",), on=sampler)

    python -m stages.episode.endpoint.of_verifiers --python /home/me/env/bin/python gsm8k > tasks.jsonl

Its packages do not fit beside Sluice's, so it is installed in a virtual environment of its own. There this file is run
by its path: for each episode with the row of a task on its standard input, and once to write the rows of all tasks. It
imports nothing of Sluice there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

INSTALL = "pip install verifiers==0.4.0"


class _NoEpisodeError(Exception):
    """The environment played none. The text is for the log of the run."""


def configuration(environment: str, settings: Mapping[str, Any], agents: Mapping[str, bool]) -> dict[str, Any]:
    """The configuration of an environment. `agents` are its agents, and whether their author says where they run."""
    made = {**settings, "taskset": {**settings.get("taskset", {}), "id": environment}}
    for agent, placed in agents.items():
        given = made.get(agent, {})
        made[agent] = given if placed or "runtime" in given else {**given, "runtime": {"type": "subprocess"}}
    return made


def result(episode: Any) -> dict[str, Any]:
    """What the command prints at the end of an episode: the sum of the rewards of the agent that the policy played, and
    the word for what stopped it. Raises _NoEpisodeError for an episode that failed or has more such agents."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        said = "".join(f"\n{error.type}: {error.message}" for error in errors)
        raise _NoEpisodeError(f"the episode failed{said or ', without an error'}")
    played = [trace for trace in episode.traces if trace.agent.trainable]
    if len(played) != 1:
        raise _NoEpisodeError(f"{len(played)} agents are to be trained; an episode of an endpoint is one conversation")
    return {"reward": played[0].reward, "end": played[0].stop_condition or "answered"}


def row(data: Mapping[str, Any], prompt: str) -> dict[str, str]:
    """The row of a task; a task without a prompt has its name or number in its place."""
    name = data.get("name") or f"task {data.get('idx')}"
    return {"prompt": prompt or str(name), "task": json.dumps(data)}


def _opened(environment: str, settings: Mapping[str, Any]) -> Any:
    """The environment."""
    try:
        from verifiers.v1.configs.agent import AgentConfig
        from verifiers.v1.utils.loaders import env_config_type, load_environment
    except ModuleNotFoundError as error:
        raise _NoEpisodeError(f"{error} for {sys.executable}: {INSTALL}") from None
    try:
        kind = env_config_type(environment, settings.get("id", ""))
        declared = [(name, field.default) for name, field in kind.model_fields.items()]
        agents = {
            name: "runtime" in default.model_fields_set
            for name, default in declared
            if isinstance(default, AgentConfig)
        }
        return load_environment(kind.model_validate(configuration(environment, settings, agents)))
    except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:  # as its own commands do
        raise _NoEpisodeError(str(error)) from None


def _rows(environment: Any, most: int) -> Iterator[dict[str, str]]:
    tasks = environment.taskset
    if most < 0:
        raise _NoEpisodeError("--most is a number of rows; 0 stands for all")
    if not most and not tasks.bounded:
        raise _NoEpisodeError("this environment has tasks without end: add --most 1000")
    for task in islice(tasks, most or None):
        yield row(task.data.model_dump(mode="json", exclude_unset=True), task.data.prompt_text)


async def _episode(environment: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Play the task of a row."""
    from verifiers.v1.clients import EvalClientConfig, ModelContext

    if not isinstance(given.get("task"), str):
        raise _NoEpisodeError('the row has no text "task": write Endpoint(..., given=("task",))')
    kind = type(environment.taskset).task_type()
    data = kind.data_type().model_validate_json(given["task"])
    client = EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    policy = ModelContext(model=os.environ["SLUICE_MODEL"], client=client)
    async with environment.serving():
        return result(await environment.run_episode(kind(data, environment.config.taskset.task), policy))


def main() -> None:
    """Play an episode, or write the rows of tasks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", help="id of the tasks")
    parser.add_argument("settings", nargs="?", type=json.loads, default="{}", help="of the environment, as JSON")
    parser.add_argument("--python", help="write the rows of the tasks: the interpreter that has verifiers")
    parser.add_argument("--most", type=int, default=0, help="rows; 0 for all")
    parser.add_argument("--rows", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.python:
        from stages.episode.endpoint.elsewhere import verifiers_command

        command = [*verifiers_command(options.python, options.environment, **options.settings), "--rows"]
        os.execvp(command[0], [*command, "--most", str(options.most)])
    printed = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):  # an environment may print
            opened = _opened(options.environment, options.settings)
            if options.rows:
                made = list(_rows(opened, options.most))
            else:
                random.seed(os.environ["SLUICE_SEED"])
                made = [asyncio.run(_episode(opened, json.load(sys.stdin)))]
    except _NoEpisodeError as error:
        sys.exit(f"{options.environment}: {error}")
    printed.writelines(f"{json.dumps(one)}\n" for one in made)


if __name__ == "__main__":
    main()
