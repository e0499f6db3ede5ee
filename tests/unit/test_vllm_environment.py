"""The environment in which vLLM is imported."""

from itertools import pairwise

import pytest

from stages.backends.vllm import environment


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
