"""Processes that each run one script and answer one question at a time. A process that exceeds its deadline is killed.

    workers = Workers([sys.executable, "-P", "script.py"], count=2)
    replies = workers.ask([["1+1"], ["9^9^9"]], deadline_s=5.0)        # per question: the decoded reply, or `Lost`

The script writes `["ready"]` (or `["broken", why]`) to its standard output. It then reads one line of JSON per question
and writes one line of JSON per reply. It inherits no thread and no lock of this process, and ends when its standard
input closes, which also happens if this process is killed.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

START_DEADLINE_S = 120.0  # allows for imports on a busy machine


@dataclass(frozen=True)
class Lost:
    """Why there is no reply: the deadline passed (`late`), or the process ended by itself."""

    late: bool
    text: str


class Workers:
    """Starts `count` processes without waiting for them; the first `ask` waits until they are ready.

    They end with `close`, with this object, or with this process. One caller at a time.
    """

    def __init__(self, command: Sequence[str], count: int) -> None:
        self._command = list(command)
        self._processes = [_WorkerProcess(self._command) for _ in range(count)]
        self._finalizer = weakref.finalize(self, _end_all, self._processes)

    @property
    def pids(self) -> list[int]:
        """Process ids of the current processes."""
        return [process.pid for process in self._processes]

    def ask(self, questions: Sequence[Any], deadline_s: float) -> list[Any]:
        """Return a reply, or `Lost`, for each question, in order. Raises RuntimeError if a process does not start."""
        for i, process in enumerate(self._processes):
            if process.question is not None:  # an earlier call was interrupted: its question is obsolete
                self._replace(i)
        replies: list[Any] = [None] * len(questions)
        open_questions = deque(range(len(questions)))
        while open_questions or any(process.question is not None for process in self._processes):
            for i, process in enumerate(self._processes):
                if process.ready and process.question is None and open_questions:
                    number = open_questions[0]
                    if process.send(number, questions[number], deadline_s):
                        open_questions.popleft()
                    else:  # it ended while idle, not because of a question
                        self._replace(i)
            self._wait()
            for i, process in enumerate(self._processes):
                asked, outcome = process.question, process.outcome()
                if asked is None or outcome is None:
                    continue
                replies[asked] = outcome
                process.question = None
                if isinstance(outcome, Lost):
                    self._replace(i)
        return replies

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._finalizer()

    def _wait(self) -> None:
        """Wait until a starting or busy process sends something, or exceeds its deadline."""
        watched = [process for process in self._processes if not process.ready or process.question is not None]
        with selectors.DefaultSelector() as selector:
            for process in watched:
                selector.register(process.output, selectors.EVENT_READ, process)
            timeout_s = max(0.0, min(process.deadline for process in watched) - time.monotonic())
            for key, _ in selector.select(timeout_s):
                key.data.read()

    def _replace(self, index: int) -> None:
        self._processes[index].end()
        self._processes[index] = _WorkerProcess(self._command)


class _WorkerProcess:
    def __init__(self, command: Sequence[str]) -> None:
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=os.environ | {"PYTHONHASHSEED": "0"},  # set order affects how some expressions are simplified
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._input, self.output = self._popen.stdin, self._popen.stdout
        self._received = b""
        self._ended = False
        self.ready = False
        self.question: int | None = None
        self.deadline = time.monotonic() + START_DEADLINE_S

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send(self, number: int, question: Any, deadline_s: float) -> bool:
        """Send a question. Returns whether the process accepted it."""
        rest = memoryview(json.dumps(question).encode() + b"\n")
        try:
            while rest:
                rest = rest[self._input.write(rest) :]
        except BrokenPipeError:
            return False
        self.question, self.deadline = number, time.monotonic() + deadline_s
        return True

    def read(self) -> None:
        chunk = os.read(self.output.fileno(), 1 << 16)
        self._received += chunk
        self._ended = self._ended or not chunk

    def outcome(self) -> Any:
        """Return the reply, `Lost`, or None if there is none yet. Raises RuntimeError if the process did not start."""
        line, newline, rest = self._received.partition(b"\n")
        message = None
        if newline:
            self._received, message = rest, json.loads(line)
        if not self.ready:
            self._start(message)
            return None
        if message is not None or self.question is None:
            return message
        if self._ended:
            return Lost(late=False, text=f"the process ended with status {self._popen.wait()}")
        return Lost(late=True, text="") if time.monotonic() >= self.deadline else None

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self._input.close()
        self.output.close()

    def _start(self, message: Any) -> None:
        if message == ["ready"]:
            self.ready = True
        elif message is not None:
            raise RuntimeError(message[1])
        elif self._ended:
            raise RuntimeError(f"{' '.join(self._popen.args)} ended with status {self._popen.wait()} while starting")  # type: ignore[arg-type]
        elif time.monotonic() >= self.deadline:
            raise RuntimeError(f"{' '.join(self._popen.args)} was not ready after {START_DEADLINE_S:g} s")  # type: ignore[arg-type]


def _end_all(processes: list[_WorkerProcess]) -> None:
    for process in processes:
        process.end()
