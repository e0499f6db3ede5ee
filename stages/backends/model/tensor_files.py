"""Writes safetensors files. Knows no names and no model."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

_NUMBER = re.compile(r"os error (\d+)")


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a file. Raises OSError, which names it, if the disk is full or fails."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        found = _NUMBER.search(str(error))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error
