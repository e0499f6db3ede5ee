"""The Triton kernels process a table as the CPU path does: under Triton's interpreter, in a process of its own.

Environments without GPUs do not include Triton. SLUICE_TRITON names a folder that has it:
pip install --no-deps --target FOLDER triton
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.optional import required

REPOSITORY = str(Path(__file__).resolve().parents[2])


def test_tables_mean_the_same_to_the_kernels() -> None:
    folder = os.environ.get("SLUICE_TRITON", "")
    if not folder and importlib.util.find_spec("triton") is None:
        required("triton", "triton")
    paths = [path for path in (folder, REPOSITORY) if path]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.refit_kernels"],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.fail(done.stderr[-3000:])
