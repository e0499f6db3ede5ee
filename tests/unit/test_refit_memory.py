"""Memory shared with other processes: readers see what the owner writes, also after later writes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from itertools import count

import msgspec
import pytest
import torch

from ops.refit.memory import Handle, SharedMemory, opened

CPU = torch.device("cpu")
READER = """
import sys, msgspec, torch
from ops.refit.memory import Handle, opened
memory = opened(msgspec.json.decode(sys.argv[1], type=Handle), torch.device("cpu"))
for line in sys.stdin:
    print(memory.sum().item(), flush=True)
"""


def test_another_process_reads_what_is_there_at_any_time() -> None:
    memory = SharedMemory(1000, CPU)
    command = [sys.executable, "-c", READER, msgspec.json.encode(memory.handle).decode()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdin is not None and reader.stdout is not None
        for value in (0, 3, 5):
            memory.bytes.fill_(value)
            print("now", file=reader.stdin, flush=True)
            assert reader.stdout.readline() == f"{1000 * value}\n"
        reader.stdin.close()
        assert reader.wait(60) == 0


def test_memory_whose_owner_is_gone_stays_with_those_who_opened_it() -> None:
    memory = SharedMemory(16, CPU)
    memory.bytes.fill_(7)
    handle = memory.handle
    kept = opened(handle, CPU)
    del memory
    assert kept.tolist() == [7] * 16
    with pytest.raises(OSError, match="fd"):
        opened(handle, CPU)


def test_memory_that_comes_after_other_memory_has_another_handle() -> None:
    """The kernel reuses the number of a closed file for the next one."""
    handles = []
    for _ in range(4):
        memory = SharedMemory(16, CPU)
        handles.append(memory.handle)
        assert memory.handle == handles[-1]
        del memory
    assert len({handle.values[0] for handle in handles}) < len(set(handles)) == 4


def test_none_at_all_is_memory_too() -> None:
    assert opened(SharedMemory(0, CPU).handle, CPU).numel() == 0


def test_a_handle_survives_plain_values() -> None:
    handle = Handle("cuda", 512, "mark", (b"memory", 512, 0, b"counter", 0, b"event", True))
    plain = msgspec.to_builtins(handle, builtin_types=(bytes,))
    again = msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(plain)), Handle)
    assert again == handle and hash(again) == hash(handle)


def test_memory_of_a_gpu_keeps_its_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch returns a new counter on every call; readers would mistake that for other memory."""
    counters = count()
    answer = (0, b"memory", 16, 0, b"counter")
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda _: (*answer, next(counters), b"event", True))
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: torch.zeros(size, dtype=dtype))
    memory, other = SharedMemory(16, torch.device("cuda")), SharedMemory(16, torch.device("cuda"))
    first, again = (pickle.loads(pickle.dumps(memory)) for _ in range(2))
    assert first == again == memory.handle != other.handle
