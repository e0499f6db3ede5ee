"""Run directories, checkpoints and saved inputs that were changed after a run wrote them."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.errors.harness import Case, live_text

LAST = "run/checkpoints/step_000002"
_LOCKS: list[IO[str]] = []  # held until the tests end


def nothing(folder: Path) -> None:
    return None


@dataclass(frozen=True)
class ResumeCase(Case):
    """A case on a copy of a finished run of two steps in which `change` breaks something."""

    change: Callable[[Path], None] = nothing

    def damage(self, finished: Path, folder: Path) -> None:
        """Copy the run to `folder`/run and break it."""
        shutil.copytree(finished, folder / "run")
        self.change(folder)


def resume(name: str, change: Callable[[Path], None] = nothing, *flags: str, code: int = 6) -> ResumeCase:
    """Return a case of --resume of `run` with one more step to run."""
    args = ("--executor", "local", "--steps", "3", *(flags or ("--run-dir", "run", "--resume")))
    return ResumeCase(name, text=live_text(), args=args, code=code, change=change)


def _flip(folder: Path) -> None:
    path = folder / LAST / "count/count.json"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(bytes(content))


def _manifest(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / LAST / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))

    return change


def cut(name: str, size: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:size])

    return change


def remove(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def _failure(folder: Path) -> None:
    (folder / "run/failures/broken").mkdir()
    (folder / "run/failures/broken/task.json").write_text('{"stage": "reward", "step": 0}')
    (folder / "run/failures/broken/columns.json").write_text('{"prompt": ["a"')
    (folder / "run/failures/broken/columns.safetensors").write_bytes(b"")


def _failure_of(stage: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        import torch
        from safetensors.torch import save_file

        _failure(folder)
        (folder / "run/failures/broken/task.json").write_text(json.dumps({"stage": stage, "step": 0}))
        (folder / "run/failures/broken/columns.json").write_text("{}")
        save_file({"reward": torch.zeros(1)}, folder / "run/failures/broken/columns.safetensors")

    return change


def _both(folder: Path) -> None:
    _flip(folder)
    remove("run/checkpoints/step_000001/manifest.json")(folder)


def _locked(folder: Path) -> None:
    lock = (folder / "run/lock").open("w+")
    lock.write('{"pid":4321,"host":"node-7"}')
    lock.flush()
    fcntl.flock(lock, fcntl.LOCK_EX)
    _LOCKS.append(lock)


def in_runs(folder: Path) -> None:
    (folder / "runs").mkdir()
    (folder / "run").rename(folder / "runs" / "my run")


def _spaced(folder: Path) -> None:
    (folder / "run").rename(folder / "my run")


OUTSIDE = {"../../run.json": {"size_bytes": 1, "sha256": "0" * 64}}
CHOSEN = ("--run-dir", "run", "--resume", "2")
CASES = [
    resume("run_dir_holds_a_run", nothing, "--run-dir", "run", code=2),
    resume("run_dir_of_a_check_holds_a_run", nothing, "--run-dir", "run", "--check", code=2),
    resume("run_dir_is_being_written", _locked, code=2),
    resume("run_dir_is_a_file", nothing, "--run-dir", "graph.py", code=2),
    resume("resume_without_a_run_dir", nothing, "--resume", code=2),
    resume("resume_without_a_run_dir_of_a_run_in_runs", in_runs, "--resume", code=2),
    resume("run_dir_with_a_space_holds_a_run", _spaced, "--run-dir", "my run", code=2),
    resume("resume_of_no_run", nothing, "--run-dir", "other", "--resume", code=2),
    resume("resume_of_no_step", nothing, "--run-dir", "run", "--resume", "latest", code=2),
    resume("resume_of_a_step_below_0", nothing, "--run-dir", "run", "--resume", "-1", code=2),
    resume("resume_of_a_missing_step", nothing, "--run-dir", "run", "--resume", "7"),
    resume("resume_before_later_checkpoints", nothing, "--run-dir", "run", "--resume", "1", code=0),
    resume("resume_with_another_seed", nothing, "--run-dir", "run", "--seed", "1", "--resume", code=2),
    resume("resume_with_nothing_left", nothing, "--run-dir", "run", "--resume", "--steps", "2", code=2),
    resume("record_is_damaged", cut("run/run.json", 30), code=2),
    resume("metrics_are_damaged", lambda folder: (folder / "run/metrics.jsonl").write_text("[]\n"), code=2),
    resume("no_checkpoint", remove("run/checkpoints"), code=0),
    resume("checkpoint_of_flipped_bits", _flip, *CHOSEN),
    resume("checkpoint_is_truncated", cut(f"{LAST}/count/count.json", 1), *CHOSEN),
    resume("checkpoint_lacks_a_file", remove(f"{LAST}/count"), *CHOSEN),
    resume("checkpoint_lacks_its_manifest", remove(f"{LAST}/manifest.json"), *CHOSEN),
    resume("manifest_is_truncated", cut(f"{LAST}/manifest.json", 20), *CHOSEN),
    resume("manifest_lies_outside", _manifest(files=OUTSIDE), *CHOSEN),
    resume("manifest_of_another_format", _manifest(format=2), *CHOSEN),
    resume("every_checkpoint_is_damaged", _both),
    resume("replay_of_no_failure", nothing, "--replay", "run", code=2),
    resume("replay_of_a_run", _failure, "--replay", "run", code=2),
    resume("replay_of_damaged_inputs", _failure, "--replay", "run/failures/broken", code=2),
    resume("replay_of_an_unknown_stage", _failure_of("rollout"), "--replay", "run/failures/broken", code=2),
]
