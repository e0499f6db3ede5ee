"""What a trainer rank shares: its parameters as of publication, in the model's dtypes."""

import pickle

import numpy as np
import pytest
import torch

from ops.refit.layout import Tensor, dense, whole
from ops.refit.memory import Handle, opened
from ops.refit.share import Share, Shares, digest_of, layout_of
from ops.refit.transports.messages import MessageSender

TENSORS = {"a": Tensor((3, 5), "bfloat16"), "b": Tensor((4,), "float32")}
PLACES = [dense(name, whole(t.shape), t.item_bytes, f"own {name}") for name, t in TENSORS.items()]
CPU = torch.device("cpu")


def parameters(value: float, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {"own a": torch.full((3, 5), value, dtype=dtype), "own b": torch.arange(4.0) + value}


def read(share: Share, memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a share, in order."""
    found = {}
    for place in layout_of([share]).ranks[0]:
        tensor = TENSORS[place.tensor]
        raw = memory[place.offset : place.offset + tensor.item_bytes * int(np.prod(tensor.shape))]
        found[place.tensor] = raw.view(getattr(torch, tensor.dtype)).view(tensor.shape)
    return found


def test_a_version_stays_while_training_goes_on() -> None:
    held = parameters(1.5)
    shares = Shares(TENSORS, PLACES, held)
    share = shares.publish(held)
    for parameter in held.values():
        parameter.add_(1.0)
    sent = pickle.loads(pickle.dumps(share))
    assert isinstance(sent.memory, Handle)
    memory = opened(sent.memory, CPU)
    assert read(sent, memory)["a"].eq(1.5).all() and read(sent, memory)["b"].tolist() == [1.5, 2.5, 3.5, 4.5]
    first = digest_of([sent])
    second = shares.publish(held)
    assert read(sent, memory)["a"].eq(1.5).all(), "the version before is still there"
    assert digest_of([second]) != first == digest_of([sent])
    shares.publish(held)
    assert read(sent, memory)["a"].eq(2.5).all(), "and then it has the one behind the next"


def test_parameters_that_moved_are_found() -> None:
    held = parameters(1.0)
    shares = Shares(TENSORS, PLACES, held)
    shares.publish(held)
    share = shares.publish(parameters(9.0))
    assert read(share, opened(share.memory, CPU))["a"].eq(9.0).all()  # type: ignore[arg-type]


def test_other_dtypes_are_rounded_to_the_models() -> None:
    held = parameters(1.0 + 2.0**-12, torch.float32)
    share = Shares(TENSORS, PLACES, held).publish(held)
    again = parameters(1.0)
    again["own b"] = held["own b"]
    assert read(share, opened(share.memory, CPU))["a"].eq(1.0).all()  # type: ignore[arg-type]
    assert digest_of([share]) == digest_of([Shares(TENSORS, PLACES, again).publish(again)])


def test_numbers_that_are_none_keep_their_bits() -> None:
    held = parameters(0.0)
    bits = torch.arange(0x7F80, 0x7F80 + 15, dtype=torch.int16).view(3, 5)
    held["own a"].view(torch.int16).copy_(bits)
    share = Shares(TENSORS, PLACES, held).publish(held)
    assert read(share, opened(share.memory, CPU))["a"].view(torch.int16).equal(bits)  # type: ignore[arg-type]


def test_far_readers_get_the_bytes() -> None:
    held = parameters(3.0)
    share = Shares(TENSORS, PLACES, held).publish(held, MessageSender().offer)
    held["own a"].zero_()
    assert isinstance(share.memory, np.ndarray)
    assert read(share, torch.from_numpy(share.memory))["a"].eq(3.0).all()


def test_a_parameter_with_gaps_is_refused() -> None:
    held = parameters(1.0)
    shares = Shares(TENSORS, PLACES, held)
    held["own a"] = torch.zeros((3, 10), dtype=torch.bfloat16)[:, ::2]
    with pytest.raises(RuntimeError, match="view"):
        shares.publish(held)
