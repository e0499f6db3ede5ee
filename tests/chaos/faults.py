"""What can happen to a run: to its driver, its workers, the data plane, Ray, its disk and its newest checkpoint."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.executors.keeper import members
from pipeline.record import trace
from pipeline.rundir import RunDir
from tests.sessions import session_of

SHORT_S = (0.05, 2.0)  # of a process that stops and goes on


@dataclass
class Scene:
    """A run in progress. `disk` is the mount of its run directory, if that is a disk of its own."""

    process: subprocess.Popen[str]
    run_dir: RunDir
    rng: random.Random
    disk: Path | None

    def session(self) -> list[int]:
        """Return the processes of the run's Ray; none without one."""
        session = session_of(self.process.pid)
        return list(members(session)) if session else []

    def named(self, text: str) -> list[int]:
        """Return the processes of the run's Ray whose command has this text."""
        return [pid for pid in self.session() if text in command_of(pid)]

    def workers(self, group: str) -> list[int]:
        """Return the living workers of a group."""
        placed = [event.pid for event in self._placed() if event.group == group]
        return [pid for pid in placed if pid in self.session()]

    def _placed(self) -> Iterator[trace.Placed]:
        with suppress(OSError):
            for _, event in trace.read(self.run_dir.events):
                if isinstance(event, trace.Placed):
                    yield event


@dataclass(frozen=True)
class Fault:
    """`do` returns whether it could be done: a process may not have started yet. `ray` is whether it needs Ray, and
    `weight` how often it is chosen."""

    name: str
    do: Callable[[Scene], bool]
    ray: bool = True
    weight: int = 2


def command_of(pid: int) -> str:
    """Return the command line of a process; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def _signalled(pids: list[int], number: signal.Signals) -> bool:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return bool(pids)


def _killed(find: Callable[[Scene], list[int]]) -> Callable[[Scene], bool]:
    return lambda scene: _signalled(find(scene), signal.SIGKILL)


def _stopped(find: Callable[[Scene], list[int]]) -> Callable[[Scene], bool]:
    return lambda scene: _signalled(find(scene), signal.SIGSTOP)


def _paused(find: Callable[[Scene], list[int]]) -> Callable[[Scene], bool]:
    def pause(scene: Scene) -> bool:
        pids = find(scene)
        _signalled(pids, signal.SIGSTOP)
        time.sleep(scene.rng.uniform(*SHORT_S))
        return _signalled(pids, signal.SIGCONT)

    return pause


def _asked(number: signal.Signals) -> Callable[[Scene], bool]:
    """Signal the driver's process group, as `timeout`, SLURM and a closed terminal do."""

    def ask(scene: Scene) -> bool:
        os.killpg(scene.process.pid, number)
        return True

    return ask


def _full(scene: Scene) -> bool:
    """Fill the disk. What resumes the run makes room again."""
    if scene.disk is None:
        return False
    with suppress(OSError), Path(scene.disk, "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(2**16))
    with suppress(OSError), Path(scene.disk, "filler").open("ab", buffering=0) as filler:
        while True:
            filler.write(b"0")
    return True


def _unread(scene: Scene) -> bool:
    """The reader of the run's output leaves."""
    if scene.process.stdout is None or scene.process.stdout.closed:
        return False
    scene.process.stdout.close()
    return True


def _damaged(scene: Scene) -> bool:
    """Kill the driver and damage the newest checkpoint, if there is an older one to go back to."""
    _signalled([scene.process.pid], signal.SIGKILL)
    scene.process.wait()
    steps = scene.run_dir.checkpoint_steps()
    if len(steps) > 1:
        files = sorted(path for path in scene.run_dir.checkpoint(steps[-1]).rglob("*") if path.is_file())
        path = scene.rng.choice(files)
        content = bytearray(path.read_bytes() or b"0")
        content[scene.rng.randrange(len(content))] ^= 1 << scene.rng.randrange(8)
        path.write_bytes(content)
    return True


def _driver(scene: Scene) -> list[int]:
    return [scene.process.pid]


def _one(group: str) -> Callable[[Scene], list[int]]:
    return lambda scene: scene.workers(group)[-1:]


def _called(text: str) -> Callable[[Scene], list[int]]:
    return lambda scene: scene.named(text)


FAULTS = (
    Fault("driver killed", _killed(_driver), ray=False),
    Fault("driver paused", _paused(_driver), ray=False),
    Fault("SIGTERM to the group", _asked(signal.SIGTERM), ray=False),
    Fault("SIGHUP to the group", _asked(signal.SIGHUP), ray=False, weight=1),
    Fault("disk full", _full, ray=False),
    Fault("output unread", _unread, ray=False, weight=1),
    Fault("newest checkpoint damaged", _damaged, ray=False),
    Fault("sampler killed", _killed(_one("sampler")), weight=6),
    Fault("sampler paused", _paused(_one("sampler")), weight=4),
    Fault("sampler stopped", _stopped(_one("sampler"))),
    Fault("learner killed", _killed(_one("learner")), weight=4),
    Fault("learner paused", _paused(_one("learner")), weight=4),
    Fault("learner stopped", _stopped(_one("learner")), weight=1),
    Fault("reward killed", _killed(_one("reward")), weight=4),
    Fault("controller killed", _killed(_called("TransferQueueController"))),
    Fault("controller paused", _paused(_called("TransferQueueController")), weight=4),
    Fault("storage killed", _killed(_called("SimpleStorageUnit"))),
    Fault("storage paused", _paused(_called("SimpleStorageUnit")), weight=4),
    Fault("raylet killed", _killed(_called("/raylet"))),
    Fault("control store killed", _killed(_called("gcs_server"))),
    Fault("control store paused", _paused(_called("gcs_server"))),
    Fault("keeper killed", _killed(_called("keeper.py")), weight=1),
)
NO_SPACE = os.strerror(errno.ENOSPC)


def chosen(rng: random.Random, executor: str, disk: Path | None) -> Fault:
    """Choose a fault that this executor and disk can have."""
    able = [fault for fault in FAULTS if (executor == "ray" or not fault.ray) and (disk or fault.do is not _full)]
    return rng.choices(able, [fault.weight for fault in able])[0]
