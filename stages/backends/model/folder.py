"""A model as a Hugging Face folder, for engines that load only folders. Knows files; trains nothing itself.

The torch backend first builds a model with a `config` or a `warm_start`, once per machine: the first worker that needs
it writes the folder, the others wait. Sampler and trainer thus start from the same bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from pipeline import Model, StageError
from pipeline.declare.saved_model import Pieces
from pipeline.errors import Problem, as_os_error
from stages.backends.model.adapters import PEFT, write_adapter_config
from stages.backends.model.build import load_network, load_tokenizer
from stages.backends.model.text import identity
from stages.backends.model.vision import write_processor
from stages.backends.model.weights import weights
from stages.model_files import refuse_code
from stages.model_weights import refuse_weights

DEADLINE_S = 1800.0  # that a worker waits for another one to build the model
LOOK_S = 0.2
_OWNERS = 0o700  # the mode of a folder that only its owner can enter


def model_folder(model: Model, run_dir: Path | None) -> Path:
    """The folder with a model's weights, configuration and tokenizer.

    A run keeps it in its run directory; without one it is in the temporary directory. Raises StageError if the source
    cannot be loaded.
    """
    model = identity(model)
    refuse_code(model)
    if model.config is None and model.warm_start is None:
        folder = Path(model.source) if Path(model.source).is_dir() else _from_hub(model)
        refuse_weights(model, folder)
        return folder
    described = f"{model.source} {model.config} {model.alphabet} {model.warm_start} {model.seed} {torch.__version__}"
    digest = hashlib.sha256(described.encode()).hexdigest()[:12]
    root = models_folder(run_dir)
    folder = root / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', model.source)}-{digest}"
    with alone(root / f"{folder.name}.lock"):
        if not folder.is_dir():
            tokenizer = load_tokenizer(model)
            network = load_network(model, tokenizer, dtype=torch.float32, device=torch.device("cpu"))
            with tempfile.TemporaryDirectory(dir=root) as made:
                _write(network, tokenizer, Path(made) / "model")
                (Path(made) / "model").rename(folder)
    return folder


def models_folder(run_dir: Path | None) -> Path:
    """Return where a run, or this user without one, keeps the models that it builds."""
    parent = run_dir or Path(tempfile.gettempdir()) / f"sluice-{os.getuid()}"
    parent.mkdir(_OWNERS, parents=True, exist_ok=True)
    root = parent / "models"
    root.mkdir(_OWNERS, exist_ok=True)
    return root


def _write(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a model's folder from any rank of a process group: transformers' own function writes on rank 0 only.

    Tensors have the names of published folders, one per expert, which engines read; the network holds experts fused.
    """
    write_description(network, tokenizer, folder)
    published = revert_weight_conversion(network, weights(network))
    contiguous = {name: tensor.contiguous() for name, tensor in published.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


def write_description(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write configuration and tokenizer into a new folder."""
    with as_os_error(folder):
        folder.mkdir(_OWNERS)
        network.config.architectures = [type(network).__name__.removeprefix("FSDP")]
        network.config.save_pretrained(folder)
        if network.generation_config is not None:
            network.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_processor(network.config, str(network.config.name_or_path), folder)


def base_of(model: Model, run_dir: Path | None) -> str | Path:
    """Where the model lies to which an adapter belongs: its own source, or the folder of one that is built."""
    is_built = model.config is not None or model.warm_start is not None
    return model_folder(model, run_dir) if is_built else model.source


def write_adapter_description(
    model: Model, tensors: Mapping[str, Pieces], tokenizer: PreTrainedTokenizerBase, base: str | Path, folder: Path
) -> dict[str, Pieces]:
    """Write what makes an adapter a folder of PEFT, into a new folder: its configuration, which names the `base`, and
    the tokenizer. Returns the tensors under PEFT's names."""
    with as_os_error(folder):
        folder.mkdir(_OWNERS)
        layers = {name.rsplit(".", 3)[1] for name in tensors}
        write_adapter_config(model.lora, layers, str(base), folder)
        tokenizer.save_pretrained(folder)
    return {PEFT + name: found for name, found in tensors.items()}


def _from_hub(model: Model) -> Path:
    """The local copy of a hub model, downloaded if missing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model.source, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"]))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise StageError(
            Problem(
                where=str(model.location),
                what=f"the model {model.source!r} cannot be fetched: {str(error).splitlines()[0]}",
                why="it is neither a local folder nor in the hub's local cache",
                fix="the path of a folder with the model, or a hub name that this machine can reach",
            )
        ) from error


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold a lock file; the lock of a dead process is free."""
    with path.open("w") as file:
        until_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise StageError(
                        Problem(
                            where=str(path),
                            what=f"another worker has been building the model for {DEADLINE_S:g} s",
                            why="all workers of a machine start from one folder",
                            fix="end that process, or build the folder beforehand and pass it as the model",
                        )
                    ) from None
                time.sleep(LOOK_S)
        yield
