"""Puts adapters into a vLLM worker's slots.

vLLM moves an adapter into a slot with 28 small kernels per layer, each matrix by its name: 27 ms for 8B on an H200
(gpu.lora_ready). Here it does so once per slot, while its copies are recorded. A later adapter has the same shapes: it
takes the memory of one that was forgotten, and its matrices are copied to the same places with a few kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stages.backends.vllm.api import adapter_model, adapters_of, manager_of, remove_adapter

Views = Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
_CLEARS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)


@dataclass
class Resident:
    """An adapter that vLLM has: its model, whose matrices are views of `flat`, and what vLLM copies into a slot."""

    model: Any
    flat: torch.Tensor
    sources: list[torch.Tensor] = field(default_factory=list)


class AdapterSlots:
    """The adapters of one worker. `views` has an adapter's matrices, by PEFT's names, in memory that holds them all."""

    def __init__(self, model_runner: Any, views: Views, lora_rank: int, device: torch.device) -> None:
        self._runner, self._manager = model_runner, manager_of(model_runner)
        self._views, self._rank, self._device = views, lora_rank, device
        self._held: dict[int, Resident] = {}
        self._spare: list[Resident] = []
        self._targets: dict[int, list[torch.Tensor]] = {}  # by slot, in the order of `Resident.sources`

    def forget(self, keep: Collection[int]) -> None:
        """Forget all adapters but these. No request may use the others."""
        for number in adapters_of(self._runner) - {*keep}:
            remove_adapter(self._runner, number)
            if number in self._held:
                self._spare.append(self._held.pop(number))

    def add(self, number: int, content: torch.Tensor) -> bool:
        """Add an adapter under this number and move it into a slot. Returns whether vLLM had to do that by itself.
        Raises RuntimeError if it would have to forget another one, or leave out a part."""
        manager = self._manager
        if len(manager) >= manager.capacity:
            raise RuntimeError(f"{len(manager)} adapters are in use")
        if self._spare:
            resident = self._spare.pop()
            resident.flat.copy_(content)
            resident.model.id = number
            with _nothing_to_move(manager):
                manager.add_adapter(resident.model)
        else:
            model = adapter_model(self._runner, number, self._views(content), self._rank, self._device)
            resident = Resident(model, content)
            manager.add_adapter(resident.model)
            if ignored := sorted(resident.model.loras.keys() - manager.modules.keys()):
                raise RuntimeError(f"vLLM has no adapter for {ignored[0]}, nor for {len(ignored) - 1} other layers")
        self._held[number] = resident
        return not self._copied(number, resident) and self._moved(number, resident)

    def _copied(self, number: int, resident: Resident) -> bool:
        """Move an adapter into the slot that vLLM chooses, by what was recorded. Returns whether that is known."""
        with _nothing_to_move(self._manager):
            self._manager.activate_adapter(number)
        targets = self._targets.get(self._manager.lora_index_to_id.index(number), [])
        if is_known := len(targets) == len(resident.sources) > 0:
            torch._foreach_copy_(targets, resident.sources, non_blocking=True)
        return is_known

    def _moved(self, number: int, resident: Resident) -> bool:
        """Have vLLM move it there instead, and record that."""
        self._manager.deactivate_adapter(number)
        with SlotCopies(resident.flat) as copies:
            self._manager.activate_adapter(number)
        if copies.are_all:
            resident.sources = copies.sources
            self._targets[self._manager.lora_index_to_id.index(number)] = copies.targets
        return True


class SlotCopies(TorchDispatchMode):
    """Records copies out of `flat`. `are_all` says that nothing else was written, but for zeros."""

    def __init__(self, flat: torch.Tensor) -> None:
        super().__init__()
        self._from = flat.untyped_storage().data_ptr()
        self.targets: list[torch.Tensor] = []
        self.sources: list[torch.Tensor] = []
        self.are_all = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Like the base class."""
        if func is torch.ops.aten.copy_.default and args[1].untyped_storage().data_ptr() == self._from:
            self.targets.append(args[0])
            self.sources.append(args[1])
        elif func.__name__.partition(".")[0].endswith("_") and func not in _CLEARS:  # writes in place
            self.are_all = False
        return func(*args, **(kwargs or {}))


@contextmanager
def _nothing_to_move(manager: Any) -> Iterator[None]:
    """Meanwhile vLLM notes which adapter is where, and touches no layer."""
    modules, packed = manager.modules, manager.packed_modules
    manager.modules, manager.packed_modules = {}, {}
    try:
        yield
    finally:
        manager.modules, manager.packed_modules = modules, packed
