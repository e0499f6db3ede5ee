"""Reads boxes of a Hugging Face folder's weights without loading the rest. Knows safetensors."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pipeline.errors import Problem, StageError
from pipeline.reading import readable
from stages.model_weights import INDEX, SINGLE, read_index


class Shards:
    """The tensors of a folder, read by box."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (folder / INDEX).is_file():
            with _readable(folder / INDEX):
                self.files = read_index(folder)
        elif (folder / SINGLE).is_file():
            with _readable(folder / SINGLE), safe_open(folder / SINGLE, "pt") as file:
                self.files = dict.fromkeys(file.keys(), SINGLE)
        else:
            raise StageError(
                Problem(
                    where=str(folder),
                    what=f"it has neither {SINGLE} nor {INDEX}",
                    why="ranks read their parts from safetensors files",
                    fix="save the model with save_pretrained, which writes safetensors",
                )
            )
        self._open: dict[str, Any] = {}

    def whole(self, name: str) -> torch.Tensor | None:
        """A tensor as it is stored; None if the folder has none of that name."""
        if name not in self.files:
            return None
        with _readable(self.folder / self.files[name]):
            found: torch.Tensor = self._file(name).get_tensor(name)
        return found

    def box(self, name: str, shape: tuple[int, ...], box: tuple[slice, ...]) -> torch.Tensor:
        """Part of a tensor. Raises StageError if the folder lacks the tensor or has another shape."""
        found = None
        if name in self.files:
            with _readable(self.folder / self.files[name]):
                found = self._file(name).get_slice(name)
        if found is None or tuple(found.get_shape()) != shape:
            held = "no such tensor" if found is None else f"one of shape {found.get_shape()}"
            raise StageError(
                Problem(
                    where=f"{self.folder}: tensor {name!r}",
                    what=f"the folder has {held}",
                    why=f"according to its config.json the model has one of shape {list(shape)}",
                    fix="a folder whose weights match its config",
                )
            )
        return found[box]

    def _file(self, name: str) -> Any:
        file = self.files[name]
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, "pt")
        return self._open[file]


def _readable(file: Path) -> AbstractContextManager[None]:
    fix = "save or download the model again"
    return readable(file, StageError, why="it is part of the model's folder", fix=fix, also=(SafetensorError,))
