"""The connection of a run to Ray: to one of its own, which it starts and ends, or to a cluster that it joins.

connection = Connection(None, print_resume, loopback=True)
connection.open(4, [])   # a Ray with 4 CPUs
connection.look()        # raises StageError once Ray's control store has died
connection.shut_down()
connection.close()
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private import worker
from ray.exceptions import RayError

from pipeline.errors import Problem, StageError, in_main_thread
from pipeline.executors.admission import check_admission
from pipeline.executors.answers import one_line
from pipeline.executors.control_store import ControlStore, Lifeline
from pipeline.executors.keeper import Keeper
from pipeline.executors.placement import LOOPBACK, PRIORITY
from pipeline.forks import closed_in_copies
from pipeline.precedence import worker_hook

QUIET = {
    "RAY_task_events_report_interval_ms": "0",  # the control store would keep 100,000 of them
    "RAY_enable_metrics_collection": "0",  # these three would be served on all addresses, without the token
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
}  # of a Ray of the run's own, unless the user has set them
SIGACTION_BYTES = 1024  # more than libc's struct sigaction has
PUT_BACK_S = 0.01


def _append(log: Path, data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
    """Add lines that Ray would print to a log."""
    with suppress(OSError), log.open("a", errors="backslashreplace") as file:
        file.writelines(f"{line}\n" for line in data["lines"])


class Connection:
    """Not open until `open`. `address` joins a cluster; without one, a Ray starts. `last_words` prints how the run goes
    on, before this process ends because the control store has died under a call of Ray's."""

    def __init__(self, address: str | None, last_words: Callable[[], None], *, loopback: bool) -> None:
        self._address, self._last_words, self._loopback = address, last_words, loopback
        self.is_open = False
        self.store: ControlStore | None = None
        self._keeper: Keeper | None = None
        self._lifeline: Lifeline | None = None

    def open(self, cpus: int, folders: Sequence[Path], log: Path | None = None) -> None:
        """Connect this process, unless it is connected. A Ray of the run's own has this number of CPUs; `folders` are
        those from which the driver imports the user's modules; what Ray prints of its errors goes to the log. Raises
        StageError if Ray cannot be reached."""
        if log:
            worker.print_to_stdstream = partial(_append, log)
        if ray.is_initialized():
            return
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if self._loopback:
            options["_node_ip_address"] = LOOPBACK
        runtime_env = {  # of every process, the data plane's actors too
            "env_vars": dict(PRIORITY),  # Ray adds to it
            "worker_process_setup_hook": worker_hook(folders),
        }
        if self._address:
            check_admission(self._address, os.environ)
        elif os.environ.get("RAY_AUTH_MODE") == "token":
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        try:
            if self._address is None:
                for variable, value in QUIET.items():
                    os.environ.setdefault(variable, value)
                own = {
                    "address": "local",  # never another Ray that happens to run on this machine
                    "num_cpus": cpus,
                    "object_store_memory": 512 * 1024**2,
                    "include_dashboard": False,
                }
                self._keeper = Keeper.start(options | own)
                closed_in_copies(self._keeper.stdin)
                self._watch_store(self._keeper.address)
            address = self._keeper.address if self._keeper else self._address
            with _kept_handler(signal.SIGTERM):  # Ray installs its own
                ray.init(**options, address=address, runtime_env=runtime_env)
        except (ConnectionError, RayError, ValueError, RuntimeError) as error:
            raise StageError(
                Problem(
                    where=f"--address {self._address}" if self._address else "Ray",
                    what=f"cannot be reached: {one_line(error)}",
                    why="the run joins that cluster" if self._address else "the run starts its own Ray",
                    fix="check the address and the token (RAY_AUTH_TOKEN)" if self._address else "see the text above",
                )
            ) from error
        self.is_open = True
        if self._keeper is None:
            self._watch_store(ray.get_runtime_context().gcs_address)

    def _watch_store(self, address: str) -> None:
        """Watch Ray's control store from now on."""
        self.store = ControlStore(address)
        self._lifeline = Lifeline(self.store, self._say_last)

    def _say_last(self) -> None:
        """Leave no process, and say how the run goes on: this process is about to end."""
        self.give_up()
        self._last_words()

    def look(self) -> None:
        """Raise StageError if the control store has died."""
        if self.store:
            self.store.look()

    @property
    def is_dead(self) -> bool:
        return self.store is not None and self.store.is_dead

    @property
    def is_own(self) -> bool:
        """Whether the run has started this Ray."""
        return self._keeper is not None

    def give_up(self) -> None:
        """Kill the processes of the run's own Ray, without its help."""
        if self._keeper:
            self._keeper.kill()

    def shut_down(self) -> None:
        """Disconnect this process, if `open` has connected it."""
        if self.is_open:
            with _handler_put_back(signal.SIGTERM):
                ray.shutdown()
            self.is_open = False

    def close(self) -> None:
        """End the run's own Ray, and watch none. Idempotent."""
        if self._keeper:
            self._keeper.close()
            self._keeper = None
        if self._lifeline:
            self._lifeline.close()


@contextmanager
def _handler_put_back(number: int) -> Iterator[None]:
    """Keep the handler of a signal, which Ray removes in C a second or more before `ray.shutdown` returns. Within the
    block only C can put it back: a thread does, again and again."""
    libc, kept, over = ctypes.CDLL(None), ctypes.create_string_buffer(SIGACTION_BYTES), threading.Event()
    libc.sigaction(number, None, kept)

    def put_back() -> None:
        while not over.wait(PUT_BACK_S):
            libc.sigaction(number, kept, None)

    thread = threading.Thread(target=put_back, name="handler", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        libc.sigaction(number, kept, None)


@contextmanager
def _kept_handler(number: int) -> Iterator[None]:
    """Restore the handler of a signal at the end. Other threads than the main one cannot install any."""
    before = signal.getsignal(number)
    yield
    if in_main_thread():
        signal.signal(number, before)
