"""Writes the model of a checkpoint as a Hugging Face folder, with the same bits. Needs neither graph nor backend.

    export_model(Path("runs/quickstart-..."), None, Path("model"))
    AutoModelForCausalLM.from_pretrained("model")

Reads only files that the checkpoint's manifest lists, after their sha256 was checked. Executes no code of the run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec

from pipeline.cli import console
from pipeline.cli.merged import ADAPTER, CONFIG, other_base, write_merged
from pipeline.declare.saved_model import MODEL, TENSORS, Pieces, read_tensors_json
from pipeline.errors import CheckpointError, GraphError, Problem, as_os_error, counted
from pipeline.reading import reason
from pipeline.record import checkpoint
from pipeline.record.checkpoint import Manifest
from pipeline.record.runs import open_run
from pipeline.rundir import RunDir

if TYPE_CHECKING:
    import torch

FILE_BYTES = 4 << 30  # size of one file of weights; the host holds one at a time
SHOWN = 10  # steps in a message


def export_model(run: Path, step: int | None, target: Path, merge: Path | None = None) -> None:
    """Write the newest complete checkpoint, or the one of `step`, into the new folder `target`; if several stages train
    a model, one folder per stage below it. An adapter is written as PEFT does, or added to the model in the folder
    `merge`. Raises GraphError or CheckpointError, and leaves nothing then."""
    open_run(run)  # raises if there is no such run
    run_dir = RunDir(run)
    _check_target(run, target)
    folder, manifest = _read(run_dir, step)
    described = sorted(Path(name).parent for name in manifest.files if name.endswith(f"/{MODEL}/{TENSORS}"))
    if not described:
        raise GraphError(
            Problem(
                where=str(folder),
                what="the checkpoint describes no model",
                why="a backend that saves the model's description writes it beside the weights",
                fix="resume the run, which writes newer checkpoints with this version, or name another run",
            )
        )
    adapters = [one for one in described if (one / CONFIG).as_posix() in manifest.files]
    if merge is not None and len(adapters) != 1:
        raise GraphError(_not_one(folder, merge, len(adapters)))
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        for one in described:
            made = partial if len(described) == 1 else partial / one.parts[0]
            made.mkdir(parents=True)
            with _whole(folder / one, target):
                _write(folder, one, manifest, made)
            if merge is not None and one in adapters:
                with TemporaryDirectory(dir=target.parent) as apart:
                    adapter = made.rename(Path(apart) / "adapter")
                    made.mkdir()
                    write_merged(adapter, merge, made)
                    other = other_base(adapter, merge)
                    console.print_problems([other] if other else [])
        checkpoint.sync_all(partial)
        partial.rename(target)
    except OSError as error:
        raise GraphError(
            Problem(
                where=f"--model {target}",
                what=f"{error.filename or target} cannot be read or written: {error.strerror}",
                why="the export is a new folder",
                fix="free disk space, or use another path",
            )
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    size_bytes = sum(path.stat().st_size for path in target.rglob("*.safetensors"))
    kind = "adapter" if adapters and merge is None else "model"
    print(f"{target}: the {kind} after step {manifest.steps}, {size_bytes:,} bytes of weights")


def _not_one(folder: Path, merge: Path, adapters: int) -> Problem:
    return Problem(
        where=f"--merge {merge}",
        what=f"the checkpoint in {str(folder)!r} has {counted(adapters, 'adapter')}",
        why="one adapter is added to the model that it belongs to",
        fix="leave out --merge",
    )


def _check_target(run: Path, target: Path) -> None:
    what = ""
    if target.resolve().is_relative_to(run.resolve()):
        what, why = "it lies inside the run directory", "a run directory holds only what its run wrote"
    elif target.exists() or target.is_symlink():
        what, why = "it already exists", "an export never overwrites anything"
    if what:
        raise GraphError(Problem(where=f"--model {target}", what=what, why=why, fix="name a new folder"))


def _read(run_dir: RunDir, step: int | None) -> tuple[Path, Manifest]:
    """Check a checkpoint. Returns its folder and manifest."""
    steps = run_dir.checkpoint_steps()
    if step is not None and steps and step not in steps:
        near = min(steps, key=lambda other: abs(other - step))
        listed = ", ".join(map(str, steps[-SHOWN:]))
        raise GraphError(
            Problem(
                where=f"--step {step}",
                what=f"there is no checkpoint after step {step}",
                why=f"the run has {counted(len(steps), 'checkpoint')}, "
                f"{'the last after steps' if len(steps) > SHOWN else 'after steps'} {listed}",
                fix=f"--step {near}",
            )
        )
    try:
        folder, manifest, damaged = checkpoint.read(run_dir, step)
    except CheckpointError as error:
        others = [other for other in steps if other != step]
        fix = f"--step {others[-1]}" if step is not None and others else "run it again"
        raise CheckpointError(*(msgspec.structs.replace(problem, fix=fix) for problem in error.problems)) from error
    console.print_problems(msgspec.structs.replace(problem, warning=True) for problem in damaged)
    return folder, manifest


def _write(folder: Path, described: Path, manifest: Manifest, made: Path) -> None:
    """Write one model. `described` is its folder inside the checkpoint."""
    from safetensors.torch import save_file

    tensors, saved = read_tensors_json(folder / described), _SavedTensors(folder, described.parent, manifest)
    files: list[list[str]] = []
    kinds: set[str] = set()
    for lot in _lots(tensors, saved):
        save_file(lot, made / _part(len(files)), metadata={"format": "pt"})
        files.append([*lot])
        kinds |= {str(tensor.dtype).removeprefix("torch.") for tensor in lot.values() if tensor.is_floating_point()}
    names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    if len(files) == 1:
        names = [ADAPTER if (described / CONFIG).as_posix() in manifest.files else "model.safetensors"]
    for number, name in enumerate(names):
        (made / _part(number)).rename(made / name)
    if len(files) > 1:
        index = {tensor: name for name, held in zip(names, files) for tensor in held}
        total = sum(path.stat().st_size for path in made.glob("*.safetensors"))
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2, sort_keys=True)
        (made / "model.safetensors.index.json").write_text(text)
    for file in manifest.files:
        path = Path(file)
        if path.parent == described and path.name == "config.json":
            _write_config(folder / path, made / path.name, kinds)
        elif path.parent == described and path.name != TENSORS:
            shutil.copyfile(folder / path, made / path.name)


def _write_config(path: Path, made: Path, kinds: set[str]) -> None:
    """Copy a configuration with the dtype of the weights, in which transformers then loads them."""
    config: dict[str, Any] = json.loads(path.read_bytes())
    if len(kinds) == 1:
        config |= dict.fromkeys(config.keys() & {"torch_dtype"} | {"dtype"}, *kinds)
    made.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _lots(tensors: dict[str, Pieces], saved: _SavedTensors) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors by name, a few GiB at a time."""
    lot: dict[str, torch.Tensor] = {}
    size_bytes = 0
    for name, whole in tensors.items():
        tensor = saved.tensor(name, whole)
        if lot and size_bytes + tensor.nbytes > FILE_BYTES:
            yield lot
            lot, size_bytes = {}, 0
        lot[name] = tensor
        size_bytes += tensor.nbytes
    yield lot


@contextmanager
def _whole(described: Path, target: Path) -> Iterator[None]:
    """Turn the errors of reading a saved model into a CheckpointError. Those of the disk pass, and name the target if
    they name no file."""
    from safetensors import SafetensorError

    try:
        with as_os_error(target):
            yield
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            Problem(
                where=str(described.parent),
                what=f"the saved model cannot be read: {reason(error)}",
                why="a stage writes its weights, and a description of them, completely",
                fix="export another step",
            )
        ) from error


def _covered(whole: Pieces) -> bool:
    """Return whether the pieces lie in the tensor and have no more numbers than it has."""
    inside = all(
        len(piece.box) == len(whole.shape)
        and piece.at >= 0
        and all(0 <= start <= stop <= size for (start, stop), size in zip(piece.box, whole.shape))
        for piece in whole.pieces
    )
    sizes = (prod(stop - start for start, stop in piece.box) for piece in whole.pieces)
    return inside and sum(sizes) <= prod(whole.shape)


def _part(number: int) -> str:
    return f"part-{number}.safetensors"


class _SavedTensors:
    """The tensors that a stage saved. Keeps the last one that was read, since neighbors are pieces of one."""

    def __init__(self, folder: Path, stage: Path, manifest: Manifest) -> None:
        self._folder, self._stage, self._manifest = folder, stage, manifest
        self._files: dict[str, dict[str, Any]] = {}  # by the start of the files' names: the open file of each tensor
        self._last: tuple[tuple[str, str], torch.Tensor] | None = None

    def tensor(self, name: str, whole: Pieces) -> torch.Tensor:
        """Put a tensor together. Raises CheckpointError if its pieces are not there, or do not cover it."""
        import torch

        made, filled = None, 0
        for piece in whole.pieces if _covered(whole) else ():
            sizes = [stop - start for start, stop in piece.box]
            flat = self._flat(piece.file, piece.tensor)
            if flat is not None and piece.at + prod(sizes) <= len(flat):
                made = torch.empty(whole.shape, dtype=flat.dtype) if made is None else made
                run = flat[piece.at : piece.at + prod(sizes)]
                made[tuple(slice(*limits) for limits in piece.box)] = run.view(sizes)
                filled += prod(sizes)
        if made is None or filled != prod(whole.shape):
            raise CheckpointError(
                Problem(
                    where=str(self._folder / self._stage / MODEL / TENSORS),
                    what=f"the saved files have {filled:,} of the {prod(whole.shape):,} numbers of tensor {name!r}",
                    why="an exported model is complete",
                    fix="export another step",
                )
            )
        return made

    def _flat(self, file: str, tensor: str) -> torch.Tensor | None:
        """The elements of a saved tensor in a row; None if there is no such tensor."""
        if self._last is None or self._last[0] != (file, tensor):
            if file not in self._files:
                self._files[file] = dict(self._open(file))
            if tensor not in self._files[file]:
                return None
            self._last = (file, tensor), self._files[file][tensor].get_tensor(tensor).reshape(-1)
        return self._last[1]

    def _open(self, file: str) -> Iterator[tuple[str, Any]]:
        from safetensors import safe_open

        for name in self._manifest.files:
            path = Path(name)
            if path.parent == self._stage and path.suffix == ".safetensors" and path.name.startswith(file):
                opened = safe_open(self._folder / path, "pt")
                yield from ((key, opened) for key in opened.keys())  # noqa: SIM118 - it is no dict
