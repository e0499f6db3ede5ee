"""No GPU memory is held after a run has ended, whatever has ended it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.rundir import RunDir

ROOT = Path(__file__).parents[2]
START_S, CLEAN_S, SLACK_MIB = 300.0, 20.0, 16


def used_mib() -> int:
    """Return the memory in use on the first GPU, by all processes."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("generator", ["torch", "vllm"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_no_memory_of_a_gpu_is_held_after_a_run(tmp_path: Path, gpus: list[str], generator: str, number: int) -> None:
    before, run_dir = used_mib(), RunDir(tmp_path / "run")
    graph = Path(__file__).with_name("colocated_graph.py")
    command = [sys.executable, "-m", "pipeline.run", str(graph), "--generator", generator, "--plain"]
    command += ["--run-dir", str(run_dir.path)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": gpus[0]}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    ends_s = time.monotonic() + START_S
    while not run_dir.metrics.is_file() or run_dir.metrics.read_bytes().count(b"\n") < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < ends_s, "no third step"
        time.sleep(0.1)
    assert used_mib() > before + 400, "two processes compute on it"
    os.killpg(process.pid, number)
    process.communicate(timeout=120)
    ends_s = time.monotonic() + CLEAN_S
    while used_mib() > before + SLACK_MIB:
        assert time.monotonic() < ends_s, f"{used_mib() - before} MiB are held"
        time.sleep(0.2)
