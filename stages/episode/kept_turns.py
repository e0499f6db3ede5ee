"""Turns on disk, so that a run that goes on from a checkpoint goes on in the middle of its episodes.

    kept = KeptTurns(folders, "episode-sampler-0", settings)
    kept.keep(name, turn, made)                # once it is sampled
    kept.find(version, name, turn)             # after a resume: what was sampled then, or None

A turn is found for the same episode, after the same tokens, by weights of the same version and under the same settings:
it is what would be sampled again, and the environment is asked again for all that it answered. The folders of versions
are read when the worker starts; the driver has then left no version there but the one that the run goes on with.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
from io import FileIO
from typing import TYPE_CHECKING

import msgspec
import torch

from pipeline.declare.columns import Ragged
from pipeline.declare.version_folders import VersionFolders
from stages.backends import Generation
from stages.episode.frames import framed, unframed

if TYPE_CHECKING:
    from stages.episode.turns import EpisodeName, NextTurn


class _KeptTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that was sampled: `seen` stands for the tokens before it and the settings."""

    group: int
    sample: int
    turn: int
    seen: bytes
    ids: bytes
    logprobs: bytes
    truncated: bool


class KeptTurns:
    """The turns of one stage on one worker, in a file for each version. Those of an earlier part of the run, which any
    worker may have sampled, are found; `settings` are what decides about tokens besides those before them."""

    def __init__(self, folders: VersionFolders, name: str, settings: object) -> None:
        self._folders, self._name, self._settings = folders, name, repr(settings).encode()
        self._files: dict[int, FileIO] = {}
        self._is_full = False
        self._earlier = {
            version: {
                (turn.group, turn.sample, turn.turn): turn
                for path in sorted(folder.iterdir())
                for turn in unframed(path.read_bytes(), _KeptTurn)
            }
            for version, folder in folders.by_version().items()
        }
        self.differed: set[EpisodeName] = set()  # whose environments have not said the same again

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to find."""
        return not any(self._earlier.values())

    def find(self, version: int, name: EpisodeName, turn: NextTurn) -> Generation | None:
        """What weights of this version have sampled for the turn; None if that is not known."""
        kept = self._earlier.get(version, {}).get((name.group, name.sample, turn.number))
        if kept is None:
            return None
        if kept.seen != self._seen(turn):
            self.differed.add(name)
            return None
        ids = torch.frombuffer(bytearray(kept.ids), dtype=torch.int32).long()
        logprobs = torch.frombuffer(bytearray(kept.logprobs), dtype=torch.float32)
        lengths = (len(ids),)
        return Generation(
            Ragged(ids, lengths),
            Ragged(logprobs, lengths),
            torch.tensor([kept.truncated]),
            Ragged(torch.full((len(ids),), version, dtype=torch.int32), lengths),
        )

    def keep(self, name: EpisodeName, turn: NextTurn, made: Generation) -> None:
        """Keep a turn whose tokens are all of one version. A full disk ends the keeping, and not the run."""
        versions = made.versions.values
        if self._is_full or not len(versions) or not bool((versions == versions[0]).all()):
            return
        kept = _KeptTurn(
            group=name.group,
            sample=name.sample,
            turn=turn.number,
            seen=self._seen(turn),
            ids=made.response_ids.values.int().numpy().tobytes(),
            logprobs=made.logprobs.values.float().numpy().tobytes(),
            truncated=bool(made.truncated[0]),
        )
        try:
            self._file(int(versions[0])).write(framed(kept))
        except OSError as error:
            self._is_full = True
            print(f"turns are kept no longer, and a resume samples them again: {error}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _seen(self, turn: NextTurn) -> bytes:
        given = (self._settings, turn.ids.numpy().tobytes(), f"{turn.place} {turn.most}".encode())
        return hashlib.blake2b(b"".join(given), digest_size=16).digest()

    def _file(self, version: int) -> FileIO:
        if version not in self._files:
            for old in [old for old in self._files if old < version - 1]:
                self._files.pop(old).close()
            self._earlier = {of: turns for of, turns in self._earlier.items() if of >= version - 1}
            folder = self._folders.of(version)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._files[version] = FileIO(folder / f"{self._name}-{secrets.token_hex(4)}", "xb")
        return self._files[version]
