"""Models, worker groups, and the line of the user's file that declared them. Frozen; nothing runs here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pipeline.declare.backend import BACKENDS, PLAIN, Backend


@dataclass(frozen=True)
class Location:
    """The line of the user's file that created a description."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def caller(depth: int) -> Location:
    """Return the location of the code `depth` frames above the caller, skipping `dataclasses`."""
    frame = sys._getframe(depth + 1)
    while frame.f_globals.get("__name__") == "dataclasses" and frame.f_back:  # report the caller of replace()
        frame = frame.f_back
    return Location(frame.f_code.co_filename, frame.f_lineno)


@dataclass(frozen=True)
class _Located:
    """Remembers the line that created it; a copy, the line with `dataclasses.replace`."""

    location: Location = field(default_factory=lambda: caller(2), init=False, repr=False, compare=False)


@dataclass(frozen=True)
class Model(_Located):
    """A language model by name.

    source      a folder with a Hugging Face model, a hub name, or, with `config`, any name
    config      a Hugging Face configuration as a dict with `model_type`: the model is initialized at random from it
    alphabet    with `config`: the characters of its tokenizer, one token each; or the word "bytes": every text, one
                token per byte
    warm_start  with any source: a description with a method `run(model, tokenizer, seed)`, applied once after loading
    lora        train an adapter and leave the model as it is: `stages.LoRA(rank=16)`
    seed        of the random weights, with `config` or `lora`
    trainable   False for a frozen copy (a reference model)
    router_replay  of a mixture of experts: score and train with the experts that the sampler chose for each token
    chat_template  a Jinja template for messages, in the place of its tokenizer's own
    images      whether its prompts have images, from `Prompts(..., images="image")`
    trust_remote_code  with the torch backend: also load a model that has pickled weights and no safetensors, or Python
                code of its own (auto_map), which then runs in the workers
    """

    source: str
    config: Mapping[str, Any] | None = None
    alphabet: str | None = None
    warm_start: Any = None
    seed: int = 0
    trainable: bool = True
    lora: Any = field(default=None, kw_only=True)
    router_replay: bool = field(default=False, kw_only=True)
    images: bool = field(default=False, kw_only=True)
    chat_template: str | None = field(default=None, kw_only=True)
    trust_remote_code: bool = field(default=False, kw_only=True)

    def frozen(self) -> Model:
        """Return the model as it is before training, never updated."""
        frozen = replace(self, trainable=False)
        object.__setattr__(frozen, "location", self.location)
        return frozen

    def __hash__(self) -> int:
        return hash((self.source, self.trainable, self.seed))


@dataclass(frozen=True)
class WorkerGroup(_Located):
    """Processes that share a backend.

    name       in this graph
    backend    the name of a backend that comes with Sluice ("torch", "vllm", "megatron"), "python" for plain
               functions, or a `Backend` of your own, which is stored in `own` and replaced here by its name
    workers    ranks. A stage `per` sample or group is spread over them; a stage with `sharding` runs on all of them
               together, each on its shard of the batch. None is one per GPU, or one without GPUs
    gpus       of the whole group, divided evenly over its workers
    cpus       of each worker, for Ray's placement
    threads    torch threads per worker, 1 or more; None is torch's default
    tensor_parallel, context_parallel, pipeline_parallel   how workers split one model; the rest is data parallel
    expert_parallel   workers that divide the experts of a mixture: each holds some of them
    expert_tensor_parallel   workers that divide each expert, a divisor of tensor_parallel; None is tensor_parallel.
               With fewer, tensor-parallel workers hold different experts (expert_parallel) or the same ones
    fetch      for workers that need the same samples: "independent", each reads the data plane; "leader", the first
               one does and broadcasts; "auto" is leader if there are several
    colocated  the group whose GPUs this one shares (the same number): the two take turns, and the one that waits frees
               its memory for the other, so nothing runs ahead (max_staleness=0)
    memory     share of a GPU for weights and cache, for a backend that allocates its memory at once ("vllm")
    cache      number format of the keys and values of earlier tokens: "auto", the model's; or "fp8" (e4m3, with scales
               for each layer that follow the weights), half the memory and the reading of bfloat16, for "vllm" on GPUs.
               Logprobs then differ more from the trainer's
    weights    number format of the matrices that it samples with: "auto", the model's; or "fp8" (e4m3, one scale for
               each block of 128 x 128), half the memory, the reading and the bytes of a refit of bfloat16, for "vllm"
               on GPUs. Embeddings, norms and routers stay as they are. Logprobs then differ more from the trainer's
    speculate  tokens that are drafted in each step of sampling and verified together in one pass, for "vllm"; 0 is off.
               Samples are those without drafts. Drafts repeat what followed the last 2 to 4 tokens earlier in the
               prompt or the response
    draft      with speculate: a small model with the same vocabulary that drafts instead. It is never trained
    fully_sharded  shard a model's weights, gradients and optimizer over the data-parallel workers (FSDP2)
    python     the interpreter of its workers, such as "venv/bin/python", if their packages must not be the driver's. A
               relative path is relative to the working directory, like that of data or of a model. On a cluster, it and
               this installation of Sluice have the same path on every machine. None is the driver's interpreter
    """

    name: str
    backend: str | Backend = PLAIN.name
    workers: int = None  # type: ignore[assignment] # set to a number in __post_init__
    gpus: int = 0
    cpus: float = 1.0
    threads: int | None = None
    tensor_parallel: int = 1
    context_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int | None = None
    fetch: Literal["auto", "independent", "leader"] = "auto"
    fully_sharded: bool = False
    colocated: WorkerGroup | None = None
    memory: float = 0.85
    python: str | os.PathLike[str] | None = None
    cache: Literal["auto", "fp8"] = "auto"
    weights: Literal["auto", "fp8"] = "auto"
    speculate: int = 0
    draft: Model | None = None
    own: Backend | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.backend, Backend):
            object.__setattr__(self, "own", self.backend)
            object.__setattr__(self, "backend", self.backend.name)
        elif self.own and self.own.name != self.backend:  # a copy with another backend
            object.__setattr__(self, "own", None)
        if self.workers is None:
            gpus = self.gpus if isinstance(self.gpus, int) and self.backend != PLAIN.name else 0
            object.__setattr__(self, "workers", max(1, gpus))

    @property
    def description(self) -> Backend | None:
        """The backend itself; None if no backend has that name."""
        return self.own or (BACKENDS.get(self.backend) if isinstance(self.backend, str) else None)

    @property
    def interpreter(self) -> str | None:
        """The absolute path of its own interpreter; None without one. A link is kept: in a virtual environment, the
        interpreter is one."""
        return os.path.abspath(self.python) if self.python is not None else None

    @property
    def leads(self) -> bool:
        """Whether one process of the backend starts all ranks of a replica."""
        return self.description is not None and self.description.leads

    @property
    def processes(self) -> int:
        """Processes that the run starts for it. A backend that leads starts the other ranks of a replica itself."""
        return self.data_parallel if self.leads else self.workers

    @property
    def model_parallel(self) -> int:
        """Workers that hold one copy of a model together."""
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel

    @property
    def data_parallel(self) -> int:
        """Copies of a model, each with its share of a batch."""
        return self.workers // max(1, self.model_parallel)


CACHES = WEIGHTS = ("auto", "fp8")
HOST = "host"  # the worker group of stages without one
