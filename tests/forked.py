"""Ray workers of the test cluster are forked from one process that has already imported torch and transformers.

    with forked_workers(folder / "socket", variables) as executable:
        ray.init(runtime_env={"py_executable": executable, "env_vars": variables}, ...)

Imports take four of the five CPU seconds that a worker needs to start. Ray starts this file in place of Python. It
passes its arguments, environment and standard streams to the forking process, and waits until its fork has ended.
Commands that start their own cluster start their workers as usual.
"""

from __future__ import annotations

import array
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PRELOADED = (  # not ray itself: it reads its environment when it is imported
    "torch",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.auto.modeling_auto",
    "omegaconf",
    "tensordict",
    "pipeline.executors.worker",
    "stages.backends.torch.engine",
)


@contextmanager
def forked_workers(address: Path, variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the command that Ray starts in place of Python. `address` is a path for the forking process's socket."""
    import subprocess

    forking = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(address)],
        env=os.environ | variables | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with forking:  # when its standard input closes, it ends
        assert forking.stdout and forking.stdout.readline() == "ready\n"
        yield f"{sys.executable} -IS {__file__} {address}"


def ask() -> None:
    """Request a fork and wait until it has ended."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(sys.argv[1])
        asking.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
        worker = {"argv": sys.argv[2:], "environment": dict(os.environ), "folder": os.getcwd()}
        asking.sendall(json.dumps(worker).encode())
        asking.shutdown(socket.SHUT_WR)
        asking.recv(1)  # the fork holds the other end


def serve(address: str) -> None:
    """Fork on request until standard input closes; then kill all forks. Also returns in each fork."""
    import gc
    import importlib
    import select
    import signal

    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    forks: set[int] = set()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([server, sys.stdin], [], [], 0.2)
            forks = {pid for pid in forks if not os.waitpid(pid, os.WNOHANG)[0]}
            if sys.stdin in ready:
                break
            if server in ready:
                asking, _ = server.accept()
                pid = os.fork()
                if not pid:
                    return become(asking)
                forks.add(pid)
                asking.close()
    for pid in forks:
        os.kill(pid, signal.SIGKILL)
    return None


def become(asking: socket.socket) -> None:
    """Run the requested program as Python would. `asking` stays open until this process ends."""
    import random
    import runpy

    _, ((_, _, streams),), _, _ = asking.recvmsg(1, socket.CMSG_SPACE(12))
    worker: dict[str, Any] = json.loads(asking.makefile().read())
    for to, stream in enumerate(array.array("i", streams)):
        os.dup2(stream, to)
        os.close(stream)
    os.setpgrp()  # Ray kills workers by their process group
    os.chdir(worker["folder"])
    os.environ.clear()
    os.environ.update(worker["environment"])
    random.seed()
    sys.argv = worker["argv"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        sys.path[0] = os.environ["PYTHONPATH"]
        serve(sys.argv[2])
    else:
        ask()
