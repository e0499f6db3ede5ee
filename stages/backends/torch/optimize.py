"""Optimizer updates of one network: policy loss, gradient accumulation, clipping, AdamW, and its exact state.

Knows tensors; it does not know steps, stages or weights' readers. The loss of a minibatch is normalised by counts over
the whole minibatch, so it does not depend on how microbatches are cut. Weights below float32 have a float32 master
copy, which the optimizer updates. An update whose loss or gradient is not finite changes nothing and is counted.

Legend: N samples, T longest response, V vocabulary.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ops.kl import kl_k3
from ops.logprobs import entropy, selected_logprobs
from ops.loss import aggregate, clipped_policy_loss
from pipeline.errors import CheckpointError, Problem
from stages.backends import Minibatch, Optimization
from stages.backends.torch.padding import pad_right
from stages.backends.torch.score import response_logits
from stages.backends.torch.weights import load_weights, weights

_WEIGHTS, _OPTIMIZER, _COUNTERS = "weights.safetensors", "optimizer.safetensors", "learner.json"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def learning_rate(settings: Optimization, update: int) -> float:
    """Of update number `update`, counted from 0."""
    if update < settings.warmup:
        return settings.lr * (update + 1) / settings.warmup
    span = max(settings.updates - settings.warmup, 1)
    done = min((update - settings.warmup) / span, 1.0)
    if settings.schedule == "linear":
        return settings.lr * (1.0 - done)
    if settings.schedule == "cosine":
        return settings.lr * 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.lr


class TorchLearner:
    """A network with its optimizer."""

    def __init__(self, network: PreTrainedModel, settings: Optimization, *, pad: int) -> None:
        self.network, self.settings, self.pad = network, settings, pad
        self.updates = self.skipped = 0
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
            for module in network.modules():  # a layer recomputes in training mode only; dropout inside it stays off
                if isinstance(module, GradientCheckpointingLayer):
                    module.training = True

    def update(self, batch: Minibatch, loss: Any, *, temperature: float) -> dict[str, float]:
        """One optimizer update; `loss` has clip, kl and aggregation (`stages.train.ClippedLoss`)."""
        count = len(batch)
        tokens = sum(batch.response_ids.lengths)
        step = self.settings.microbatch or count
        normalizer = tokens if loss.aggregation == "token" else count
        sums = {"loss": 0.0, "clip_fraction": 0.0, "entropy": 0.0, "kl": 0.0, "ratio_max": 0.0}
        for start in range(0, count, step):
            part = self._backward(batch.part(start, start + step), loss, temperature, normalizer)
            for name, value in part.items():
                sums[name] = max(sums[name], value) if name == "ratio_max" else sums[name] + value
        norm = self._step(sums["loss"])
        for name in ("clip_fraction", "entropy", "kl"):
            sums[name] /= tokens
        if batch.ref_logprobs is None:
            del sums["kl"]
        return sums | norm

    def _backward(self, part: Minibatch, loss: Any, temperature: float, normalizer: int) -> dict[str, float]:
        """Adds the gradient of one microbatch; returns sums over its tokens, and its share of the loss."""
        device = self.network.device
        logits_NTV, ids_NT, mask_NT = response_logits(
            self.network, part.prompt_ids, part.response_ids, temperature=temperature, pad=self.pad
        )
        logprobs_NT = selected_logprobs(logits_NTV, ids_NT)
        old_NT = pad_right(part.old_logprobs).to(device)
        loss_NT, clipped_NT = clipped_policy_loss(
            logprobs_NT, old_NT, part.advantage.to(device), mask_NT, loss.clip[0], loss.clip[1]
        )
        with torch.no_grad():
            ratio_NT = (logprobs_NT - old_NT).exp().masked_fill(~mask_NT, 0.0)
            sums = {
                "clip_fraction": clipped_NT.logical_and(mask_NT).sum().item(),
                "entropy": entropy(logits_NTV.detach()).masked_fill(~mask_NT, 0.0).sum().item(),
                "ratio_max": ratio_NT.max().item(),
            }
        if part.ref_logprobs is not None:
            kl_NT = kl_k3(logprobs_NT, pad_right(part.ref_logprobs).to(device), mask_NT)
            loss_NT = loss_NT + loss.kl * kl_NT
            sums["kl"] = kl_NT.detach().masked_fill(~mask_NT, 0.0).sum().item()
        objective = aggregate(loss_NT, mask_NT, loss.aggregation, normalizer)
        objective.backward()
        for name, master in self.masters.items():
            parameter = self.parameters[name]
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float() if master.grad is None else master.grad + parameter.grad
                parameter.grad = None
        return sums | {"loss": objective.item()}

    def _step(self, loss: float) -> dict[str, float]:
        norm = torch.nn.utils.get_total_norm([m.grad for m in self.masters.values() if m.grad is not None])
        rate = learning_rate(self.settings, self.updates)
        finite = math.isfinite(loss) and bool(norm.isfinite())
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
        return {"grad_norm": norm.item(), "lr": rate, "skipped": float(not finite)}

    @torch.no_grad()
    def _publish_masters(self) -> None:
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                self.parameters[name].copy_(master)

    def save(self, folder: Path) -> None:
        """safetensors and JSON; nothing that executes code when it is read."""
        state = {}
        for name, master in self.masters.items():
            for moment, value in self.optimizer.state.get(master, {}).items():
                state[f"{moment}:{name}"] = value.detach().cpu().contiguous()
            if master is not self.parameters[name]:
                state[f"master:{name}"] = master.detach().cpu().contiguous()
        save_file(weights(self.network), folder / _WEIGHTS)
        save_file(state, folder / _OPTIMIZER)
        (folder / _COUNTERS).write_text(json.dumps({"updates": self.updates, "skipped": self.skipped}))

    def restore(self, folder: Path) -> None:
        """What `save` wrote into `folder`. Raises CheckpointError where a file is missing or is not whole."""
        try:
            named = load_file(folder / _WEIGHTS)
            state = load_file(folder / _OPTIMIZER)
            counters = json.loads((folder / _COUNTERS).read_text())
        except (OSError, SafetensorError, json.JSONDecodeError) as error:
            raise CheckpointError(
                Problem(
                    where=str(folder),
                    what=f"the learner's state cannot be read: {error}",
                    why=f"it is {_WEIGHTS}, {_OPTIMIZER} and {_COUNTERS}, all three whole",
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
                device = {moment: master.device for moment in _MOMENTS}
                self.optimizer.state[master] = {m: state[f"{m}:{name}"].to(device[m]) for m in _MOMENTS}
