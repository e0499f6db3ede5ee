"""The Triton kernels compute what the CPU paths do: under Triton's interpreter, in processes of their own.

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


@pytest.mark.parametrize("module", ["tests.refit_kernels", "tests.vocab_kernels"])
def test_kernels_compute_the_same(module: str) -> None:
    folder = os.environ.get("SLUICE_TRITON", "")
    if not folder and importlib.util.find_spec("triton") is None:
        required("triton", "triton")
    paths = [path for path in (folder, REPOSITORY) if path]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.fail(done.stderr[-3000:])
