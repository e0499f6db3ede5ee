"""Seconds from a fault to the next trained step: a killed sampler, reward, trainer, data plane or driver.

python -m benchmarks.recovery [--rounds 3] [--out FILE]

A small quickstart on Ray and TransferQueue, with a checkpoint every third step. A step that was trained before the
fault and is trained again does not count. A driver that has died, or ended because the data plane has, is resumed at
once by the command; loading Python, Ray and the models is part of its time. Aims on two cores: sampler 15 s, trainer
30 s, driver 30 s.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.report import report
from pipeline.rundir import RunDir
from tests.chaos.faults import FAULTS, Scene
from tests.chaos.ordeal import GRAPH, ROOT, steps_of, with_root

AIMS_S = {"sampler killed": 15.0, "learner killed": 30.0, "driver killed": 30.0}
KILLED = (*AIMS_S, "reward killed", "controller killed", "storage killed")
AFTER, LATE_S = 4, 180.0  # the step after which the fault comes; seconds after which none comes


def command(folder: Path, *, resume: bool) -> subprocess.Popen[str]:
    """Start the run, or resume it."""
    words = [sys.executable, "-m", "pipeline.run", str(GRAPH), "--run-dir", str(folder), "--steps", "10000", "--plain"]
    return subprocess.Popen(
        [*words, *(["--resume"] if resume else [])],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": with_root(), "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def recovery_s(name: str, folder: Path) -> float:
    """Break a run in this way and return the seconds until it has trained a further step."""
    fault = next(fault for fault in FAULTS if fault.name == name)
    run_dir, process = RunDir(folder), command(folder, resume=False)
    try:
        _until(run_dir, AFTER, process, resume=False)
        if not fault.do(Scene(process, run_dir, random.Random(0), None)):
            raise TimeoutError(f"{name}: there is no such process")
        start_s, step = time.perf_counter(), max(steps_of(run_dir))
        process = _until(run_dir, step + 1, process, resume=True)
        return time.perf_counter() - start_s
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _until(run_dir: RunDir, step: int, process: subprocess.Popen[str], *, resume: bool) -> subprocess.Popen[str]:
    """Wait for a step; resume the run, if allowed, whenever its process ends. Returns the last process."""
    ends_s = time.perf_counter() + LATE_S
    while max(steps_of(run_dir), default=0) < step:
        if process.poll() is not None:
            if not resume:
                raise TimeoutError(f"the run ended with exit code {process.returncode}")
            process = command(run_dir.path, resume=True)
        if time.perf_counter() > ends_s:
            raise TimeoutError(f"no step {step} within {LATE_S:g} s")
        time.sleep(0.02)
    return process


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs per fault, in turn")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    took_s: dict[str, list[float]] = {name: [] for name in KILLED}
    with tempfile.TemporaryDirectory() as place:
        for number in range(options.rounds):
            for name, times in took_s.items():
                times.append(recovery_s(name, Path(place, f"{name} {number}".replace(" ", "-"))))
                print(f"{name}: {times[-1]:.1f} s", file=sys.stderr, flush=True)
    rows = [
        {"fault": name, "median s": statistics.median(times), "most s": max(times), "aim s": AIMS_S.get(name)}
        for name, times in took_s.items()
    ]
    report("recovery", rows, ["fault", "median s", "most s", "aim s"], f"{options.rounds} rounds in turn.", options.out)


if __name__ == "__main__":
    main()
