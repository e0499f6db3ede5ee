"""Runs optimizer updates of one network (gradient accumulation, clipping, AdamW) and saves its exact state.

Knows tensors, not steps, stages or who reads the weights. Weights below float32 have a float32 master copy, which the
optimizer updates.

Legend: N samples, T longest response.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ops.logprobs import entropy, selected_logprobs
from pipeline.declare.columns import Ragged
from pipeline.declare.ranks import Ranks
from pipeline.declare.sharding import Microbatch, Update
from stages.backends import Batch, Optimization
from stages.backends.interface import part
from stages.backends.model.sharded import is_divided, like, whole
from stages.backends.model.weights import live_weights, load_weights, state
from stages.backends.objective import MAXIMA
from stages.backends.torch.images import Seen
from stages.backends.torch.routers import Routers, along
from stages.backends.torch.score import predict
from stages.backends.trainer import COUNTERS, BaseLearner, File
from stages.lora import LoRA
from stages.losses import PolicyLoss

WEIGHTS, _OPTIMIZER = "weights.safetensors", "optimizer.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class TorchLearner(BaseLearner):
    """A network with its optimizer. `sees` finds the images of prompts in their column; `lora` describes the network's
    adapter."""

    backend = "torch"

    def __init__(
        self, network: PreTrainedModel, settings: Optimization, *, pad: int, ranks: Ranks | None = None,
        routers: Routers | None = None, sees: Callable[[Ragged | None], Seen | None] = lambda images: None,
        lora: LoRA | None = None,
    ) -> None:  # fmt: skip
        super().__init__(settings, network.device, ranks or Ranks())
        self.network, self.pad, self.routers, self._sees = network, pad, routers, sees
        self.disagreement = routers.disagreement if routers else None
        self.parameters = {name: p for name, p in network.named_parameters() if p.requires_grad}
        if lora is not None:  # .q_proj.lora_A.weight
            self.lora = replace(lora, targets=tuple({name.rsplit(".", 3)[1] for name in self.parameters}))
        self.masters = {
            name: p if p.dtype == torch.float32 else p.detach().float() for name, p in self.parameters.items()
        }
        self.optimizer = torch.optim.AdamW(
            self.masters.values(),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        if settings.checkpoint_activations:
            network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            for module in network.modules():  # layers recompute only in training mode; dropout inside stays off
                if isinstance(module, GradientCheckpointingLayer):
                    module.training = True

    def _backward(
        self, batch: Batch, loss: PolicyLoss, temperature: float, update: Update, packed: bool
    ) -> list[dict[str, torch.Tensor]]:
        return [self._pass(batch, loss, temperature, update, microbatch, packed) for microbatch in update.microbatches]

    def _pass(
        self, batch: Batch, loss: PolicyLoss, temperature: float, update: Update, microbatch: Microbatch, packed: bool
    ) -> dict[str, torch.Tensor]:
        samples = microbatch.samples
        ids = (part(batch.prompt_ids, samples), part(batch.response_ids, samples))
        seen = self._sees(None if batch.images is None else part(batch.images, samples))
        given: Any = {"temperature": temperature, "pad": self.pad, "packed": packed, "seen": seen}
        with along(self.routers, batch.routes, *ids, microbatch, packed=packed):
            made = predict(self.network, *ids, microbatch, **given)
            with torch.set_grad_enabled(loss.needs_entropy):
                entropy_NT = made.rectangle(entropy(made.logits))
            logprobs_NT = made.rectangle(selected_logprobs(made.logits, made.ids))
            value, sums = self._objective(batch, loss, update, samples, logprobs_NT, entropy_NT, made.mask_NT)
            value.backward()
        for name, master in self.masters.items():
            parameter = self.parameters[name]
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float() if master.grad is None else master.grad + parameter.grad
                parameter.grad = None
        return sums

    def _reduce(self, sums: dict[str, float]) -> tuple[dict[str, float], float]:
        gradients = [master.grad for master in self.masters.values() if master.grad is not None]
        if not is_divided(self.network):
            self.ranks.sum(gradients)
        sums = self.ranks.totals(sums, largest=MAXIMA)
        return sums, whole(torch.nn.utils.get_total_norm(gradients)).item()

    @torch.no_grad()
    def _step(self, rate: float, norm: float, finite: bool) -> None:
        if finite:
            if self.settings.clip_grad > 0:
                torch.nn.utils.clip_grads_with_norm_(self.masters.values(), self.settings.clip_grad, torch.tensor(norm))
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            for name, master in self.masters.items():
                if master is not self.parameters[name]:
                    self.parameters[name].copy_(master)
        self.optimizer.zero_grad(set_to_none=True)

    def _park(self, room: int | None) -> None:
        masters = [master for name, master in self.masters.items() if master is not self.parameters[name]]
        states = (value for state in self.optimizer.state.values() for value in state.values())
        self.parking.park([*masters, *states], room)

    def _files(self) -> Iterator[File]:
        """All ranks gather and rank 0 writes, so the files do not depend on the number of ranks."""
        for name, tensors in ((WEIGHTS, live_weights(self.network)), (_OPTIMIZER, self._moments())):
            if self.ranks.rank == 0:
                yield name, tensors
            else:
                deque(tensors, maxlen=0)

    def _moments(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, master in self.masters.items():
            for moment, value in self.optimizer.state.get(master, {}).items():
                yield f"{moment}:{name}", whole(value.detach())
            if master is not self.parameters[name]:
                yield f"master:{name}", master.detach()

    def saved_bytes(self) -> int:
        """Bytes of the weights, master weights and moments, on the rank that writes."""
        if self.ranks.rank > 0:
            return 0
        masters = (master for name, master in self.masters.items() if master is not self.parameters[name])
        moments = (value for held in self.optimizer.state.values() for value in held.values())
        return sum(tensor.nbytes for tensor in (*state(self.network).values(), *masters, *moments))

    def _read(self, folder: Path) -> dict[str, int]:
        named, state = load_file(folder / WEIGHTS), load_file(folder / _OPTIMIZER)
        counters = json.loads((folder / COUNTERS).read_text())
        load_weights(self.network, named)
        self.optimizer.state.clear()
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                with torch.no_grad():
                    master.copy_(state[f"master:{name}"])
            if f"step:{name}" in state:
                moments = {moment: like(state[f"{moment}:{name}"], master) for moment in _MOMENTS[:2]}
                self.optimizer.state[master] = moments | {"step": state[f"step:{name}"].to(master.device)}
        return counters
