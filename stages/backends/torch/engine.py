"""The torch engine of one worker: its models by role, and the methods that stages call. Knows no stages.

float32 on the CPU; bfloat16 on the GPU, with float32 master copies of trained weights. The copies of a model (trained,
served, frozen) come from one build, warm start included, so they start equal.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ops.comm.stateless_group import GroupError
from ops.refit.share import Share
from pipeline import Model, StageContext, StageError
from pipeline.declare.columns import Ragged
from pipeline.declare.ranks import Ranks
from pipeline.declare.saved_model import write_tensors_json
from pipeline.declare.sharding import Shard
from pipeline.errors import Problem
from stages.backends import PULL, Cancelled, Decoded, Draws, Generation, Optimization, Route, Sampling, ServedWeights
from stages.backends.device import claim
from stages.backends.model import weights as weight_tools
from stages.backends.model.adapters import attach, sharing
from stages.backends.model.build import closing_tokens, load_network
from stages.backends.model.folder import base_of, write_adapter_description, write_description
from stages.backends.model.places import Placed, pieces, placed
from stages.backends.model.sharded import divide
from stages.backends.model.text import identity
from stages.backends.refit.source import peer_lost
from stages.backends.refit.target import Target, acknowledged
from stages.backends.torch.generate import decode, generate
from stages.backends.torch.images import Seen
from stages.backends.torch.optimize import WEIGHTS, TorchLearner
from stages.backends.torch.reward_model import RewardModelOnDevice, open_reward_model
from stages.backends.torch.routers import Routers
from stages.backends.torch.score import score
from stages.backends.trainer import BaseTrainer
from stages.model_shape import positions
from stages.routes import mixture_problems

Role = Literal["trained", "served", "frozen"]
LOOK_S = 0.02  # between two looks of a stream whose weights have no version


def open_engine(context: StageContext) -> TorchEngine:
    """Open the engine of this worker. Raises StageError if its group needs a GPU and torch sees none."""
    group, device = context.group, claim(context.group)
    dtype = torch.bfloat16 if group.gpus > 0 else torch.float32
    divided = group.fully_sharded and context.ranks.connected
    worker = (context.rank, group.workers)
    return TorchEngine(device, dtype, context.ranks, divided=divided, worker=worker, run_dir=context.run_dir)


class TorchEngine(BaseTrainer):
    """`stages.backends.Engine` on one device per rank. `divided` shards trained and frozen copies over the ranks;
    `worker` is this worker's index in its group, and the number of workers. In `run_dir` lie models that are built."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, ranks: Ranks | None = None, *, divided: bool = False,
        worker: tuple[int, int] = (0, 1), run_dir: Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(device, dtype, worker[0])
        self.worker, self.ranks, self.divided, self.run_dir = worker, ranks or Ranks(), divided, run_dir
        self._builds: dict[Model, PreTrainedModel] = {}
        self._bases: dict[Model, PreTrainedModel] = {}  # of models with adapters: shared by all roles
        self._networks: dict[tuple[Model, Role], PreTrainedModel] = {}
        self._routers: dict[tuple[Model, Role], Routers] = {}
        self._versions: dict[Model, int] = {}  # of the weights that `serve` loaded
        self._between: set[Model] = set()  # models whose served copy has no version
        self._targets: dict[Model, Target] = {}
        self._reward_models: dict[Model, RewardModelOnDevice] = {}

    def network(self, model: Model, role: Role) -> PreTrainedModel:
        """The copy of the model in this role; every call returns the same object."""
        key = identity(model)
        if (key, role) not in self._networks:
            network = self._adapted(key, role) if key.lora else self._fresh(key)
            if role != "trained":
                network.requires_grad_(False)
            if self.divided and role != "served":
                divide(network.float() if role == "trained" else network, self.ranks, self.dtype)
            self._networks[key, role] = network
        return self._networks[key, role]

    def routers(self, model: Model, role: Role) -> Routers | None:
        """The routers of a copy; None without router replay. Raises StageError if the model has none."""
        key = identity(model)
        if not key.router_replay or role == "frozen":
            return None
        if (key, role) not in self._routers:
            network = self.network(model, role)
            if problems := list(mixture_problems(key, network.config.to_dict())):
                raise StageError(*problems)
            self._routers[key, role] = Routers(network)
        return self._routers[key, role]

    def load(self, model: Model) -> None:
        """Load the served copy."""
        self.network(model, _served(model))

    def generate(
        self, model: Model, prompt_ids: Ragged, sampling: Sampling, draws: Draws | None, *, images: Ragged | None = None
    ) -> Generation:
        """Sample responses from the served copy."""
        network = self.network(model, _served(model))
        pad, version = _pad(self.tokenizer(model)), self.served_version(model)
        _check_length(model, network, prompt_ids, sampling)
        closing = self._closing(model, network, sampling)
        uniforms = draws.uniforms(sampling.max_tokens) if draws else None
        routers = self.routers(model, _served(model)) if sampling.routes else None
        return generate(
            network, prompt_ids, sampling, uniforms, closing=closing, pad=pad, version=version, routers=routers,
            seen=self._seen(model, images),
        )  # fmt: skip

    async def stream(
        self,
        model: Model,
        prompt_ids: Ragged,
        sampling: Sampling,
        draws: Draws | None,
        *,
        group_size: int,
        version: int = 0,
        unwanted: Callable[[int], bool] = lambda group: False,
        images: Ragged | None = None,
    ) -> AsyncGenerator[Decoded | Cancelled, None]:
        """Sample responses from the served copy, group by group."""
        network = self.network(model, _served(model))
        _check_length(model, network, prompt_ids, sampling)
        events = decode(
            network,
            prompt_ids,
            sampling,
            draws.uniforms(sampling.max_tokens) if draws else None,
            closing=self._closing(model, network, sampling),
            pad=_pad(self.tokenizer(model)),
            group_size=group_size,
            version=lambda: self.served_version(model, version),
            unwanted=unwanted,
            routers=self.routers(model, _served(model)) if sampling.routes else None,
            seen=self._seen(model, images),
        )
        while True:
            while identity(model) in self._between:
                await asyncio.sleep(LOOK_S)
            try:
                event = next(events)
            except StopIteration:
                return
            if event is not None:
                yield event
            await asyncio.sleep(0)

    def score(
        self, model: Model, prompt_ids: Ragged, response_ids: Ragged, shard: Shard, *, temperature: float,
        images: Ragged | None = None,
    ) -> Ragged:  # fmt: skip
        """Logprobs of the response tokens under the trained copy, or under the frozen copy if the model is frozen."""
        network = self.network(model, "trained" if model.trainable else "frozen")
        pad = _pad(self.tokenizer(model))
        seen = self._seen(model, images)
        return score(network, prompt_ids, response_ids, shard, temperature=temperature, pad=pad, seen=seen)

    def score_replayed(
        self, model: Model, prompt_ids: Ragged, response_ids: Ragged, shard: Shard, *, temperature: float,
        routes: Ragged,
    ) -> Ragged:  # fmt: skip
        """Logprobs of the response tokens under the trained copy, with given experts."""
        return score(
            self.network(model, "trained"), prompt_ids, response_ids, shard, temperature=temperature,
            pad=_pad(self.tokenizer(model)), routers=self.routers(model, "trained"), routes=routes,
        )  # fmt: skip

    def reward(
        self, model: Model, prompts: Sequence[str], responses: Sequence[str], *, chat: bool, microbatch: int
    ) -> torch.Tensor:
        """Scores of a reward model, which its first call loads."""
        key = identity(model)
        if key not in self._reward_models:
            self._reward_models[key] = open_reward_model(key, dtype=self.dtype, device=self.device)
        return self._reward_models[key].scores(prompts, responses, chat=chat, microbatch=microbatch)

    def trained_weights(self, model: Model) -> dict[str, torch.Tensor]:
        """A snapshot of the trained copy, on rank 0."""
        if self.ranks.rank > 0 and not self.divided:
            return {}  # rank 0 has the whole model
        made = weight_tools.weights(self.network(model, "trained"), self.dtype)
        return made if self.ranks.rank == 0 else {}

    def served_weights(self, model: Model) -> dict[str, torch.Tensor]:
        """A snapshot of the served copy."""
        return weight_tools.weights(self.network(model, _served(model)))

    def serve(self, model: Model, shares: Sequence[Share], version: int, route: Route = PULL) -> ServedWeights:
        """Load a version into the served copy, in place. Returns the hash of the weights that it then holds."""
        key = identity(model)
        if key not in self._targets:
            tensors, places, held = placed(self.network(model, "served"))
            rank, workers = self.worker
            self._targets[key] = Target(tensors, [places], 0, held, replica=rank, replicas=workers)
        if route.meeting is not None:
            self._between.add(key)
        try:
            received = self._targets[key].receive(shares, version, route)
        except GroupError as error:
            raise peer_lost(error) from error
        sha256 = acknowledged(shares, [received.summed])
        self._between.discard(key)
        self._versions[key] = version
        return ServedWeights(sha256, received.record)

    def served_version(self, model: Model, default: int = 0) -> int:
        """The version of the last `serve`; `default` for a frozen model."""
        return self._versions.get(model, default)

    def describe(self, model: Model, folder: Path) -> None:
        """Write what makes the saved weights a Hugging Face folder."""
        if self.ranks.rank == 0:
            network = self.network(model, "trained")
            found = pieces(network, WEIGHTS)
            if model.lora is None:
                write_description(network, self.tokenizer(model), folder)
            else:
                found = write_adapter_description(
                    model, found, self.tokenizer(model), base_of(model, self.run_dir), folder
                )
            write_tensors_json(folder, found)

    def _new_learner(self, model: Model, optimization: Optimization) -> TorchLearner:
        pad = _pad(self.tokenizer(model))
        network, routers = self.network(model, "trained"), self.routers(model, "trained")
        sees = partial(self._seen, model)
        return TorchLearner(
            network, optimization, pad=pad, ranks=self.ranks, routers=routers, sees=sees, lora=model.lora
        )

    def _seen(self, model: Model, images: Ragged | None) -> Seen | None:
        pictures = self.pictures(model, images)
        return None if pictures is None else (self.vision(model), pictures)

    def _placed(self, model: Model) -> Placed:
        return placed(self.network(model, "trained"), self.dtype)

    def _config(self, model: Model) -> dict[str, Any]:
        return self.network(model, "trained" if model.trainable else "frozen").config.to_dict()

    def _closing(self, model: Model, network: PreTrainedModel, sampling: Sampling) -> list[int]:
        """Ids that end a response."""
        tokenizer = self.tokenizer(model)
        return sorted({*closing_tokens(network, tokenizer), *(_stop_token(tokenizer, text) for text in sampling.stop)})

    def _adapted(self, key: Model, role: Role) -> PreTrainedModel:
        """The model before training with an adapter of this role; the frozen copy has none."""
        if key not in self._bases:
            base = replace(key, source=str(base_of(key, self.run_dir)), config=None, alphabet=None, warm_start=None)
            object.__setattr__(base, "location", key.location)
            self._bases[key] = load_network(base, self.tokenizer(key), dtype=self.dtype, device=self.device)
        network = sharing(self._bases[key])
        if role != "frozen":
            attach(network, key.lora, seed=key.seed, where=str(key.location))
        return network

    def _fresh(self, key: Model) -> PreTrainedModel:
        """The model before training. A build that is costly to repeat is kept on the CPU."""
        network: Any
        if key in self._builds:
            network = copy.deepcopy(self._builds[key])
            return network.to(self.device)
        network = load_network(key, self.tokenizer(key), dtype=self.dtype, device=self.device)
        if key.warm_start is not None:
            pristine: Any = copy.deepcopy(network)
            self._builds[key] = pristine.to("cpu")
        return network


def _served(model: Model) -> Role:
    return "served" if model.trainable else "frozen"


def _pad(tokenizer: PreTrainedTokenizerBase) -> int:
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0  # masked wherever it is used


def _check_length(model: Model, network: PreTrainedModel, prompt_ids: Ragged, sampling: Sampling) -> None:
    """Raise StageError if a response may become longer than the model allows."""
    most = positions(network.config.to_dict())
    longest, limit = sampling.longest(prompt_ids.lengths)
    if most is not None and longest + limit > most:
        raise StageError(
            Problem(
                where=str(model.location),
                what=f"a prompt of {longest} tokens and max_tokens={limit} exceed {most} tokens",
                why="this is the most that the model's config allows (max_position_embeddings)",
                fix="a smaller max_tokens, or shorter prompts",
            )
        )


def _stop_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if len(ids) != 1:
        raise StageError(
            Problem(
                where=f"stop {text!r}",
                what=f"this tokenizer splits it into {len(ids)} tokens",
                why="generation stops at single tokens",
                fix="use a text that is one token",
            )
        )
    return ids[0]
