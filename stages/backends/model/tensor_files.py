"""Writes safetensors files, and turns errors of a disk into OSErrors. Knows no names and no model."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from pipeline.errors import naming

_NUMBER = re.compile(r"os error (\d+)")


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a file. Raises OSError, which names it, if the disk is full or fails."""
    with as_os_error(path):
        save_file(dict(tensors), path, metadata={"format": "pt"})


@contextmanager
def as_os_error(path: Path) -> Iterator[None]:
    """Turn an error of a library in Rust that the system caused into an OSError. One that names no path names this."""
    try:
        with naming(path):
            yield
    except Exception as error:
        if isinstance(error, OSError) or not (found := _NUMBER.search(str(error))):
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
