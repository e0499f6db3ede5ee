"""Brings a run to its end through faults: breaks it, resumes it when it has ended, and reads the record.

`Ordeal.run` returns what happened. It raises `OrdealError` where a run hangs, ends in a traceback or with an exit code
that is not documented, cannot be resumed, loses or repeats a sample, ends with other weights, or leaves a process.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.rundir import RunDir
from tests.chaos.faults import FAULTS, Fault, Scene, chosen, command_of
from tests.forked import FORKS, Command
from tests.journal.checker import check
from tests.sessions import session_of, wait_until_empty

ROOT = Path(__file__).parents[2]
GRAPH = Path(__file__).parent / "small.py"
CALM, HANGS_S, CLEAN_S = 2, 150.0, 30.0
"""Processes in a row that a fault ended before a step, after which one may go on undisturbed; seconds
without a step or an end that are a hang; seconds for the processes of an ended run to go."""
BEAT_S = 8.0  # a worker that does not answer for so long is lost
COMMAND = f"""
import sys
import pipeline.executors.ray
from pipeline.executors import heartbeat
heartbeat.DEADLINE_S = {BEAT_S}
from pipeline.run import main
sys.exit(main())
"""
OUTSIDE = {-signal.SIGTERM, -signal.SIGHUP}  # of a process that had not begun, or had said how the run ended
CODES = {2, 3, 4, 5, 6, 128 + signal.SIGTERM, 128 + signal.SIGHUP, -signal.SIGKILL}


class OrdealError(AssertionError):
    """A run did not survive as it should."""


@dataclass
class Blow:
    """A fault that was done; `recovered_s` is until the next trained step, None if the run ended without one."""

    fault: Fault
    step: int
    recovered_s: float | None = None
    ended: int | None = None
    "The exit code, if the process ended before the next step."


@dataclass
class Ordeal:
    """One run in `folder`, decided by `seed`. `weights` is the digest of the undisturbed run's, None for that run."""

    seed: int
    executor: str
    folder: Path
    weights: str | None
    disk: Path | None = None
    most: int = 6  # faults
    steps: int = 12
    told: bool = False
    forked: bool = False
    "Whether the processes of the run come from one that has imported torch, and start sooner."
    blows: list[Blow] = field(default_factory=list)
    sessions: set[int] = field(default_factory=set)

    def run(self) -> list[Blow]:
        """Return the faults that were done, once the run is complete and its record sound."""
        self._rng = random.Random(f"{self.seed} {self.executor}")
        self._run_dir, resume, fruitless = RunDir(self.folder), False, 0
        while True:
            before = self._step()
            code, said = self._process(resume, calm=fruitless >= CALM or len(self.blows) >= self.most)
            self._say(f"exit {code} after step {self._step()}")
            if "Traceback" in said:
                raise OrdealError(f"a traceback:\n{said[-3000:]}")
            self._wait_for_the_end()
            if code == 0 or "nothing is left to do" in said:  # a fault came after the end
                break
            if code not in (CODES if self._began and self._step() < self.steps else CODES | OUTSIDE):
                raise OrdealError(f"exit code {code}:\n{said[-3000:]}")
            if code == 2 and not self.blows:
                raise OrdealError(said[-3000:])
            fruitless = fruitless + 1 if self._step() <= before else 0
            if fruitless > CALM + 1:
                raise OrdealError(f"it does not get beyond step {before}:\n{said[-3000:]}")
            if self.disk:
                Path(self.disk, "filler").unlink(missing_ok=True)
            resume = self._run_dir.events.is_file()
        self._verdict()
        return self.blows

    def _process(self, resume: bool, *, calm: bool) -> tuple[int, str]:
        """Run the command once, with faults unless `calm`. Returns its exit code and what it said."""
        command = ["-c", COMMAND, str(GRAPH), "--steps", str(self.steps), "--plain"]
        command += ["--executor", self.executor, "--run-dir", str(self.folder), *(["--resume"] if resume else [])]
        environment = os.environ | {"PYTHONPATH": with_root(), "RAY_USAGE_STATS_ENABLED": "0"}
        with tempfile.TemporaryFile("w+") as stderr:  # not on the disk that is full at times
            options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True, "cwd": ROOT}
            options["start_new_session"] = True
            if self.forked:
                process: subprocess.Popen[str] = Command(*command, env=environment | FORKS, **options)
            else:
                process = subprocess.Popen([sys.executable, *command], env=environment, **options)
            scene = Scene(process, self._run_dir, self._rng, self.disk)
            try:
                self._began = False
                while process.poll() is None:
                    if calm or len(self.blows) >= self.most:
                        self._until(scene, lambda: False)
                    else:
                        self._strike(scene)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGCONT)
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if process.stdout and not process.stdout.closed:
                    process.stdout.close()
            stderr.seek(0)
            return process.returncode, stderr.read()

    def _strike(self, scene: Scene) -> None:
        """Wait for the moment of the next fault, do it, and wait until the run has recovered or ended."""
        fault = chosen(self._rng, self.executor, self.disk)
        if self._rng.random() < 0.25:  # anywhere, start-up included
            ends_s = time.monotonic() + self._rng.uniform(0.0, 12.0 if self.executor == "ray" else 3.0)
            self._until(scene, lambda: time.monotonic() > ends_s)
        else:
            step = self._step() + self._rng.randint(1, 3)
            self._until(scene, lambda: self._step() >= min(step, self.steps))
            time.sleep(self._rng.uniform(0.0, 0.3))
        self.sessions |= {session for session in [session_of(scene.process.pid)] if session}
        self._began = self._began or str(scene.process.pid) in self._locked()
        if scene.process.poll() is not None or not fault.do(scene):
            return
        blow, start_s, step = Blow(fault, self._step()), time.monotonic(), self._step()
        self.blows.append(blow)
        self._say(f"{fault.name} after step {step}")
        self._until(scene, lambda: self._step() > step or self._step() >= self.steps)
        if scene.process.poll() is None:
            blow.recovered_s = time.monotonic() - start_s
        else:
            blow.ended = scene.process.returncode

    def _until(self, scene: Scene, reached) -> None:
        """Wait until something holds or the process has ended. A process that makes no step for too long hangs."""
        step, moved_s = self._step(), time.monotonic()
        while scene.process.poll() is None and not reached():
            if self._step() != step:
                step, moved_s = self._step(), time.monotonic()
            if time.monotonic() - moved_s > HANGS_S:
                doing = "\n".join(f"{pid} {command_of(pid)[:100]}" for pid in scene.session())
                raise OrdealError(f"no step and no end for {HANGS_S:g} s after step {step}; its processes:\n{doing}")
            time.sleep(0.02)
            self._drain(scene)

    def _drain(self, scene: Scene) -> None:
        """Read what the command prints, so that it does not wait for a reader."""
        stdout = scene.process.stdout
        if stdout and not stdout.closed:
            os.set_blocking(stdout.fileno(), False)
            with suppress(OSError):
                while os.read(stdout.fileno(), 65536):
                    pass

    def _step(self) -> int:
        return max(steps_of(self._run_dir), default=0)

    def _locked(self) -> str:
        """Return what the lock of the run directory says of the process that has it."""
        with suppress(OSError):
            return self._run_dir.lock.read_text()
        return ""

    def _wait_for_the_end(self) -> None:
        """Wait until no process of an ended Ray is left."""
        while self.sessions:
            try:
                wait_until_empty(self.sessions.pop(), CLEAN_S)
            except AssertionError as left:
                raise OrdealError(f"left behind: {left}") from left

    def _verdict(self) -> None:
        """Check the record and the weights of a complete run."""
        report = check(self.folder)
        if report:
            raise OrdealError("the record: " + "; ".join(map(str, report)))
        if (steps := steps_of(self._run_dir)) != list(range(self.steps + 1)):  # 0 is what runs before the first
            raise OrdealError(f"metrics of the steps {steps}")
        if self.weights is not None and digest(self._run_dir, self.steps) != self.weights:
            raise OrdealError("other weights than those of an undisturbed run")

    def _say(self, text: str) -> None:
        if self.told:
            print(f"  {time.strftime('%H:%M:%S')} {self.seed}: {text}", flush=True)


def with_root() -> str:
    """Return PYTHONPATH with this repository in front."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def steps_of(run_dir: RunDir) -> list[int]:
    """Return the steps in metrics.jsonl, whose last line may be torn."""
    with suppress(OSError):
        lines = run_dir.metrics.read_bytes().split(b"\n")[:-1]
        return [json.loads(line)["step"] for line in lines]
    return []


def digest(run_dir: RunDir, steps: int) -> str:
    """Return the digest of a complete run's weights."""
    return hashlib.sha256((run_dir.checkpoint(steps) / "train" / "weights.safetensors").read_bytes()).hexdigest()


def undisturbed(folder: Path, steps: int) -> str:
    """Return the digest of the weights of a run that nothing breaks."""
    Ordeal(0, "local", folder, None, most=0, steps=steps, forked=True).run()
    return digest(RunDir(folder), steps)


def table(blows: list[Blow]) -> list[dict[str, object]]:
    """Return a row per fault: how often, how often the run went on, and seconds to the next step (median, most)."""
    rows = []
    for fault in FAULTS:
        own = [blow for blow in blows if blow.fault is fault]
        took_s = sorted(blow.recovered_s for blow in own if blow.recovered_s is not None)
        if own:
            rows.append(
                {
                    "fault": fault.name,
                    "times": len(own),
                    "went on": len(took_s),
                    "median s": took_s[len(took_s) // 2] if took_s else None,
                    "most s": took_s[-1] if took_s else None,
                }
            )
    return rows
