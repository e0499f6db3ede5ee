"""Folders by policy version, for what weights of a version have made and a run that goes on with them can use again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class VersionFolders:
    """The folders below a path. Those of versions that no run goes on with are forgotten by the driver."""

    path: Path

    def of(self, version: int) -> Path:
        """Return the folder of a version, which need not exist."""
        return self.path / f"{version:06d}"

    def by_version(self) -> dict[int, Path]:
        """Return the folders that exist."""
        paths = self.path.iterdir() if self.path.is_dir() else ()
        return {int(path.name): path for path in paths if path.name.isdigit() and path.is_dir()}

    def forget(self, forgets: Callable[[int], bool]) -> None:
        """Remove the folders of versions. One in which a worker writes may appear again."""
        for version, folder in self.by_version().items():
            if forgets(version):
                shutil.rmtree(folder, ignore_errors=True)

    def keep_for(self, done: int, saved: Callable[[], Sequence[int]]) -> None:
        """Remove the folders of versions that no run goes on with after `done` steps: all but the last two, and that of
        the last of the steps with a checkpoint, which `saved` lists if there is anything to remove."""
        if any(version < done - 1 for version in self.by_version()):
            last = saved()[-1:]
            self.forget(lambda version: version < done - 1 and version not in last)
