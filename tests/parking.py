"""Parking for tensors on the CPU that behaves like GPU parking: restored tensors are valid only after `arrive`."""

import torch

from stages.backends.device import Parking


class Late(Parking):
    """Tensors that left hold NaN until `arrive`."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._waits = False

    def leave(self) -> None:
        for tensor in self._parked:
            tensor.data = torch.full_like(tensor, float("nan"))
        self._waits = True

    def arrive(self) -> None:
        if self._waits:
            for tensor in self._parked:
                tensor.data = self._places[id(tensor)]
            super().leave()
        self._waits = False
