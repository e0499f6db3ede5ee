"""Refit: copies the trained weights to the sampler.

    Refit(policy, source=learner, target=sampler)

Each source rank offers its part, and each target rank writes what it needs into its own storage. The transport decides
how; the bytes that arrive are the same. The receiving side computes a checksum of what it then serves, and a mismatch
is an error. So an acknowledged version identifies the bytes that generate, by a layout-independent hash.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, ClassVar, Literal

from ops.refit.transports import TRANSPORTS, Transport, is_taken, missing, wrong_parameters
from pipeline import Graph, Model, Output, Stage, StageContext, StageError, Task, WorkerGroup
from pipeline.declare.calls import required
from pipeline.declare.task import Rendezvous
from pipeline.declare.work import GpuPart, GpuWork, Load
from pipeline.errors import Problem, counted, shown
from stages.backends import Route, ServedWeights, asked, backend_problems, engine, is_installed, model_problems
from stages.forecast.shape import HALF, divided
from stages.vocabulary import SERVED_WEIGHTS, TRAINED_WEIGHTS

if TYPE_CHECKING:
    TransportName = str
else:
    TransportName = Literal[("auto", *TRANSPORTS)]  # the type of a recipe's flag
_TAKEN = ("size_bytes", "offer_ms", "carry_ms")  # the stage's own metrics, besides path_NAME
NCCL = "nccl.core"
_COPIES = {  # of the weights: kept by the source, and by the target (benchmarks/results/gpu.refit_matrix.apart.json)
    "pull": (1.0, 0.0), "messages": (1.0, 0.0), "golden": (1.0, 1.0), "broadcast": (1.9, 0.9), "p2p": (1.5, 0.5),
}  # fmt: skip
NEEDS_NCCL, INSTALL_NCCL = "the package nccl4py, which is not installed", "pip install 'sluice-rl[nccl]'"


@dataclass(frozen=True)
class Refit(Stage):
    """Pushes the trained copy of `model` on `source` into the served copy on `target`.

    `transport` is a name, a description with its sizes, as Broadcast(bucket_bytes=...) or P2P(keep_copy=False)
    (docs/refit.md), or an instance of your own class (docs/your-own-transport.md). "auto" is "pull" if all
    workers are on one machine; otherwise "p2p" between GPUs, "gloo" between CPUs, and "messages" if both groups share
    GPUs.

    pull        the target reads the source's memory, on one machine
    messages    each rank's part as one message through the executor; the target takes what it needs
    p2p, gloo   each source rank sends each target rank what it needs, over NCCL between GPUs or gloo between CPUs
    broadcast   whole tensors, gathered on one rank and broadcast to all, over NCCL or gloo
    tree        waves: a sampler that has a full version forwards it; over gloo, for many samplers and few trainers
    golden      the reference for the others: messages, whole tensors, the sampler's own loader; slow

    The version is the number of steps before it: the first refit, before the first step of a new run, is version 0, so
    the sampler starts from the trainer's weights. Metrics: `size_bytes` of the model, `path_pull` (or another
    transport) = 1, `received_bytes`, `loader_bytes` (of those, what vLLM's own loader wrote), `lookups` (0 after the
    first versions), and milliseconds of each part. Memory for refits, of a worker of the source and of the target:
    `kept_bytes_source` and `kept_bytes_target` stay allocated between versions, `peak_bytes_source` and
    `peak_bytes_target` are the most during one. The model's own weights do not count.

    If `target` has weights="fp8", the source quantizes the matrices: `quant_error_layer_3` is the Frobenius norm of the
    error of layer 3 over that of its weights, `quant_error` the mean over the layers, `quant_error_worst` the largest.

    If `target` has cache="fp8", the scales of keys follow the weights: `cache_scale_k_min` and `cache_scale_k_max` are
    the smallest and the largest over the layers, and so for values (`v`) and queries (`q`); `bound_ms` is what it takes
    to compute them.
    """

    model: Model
    _: KW_ONLY
    source: WorkerGroup
    target: WorkerGroup
    transport: Transport | str = "auto"

    name = "refit"
    shape = "transfer"
    _transport: ClassVar[Transport | None]  # set by __post_init__
    reads = (TRAINED_WEIGHTS,)
    writes = (SERVED_WEIGHTS,)
    per = "batch"

    def __post_init__(self) -> None:
        """Look up a name here, since workers do not know registered transports."""
        named = TRANSPORTS.get(self.transport) if isinstance(self.transport, str) else self.transport
        object.__setattr__(self, "_transport", named)

    @property
    def uses(self) -> tuple[Model, ...]:
        """The model whose weights are transferred."""
        return (self.model,)

    def groups(self) -> tuple[WorkerGroup, ...]:
        """Source and target."""
        return (self.source, self.target)

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Check both backends, the model, equal weight dtypes at both ends, and the transport."""
        yield from backend_problems(self.source, self, "train")
        yield from backend_problems(self.target, self, "sample")
        yield from model_problems(self.model)
        if self.target.weights != "auto" and self.source.own is not None:
            yield Problem(
                where=str(self.location),
                what=f"stage {self.name!r} goes from {self.source.backend!r} to weights={self.target.weights!r}",
                why="the source quantizes, which the backends 'torch' and 'megatron' do",
                fix="weights='auto', or one of these backends",
            )
        if (self.source.gpus > 0) != (self.target.gpus > 0):
            yield Problem(
                where=str(self.location),
                what=f"stage {self.name!r} goes from {counted(self.source.gpus, 'GPU')} to {self.target.gpus}",
                why="the torch backend has bfloat16 weights on GPUs and float32 weights on CPUs",
                fix="gpus on both worker groups, or on neither",
            )
        if self.transport == "auto" and self._between_gpus() and not self._share_gpus() and self._lacks_nccl():
            yield Problem(
                where=str(self.location),
                what=f"stage {self.name!r} has transport='auto'",
                why=f"between machines it is 'p2p', which needs {NEEDS_NCCL}; on one machine it is 'pull'",
                fix=f"{INSTALL_NCCL}, or keep both worker groups on one machine",
                warning=True,
            )
        for why, fix in (*self._objections(), *wrong_parameters(self._transport)):
            what = f"stage {self.name!r} has transport={shown(self.transport)}"
            yield Problem(where=str(self.location), what=what, why=why, fix=fix)

    def _objections(self) -> Iterable[tuple[str, str]]:
        """Why this transport is invalid, and what to write instead."""
        transport = self._transport
        if self.transport == "auto":
            return
        if transport is None and isinstance(self.transport, str):
            near = get_close_matches(self.transport, names := ["auto", *TRANSPORTS], n=1)
            yield "no transport has that name", f"did you mean {near[0]!r}?" if near else f"one of {_listed(names)}"
        elif what := missing(transport):
            yield what, _remedy(self.transport)
        elif transport is not None:
            yield from self._misplaced(transport)

    def _misplaced(self, transport: Transport) -> Iterable[tuple[str, str]]:
        on_gpus = self._between_gpus()
        device, name = ("cuda", "GPUs") if on_gpus else ("cpu", "CPUs")
        if device not in transport.devices:
            fits = [each.name for each in TRANSPORTS.values() if device in each.devices]
            yield f"it does not work between {name}", f"transport='auto', or one of {_listed(fits)}"
        elif not isinstance(transport.keep_copy, bool):
            yield "keep_copy must be True or False", "keep_copy=True"
        elif not transport.keep_copy and not transport.both_carry:
            yield (
                "samplers read the trainer's copy while training continues, so there must be one",
                f"keep_copy=True, or {'P2P' if on_gpus else 'Gloo'}(keep_copy=False), which the trainer waits for",
            )
        elif on_gpus and transport.both_carry and self._share_gpus():
            yield "both sides share GPUs, and NCCL allows one rank per GPU", "transport='auto'"
        elif on_gpus and transport.both_carry and self._lacks_nccl():
            yield f"it needs {NEEDS_NCCL}", INSTALL_NCCL

    def _lacks_nccl(self) -> bool:
        """Whether NCCL's package is missing where the workers of one side run."""
        sides = [group for group in self.groups() if group.python is not None]
        here = len(sides) < 2 and not is_installed(NCCL)
        return here or any(asked((NCCL,), group).missing for group in sides)

    def meets(self, is_near: bool) -> bool:
        """Whether both sides carry. Raises StageError for a one-machine transport between machines."""
        transport = self.path(is_near)
        if transport.one_machine and not is_near:
            raise StageError(
                Problem(
                    where=str(self.location),
                    what=f"stage {self.name!r} has transport={transport.name!r} and workers on several machines",
                    why="this transport needs all workers on one machine",
                    fix="transport='auto', or worker groups that fit on one machine",
                )
            )
        return transport.both_carry

    def path(self, is_near: bool) -> Transport:
        """The transport to use; `is_near` is whether all workers are on one machine."""
        if self._transport is not None:
            return self._transport
        if is_near:
            return TRANSPORTS["pull"]
        if self._share_gpus():
            return TRANSPORTS["messages"]
        return TRANSPORTS["p2p" if self.source.gpus > 0 else "gloo"]

    def work(self, load: Load) -> GpuWork | None:
        """The weights of the most loaded receiver, read and moved once; None unless both sides have GPUs."""
        if not self._between_gpus():
            return None
        size = self._sent_bytes(self.target)
        return GpuWork(kind=f"refit.{'shared' if self._share_gpus() else 'apart'}", moved_bytes=size, passes=1)

    def memory(self, load: Load) -> Sequence[GpuPart]:
        """The copies that stay between versions, of each side (the column "kept" in docs/benchmarks.md)."""
        name, receives = self.path(is_near=True).name, load.group.name == self.target.name
        copies = _COPIES.get(name, _COPIES["golden"])[receives]
        copies += self.target.weights != "auto" and not receives  # what the source quantizes, before it is copied
        size = self._sent_bytes(load.group) * copies
        return [GpuPart(name="copy for refits", size_bytes=size)] if size else []

    def _sent_bytes(self, group: WorkerGroup) -> float:
        """Bytes of a version on the fullest rank of a side: of the weights, or of an adapter."""
        part = divided(self.model, group)
        return HALF * part.trained_by(self.model) if self.model.lora else part.size_bytes(self.target.weights)

    def fitting(self, load: Load, room_bytes: float) -> str:
        """Nothing: it has no part that lasts for a task."""
        return ""

    def setup(self, context: StageContext) -> Callable[[Rendezvous, Task], Output]:
        """Open the backend. The side determines which copy of the model is meant."""
        backend = engine(context)

        def run(rendezvous: Rendezvous, task: Task) -> Output:
            transport, begun_s, version = self.path(rendezvous.is_near), time.perf_counter(), task.step + 1
            if rendezvous.side == "source":
                quantized = self.target.weights != "auto"
                share = (backend.share_quantized if quantized else backend.share)(self.model, transport)
                rendezvous.offer(share)
                return made(transport, {"offer_ms": 1e3 * (time.perf_counter() - begun_s)}, share.record)
            route = Route(transport, rendezvous.meeting if transport.both_carry else None)
            shares = rendezvous.take()
            if rendezvous.side == "carrier":
                record = backend.carry(self.model, shares, version, route)
                return made(transport, {"carry_ms": 1e3 * (time.perf_counter() - begun_s)}, record)
            served = backend.serve(self.model, shares, version, route)
            if not (isinstance(served, ServedWeights) and isinstance(served.sha256, str)):
                raise TypeError(f"the backend's serve() returned {shown(served)}; it returns ServedWeights with a hash")
            own = {"size_bytes": float(shares[0].model_bytes), f"path_{transport.name}": 1.0}
            return replace(made(transport, own, served.record), weights=(version, served.sha256))

        def made(transport: Transport, own: dict[str, float], record: Mapping[str, float]) -> Output:
            """Return the metrics of one side. Raises StageError if the transport's have names of the stage's own."""
            if taken := [name for name in record if name in _TAKEN or str(name).startswith("path_")]:
                raise StageError(
                    Problem(
                        where=str(self.location),
                        what=f"transport {transport.name!r} returned the metric {taken[0]!r}",
                        why=f"stage {self.name!r} reports {', '.join(_TAKEN)} and path_... itself",
                        fix="choose another name",
                    )
                )
            return Output(metrics=own | dict(record))

        return run

    def _between_gpus(self) -> bool:
        """Whether both sides have GPUs."""
        return self.source.gpus > 0 and self.target.gpus > 0

    def _share_gpus(self) -> bool:
        """Whether both sides share GPUs."""
        homes = {(group.colocated or group).name for group in self.groups()}
        return self.source.gpus > 0 and len(homes) == 1


def _remedy(transport: object) -> str:
    """Return how to correct an object that is not a transport."""
    if isinstance(transport, type):
        return f"transport={transport.__name__}({', '.join(f'{name}=...' for name in required(transport))})"
    if is_taken(transport):
        return f"choose a name other than {_listed(TRANSPORTS)}"
    return "write the class as in docs/your-own-transport.md"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
