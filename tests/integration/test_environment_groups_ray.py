"""Environments on other machines than the samplers, where processes are killed, and whose network ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.doors import REPOSITORY
from tests.forked import FORKS
from tests.hosts import hosts

SCRIPT = Path(__file__).with_name("environments_apart.py")


def test_environments_on_another_node_are_those_beside_the_sampler_whatever_is_killed(tmp_path: Path) -> None:
    """A process and a worker of the group, in the middle of turns: weights have the bits of a run in one process, and
    no process is left, which the script waits for. The group's interpreter runs all that take their place too."""
    words = [sys.executable, str(SCRIPT), str(tmp_path)]
    given = {"timeout": 300, "cwd": REPOSITORY, "env": os.environ | FORKS | {"PYTHONPATH": str(REPOSITORY)}}
    done = subprocess.run(words, capture_output=True, text=True, check=False, **given)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["same"] and said["killed"] == 3 and said["retried"] > 0
    assert said["nodes"] == ["127.0.0.3"] and said["placed"] in ([0, 1, 0], [0, 1, 1])
    assert said["samplers"] == [0, 1] and said["dropped"] == []
    assert said["python"] == [f"7 {tmp_path / 'venv'}"]


SERVES = """
import sys, time
import msgspec
from stages.episode.environment_server import EnvironmentServer
from stages.episode.processes import Processes
from tests.unit.environments import Sleeping
made = EnvironmentServer(Processes(Sleeping(600.0), count=1, log=None))
print(msgspec.json.encode(made.listen(sys.argv[1])).decode(), flush=True)
time.sleep(600)
"""
ASKS = """
import asyncio, sys
import msgspec
from pipeline.declare.task import ServerAddress
from stages.episode import admission
from stages.episode.environment_client import ServedEnvironments
from tests.unit.environments import Sleeping
from tests.waiting import until
admission.SILENT_S = admission.ASKS_S = admission.ASKS = 1
made = ServedEnvironments(Sleeping(), [msgspec.json.decode(sys.argv[1], type=ServerAddress)], first=0)
place = made.place()
asked = place.start("open", 0, 600.0, row={"prompt": "1"}, seed=(1,))
until(lambda: place._link._writer)
print("asked", flush=True)
print(repr(asked.exception(60.0)), flush=True)
"""


def test_a_machine_that_no_longer_answers_ends_the_connection() -> None:
    """A call that waits has failed then, however long its deadline is; the kernel has asked once more."""
    given = {"stdout": subprocess.PIPE, "text": True, "cwd": REPOSITORY}
    with hosts(2) as (here, there):
        serves = there.start(sys.executable, "-c", SERVES, there.address, **given)
        asks = here.start(sys.executable, "-c", ASKS, serves.stdout.readline(), **given)
        with serves, asks:
            assert asks.stdout.readline() == "asked\n"
            there.unplug()
            assert asks.stdout.readline() == "PlaceLostError('open: unreachable: ')\n"
            for process in (serves, asks):
                process.kill()
