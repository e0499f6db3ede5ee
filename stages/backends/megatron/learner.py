"""Runs optimizer updates of a network spread over many ranks, and saves its exact state.

Knows Megatron-core's gradient buffers and distributed optimizer, not steps or stages. Gradients are summed over
data-parallel ranks in float32; each of these ranks updates its share of the weights, in float32 master weights if the
network's are lower precision. An update with a non-finite loss or gradient changes nothing on any rank, and is counted.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from pipeline.declare.columns import Ragged
from pipeline.declare.sharding import Update
from stages.backends import Batch, Optimization
from stages.backends.device import Parking
from stages.backends.megatron import checkpoint
from stages.backends.megatron.microbatches import Row
from stages.backends.megatron.network import Network
from stages.backends.megatron.passes import rows_of, run
from stages.backends.model.padding import pad_right
from stages.backends.objective import MAXIMA, Scored, objective
from stages.losses import PolicyLoss


class MegatronLearner:
    """A network with its optimizer. All ranks call every method together."""

    def __init__(self, network: Network, settings: Optimization) -> None:
        self.network, self.settings, self.groups = network, settings, network.groups
        self.updates = self.skipped = 0
        self.parking = Parking(self.groups.device)
        if settings.checkpoint_activations:
            network.recompute()
        half = network.config.params_dtype == torch.bfloat16
        with self.groups.computing():
            self.buffered = DistributedDataParallel(
                network.config,
                DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
                network,
            )
            self.optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=settings.lr,
                    adam_beta1=settings.betas[0],
                    adam_beta2=settings.betas[1],
                    adam_eps=settings.eps,
                    weight_decay=settings.weight_decay,
                    decoupled_weight_decay=True,
                    clip_grad=settings.clip_grad,
                    bf16=half,
                    params_dtype=network.config.params_dtype,
                    use_distributed_optimizer=True,
                ),
                [self.buffered],
                config_overrides={},  # weight decay applies to all weights, norms and biases included
            )
            self._start()

    @torch.no_grad()
    def _start(self) -> None:
        """Initialize the optimizer's state, so that it can be saved before the first update."""
        for each in self.optimizer.chained_optimizers:
            for held in each.get_parameters():
                moments = {"exp_avg": torch.zeros_like(held), "exp_avg_sq": torch.zeros_like(held)}
                each.optimizer.state[held].update(moments)
                if isinstance(each.optimizer, torch.optim.AdamW):
                    each.optimizer.state[held]["step"] = torch.tensor(0.0)

    def update(
        self, batch: Batch, loss: PolicyLoss, *, temperature: float, update: Update, packed: bool = False
    ) -> dict[str, float]:
        """Run one optimizer update from the microbatches of `update`, on all ranks together."""
        self.parking.arrive()
        with self.groups.computing():
            sums = self._backward(batch, loss, temperature, update, packed)
            finalize_model_grads([self.buffered], None, pg_collection=self.groups.process)
            means = {
                name: value if name in ("loss", *MAXIMA) else value / update.tokens for name, value in sums.items()
            }
            return means | self._step(sums["loss"])

    def _backward(
        self, batch: Batch, loss: PolicyLoss, temperature: float, update: Update, packed: bool
    ) -> dict[str, float]:
        """Accumulate the gradients of all microbatches. Returns sums over the tokens of all ranks, and the loss."""
        self.buffered.zero_grad_buffer()
        self.optimizer.zero_grad()

        def finish(number: int, row: Row, hidden_SNH: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
            part = batch.at(update.microbatches[number].samples)
            logprobs_R, entropy_R = self.network.logprobs(hidden_SNH, row, temperature)
            return objective(
                loss,
                self._scored(part, row, logprobs_R, entropy_R if loss.needs_entropy else entropy_R.detach()),
                tokens=update.tokens,
                samples=update.samples,
            )

        rows = rows_of(batch.prompt_ids, batch.response_ids, update.microbatches, self.groups, packed=packed)
        found = run(self.buffered, self.network, rows, finish, backward=True)
        sums: dict[str, float] = {}
        for name in found[0] if found else ():
            values = [each[name] for each in found]
            sums[name] = max(values) if name in MAXIMA else sum(values)
        if self.groups.is_last:
            sums = self.groups.ranks.totals(sums, largest=MAXIMA)
        if self.groups.layout.pipeline == 1:
            return sums
        message: list[Any] = [sums]
        dist.broadcast_object_list(message, src=self.groups.last, group=self.groups.process.pp)
        return message[0]

    def _scored(self, part: Batch, row: Row, logprobs_R: torch.Tensor, entropy_R: torch.Tensor) -> Scored:
        def padded(column: torch.Tensor | Ragged) -> torch.Tensor:
            wide = pad_right(column, 0, row.width) if isinstance(column, Ragged) else column
            return wide.to(self.groups.device)

        return Scored(
            logprobs_NT=row.rectangle(logprobs_R),
            old_logprobs_NT=padded(part.old_logprobs),
            rollout_logprobs_NT=padded(part.rollout_logprobs) if part.rollout_logprobs else None,
            advantage_N=part.advantage.to(self.groups.device),
            mask_NT=row.mask,
            ref_logprobs_NT=padded(part.ref_logprobs) if part.ref_logprobs else None,
            entropy_NT=row.rectangle(entropy_R),
            columns={name: padded(column) for name, column in part.columns.items()},
        )

    def _step(self, loss: float) -> dict[str, float]:
        self.optimizer.prepare_grads()
        size = self.optimizer.get_grad_norm()
        rate = self.settings.learning_rate(self.updates)
        finite = math.isfinite(loss) and math.isfinite(size)
        if finite:
            for each in self.optimizer.chained_optimizers:
                for group in each.param_groups:
                    group["lr"] = rate
                if self.settings.clip_grad > 0 and (held := each.get_parameters()):
                    clip_grad_by_total_norm_fp32(held, self.settings.clip_grad, size)
            self.optimizer.step_with_ready_grads()
        self.updates += 1
        self.skipped += not finite
        return {"grad_norm": size, "lr": rate, "skipped": float(not finite)}

    def park(self, room: int | None = None) -> None:
        """Move moments and master weights to the host, where they can be saved; gradients are dropped. On a GPU, moves
        only enough to free `room` bytes."""
        self.buffered.offload_grad_buffers(synchronize=self.groups.device.type == "cuda", empty_cache=False)
        shares = checkpoint.shares(self.network, self.optimizer)
        self.parking.park((tensor for _, _, kinds in shares for tensor in kinds.values()), room)

    def leave(self) -> None:
        """Move them back, overlapped with work that does not need them."""
        self.buffered.restore_grad_buffers(synchronize=self.groups.device.type == "cuda")  # synchronizes all streams
        self.parking.leave()

    def save(self, folder: Path) -> None:
        """Save weights and optimizer, bit-exact; each rank writes its share."""
        self.parking.arrive()
        checkpoint.write(folder, self.network, self.optimizer, {"updates": self.updates, "skipped": self.skipped})

    def restore(self, folder: Path) -> None:
        """Load what `save` wrote into `folder`. Raises CheckpointError if a file is missing or incomplete."""
        self.parking.arrive()
        counters = checkpoint.read(folder, self.network, self.optimizer)
        self.updates, self.skipped = counters["updates"], counters["skipped"]
