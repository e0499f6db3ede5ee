"""Packed scalars must not misalign what follows them: a kernel would process it byte by byte."""

import pytest
import torch

from ops.refit import message as module
from ops.refit.layout import Tensor, dense, whole
from ops.refit.message import Message
from ops.refit.plan import Copy
from ops.refit.share import Shares, layout_of
from ops.refit.transports.broadcast import _buckets

SIZES = [2, 4096, 1, 24, 6, 8192]  # in bytes: scalars between tensors


def copies() -> list[Copy]:
    """Return copies between buffers that start where an allocator would align them."""
    return [Copy(0, 0, str(size), str(size), 0, 0, size, 1, size, size) for size in SIZES]


def slow_bytes(message: Message) -> int:
    """Return how many bytes, of packing and unpacking together, are not moved in the widest words."""
    memory = torch.zeros(message.size + 16, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 16 :][: message.size]
    buffers = {str(size): torch.zeros(size, dtype=torch.uint8) for size in SIZES}
    assert all(buffer.data_ptr() % 16 == 0 for buffer in buffers.values())
    moves = [
        message.pack(lambda copy: buffers[copy.source_buffer], memory),
        message.unpack(memory, lambda copy: buffers[copy.destination_buffer]),
    ]
    tables = [table for each in moves for table in each.described(0)]
    return sum(int((table[:, 2] * table[:, 3]).sum()) * word for word, table in tables if word < 8)


def test_what_follows_a_scalar_in_a_message_goes_in_wide_words(monkeypatch: pytest.MonkeyPatch) -> None:
    scalars = sum(size for size in SIZES if size % 8)
    assert slow_bytes(Message(copies())) == 2 * scalars
    monkeypatch.setattr(module, "ALIGNED", 1)
    assert slow_bytes(Message(copies())) > 2 * 4096


def test_a_message_brings_every_byte_behind_scalars_too() -> None:
    given = {str(size): torch.randint(0, 256, (size,), dtype=torch.uint8) for size in SIZES}
    taken = {name: torch.zeros_like(buffer) for name, buffer in given.items()}
    message = Message(copies())
    memory = torch.zeros(message.size, dtype=torch.uint8)
    message.pack(lambda copy: given[copy.source_buffer], memory).run()
    message.unpack(memory, lambda copy: taken[copy.destination_buffer]).run()
    assert all(taken[name].equal(given[name]) for name in given)


def test_parameters_and_tensors_behind_a_scalar_begin_where_wide_words_do() -> None:
    tensors = {"scalar": Tensor((1,), "bfloat16"), "odd": Tensor((3,), "float32"), "wide": Tensor((64,), "float32")}
    places = [dense(name, whole(tensor.shape), tensor.item_bytes, name) for name, tensor in tensors.items()]
    held = {name: torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype)) for name, tensor in tensors.items()}
    share = Shares(tensors, places, held).publish(held)
    assert all(place.offset % 16 == 0 for place in layout_of([share]).ranks[0])
    assert all(placed.offset % 16 == 0 for bucket in _buckets(tensors, 1 << 20) for placed in bucket)
