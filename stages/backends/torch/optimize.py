"""Runs optimizer updates of one network (policy loss, gradient accumulation, clipping, AdamW) and saves its exact
state.

Knows tensors, not steps, stages or who reads the weights. The loss of a minibatch is normalized by counts over the
whole minibatch of all ranks, so it does not depend on the split into shards and microbatches; gradients are summed over
ranks. Weights below float32 have a float32 master copy, which the optimizer updates. An update with a non-finite loss
or gradient changes nothing on any rank, and is counted.

Legend: N samples, T longest response.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ops.logprobs import entropy, selected_logprobs
from pipeline.declare.columns import Ragged
from pipeline.declare.ranks import Ranks
from pipeline.declare.sharding import Microbatch, Update
from pipeline.errors import CheckpointError, Problem
from stages.backends import Batch, Optimization
from stages.backends.device import Parking
from stages.backends.model.padding import pad_right
from stages.backends.model.sharded import is_divided, like, whole
from stages.backends.model.weights import load_weights, weights
from stages.backends.objective import MAXIMA, Scored, objective
from stages.backends.torch.score import Predicted, predict
from stages.losses import PolicyLoss

_WEIGHTS, _OPTIMIZER, _COUNTERS = "weights.safetensors", "optimizer.safetensors", "learner.json"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class TorchLearner:
    """A network with its optimizer."""

    def __init__(
        self, network: PreTrainedModel, settings: Optimization, *, pad: int, ranks: Ranks | None = None
    ) -> None:
        self.network, self.settings, self.pad, self.ranks = network, settings, pad, ranks or Ranks()
        self.updates = self.skipped = 0
        self.parking = Parking(network.device)
        self.parameters = {name: p for name, p in network.named_parameters() if p.requires_grad}
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

    def update(
        self, batch: Batch, loss: PolicyLoss, *, temperature: float, update: Update, packed: bool = False
    ) -> dict[str, float]:
        """Run one optimizer update from the microbatches of `update`, on all ranks together."""
        self.parking.arrive()
        sums: dict[str, float] = {}
        for microbatch in update.microbatches:
            found = self._backward(batch.at(microbatch.samples), loss, temperature, update, microbatch, packed)
            for name, value in found.items():
                before = sums.get(name, 0.0)
                sums[name] = max(before, value) if name in MAXIMA else before + value
        if not is_divided(self.network):
            self.ranks.sum([master.grad for master in self.masters.values() if master.grad is not None])
        sums = self.ranks.totals(sums, largest=MAXIMA)
        means = {name: value if name in ("loss", *MAXIMA) else value / update.tokens for name, value in sums.items()}
        return means | self._step(sums["loss"])

    def _backward(
        self,
        part: Batch,
        loss: PolicyLoss,
        temperature: float,
        update: Update,
        microbatch: Microbatch,
        packed: bool = False,
    ) -> dict[str, float]:
        """Accumulate the gradient of one microbatch. Returns sums over its tokens, and its share of the loss."""
        made = predict(
            self.network,
            part.prompt_ids,
            part.response_ids,
            microbatch,
            temperature=temperature,
            pad=self.pad,
            packed=packed,
        )
        with torch.set_grad_enabled(loss.needs_entropy):
            entropy_NT = made.rectangle(entropy(made.logits))
        scored = Scored(
            logprobs_NT=made.rectangle(selected_logprobs(made.logits, made.ids)),
            old_logprobs_NT=self._padded(part.old_logprobs, made),
            rollout_logprobs_NT=self._padded(part.rollout_logprobs, made) if part.rollout_logprobs else None,
            advantage_N=part.advantage.to(self.network.device),
            mask_NT=made.mask_NT,
            ref_logprobs_NT=self._padded(part.ref_logprobs, made) if part.ref_logprobs else None,
            entropy_NT=entropy_NT,
            columns={name: self._padded(column, made) for name, column in part.columns.items()},
        )
        value, sums = objective(loss, scored, tokens=update.tokens, samples=update.samples)
        value.backward()
        for name, master in self.masters.items():
            parameter = self.parameters[name]
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float() if master.grad is None else master.grad + parameter.grad
                parameter.grad = None
        return sums

    def _padded(self, column: torch.Tensor | Ragged, made: Predicted) -> torch.Tensor:
        wide = pad_right(column, 0, made.width) if isinstance(column, Ragged) else column
        return wide.to(self.network.device)

    def _step(self, loss: float) -> dict[str, float]:
        norm = torch.nn.utils.get_total_norm([m.grad for m in self.masters.values() if m.grad is not None])
        rate = self.settings.learning_rate(self.updates)
        size = whole(norm).item()
        finite = math.isfinite(loss) and math.isfinite(size)
        if finite:
            if self.settings.clip_grad > 0:
                torch.nn.utils.clip_grads_with_norm_(self.masters.values(), self.settings.clip_grad, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self._publish_masters()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        self.skipped += not finite
        return {"grad_norm": size, "lr": rate, "skipped": float(not finite)}

    @torch.no_grad()
    def _publish_masters(self) -> None:
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                self.parameters[name].copy_(master)

    def park(self, room: int | None = None) -> None:
        """Move moments and master weights to the host, where they can be saved. On a GPU, moves only enough to free
        `room` bytes."""
        masters = [master for name, master in self.masters.items() if master is not self.parameters[name]]
        states = (value for state in self.optimizer.state.values() for value in state.values())
        self.parking.park([*masters, *states], room)

    def leave(self) -> None:
        """Move them back, overlapped with work that does not need them."""
        self.parking.leave()

    def save(self, folder: Path) -> None:
        """Save as safetensors and JSON; reading them executes no code. All ranks gather and rank 0 writes, so the files
        do not depend on the number of ranks."""
        self.parking.arrive()
        state = {}
        for name, master in self.masters.items():
            for moment, value in self.optimizer.state.get(master, {}).items():
                state[f"{moment}:{name}"] = whole(value.detach()).cpu().contiguous()
            if master is not self.parameters[name]:
                state[f"master:{name}"] = master.detach().cpu().contiguous()
        named = weights(self.network)
        if self.ranks.rank > 0:
            return
        save_file(named, folder / _WEIGHTS)
        save_file(state, folder / _OPTIMIZER)
        (folder / _COUNTERS).write_text(json.dumps({"updates": self.updates, "skipped": self.skipped}))

    def restore(self, folder: Path) -> None:
        """Load what `save` wrote into `folder`. Raises CheckpointError if a file is missing or incomplete."""
        self.parking.arrive()
        try:
            named = load_file(folder / _WEIGHTS)
            state = load_file(folder / _OPTIMIZER)
            counters = json.loads((folder / _COUNTERS).read_text())
        except (OSError, SafetensorError, json.JSONDecodeError) as error:
            raise CheckpointError(
                Problem(
                    where=str(folder),
                    what=f"the learner's state cannot be read: {error}",
                    why=f"it is {_WEIGHTS}, {_OPTIMIZER} and {_COUNTERS}, all complete",
                    fix="resume from another checkpoint",
                )
            ) from error
        load_weights(self.network, named)
        self.updates, self.skipped = counters["updates"], counters["skipped"]
        self.optimizer.state.clear()
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                with torch.no_grad():
                    master.copy_(state[f"master:{name}"])
            if f"step:{name}" in state:
                moments = {moment: like(state[f"{moment}:{name}"], master) for moment in _MOMENTS[:2]}
                self.optimizer.state[master] = moments | {"step": state[f"step:{name}"].to(master.device)}
