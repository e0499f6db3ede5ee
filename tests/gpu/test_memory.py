"""GPU memory that other processes open, also with an allocator that has expandable segments."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
import torch

from ops.refit.memory import SharedMemory
from stages.backends.device import host_copy
from tests.gpu.processes import each

SIZE = 48 << 20
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
READER = """
import sys, msgspec, torch
from ops.refit.memory import Handle, opened
memory = opened(msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=Handle), torch.device("cuda", 0))
for line in sys.stdin:
    print(memory.min().item(), memory.max().item(), len(memory), flush=True)
"""


def read_by_another(rank: int) -> list[str]:
    """Return what another process reads from this one's memory after each of three writes."""
    device = torch.device("cuda", 0)
    before = torch.zeros(SIZE, dtype=torch.uint8, device=device)  # keeps `memory` off the start of a segment
    memory = SharedMemory(SIZE, device)
    assert memory.bytes.data_ptr() != before.data_ptr()
    grows = {segment["is_expandable"] for segment in torch.cuda.memory_snapshot()}
    assert grows == {ALLOCATOR in os.environ}
    command = [sys.executable, "-c", READER, msgspec.msgpack.encode(memory.handle).hex()]
    plain = {name: value for name, value in os.environ.items() if name != ALLOCATOR}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=plain) as reader:
        assert reader.stdin is not None and reader.stdout is not None and reader.stderr is not None
        said = []
        for value in (0, 3, 5):
            memory.bytes.fill_(value)
            torch.cuda.synchronize()
            print("now", file=reader.stdin, flush=True)
            said.append(reader.stdout.readline().strip() or reader.stderr.read()[-2000:])
        reader.stdin.close()
        return said


@pytest.mark.parametrize("allocator", ["", "expandable_segments:True"], ids=["plain", "growing"])
def test_another_process_reads_what_is_there_at_any_time(gpus: list[str], allocator: str) -> None:
    (said,) = each(read_by_another, gpus[:1], environment={ALLOCATOR: allocator} if allocator else {})
    assert said == [f"{value} {value} {SIZE}" for value in (0, 3, 5)]


def test_what_is_copied_to_the_host_is_the_same(gpus: list[str]) -> None:
    large = torch.randint(0, 1 << 30, (20_000_003,), device="cuda")  # 160 MB: several parts, the last one short
    transposed = large[:6].view(2, 3).T
    for tensor in (large, transposed, torch.tensor(3.0, device="cuda"), large[:0], large[:5].bfloat16()):
        copied = host_copy(tensor)
        assert copied.is_contiguous() and not copied.is_pinned() and copied.dtype == tensor.dtype
        assert torch.equal(copied, tensor.cpu())
