"""Mirrors a live run from a separate process, which ends with the run."""

from __future__ import annotations

import queue
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from pipeline import precedence
from pipeline.errors import CheckpointError, GraphError, Problem
from pipeline.forks import closed_in_copies
from pipeline.reading import decode
from pipeline.rundir import RunDir

READY_S = 120.0  # that the storage may take at the start
SILENT_S = 120.0  # without a byte that arrives, until the end of a run does not wait any more
SAY_S = 10.0  # between lines that say what is waited for

Warn = Callable[[Problem], None]


class Said(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the process: what it does, how far it is, or what is wrong."""

    text: str = ""
    progress: str = ""
    problem: Problem | None = None


@contextmanager
def mirrored(run: RunDir, url: str | None, warn: Warn) -> Iterator[None]:
    """Start `pipeline.mirror` for this address, if any, and wait at the end until the last checkpoint is there. What it
    says goes to RUN/logs/mirror.log, and what is wrong to `warn`.

    Raises CheckpointError at the start if the storage cannot be used, GraphError if it has another run of that name.
    Later failures do not affect the run. A run that a second signal ends waits for nothing.
    """
    if url is None:
        yield
        return
    process = _MirrorProcess(run, url, warn)
    try:
        process.ready()
        yield
    except BaseException as error:
        process.end(at_once=isinstance(error, SystemExit | KeyboardInterrupt))
        raise
    process.end(at_once=False)


class _MirrorProcess:
    """`pipeline.mirror RUN URL --until-eof`."""

    def __init__(self, run: RunDir, url: str, warn: Warn) -> None:
        self._run, self._url, self._warn = run, url, warn
        self._first: queue.SimpleQueue[Said | None] = queue.SimpleQueue()  # until it has started; None at its end
        self._started = False
        self._heard_s, self._progress = time.monotonic(), "no byte has arrived yet"
        self._process = subprocess.Popen(
            precedence.command("pipeline.mirror", str(run.path), url, "--until-eof"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,  # so that Ctrl-C reaches only the run
        )  # fmt: skip
        assert self._process.stdin is not None
        closed_in_copies(self._process.stdin)
        self._reader = threading.Thread(target=self._read, daemon=True, name="mirror")
        self._reader.start()

    def ready(self) -> None:
        """Wait until the storage has the run's folder. Raises what is wrong with it."""
        try:
            said = self._first.get(timeout=READY_S)
        except queue.Empty:
            said = Said(problem=self._problem("it does not answer", f"a run waits {READY_S:.0f} s for its mirror"))
        if said is None:
            said = Said(problem=self._problem("its process has ended", f"{self._log} says why"))
        if said.problem:
            raise (GraphError if self._exit_code() == 2 else CheckpointError)(said.problem)
        self._started = True

    def _exit_code(self) -> int | None:
        """The exit code of a process that has said what is wrong; None if it goes on."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(5.0)
        return None

    def end(self, *, at_once: bool) -> None:
        """Let the process copy what is left, and end. If it does not, say how the mirror is completed by hand."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            if self._started and not at_once:
                self._wait()
        finally:
            self._process.kill()
            failed = self._process.wait() != 0
            self._reader.join()
            if failed and self._started:
                self._warn(self._problem("it lacks the end of the run", "the run did not wait for it"))

    def _wait(self) -> None:
        """Wait until the process has ended, or has said nothing for `SILENT_S`."""
        self._heard_s = said_s = time.monotonic()
        while self._reader.is_alive() and (now_s := time.monotonic()) < self._heard_s + SILENT_S:
            if now_s > said_s + SAY_S:
                said_s = now_s
                print(f"waiting for the mirror: {self._progress} (Ctrl-C ends the wait)", file=sys.stderr, flush=True)
            self._reader.join(0.2)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._log.open("ab") as log:
            for line in self._process.stdout:
                try:
                    said = decode(line, Said)
                except msgspec.DecodeError:  # of a library
                    said = Said(text=line.decode(errors="replace").rstrip())
                self._heard_s, self._progress = time.monotonic(), said.progress or self._progress
                if said.problem or said.text:
                    log.write(f"{said.problem or said.text}\n".encode())
                    log.flush()
                if not self._started:
                    self._first.put(said)
                elif said.problem:
                    self._warn(said.problem)
        self._first.put(None)

    @property
    def _log(self) -> Path:
        return self._run.logs / "mirror.log"

    def _problem(self, what: str, why: str) -> Problem:
        again = shlex.join([*precedence.typed("pipeline.mirror"), str(self._run.path), self._url])
        return Problem(where=f"--mirror {self._url}", what=what, why=why, fix=again, warning=self._started)
