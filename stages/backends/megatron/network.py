"""One rank's part of a decoder, built from Megatron-core modules, and logprobs from its hidden states.

Knows layers and process groups, not where weights come from or what is trained.

Legend: S positions, N samples, H hidden size, R response tokens, M those that this rank predicts, V this rank's part of
the vocabulary, D head size.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import linear

from ops.context_parallel import whole
from ops.vocab_parallel import logprobs_and_entropy
from stages.backends.megatron.fused import Fused
from stages.backends.megatron.groups import Groups
from stages.backends.megatron.layers import block
from stages.backends.megatron.microbatches import PassRow
from stages.backends.megatron.names import padded_vocab, parameters
from stages.backends.megatron.parts import stage_layers
from stages.backends.megatron.rotary import frequencies
from stages.backends.megatron.router import ReplayingRouter
from stages.backends.model.decoder import Decoder
from stages.backends.model.routes import Disagreement


class Network(GPTModel):
    """This rank's part. It outputs hidden states (on the last stage after the final norm); `logprobs` does the rest, so
    logits are computed only where response tokens are predicted."""

    def __init__(self, decoder: Decoder, config: TransformerConfig, groups: Groups, fused: Fused) -> None:
        part = replace(groups.part(), fused_norms=fused.layers, grouped_experts=decoder.experts > 0 and fused.experts)
        super().__init__(
            config=config,
            transformer_layer_spec=block(decoder, config, part, fused),
            vocab_size=padded_vocab(decoder, part.tensors),
            max_sequence_length=0,  # needed for learned positions only
            pre_process=part.stage == 0,
            post_process=part.stage == part.stages - 1,
            share_embeddings_and_output_weights=decoder.tied,
            position_embedding_type="none",
            pg_collection=groups.process,
        )
        self.shape, self.groups, self.part, self.fused = decoder, groups, part, fused
        self.disagreement = Disagreement()
        self.routers = self._numbered_routers()
        self.frequencies_D = frequencies(decoder.rope).to(groups.device) if decoder.rope else None
        # Megatron-core marks weights as divided when it initializes them, and biases always. These weights are loaded;
        # without the mark, the gradient norm would count only one rank's part.
        self.table = table = parameters(decoder, part)
        for name, parameter in self.named_parameters():
            if table[name].expert:
                # Sum its gradients over the ranks with the same expert (expt_dp). Megatron-core does so only with
                # expert_parallel > 1; without it, tensor-parallel ranks can hold whole experts, for their own tokens.
                parameter.allreduce = False
            if (dim := table[name].divided) is not None and not hasattr(parameter, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(parameter, True, dim, 1)

    def _numbered_routers(self) -> dict[int, ReplayingRouter]:
        """The routers of this stage, by their number among those of all stages."""
        own = stage_layers(len(self.shape.layers), self.part.stages)[self.part.stage]
        sparse = self.shape.sparse
        routers = {sparse.index(i): layer.router for i, layer in zip(own, self.decoder.layers) if i in sparse}
        for router in routers.values():
            router.disagreement = self.disagreement
        return routers

    def forward(self, row: PassRow) -> torch.Tensor:
        """Returns [S, N, H], or its tensor-parallel share of S. Later stages get their input from
        `set_input_tensor`."""
        self._give(row.experts)
        hidden_SNH = None
        if self.pre_process:
            hidden_SNH = self._embedded(row)
        return self.decoder(
            hidden_states=hidden_SNH,
            attention_mask=None,
            rotary_pos_emb=self._angles(row),
            packed_seq_params=row.packed,
        )

    def _embedded(self, row: PassRow) -> torch.Tensor:
        """The embeddings of the row's tokens. That of the token that pads gets no gradient, as in transformers, also
        where the token is part of a text: it is zeros, and a norm of zeros has an enormous gradient."""
        hidden_SNH = self.embedding(input_ids=row.ids_NS, position_ids=row.positions_S)
        if self.shape.pad is None:
            return hidden_SNH
        pads_SN = self._of_rank(torch.eq(row.ids_NS.T, self.shape.pad).contiguous())
        return torch.where(pads_SN[..., None], hidden_SNH.detach(), hidden_SNH)

    def _give(self, experts: torch.Tensor | None) -> None:
        """Let the routers have the experts of the next pass."""
        for layer, router in self.routers.items():
            given = None if experts is None else self._of_rank(experts)[:, :, layer].flatten(0, 1)
            router.given_TK = given

    def _of_rank(self, values_S: torch.Tensor) -> torch.Tensor:
        """The tensor-parallel share of S."""
        return values_S.chunk(self.part.tensors)[self.part.tensor]

    def _angles(self, row: PassRow) -> torch.Tensor | None:
        """Angles of the rotary embedding, [S, 1, 1, D], whose halves are equal."""
        if self.frequencies_D is None:
            return None
        angles_SD = torch.outer(row.positions_S.float(), self.frequencies_D)
        return torch.cat([angles_SD, angles_SD], dim=-1)[:, None, None, :]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """What the table names: parameters, and constants that no update changes; with an adapter, that alone."""
        held = chain(self.named_parameters(), self.named_buffers())
        return {name: tensor for name, tensor in held if name in self.table}

    def logprobs(self, hidden_SNH: torch.Tensor, row: PassRow, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprob and entropy of each response token, [R]; on the last stage."""
        group = self.groups.process.tp
        hidden_SNH = gather_from_sequence_parallel_region(hidden_SNH, group=group)
        weight_VH = self.shared_embedding_or_output_weight() if self.shape.tied else self.output_layer.weight
        first = self.part.tensor * len(weight_VH)
        weight_VH = weight_VH[: max(1, self.shape.vocab - first)]  # the rest is padding
        logits_MV = linear(hidden_SNH.flatten(0, 1)[row.keep_M], weight_VH)
        logprobs_M, entropy_M = logprobs_and_entropy(
            logits_MV,
            row.targets_M,
            group=group if self.groups.layout.tensor > 1 else None,
            first=first,
            temperature=temperature,
            reuse=True,
        )
        return self._whole(logprobs_M, row), self._whole(entropy_M, row)

    def _whole(self, values_M: torch.Tensor, row: PassRow) -> torch.Tensor:
        """[R]: the values of this rank and of the others that hold slices of the row."""
        if row.here_M is None:
            return values_M
        return whole(values_M, row.here_M, size=sum(row.lengths), group=self.groups.process.cp)

    def sum_in_place(self) -> None:
        """From now on, matrix products that can add weight gradients to the parameters' `main_grad` themselves."""
        for module in self.modules():
            if self.fused.gradients and hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True

    def recompute(self, what: Literal[True, "mlp"] = True) -> None:
        """From now on, keep only layer inputs and recompute activations in the backward pass; or, with "mlp", of the
        feed-forward parts only."""
        for layer in self.decoder.layers:
            if what == "mlp":
                layer.recompute_feed_forward()
                continue
            layer.recomputes = True
            if attention := getattr(layer.self_attention, "core_attention", None):
                attention.recomputed = True
