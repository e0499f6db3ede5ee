"""Processes of tests that are forked from one that has already imported torch and transformers.

    with forked_workers(folder / "socket", variables) as executable:
        ray.init(runtime_env={"py_executable": executable, "env_vars": variables}, ...)

Imports take four of the five CPU seconds that a Ray worker needs to start. Ray starts this file in place of Python. It
passes its arguments, environment and standard streams to the forking process, and waits until its fork has ended.

    Command("-m", "pipeline.run", "graph.py", "--executor", "local", cwd=folder, stderr=subprocess.PIPE, text=True)

is `python -m pipeline.run ...` as a subprocess.Popen, without its imports. One descriptor in `pass_fds` is number 3
there.

    Command("-m", "pipeline.run", "graph.py", env=os.environ | FORKS)

With `FORKS`, also the workers of a cluster that a command starts for itself are forked: the first one starts a forking
process for all, in the session of that cluster. Without it, they start as usual.
"""

from __future__ import annotations

import array
import atexit
import functools
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PRELOADED = (  # not ray itself: it reads its environment when it is imported
    "torch",
    "omegaconf",
    "tensordict",
    "pipeline.cli.executor_flags",
    "pipeline.engine.driver",
    "pipeline.executors.local",
    "pipeline.executors.worker",
)
MODELS = (  # not in the forking process of a cluster of a command's own
    "stages.backends.torch.engine",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.auto.modeling_auto",
)
FORKS = {"RAY_RUNTIME_ENV_HOOK": "tests.forked.with_forks"}
ROOT = Path(__file__).resolve().parents[1]
POLL_S = 0.05
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")  # of subprocess.Popen
OF_CHILD = (PIPES[0], PIPES[3], PIPES[5])


@contextmanager
def forked_workers(address: Path, variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the command that Ray starts in place of Python. `address` is a path for the forking process's socket."""
    with serving(address, variables):
        yield f"{sys.executable} -IS {__file__} {address}"


@contextmanager
def serving(address: Path, variables: Mapping[str, str]) -> Iterator[None]:
    """Run a forking process at this address."""
    forking = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(address)],
        env=os.environ | variables | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with forking:  # when its standard input closes, it ends
        assert forking.stdout and forking.stdout.readline() == "ready\n"
        yield


@functools.cache
def own_server() -> Path:
    """Return the address of the forking process of this process's commands, which ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="forks-")
    atexit.register(folder.cleanup)
    address = Path(folder.name) / "socket"
    server = serving(address, {})
    server.__enter__()
    atexit.register(server.__exit__, None, None, None)
    return address


def asked(address: str | Path, request: Mapping[str, Any], streams: list[int]) -> tuple[socket.socket, int]:
    """Request a fork; return the connection, from which its exit status comes, and its process."""
    asking = socket.socket(socket.AF_UNIX)
    asking.connect(str(address))
    asking.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))])
    asking.sendall(json.dumps(request).encode())
    asking.shutdown(socket.SHUT_WR)
    return asking, int.from_bytes(asking.recv(4), "little")


class Command(subprocess.Popen):
    """`python` with these words, of which the first is -m or -c, forked. The other arguments are those of Popen."""

    def __init__(self, *words: str, **given: Any) -> None:
        super().__init__(list(words), **given)

    def _execute_child(self, *given: Any) -> None:
        import inspect

        asked_for = inspect.signature(subprocess.Popen._execute_child).bind(self, *given).arguments
        streams = [i if asked_for[name] == -1 else asked_for[name] for i, name in enumerate(OF_CHILD)]
        streams += asked_for["pass_fds"]
        request = {
            "argv": asked_for["args"],
            "environment": dict(os.environ if asked_for["env"] is None else asked_for["env"]),
            "folder": str(asked_for["cwd"] or os.getcwd()),
            "session": asked_for["start_new_session"],
        }
        self._asking, self.pid = asked(own_server(), request, streams)
        self._child_created = True
        self._close_pipe_fds(*(asked_for[name] for name in PIPES))

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        self._asking.setblocking(not wait_flags & os.WNOHANG)
        try:
            status = self._asking.recv(4)
        except BlockingIOError:
            return 0, 0
        assert status, "the forking process has ended"
        return self.pid, int.from_bytes(status, "little")

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        if self.returncode is None:
            try:
                pid, status = self._try_wait(os.WNOHANG)
            except (OSError, AssertionError):
                if _deadstate is None:
                    raise
                self.returncode = _deadstate  # of one that nobody holds any more, as Popen does
            else:
                if pid:
                    self._handle_exitstatus(status)
        return self.returncode


def with_forks(runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the runtime environment of a cluster whose workers are forked from a process that the first one starts."""
    address = f"@forks-{os.getpid()}-{secrets.token_hex(8)}"  # of a socket without a file
    return {**(runtime_env or {}), "py_executable": f"{sys.executable} -IS {__file__} {address}"}


def ask() -> None:
    """Request a fork and wait until it has ended."""
    address = sys.argv[1]
    if address.startswith("@"):
        address = "\0" + address[1:]
        serve_first(address)
    worker = {"argv": sys.argv[2:], "environment": dict(os.environ), "folder": os.getcwd(), "session": False}
    asking, _ = asked(address, worker, [0, 1, 2])
    asking.recv(4)


def serve_first(address: str) -> None:
    """Start the forking process of a cluster, unless another worker has. It ends with what starts the workers."""
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.bind(address)
        except OSError:
            return
        server.listen()
        command = [sys.executable, __file__, "--serve-cluster", str(server.fileno()), str(os.getppid())]
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.Popen(command, env=os.environ | own, pass_fds=[server.fileno()], process_group=0)


def serve(server: socket.socket, modules: tuple[str, ...], ended: Callable[[], bool]) -> None:
    """Fork on request until `ended`; then kill all forks. Also returns in each fork."""
    import gc
    import importlib
    import select
    import signal

    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    forks: dict[int, socket.socket] = {}
    print("ready", flush=True)
    while not ended():
        ready, _, _ = select.select([server], [], [], POLL_S)
        for pid in list(forks):
            gone, status = os.waitpid(pid, os.WNOHANG)
            if gone:
                with forks.pop(pid) as asking:
                    answer(asking, status)
        if ready:
            asking, _ = server.accept()
            pid = os.fork()
            if not pid:
                for other in (server, *forks.values()):
                    other.close()
                return become(asking)
            forks[pid] = asking
    for pid in forks:
        os.kill(pid, signal.SIGKILL)
    return None


def answer(asking: socket.socket, number: int) -> None:
    """Send a number to who asked, unless it has ended."""
    with suppress(OSError):
        asking.sendall(number.to_bytes(4, "little"))


def serve_tests(address: str) -> None:
    """Serve at a path until standard input closes."""
    import select

    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen()
    serve(server, PRELOADED + MODELS, lambda: bool(select.select([sys.stdin], [], [], 0)[0]))


def serve_cluster(listening: int, raylet: int) -> None:
    """Serve on an open socket while a process lives."""
    serve(socket.socket(fileno=listening), PRELOADED, lambda: not os.path.exists(f"/proc/{raylet}"))


def become(asking: socket.socket) -> None:
    """Run the requested program as Python would."""
    import random
    import runpy

    with asking:
        _, ((_, _, streams),), _, _ = asking.recvmsg(1, socket.CMSG_SPACE(16))
        wanted: dict[str, Any] = json.loads(asking.makefile().read())
        if wanted["argv"][0] not in ("-m", "-c"):
            os.setpgrp()  # Ray kills workers by their process group
        elif wanted["session"]:
            os.setsid()
        answer(asking, os.getpid())  # now, so that who knows the number can kill the group
    for to, stream in enumerate(array.array("i", streams)):
        os.dup2(stream, to)
        os.close(stream)
    os.chdir(wanted["folder"])
    os.environ.clear()
    os.environ.update(wanted["environment"])
    random.seed()
    first, *rest = sys.argv = wanted["argv"]
    if first in ("-m", "-c"):
        return command(first, rest)
    sys.path.insert(0, os.path.dirname(first))
    runpy.run_path(first, run_name="__main__")
    return None


def command(option: str, words: list[str]) -> None:
    """Be `python -m` or `python -c`."""
    import runpy
    import signal

    from pipeline.precedence import search_last

    for number, handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        signal.signal(number, handler)
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [os.getcwd() if option == "-m" else "", *given, *sys.path[1:]]
    if option == "-c":
        sys.argv = [option, *words[1:]]
        exec(words[0], {"__name__": "__main__"})
        return
    sys.argv = words
    if words[0].startswith("pipeline."):
        search_last(sys.path[:1])  # as at the import of our packages
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if sys.argv[1].startswith("--serve"):
        sys.path[0] = os.environ["PYTHONPATH"]
    match sys.argv[1:]:
        case ["--serve", address]:
            serve_tests(address)
        case ["--serve-cluster", listening, raylet]:
            serve_cluster(int(listening), int(raylet))
        case _:
            ask()
