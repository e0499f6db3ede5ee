"""Runs optimizer updates of a network spread over many ranks, and saves its exact state.

Knows Megatron-core's gradient buffers and distributed optimizer, not steps or stages. Gradients are summed over
data-parallel ranks in float32; each of these ranks updates its share of the weights, in float32 master weights if the
network's are lower precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from pipeline.declare.sharding import Update
from stages.backends import Batch, Optimization
from stages.backends.megatron import checkpoint
from stages.backends.megatron.microbatches import PassRow
from stages.backends.megatron.network import Network
from stages.backends.megatron.passes import rows_of, run
from stages.backends.objective import MAXIMA
from stages.backends.trainer import BaseLearner, File
from stages.losses import PolicyLoss


class MegatronLearner(BaseLearner):
    """A network with its optimizer. All ranks call every method together."""

    backend = "megatron"

    def __init__(self, network: Network, settings: Optimization) -> None:
        super().__init__(settings, network.groups.device, network.groups.ranks)
        self.network, self.groups, self._computing = network, network.groups, network.groups.computing
        self.disagreement, self.lora = network.disagreement, network.shape.lora
        if settings.checkpoint_activations:
            network.recompute(settings.checkpoint_activations)
        half = network.config.params_dtype == torch.bfloat16
        with self._computing():
            self.buffered = DistributedDataParallel(
                network.config,
                DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
                network,
            )
            if network.shape.lora is None:  # a frozen layer has no `main_grad`
                network.sum_in_place()
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

    def _backward(
        self, batch: Batch, loss: PolicyLoss, temperature: float, update: Update, packed: bool
    ) -> list[dict[str, torch.Tensor]]:
        self.buffered.zero_grad_buffer()
        self.optimizer.zero_grad()

        def finish(number: int, row: PassRow, hidden_SNH: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            logprobs_R, entropy_R = self.network.logprobs(hidden_SNH, row, temperature)
            entropy_NT = row.rectangle(entropy_R if loss.needs_entropy else entropy_R.detach())
            samples = update.microbatches[number].samples
            return self._objective(batch, loss, update, samples, row.rectangle(logprobs_R), entropy_NT, row.mask)

        samples = (batch.prompt_ids, batch.response_ids, batch.routes)
        rows = rows_of(*samples, update.microbatches, self.network, packed=packed)
        return run(self.buffered, self.network, rows, finish, backward=True)

    def _from_last(self, values: torch.Tensor) -> torch.Tensor:
        return self.groups.from_last(values)

    def _reduce(self, sums: dict[str, float]) -> tuple[dict[str, float], float]:
        message: list[Any] = [self.ranks.totals(sums, largest=MAXIMA) if self.groups.is_last else None]
        if self.groups.layout.pipeline > 1:
            dist.broadcast_object_list(message, src=self.groups.last, group=self.groups.process.pp)
        finalize_model_grads([self.buffered], None, pg_collection=self.groups.process)
        self.optimizer.prepare_grads()
        return message[0], self.optimizer.get_grad_norm()

    def _step(self, rate: float, norm: float, finite: bool) -> None:
        if not finite:
            return
        for each in self.optimizer.chained_optimizers:
            for group in each.param_groups:
                group["lr"] = rate
            if self.settings.clip_grad > 0 and (held := each.get_parameters()):
                clip_grad_by_total_norm_fp32(held, self.settings.clip_grad, norm)
        self.optimizer.step_with_ready_grads()

    def _park(self, room: int | None) -> None:
        """Drop the gradients too."""
        self.buffered.offload_grad_buffers(synchronize=self.groups.device.type == "cuda", empty_cache=False)
        shares = checkpoint.shares(self.network, self.optimizer)
        self.parking.park((tensor for _, _, kinds in shares for tensor in kinds.values()), room)

    def leave(self) -> None:
        """Move them back, overlapped with work that does not need them."""
        self.buffered.restore_grad_buffers(synchronize=self.groups.device.type == "cuda")  # synchronizes all streams
        super().leave()

    def _files(self) -> Iterator[File]:
        return checkpoint.files(self.network, self.optimizer)

    def _described(self, counters: dict[str, int]) -> dict[str, Any]:
        return checkpoint.described(self.network, counters)

    def saved_bytes(self) -> int:
        """Bytes of this rank's weights and of its share of the master weights and moments."""
        return sum(tensor.nbytes for _, tensor in checkpoint.state(self.network, self.optimizer))

    def _read(self, folder: Path) -> dict[str, int]:
        return checkpoint.read(folder, self.network, self.optimizer)
