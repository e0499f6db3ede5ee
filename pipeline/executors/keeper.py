"""Keeps a run's own Ray in a process of its own session, so that no signal to the driver's process group reaches it.

    keeper = Keeper.start({"num_cpus": 4})    # in the driver
    ray.init(address=keeper.address)
    keeper.close()

Ray's files, sockets among them, lie in a folder that only this user can enter; Ray alone would let everybody write
there. The folder goes with the last process.

`timeout`, SLURM, systemd and a closed terminal signal all processes of a group: with Ray among them, its control store
would die under the driver while that still saves. The keeper's standard input is a pipe from the driver. Once it ends,
because the driver closed it or died, the keeper shuts Ray down and kills what is left in its session: workers, their
children, the data plane. Ray runs in a child of the keeper, because it aborts a process whose control store is gone.

This file is run as a script, and then imports nothing of Sluice.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

START_S = 120.0  # for Ray to come up
STOP_S = 20.0  # for Ray to shut down, before everything is killed
POLL_S = 0.2  # between looks at the process that runs Ray
LONGEST = 24  # bytes of the path of the folder for temporary files
KEEP = "keep"  # the argument of that process
LATE = "timed out during startup"  # Ray's word for a node that is not up within its own 30 s (ray/_private/node.py)


@dataclass
class Keeper:
    """A running keeper. `address` is that of its Ray."""

    address: str
    process: subprocess.Popen[bytes]
    folder: str

    @staticmethod
    def start(options: Mapping[str, Any]) -> Keeper:
        """Start Ray with these options of ray.init, and once more if a busy machine was too slow for it. Raises
        ConnectionError with Ray's words if it does not come up."""
        try:
            return Keeper._started(options)
        except ConnectionError as error:
            if LATE not in str(error):
                raise
        print("Ray has not come up in the time that it gives itself; it is started once more", file=sys.stderr)
        return Keeper._started(options)

    @staticmethod
    def _started(options: Mapping[str, Any]) -> Keeper:
        # Its mode is 0700. Ray opens its own folder, within, to everybody.
        folder = tempfile.mkdtemp(prefix="ray-", dir=_short_folder())
        command = [sys.executable, "-P", __file__, folder]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdin and process.stdout
        try:
            process.stdin.write(json.dumps({**options, "_temp_dir": f"{folder}/r"}).encode() + b"\n")
            process.stdin.flush()
            ready = select.select([process.stdout], [], [], START_S)[0]
            answer = json.loads((process.stdout.readline() if ready else b"") or b"{}")
            if "address" in answer:
                return Keeper(answer["address"], process, folder)
            late = f"it has not come up within {START_S:g} s"
            raise ConnectionError(answer.get("failed") or ("its process has died" if ready else late))
        except BaseException:
            _end(process, folder)
            raise

    @property
    def stdin(self) -> IO[bytes]:
        """The pipe whose end ends Ray."""
        assert self.process.stdin
        return self.process.stdin

    def close(self) -> None:
        """Shut Ray down, with all its processes. Idempotent."""
        _end(self.process, self.folder)

    def kill(self) -> None:
        """Kill Ray's processes and the keeper."""
        _kill(self.process, self.folder)


def _short_folder() -> str:
    """Return where to make Ray's folder: the path of a socket has 107 bytes, and Ray adds about 70."""
    usual = tempfile.gettempdir()
    return usual if len(usual.encode()) <= LONGEST else "/tmp"


def _end(process: subprocess.Popen[bytes], folder: str) -> None:
    assert process.stdin
    with suppress(OSError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S + 5.0)
    _kill(process, folder)  # it may have been killed before its session was empty


def _kill(process: subprocess.Popen[bytes], folder: str) -> None:
    _kill_session(process.pid)  # the keeper leads it
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def members(session: int) -> Iterator[int]:
    """Yield the processes of a session, without those that have ended and are not yet reaped."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError):
                if os.getsid(int(entry.name)) == session and not _has_ended(entry):
                    yield int(entry.name)


def _has_ended(entry: Path) -> bool:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _kill_session(session: int) -> None:
    """Kill the processes of a session but this one, until there is none: what dies may have just started another."""
    deadline = time.monotonic() + STOP_S
    while (others := [pid for pid in members(session) if pid != os.getpid()]) and time.monotonic() < deadline:
        for pid in others:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _guard(folder: str) -> None:
    """Run `_keep` in a process of its own until standard input ends, or until it dies: Ray ends a process whose control
    store is gone. Then end what is left in the session."""
    keep = subprocess.Popen([sys.executable, "-P", __file__, KEEP], stdin=subprocess.PIPE)
    assert keep.stdin
    to = keep.stdin

    def forward() -> None:
        """Let the other process read what the driver writes, and its end."""
        with suppress(OSError), to:
            while part := os.read(sys.stdin.fileno(), 1 << 16):
                to.write(part)
                to.flush()

    ended = threading.Thread(target=forward, daemon=True)
    ended.start()
    while ended.is_alive() and keep.poll() is None:
        ended.join(POLL_S)
    with suppress(subprocess.TimeoutExpired):
        keep.wait(STOP_S)
    _kill_session(os.getsid(0))
    shutil.rmtree(folder, ignore_errors=True)


def _keep() -> None:
    """Run Ray until standard input ends."""
    os.umask(0o077)
    options = json.loads(sys.stdin.readline())
    import ray

    try:
        ray.init(**options)
        answer = {"address": ray.get_runtime_context().gcs_address}
    except Exception as error:  # noqa: BLE001 - the driver reports it
        answer = {"failed": next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)}
    with suppress(BrokenPipeError):
        print(json.dumps(answer), flush=True)
    if "address" in answer:
        sys.stdin.read()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # Ray prints what is left of its workers' logs
        ray.shutdown()


if __name__ == "__main__":
    _keep() if sys.argv[1:] == [KEEP] else _guard(sys.argv[1])
