"""Writes a checkpoint as the driver does, in one go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.record.checkpoint import Draft, Manifest
from pipeline.rundir import RunDir


def write_checkpoint(run: RunDir, *, steps: int, save: Callable[[Path], object], **rest: Any) -> tuple[Path, Manifest]:
    """Let `save` fill the folder. Returns the checkpoint and its manifest."""
    draft = Draft(run, steps)
    with draft.kept():
        save(draft.folder)
        manifest = draft.finish(**rest)
        draft.put()
    return draft.final, manifest
