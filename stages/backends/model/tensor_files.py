"""Writes safetensors files, and turns errors of a disk into OSErrors. Knows no names and no model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from pipeline.errors import as_os_error


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a file. Raises OSError, which names it, if the disk is full or fails."""
    with as_os_error(path):
        save_file(dict(tensors), path, metadata={"format": "pt"})
