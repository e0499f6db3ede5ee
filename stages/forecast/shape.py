"""The shape of a stage's model before it is loaded, and the number of its weights on one GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.flops import Transformer
from pipeline import GraphError, Model, WorkerGroup
from pipeline.errors import Problem
from stages.model_shape import known_config

HALF, SINGLE = 2, 4  # bytes of a bfloat16, of a float32
QUANTIZED = 1 + SINGLE / 128**2  # bytes of an 8-bit float with its share of a block's scale


@dataclass(frozen=True)
class Divided:
    """A model on the ranks of a worker group. `tied`: its input and output embedding are one."""

    shape: Transformer
    tied: bool
    tensor: int
    pipeline: int
    context: int
    experts: int

    @property
    def layers(self) -> int:
        """Layers of the fullest pipeline stage."""
        return -(-self.shape.layers // self.pipeline)

    @property
    def weights(self) -> float:
        """Weights of the fullest rank. Norms and biases are left out."""
        shape = self.shape
        embeddings = 1 if self.tied or self.pipeline > 1 else 2
        undivided = self.layers / shape.layers * shape.undivided_weights
        return self.matrices + undivided + embeddings * shape.logit_weights / self.tensor

    @property
    def matrices(self) -> float:
        """Of these, the weights of attention, MLPs and experts."""
        shape = self.shape
        single = shape.mlp_weights(0)
        own = (shape.mixer_weights + single - shape.undivided_weights) / self.tensor
        return self.layers / shape.layers * own + self.expert_matrices

    @property
    def expert_matrices(self) -> float:
        """Of these, the weights of experts."""
        shape = self.shape
        return self.layers / shape.layers * (shape.mlp_weights(shape.experts) - shape.mlp_weights(0)) / self.experts

    def trained_by(self, model: Model) -> float:
        """Weights of the fullest rank that training changes: all, or those of an adapter, as if its targets were all
        layers outside of experts."""
        if model.lora is None:
            return self.weights
        shape = self.shape
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        attention = 4 * shape.hidden + 2 * query + 2 * key  # inputs and outputs
        inner = shape.shared if shape.experts else shape.intermediate
        return self.layers * model.lora.rank * (attention + 3 * (shape.hidden + inner)) / self.tensor

    def size_bytes(self, weights: str) -> float:
        """Bytes of the weights of the fullest rank, where `WorkerGroup.weights` is this."""
        return HALF * self.weights - (HALF - QUANTIZED) * self.matrices * (weights == "fp8")


def divided(model: Model, group: WorkerGroup) -> Divided:
    """Return a model as a group divides it. Raises GraphError if its shape is not known before it loads."""
    config = model_config(model)
    try:
        shape = Transformer.of(config)
    except (TypeError, ValueError) as error:
        raise GraphError(
            Problem(
                where=str(model.location),
                what=f"the shape of {model.source!r} is not known: {error}",
                why="time and memory follow from it",
                fix="a config with these numbers, of a Llama-like model, or no --on",
            )
        ) from None
    expert_tensor = group.expert_tensor_parallel or group.tensor_parallel
    return Divided(
        shape=shape,
        tied=bool(config.get("tie_word_embeddings")) and config.get("model_type") != "nemotron_h",  # which never is
        tensor=group.tensor_parallel,
        pipeline=group.pipeline_parallel,
        context=group.context_parallel,
        experts=group.expert_parallel * expert_tensor,
    )


def model_config(model: Model) -> Mapping[str, Any]:
    """Return the Hugging Face config of a model: from the Model, a local folder, or the hub. Raises GraphError if it
    cannot be had."""
    if (config := known_config(model)) or Path(model.source).exists():
        return config
    from huggingface_hub import hf_hub_download

    try:  # the library's own errors are OSErrors and ValueErrors
        return dict(json.loads(Path(hf_hub_download(model.source, "config.json")).read_text()))
    except (OSError, ValueError):
        raise GraphError(
            Problem(
                where=str(model.location),
                what=f"the config of {model.source!r} is not on this machine, and the hub does not give it",
                why="time and memory follow from a model's shape",
                fix="a local folder with its config.json, or a connection to the hub",
            )
        ) from None
