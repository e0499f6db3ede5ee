"""Environments on other machines than the samplers, some of which are killed meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.doors import REPOSITORY

SCRIPT = Path(__file__).with_name("environments_apart.py")


def test_environments_on_another_node_are_those_beside_the_sampler_whatever_is_killed(tmp_path: Path) -> None:
    """A process and a worker of the group, in the middle of turns: weights have the bits of a run in one process, and
    no process is left, which the script waits for."""
    words = [sys.executable, str(SCRIPT), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=REPOSITORY, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["same"] and said["killed"] == 3 and said["retried"] > 0
    assert said["nodes"] == ["127.0.0.3"] and said["placed"] in ([0, 1, 0], [0, 1, 1])
    assert said["samplers"] == [0, 1] and said["dropped"] == []
