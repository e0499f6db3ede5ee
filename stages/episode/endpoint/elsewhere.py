"""Commands of Endpoint that play environments of other libraries, each in a virtual environment of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def verifiers_command(python: str, environment: str, **settings: Any) -> tuple[str, ...]:
    """A command that plays one episode of an environment of verifiers, for `Endpoint(command=..., given=("task",))`.

    python        the interpreter of the virtual environment that has verifiers and the environment
    environment   the id of its tasks (`taskset.id`)
    settings      of the environment, as in the block `env` of a configuration of verifiers: `id` of another `Env` than
                  the tasks' own, `taskset={"task": {...}}`, `agent={"harness": {"id": "null"}, "max_turns": 4}`

    The row's field `task` is the data of a task, as JSON; `python -m stages.episode.endpoint.of_verifiers` writes rows.
    One agent talks to the policy; what others say comes from models that the settings name. Agents run as processes of
    this machine, `runtime={"type": "subprocess"}`, if nothing else is said. Raises TypeError for settings that are no
    JSON.
    """
    found = os.path.abspath(python) if os.sep in python else python  # commands run in folders of their own
    # -P: the modules beside the file have names of packages
    return found, "-P", str(Path(__file__).with_name("of_verifiers.py")), environment, json.dumps(settings)
