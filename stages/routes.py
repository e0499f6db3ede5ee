"""Router replay: the experts that the sampler chose for each token, as a field, for scoring and training.

    policy = Model("Qwen/Qwen3-30B-A3B", router_replay=True)

A sampler and a trainer that compute slightly different numbers choose different experts for some tokens, and then their
logprobs differ by far more than rounding. With router replay (R3, arXiv 2510.11370) `Rollout` writes `routed_experts`,
and `PrevLogprobs` and `Train` compute with these experts; the weights of the experts, and the router's gradient, come
from the trainer's own scores. Describes and checks; loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline import Field, Model, WorkerGroup
from pipeline.errors import Problem
from stages.model_shape import known_config, sparse_layers

_EXPERTS = {  # what the families call the number of experts of a layer
    "qwen3_moe": "num_experts",
    "glm4_moe": "n_routed_experts",
    "deepseek_v3": "n_routed_experts",
    "nemotron_h": "n_routed_experts",
}
FAMILIES = tuple(_EXPERTS)


def replays(model: Model) -> bool:
    """Whether a stage computes with the sampler's experts: not the frozen copy, whose own routers choose."""
    return isinstance(model, Model) and model.router_replay is True and model.trainable  # anything else is reported


def routed_experts(model: Model) -> Field:
    """The field of a model's routes. A sample has one entry for each of its tokens but the last, each layer with
    experts and each expert chosen there, in that order, flat.

    The largest number of the dtype says that a token's experts are not known. uint8, or int16 for more than 255 experts
    or if their number is not known before the model is loaded.
    """
    config = known_config(model)
    count = config.get(_EXPERTS.get(config.get("model_type", ""), ""))
    small = isinstance(count, int) and count <= 255
    hint = "add Rollout(policy, on=sampler), with the model that is trained"
    return Field("routed_experts", dtype="uint8" if small else "int16", dims="N R", unit="expert", low=0, hint=hint)


def of_replay(model: Model) -> tuple[Field, ...]:
    """The field that router replay adds to what the stages of a model read or write; none without it."""
    return (routed_experts(model),) if replays(model) else ()


def mixture_problems(model: Model, config: Mapping[str, Any] | None = None) -> Iterator[Problem]:
    """Reasons why a model cannot replay routes: from its config, or as far as that is known before it is loaded."""
    config = known_config(model) if config is None else config
    if model.router_replay is True and "model_type" in config and (why := _no_mixture(config)):
        yield Problem(
            where=str(model.location),
            what=f"the model {model.source!r} has router_replay=True",
            why=why,
            fix="router_replay=False",
        )


def _no_mixture(config: Mapping[str, Any]) -> str:
    """Why a model with this config has no experts to replay; "" if it has."""
    family = config["model_type"]
    if family not in FAMILIES:
        return f"a {family!r} is none of the mixtures of experts whose routers are known: {', '.join(FAMILIES)}"
    try:
        return "" if sparse_layers(config) else "none of its layers has experts"
    except (KeyError, TypeError):  # not known before the model is loaded
        return ""


def replay_problems(model: Model, group: WorkerGroup) -> Iterator[Problem]:
    """Reasons why a worker group can neither return nor replay the experts of a model."""
    backend = group.description
    if backend is None or not replays(model):
        return
    where, what = str(model.location), f"the model {model.source!r} has router_replay=True, and worker group"
    device = "cuda" if group.gpus else "cpu"
    if device not in backend.replays:
        elsewhere = "cuda" in backend.replays
        yield Problem(
            where=where,
            what=f"{what} {group.name!r} has the backend {backend.name!r}" + " and no GPUs" * elsewhere,
            why=f"{backend.name!r} returns the experts that it chooses on GPUs only"
            if elsewhere
            else "that backend neither returns the experts that it chooses nor computes with given ones",
            fix="gpus=..., " * elsewhere + "backend='torch', or router_replay=False",
        )
    elif group.speculate:
        why = "what vLLM returns for drafted tokens has not been tested"
        yield Problem(
            where=where, what=f"{what} {group.name!r} has speculate={group.speculate}", why=why, fix="speculate=0"
        )
