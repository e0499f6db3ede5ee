"""What the training engines have in common: the sequence of an update, learners, refits, memory, and speed.

Knows no network, no process groups and no optimizer: each engine has its own. The loss of a minibatch is
normalized by counts over the whole minibatch of all ranks, so it does not depend on the split into shards and
microbatches; gradients are summed over ranks.

Legend: N samples, T longest response.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from ops.flops import Transformer, model_flops, peak_tflops
from ops.refit.share import Share
from ops.refit.transports import Transport
from pipeline import Model, StageError
from pipeline.declare.columns import Ragged
from pipeline.declare.parameters import is_whole
from pipeline.declare.ranks import Ranks
from pipeline.declare.saved_model import MODEL
from pipeline.declare.sharding import Update
from pipeline.errors import CheckpointError, Problem, naming, shown
from pipeline.reading import BROKEN, check_files, reason
from stages.backends.device import Parking, bytes_in_use, host_copy, release_unused, sent
from stages.backends.interface import Batch, Learner, Optimization, Route
from stages.backends.model.adapters import read_adapter_config
from stages.backends.model.padding import pad_right
from stages.backends.model.places import Placed
from stages.backends.model.routes import Disagreement
from stages.backends.model.tensor_files import write_tensors
from stages.backends.model.text import Tokenizers, identity
from stages.backends.objective import MAXIMA, Scored, on_device, read
from stages.backends.refit.quantizer import Reduce
from stages.backends.refit.source import Source
from stages.lora import LoRA
from stages.losses import PolicyLoss

COUNTERS, _BACKEND = "learner.json", "backend"
File: TypeAlias = tuple[str, Iterable[tuple[str, torch.Tensor]]]  # a name, and tensors by name


class BaseLearner(Learner, ABC):
    """A network with its optimizer. All ranks call every method together."""

    network: Any
    backend: str  # by name
    lora: LoRA | None = None  # the adapter that is trained, its targets by name
    _computing: Callable[[], AbstractContextManager[None]] = nullcontext  # the context of an update

    def __init__(self, settings: Optimization, device: torch.device, ranks: Ranks) -> None:
        self.settings, self.ranks, self._device = settings, ranks, device
        self.updates = self.skipped = 0
        self.parking, self.parked_model = Parking(device), Parking(device)
        self._own: dict[int, torch.Tensor] = {}  # by sample: the logprobs of an update's own pass, on the device
        self._own_logprobs: Ragged | None = None
        self.disagreement: Disagreement | None = None  # of the routers with the batch's routes

    def update(
        self, batch: Batch, loss: PolicyLoss, *, temperature: float, update: Update, packed: bool = False
    ) -> dict[str, float]:
        """Run one optimizer update. If its loss or gradient is not finite, it changes nothing on any rank, and counts
        as skipped."""
        self.parking.arrive()
        self._own.clear()
        if self.disagreement:
            self.disagreement.clear()
        with self._computing():
            sums: dict[str, float] = {}
            for found in read(self._backward(batch, loss, temperature, update, packed)):
                for name, value in found.items():
                    before = sums.get(name, 0.0)
                    sums[name] = max(before, value) if name in MAXIMA else before + value
            if batch.old_logprobs is None:
                self._own_logprobs = self._gathered(batch.response_ids, update)
            sums, norm = self._reduce(sums)
            rate = self.settings.learning_rate(self.updates)
            finite = math.isfinite(sums["loss"]) and math.isfinite(norm)
            self._step(rate, norm, finite)
        self.updates += 1
        self.skipped += not finite
        means = {name: value if name in ("loss", *MAXIMA) else value / update.tokens for name, value in sums.items()}
        if self.disagreement and batch.routes:
            means["router_disagreement"] = self.disagreement.share(self._device)
        return means | {"grad_norm": norm, "lr": rate, "skipped": float(not finite)}

    def own_logprobs(self) -> Ragged:
        """Return what the last update's pass computed, if its batch had no old logprobs."""
        assert self._own_logprobs is not None
        return self._own_logprobs

    def _gathered(self, response_ids: Ragged, update: Update) -> Ragged:
        samples = sorted(chain.from_iterable(microbatch.samples for microbatch in update.microbatches))
        lengths = tuple(response_ids.lengths[sample] for sample in samples)
        values = torch.empty(sum(lengths), device=self._device)
        if self._own:
            values = torch.cat([self._own[sample] for sample in samples])
        return Ragged(self._from_last(values).clamp_(max=0.0).cpu(), lengths)

    def _from_last(self, values: torch.Tensor) -> torch.Tensor:
        """Return what the ranks have that compute the logprobs: all have them, unless layers are divided."""
        return values

    def _objective(
        self, batch: Batch, loss: PolicyLoss, update: Update, samples: Sequence[int],
        logprobs_NT: torch.Tensor, entropy_NT: torch.Tensor, mask_NT: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
        """Compute the objective of one microbatch of an update, which has these samples."""
        part, old_NT = batch.at(samples), logprobs_NT.detach()

        def padded(column: torch.Tensor | Ragged) -> torch.Tensor:
            wide = pad_right(column, 0, mask_NT.shape[1]) if isinstance(column, Ragged) else column
            return sent(wide, mask_NT.device)

        if part.old_logprobs is None:
            rows = zip(samples, old_NT.float(), part.response_ids.lengths)
            self._own |= {sample: row_T[:length] for sample, row_T, length in rows}
        if part.sampled is not None:
            mask_NT = mask_NT & padded(part.sampled)
        scored = Scored(
            logprobs_NT=logprobs_NT,
            old_logprobs_NT=padded(part.old_logprobs) if part.old_logprobs else old_NT,
            rollout_logprobs_NT=padded(part.rollout_logprobs) if part.rollout_logprobs else None,
            advantage=padded(part.advantage),
            mask_NT=mask_NT,
            ref_logprobs_NT=padded(part.ref_logprobs) if part.ref_logprobs else None,
            entropy_NT=entropy_NT,
            columns={name: padded(column) for name, column in part.columns.items()},
        )
        return on_device(loss, scored, tokens=update.tokens, samples=update.samples)

    @abstractmethod
    def _backward(
        self, batch: Batch, loss: PolicyLoss, temperature: float, update: Update, packed: bool
    ) -> Sequence[dict[str, torch.Tensor]]:
        """Accumulate the gradients of this rank's microbatches. Returns sums over the tokens of each, on the device:
        reading them would make the device wait."""

    @abstractmethod
    def _reduce(self, sums: dict[str, float]) -> tuple[dict[str, float], float]:
        """Combine gradients and metrics over all ranks. Returns the metrics, and the norm of the whole gradient."""

    @abstractmethod
    def _step(self, rate: float, norm: float, finite: bool) -> None:
        """Clip the gradients and step; if they are not `finite`, leave the weights as they are."""

    def park(self, room: int | None = None) -> None:
        """Move moments and master weights to the host, where they can be saved, and the model of an adapter, which no
        refit needs. On a GPU, moves only enough to free `room` bytes, the model last."""
        self._park(room)
        self.parked_model.park(self._constant(), room, constant=True)

    @abstractmethod
    def _park(self, room: int | None) -> None:
        """Move moments and master weights."""

    def _constant(self) -> list[torch.Tensor]:
        """The weights of the model that an adapter changes; none where the whole model is trained."""
        return [each for each in self.network.parameters() if not each.requires_grad] if self.lora else []

    def leave(self) -> None:
        """Move them back, overlapped with work that does not need them."""
        self.parked_model.leave()
        self.parked_model.arrive()  # the next pass needs it
        self.parking.leave()

    def save(self, folder: Path) -> None:
        """Save weights and optimizer, bit-exact, as safetensors and JSON; reading them executes no code. One file's
        tensors at a time are copied to the host."""
        self.parking.arrive()
        for name, tensors in self._files():
            write_tensors({key: tensor.detach().cpu().contiguous() for key, tensor in tensors}, folder / name)
        self._describe(folder, self._counters())

    @torch.no_grad()
    def copied(self) -> Callable[[Path], None]:
        """Copy weights and optimizer to the host. Returns a function that writes what `save` would have written."""
        self.parking.arrive()
        held = {name: {key: host_copy(tensor) for key, tensor in file} for name, file in self._files()}
        counters = self._counters()

        def write(folder: Path) -> None:
            while held:
                name, tensors = held.popitem()
                write_tensors(tensors, folder / name)
            self._describe(folder, counters)

        return write

    def _counters(self) -> dict[str, int]:
        return {"updates": self.updates, "skipped": self.skipped}

    def _describe(self, folder: Path, counters: dict[str, int]) -> None:
        """Let rank 0 write what is no tensor."""
        if self.ranks.rank == 0:
            with naming(folder / COUNTERS):
                written = {_BACKEND: self.backend, **self._described(counters)}
                (folder / COUNTERS).write_text(json.dumps(written))

    @abstractmethod
    def saved_bytes(self) -> int:
        """How many bytes of tensors this rank saves."""

    @abstractmethod
    def _files(self) -> Iterator[File]:
        """Yield the files that this rank saves, with tensors on any device. All ranks exhaust it together."""

    def _described(self, counters: dict[str, int]) -> dict[str, Any]:
        """What `_read` finds in the file `COUNTERS`, as JSON, beside the backend."""
        return counters

    def restore(self, folder: Path) -> None:
        """Load what `save` wrote into `folder`. Raises CheckpointError if a file is missing or incomplete, or if
        another backend wrote it, or another adapter is in it."""
        self.parking.arrive()
        try:
            check_files(folder)
            self._check_same(folder)
            counters = self._read(folder)
            self.updates, self.skipped = counters["updates"], counters["skipped"]
            if not (is_whole(self.updates, 0) and is_whole(self.skipped, 0)):
                raise ValueError(f"{COUNTERS} counts {shown(self.updates)} updates, {shown(self.skipped)} skipped ones")
        except torch.OutOfMemoryError:
            raise
        except (*BROKEN, SafetensorError, LookupError, TypeError, RuntimeError) as error:  # RuntimeError: other shapes
            what = f"{error} is missing" if isinstance(error, KeyError) else reason(error)
            raise CheckpointError(
                Problem(
                    where=str(folder),
                    what=f"the learner's state cannot be read: {what}",
                    why="it is learner.json and safetensors files, all complete",
                    fix="resume from another checkpoint",
                )
            ) from error

    def _check_same(self, folder: Path) -> None:
        """Raise CheckpointError if the state is that of another backend or adapter, as far as the folder says: that of
        an older version does not name its backend, and where no model is described, its adapter is not known."""
        written = json.loads((folder / COUNTERS).read_bytes())
        if not isinstance(written, dict):
            raise ValueError(f"{COUNTERS} is no JSON object")
        backend = written.get(_BACKEND, self.backend)
        if backend != self.backend:
            what = f"the backend {backend!r} saved the learner's state, and the learner now has {self.backend!r}"
            why = "each backend saves weights and optimizer in a form of its own"
            raise CheckpointError(_changed(folder, what, why, f"with backend={backend!r} for the learner's group"))
        if not (folder / MODEL).is_dir():
            return
        saved, own = read_adapter_config(folder / MODEL), self.lora
        own = own and replace(own, targets=tuple(sorted(own.targets)))
        if saved != own:
            what = f"the checkpoint has {_adapter(saved, own)}, and the model now has {_adapter(own, saved)}"
            fix = f"with lora={saved} of the Model" if saved else "without lora= of the Model"
            raise CheckpointError(_changed(folder, what, "a resumed run continues as if it had not stopped", fix))

    @abstractmethod
    def _read(self, folder: Path) -> dict[str, int]:
        """Load weights and optimizer. Returns the counters."""


class BaseTrainer(Tokenizers, ABC):
    """The `rank`-th worker of a group that trains, in `dtype`. An engine adds `score` and `trained_weights`."""

    def __init__(self, device: torch.device, dtype: torch.dtype, rank: int) -> None:
        super().__init__()
        self.device, self.dtype = device, dtype
        self._rank = rank
        self._learners: dict[Model, BaseLearner] = {}
        self._sources: dict[Model, Source] = {}

    def learner(self, model: Model, optimization: Optimization) -> BaseLearner:
        """The trained copy with an optimizer. Raises StageError if the model already has one."""
        key = identity(model)
        if key in self._learners:
            raise StageError(
                Problem(
                    where=str(model.location),
                    what=f"two stages train the model {model.source!r}",
                    why="its optimizer has one state",
                    fix="use one Train stage per model",
                )
            )
        self._learners[key] = self._new_learner(model, optimization)
        return self._learners[key]

    @abstractmethod
    def _new_learner(self, model: Model, optimization: Optimization) -> BaseLearner:
        """A learner of the trained copy."""

    def share(self, model: Model, transport: Transport) -> Share:
        """This rank's part of the trained copy, as this transport offers it."""
        return self._share(model, transport, None)

    def share_quantized(self, model: Model, transport: Transport) -> Share:
        """This rank's part of the quantized copy. Its record has the error of each layer."""
        return self._share(model, transport, reduce)

    def _share(self, model: Model, transport: Transport, quantize: Reduce | None) -> Share:
        key, (tensors, places, held) = identity(model), self._placed(model)
        if key not in self._sources:
            self._sources[key] = Source(self.device, self._rank, tensors, places, held, quantize=quantize)
        return self._sources[key].share(held, transport)

    def carry(self, model: Model, shares: Sequence[Share], version: int, route: Route) -> Mapping[str, float]:
        """Send what `share` returned to the ranks that serve. Returns metrics."""
        return self._sources[identity(model)].carry(shares, version, route)

    @abstractmethod
    def _placed(self, model: Model) -> Placed:
        """The trained copy for a refit: all its tensors, the places of this rank's part, and that part, by buffer."""

    def sleep(self, room: int | None = None) -> tuple[int, int]:
        """Free the memory of optimizers until `wake`; on a GPU only as much as needed to free `room` bytes. Weights
        stay, for a refit. Returns the bytes in use before and after."""
        before_bytes = bytes_in_use(self.device)
        for learner in self._learners.values():
            learner.park(room)
        if room is None:  # an engine that starts beside it counts what is free
            release_unused(self.device)
        return before_bytes, bytes_in_use(self.device)

    def wake(self) -> tuple[int, int]:
        """Reclaim the memory. Returns what `sleep` returns."""
        before_bytes = bytes_in_use(self.device)
        for learner in self._learners.values():
            learner.leave()
        return before_bytes, bytes_in_use(self.device)

    def flops(
        self, model: Model, prompt_ids: Ragged, response_ids: Ragged, *, training: bool, spared: Sequence[int] = ()
    ) -> float | None:
        """Operations of a forward pass of the whole model, or of both passes, without those of an adapter; None unless
        it is a Llama-style transformer."""
        try:
            shape = Transformer.of(self._config(model))
        except ValueError:
            return None
        lengths = [p + t - 1 for p, t in zip(prompt_ids.lengths, response_ids.lengths)]  # the last token is not input
        kind = {"training": training, "frozen": model.lora is not None}
        done = model_flops(shape, lengths, logits=response_ids.lengths, **kind)
        return done - model_flops(shape, spared, logits=[0] * len(spared), **kind)

    @abstractmethod
    def describe(self, model: Model, folder: Path) -> None:
        """Write the configuration and tokenizer of the trained copy into a new folder, and where its tensors lie in
        the files that the learner saves. All ranks call it; rank 0 writes."""

    @abstractmethod
    def _config(self, model: Model) -> Mapping[str, Any]:
        """The model's Hugging Face config."""

    def peak_tflops(self) -> float | None:
        """Peak TFLOP/s of the GPU, by its name; None on a CPU."""
        return peak_tflops(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None


def _adapter(lora: LoRA | None, other: LoRA | None) -> str:
    """Describe an adapter, by what it has unlike another one."""
    own = {} if lora is None else vars(lora)
    differs = [f"{name}={value}" for name, value in own.items() if other is None or value != getattr(other, name)]
    return f"an adapter with {', '.join(differs)}" if differs else "no adapter"


def _changed(folder: Path, what: str, why: str, fix: str) -> Problem:
    return Problem(where=str(folder), what=what, why=why, fix=f"resume {fix}, or start a new run in another folder")


def reduce(tensor: torch.Tensor, how: Literal["max", "sum"]) -> None:
    """Combine a tensor over all workers of this group, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
