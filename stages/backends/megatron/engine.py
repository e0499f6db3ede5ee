"""The megatron engine of one rank: its part of each model, and the methods that stages call. Knows no stages.

float32 on the CPU; bfloat16 on the GPU, with float32 master copies of trained weights. A model and its frozen copy
share one network: the frozen weights stay on the host, and swap places with the trained ones for scoring.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

from pipeline import Model, StageContext, StageError
from pipeline.declare.columns import Ragged
from pipeline.declare.saved_model import write_tensors_json
from pipeline.declare.sharding import Shard
from stages.backends import Optimization
from stages.backends.device import claim
from stages.backends.megatron import fused
from stages.backends.megatron.adapters import attach, without
from stages.backends.megatron.checkpoint import pieces
from stages.backends.megatron.config import transformer_config
from stages.backends.megatron.folder import copy_description, fill, gathered, write
from stages.backends.megatron.groups import Groups, join
from stages.backends.megatron.learner import MegatronLearner
from stages.backends.megatron.network import Network
from stages.backends.megatron.passes import score
from stages.backends.megatron.places import places, tensors
from stages.backends.model.families import decoder_of
from stages.backends.model.folder import base_of, model_folder, write_adapter_description
from stages.backends.model.places import Placed
from stages.backends.model.text import identity
from stages.backends.trainer import BaseTrainer
from stages.routes import mixture_problems


def open_engine(context: StageContext) -> MegatronEngine:
    """Open the engine of this rank; all ranks of the group call it together. Raises StageError if the group needs GPUs
    and torch sees none."""
    group, device = context.group, claim(context.group)
    groups = join(context.ranks, group.expert_parallel, device, context.seed, group.expert_tensor_parallel)
    return MegatronEngine(groups, context.run_dir)


@dataclass(eq=False)
class _Loaded:
    """A model on this rank: its folder and config, its network, and the frozen weights on the host."""

    folder: Path
    config: Mapping[str, Any]
    network: Network
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def placed(self) -> Placed:
        """The tensors and places of a refit, which do not change."""
        network, dtype = self.network, self.network.config.params_dtype
        own = places(network.shape, network.part, dtype.itemsize)
        return tensors(network.shape, str(dtype).removeprefix("torch.")), own, network.weights


class MegatronEngine(BaseTrainer):
    """`stages.backends.interface.Trainer` on one device per rank. All ranks of a replica call `score` together; all
    ranks of the group call everything that concerns the trained copy together."""

    def __init__(self, groups: Groups, run_dir: Path | None = None) -> None:
        dtype = torch.bfloat16 if groups.device.type == "cuda" else torch.float32
        super().__init__(groups.device, dtype, groups.ranks.rank)
        self.groups, self.run_dir = groups, run_dir
        self._loaded: dict[Model, _Loaded] = {}

    def network(self, model: Model) -> Network:
        """This rank's part of the trained copy; every call returns the same object."""
        return self._of(model).network

    def score(
        self, model: Model, prompt_ids: Ragged, response_ids: Ragged, shard: Shard, *, temperature: float
    ) -> Ragged:
        """Logprobs of the response tokens under the trained or the frozen copy; on all ranks."""
        held = self._of(model)
        with self.groups.computing():
            if model.trainable or identity(model) not in self._learners:  # without a learner, both are equal
                return score(held.network, prompt_ids, response_ids, shard, temperature=temperature)
            with without(held.network) if model.lora else self._frozen(held):
                return score(held.network, prompt_ids, response_ids, shard, temperature=temperature)

    def score_replayed(
        self, model: Model, prompt_ids: Ragged, response_ids: Ragged, shard: Shard, *, temperature: float,
        routes: Ragged,
    ) -> Ragged:  # fmt: skip
        """Logprobs of the response tokens under the trained copy, with given experts; on all ranks."""
        network = self.network(model)
        with self.groups.computing():
            return score(network, prompt_ids, response_ids, shard, temperature=temperature, routes=routes)

    def trained_weights(self, model: Model) -> dict[str, torch.Tensor]:
        """A snapshot of the trained copy by Hugging Face name, on rank 0; an empty dict on the others."""
        return dict(self._gathered(model))

    def export(self, model: Model, folder: Path) -> None:
        """Save the trained copy as a Hugging Face folder; rank 0 writes a few GiB at a time."""
        folder.mkdir(parents=True, exist_ok=True)
        write(self._gathered(model), folder, self._of(model).folder, self.groups.ranks.rank)

    def describe(self, model: Model, folder: Path) -> None:
        """Write what makes the saved weights a Hugging Face folder."""
        if self.groups.ranks.rank == 0:
            held = self._of(model)
            found = pieces(held.network)
            if model.lora is None:
                folder.mkdir()
                copy_description(held.folder, folder)
            else:
                base = base_of(model, self.run_dir)
                found = write_adapter_description(model, found, self.tokenizer(model), base, folder)
            write_tensors_json(folder, found)

    def _new_learner(self, model: Model, optimization: Optimization) -> MegatronLearner:
        return MegatronLearner(self.network(model), optimization)

    def _placed(self, model: Model) -> Placed:
        return self._of(model).placed

    def _config(self, model: Model) -> Mapping[str, Any]:
        return self._of(model).config

    def _of(self, model: Model) -> _Loaded:
        """The model on this rank, loaded by the first call, which all ranks make together."""
        key = identity(model)
        if key not in self._loaded:
            if self.groups.ranks.rank == 0:  # transformers saves a newly built model on rank 0 only
                model_folder(key, self.run_dir)
            dist.barrier()
            folder = model_folder(key, self.run_dir)
            entries = AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()
            where = f"{model.location}, model {model.source!r}"
            if problems := list(mixture_problems(key, entries)):
                raise StageError(*problems)
            decoder = decoder_of(entries, where)
            with self.groups.computing():
                kernels = fused.fused_on(self.groups)
                config = transformer_config(decoder, self.groups, self.dtype, where, kernels)
                network = Network(decoder, config, self.groups, kernels).to(self.groups.device)
            fill(network.weights, network.table, folder)
            if key.lora is not None:
                attach(network, key.lora, family=entries["model_type"], seed=key.seed, where=where)
            self._loaded[key] = _Loaded(folder, entries, network)
        return self._loaded[key]

    def _gathered(self, model: Model) -> Iterator[tuple[str, torch.Tensor]]:
        network = self.network(model)
        return gathered(network.weights, network.shape, self.groups, network.part)

    @contextmanager
    def _frozen(self, held: _Loaded) -> Iterator[None]:
        """Inside this context, the network has the weights that it started with."""
        live = held.network.weights
        if not held.frozen:
            pinned = self.groups.device.type == "cuda"
            held.frozen = {name: torch.empty(p.shape, dtype=p.dtype, pin_memory=pinned) for name, p in live.items()}
            fill(held.frozen, held.network.table, held.folder)
        _exchange(live, held.frozen)
        try:
            yield
        finally:
            _exchange(live, held.frozen)


@torch.no_grad()
def _exchange(live: Mapping[str, torch.Tensor], waiting: Mapping[str, torch.Tensor]) -> None:
    """Swap the contents of two sets of tensors; doing it twice restores both."""
    for name, tensor in live.items():
        before = tensor.detach().clone()
        tensor.copy_(waiting[name])
        waiting[name].copy_(before)
