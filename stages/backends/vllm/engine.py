"""The vLLM engine of one worker. Turns calls of stages into requests. It samples and does nothing else.

One worker is one replica; it starts its tensor-parallel ranks as child processes. float32 on the CPU, bfloat16 on GPUs.
When weights change mid-response, vLLM recomputes the response so far, so from there on the KV cache matches the new
weights.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoConfig, GenerationConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ops.refit.share import Share, layout_of
from pipeline import Model, StageContext, StageError, WorkerGroup
from pipeline.declare.columns import Ragged
from pipeline.errors import Problem
from stages.backends import PULL, Cancelled, Decoded, Draws, Generation, Route, Sampling, ServedWeights
from stages.backends.model.folder import model_folder
from stages.backends.model.quantized_folder import quantized_folder
from stages.backends.model.text import Tokenizers
from stages.backends.refit.target import check_same
from stages.backends.vllm import environment, install_cpu, processes
from stages.backends.vllm.limits import cache_problems, quantized_problems
from stages.backends.vllm.running import RunningStreams
from stages.backends.vllm.weights import VersionShares, expected
from stages.model_shape import positions, sparse_layers
from stages.routes import mixture_problems, replays

if TYPE_CHECKING:
    from stages.backends.vllm.client import Client
    from stages.backends.vllm.requests import Request


def open_engine(context: StageContext) -> VllmEngine:
    """The engine of this worker. Raises StageError if vLLM is not built for the group's device."""
    group = context.group
    environment.prepare(gpus=group.gpus > 0, threads=group.threads or 0, tensor_parallel=group.tensor_parallel)
    if group.gpus or group.tensor_parallel > 1:
        processes.import_ahead(group.gpus > 0)
    from stages.backends.vllm.api import computes_on_cpu  # reads the environment

    if computes_on_cpu() != (group.gpus == 0):
        raise StageError(_other_build(group))
    versions = context.max_staleness + 1  # that are in flight together
    worker = context.rank, group.processes
    return VllmEngine(group, context.run_dir, worker, versions=versions, beside_bytes=context.beside_bytes)


@dataclass(frozen=True, kw_only=True)
class StartedEngine:
    """The model of a running engine: the ids that end a response, and its maximum length."""

    model: Model
    client: Client
    closing: list[int]
    longest: int
    layers: list[int] | None = None  # with experts, if it replays routes


class VllmEngine(Tokenizers):
    """`stages.backends.Sampler` with one model. `versions` of an adapter are computed together; others wait. Other
    groups keep `beside_bytes` of its GPUs."""

    def __init__(
        self, group: WorkerGroup, run_dir: Path | None, worker: tuple[int, int] = (0, 1), *, versions: int = 1,
        beside_bytes: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self._versions, self._beside_bytes = versions, beside_bytes
        self._worker = worker  # replica index and count
        self.group, self.run_dir = group, run_dir
        self.dtype = torch.bfloat16 if group.gpus > 0 else torch.float32
        self._started: StartedEngine | None = None
        self._version: int | None = None  # of the weights loaded by `serve`
        self._names = itertools.count()
        self._streams = RunningStreams()

    def load(self, model: Model) -> None:
        """Start the model's engine. Raises StageError if it cannot start, and for a second model."""
        self._of(model)

    def client(self, model: Model) -> Client:
        """The model's engine, started. Raises StageError as `load` does."""
        return self._of(model).client

    def _of(self, model: Model) -> StartedEngine:
        from stages.backends.vllm.client import Client, Setup

        if self._started is None:
            group, folder = self.group, model_folder(model, self.run_dir)
            config, where = AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict(), str(group.location)
            layers = _layers(model, config) if replays(model) else None
            if found := [*quantized_problems(config, where), *cache_problems(group, config, where)]:
                raise StageError(*found)
            if group.weights == "fp8":
                folder = quantized_folder(folder, self.run_dir)
            setup = Setup(
                folder=folder, gpus=group.gpus > 0, tensor_parallel=group.tensor_parallel, memory=group.memory,
                where=str(group.location), cache=group.cache, speculate=group.speculate,
                draft=None if group.draft is None else model_folder(group.draft, self.run_dir),
                replica=self._worker[0], replicas=self._worker[1],
                lora=model.lora if model.trainable else None, slots=self._versions,
                routes=layers is not None, beside_bytes=self._beside_bytes,
            )  # fmt: skip
            closing, client = _closing(folder, self.tokenizer(model)), Client(setup)
            self._started = StartedEngine(
                model=model, client=client, closing=closing, longest=client.longest(), layers=layers
            )
        if self._started.model != model:
            raise StageError(self._second(self._started.model, model))
        return self._started

    def generate(
        self, model: Model, prompt_ids: Ragged, sampling: Sampling, draws: Draws | None, *, images: Ragged | None = None
    ) -> Generation:
        """Sample responses from the served copy."""
        requests = self._requests(model, prompt_ids, sampling, draws, images)
        self.client(model).complete(requests)
        return _generation(requests, 0, self._layers_of(sampling))

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
        """Sample responses from the served copy; groups arrive in completion order."""
        requests = self._requests(model, prompt_ids, sampling, draws, images)
        with self._streams.of(self.client(model), requests, group_size, unwanted) as running:
            while running.open:
                ended = await running.ended()
                if lost := sorted(ended.keys() & running.given_up):
                    yield Cancelled({group: max(len(request.tokens) for request in ended[group]) for group in lost})
                if made := tuple(sorted(ended.keys() - running.given_up)):
                    lot = [request for group in made for request in ended[group]]
                    yield Decoded(made, _generation(lot, version, self._layers_of(sampling)))

    def serve(self, model: Model, shares: Sequence[Share], version: int, route: Route = PULL) -> ServedWeights:
        """Load a version into the engine between two tokens. Returns the hash of the loaded weights."""
        client = self.client(model)
        check_same(
            expected(client.setup.folder, self.dtype, client.setup.lora, self.group.weights), layout_of(shares).tensors
        )
        served = client.load(VersionShares(shares, version, route))
        self._version = version
        return served

    def served_version(self, model: Model, default: int = 0) -> int:
        """The version of the last `serve`; None for a frozen model."""
        served = self._started is not None and self._started.model == model
        return self._version if served and self._version is not None else default

    def sleep(self, room: int | None = None) -> tuple[int, int]:
        """Free all GPU memory until `wake`, whatever `room` is: weights move to the host, the cache is dropped. Returns
        the bytes in use on the first GPU before and after; 0 for an engine that has not started."""
        return self._started.client.sleep() if self._started is not None else (0, 0)

    def wake(self) -> tuple[int, int]:
        """Reclaim the memory. Returns what `sleep` returns."""
        return self._started.client.wake() if self._started is not None else (0, 0)

    def close(self) -> None:
        """Stop the engine's processes."""
        if self._started is not None:
            self._started.client.close()
            self._started = None

    def _requests(
        self, model: Model, prompt_ids: Ragged, sampling: Sampling, draws: Draws | None, images: Ragged | None
    ) -> list[Request]:
        from stages.backends.vllm.api import parameters
        from stages.backends.vllm.choice import request_choice
        from stages.backends.vllm.requests import Request

        served = self._of(model)
        longest, limit = sampling.longest(prompt_ids.lengths)
        if longest + limit > served.longest:
            raise StageError(self._too_long(longest, limit, served.longest))
        made, pictures = [], self.pictures(model, images)
        for position, prompt in enumerate(prompt_ids.rows()):
            name = str(next(self._names))
            choice = request_choice(name, sampling, None if draws is None else draws.of(position))
            limit = sampling.limit(position)
            params = parameters(max_tokens=limit, closing=served.closing, stop=sampling.stop, choice=choice)
            request = Request(position=position, name=name, prompt=prompt.tolist(), params=params)
            if pictures is not None:
                request.pictures = pictures[position]
                request.runs = [*self.vision(model).runs(request.prompt, request.pictures)]
            made.append(request)
        return made

    def _layers_of(self, sampling: Sampling) -> list[int] | None:
        """The layers whose experts were asked for."""
        return self._started.layers if self._started and sampling.routes else None

    def _second(self, first: Model, model: Model) -> Problem:
        return Problem(
            where=str(self.group.location),
            what=f"worker group {self.group.name!r} samples from {first.source!r} and from {model.source!r}"
            + ("" if model.trainable == first.trainable else ", trained and frozen"),
            why="a vllm worker group serves one model",
            fix="one worker group per model",
        )

    def _too_long(self, prompt: int, max_tokens: int, longest: int) -> Problem:
        assert self._started is not None
        folder = self._started.client.setup.folder
        most = positions(AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict())
        by_model = most is not None and longest >= most
        return Problem(
            where=str(self.group.location),
            what=f"a prompt of {prompt} tokens and max_tokens={max_tokens} exceed {longest} tokens",
            why="this is the most that the model's config allows (max_position_embeddings)"
            if by_model
            else "this is what the engine's cache has room for",
            fix="a smaller max_tokens, or shorter prompts" + ("" if by_model else ", or more memory for the cache"),
        )


def _generation(ended: Sequence[Request], version: int, layers: Sequence[int] | None = None) -> Generation:
    """Collect the samples in this order, with the experts of these layers. `version` is for weights that were never
    served."""
    lengths = tuple(len(request.tokens) for request in ended)
    stamps = [version if stamp is None else stamp for request in ended for stamp in request.versions()]
    return Generation(
        Ragged(torch.tensor([token for request in ended for token in request.tokens], dtype=torch.long), lengths),
        Ragged(torch.from_numpy(np.concatenate([request.logprobs for request in ended])), lengths),
        torch.tensor([request.ended == "length" for request in ended]),
        Ragged(torch.tensor(stamps, dtype=torch.int32), lengths),
        passes=sum(request.passes for request in ended),
        routes=None if layers is None else routes_of(ended, layers),
    )


def routes_of(ended: Sequence[Request], layers: Sequence[int]) -> Ragged:
    """The field of stages/routes.py. vLLM returns all layers of the model, with zeros for those without experts. Raises
    RuntimeError if it has not returned the experts of each token."""
    rows = []
    for request in ended:
        tokens = len(request.prompt) + len(request.tokens) - 1
        if request.routes is None or len(request.routes) != tokens:
            found = 0 if request.routes is None else len(request.routes)
            raise RuntimeError(f"vLLM has returned the experts of {found} tokens, of {tokens}")
        rows.append(torch.from_numpy(request.routes[:, list(layers)].astype(np.int16)).flatten())
    return Ragged.of(rows)


def _layers(model: Model, config: Mapping[str, Any]) -> list[int]:
    """The layers with experts. Raises StageError if the model has none to replay."""
    if problems := list(mixture_problems(model, config)):
        raise StageError(*problems)
    return sparse_layers(config)


def _closing(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end a response, from the generation config, the config and the tokenizer."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    generation = (folder / "generation_config.json").is_file() and GenerationConfig.from_pretrained(folder)
    found: set[int] = set()
    for ids in (
        generation.eos_token_id if generation else None,
        config.get_text_config().eos_token_id,
        tokenizer.eos_token_id,
    ):
        found.update([ids] if isinstance(ids, int) else ids or ())
    return sorted(found)


def _other_build(group: WorkerGroup) -> Problem:
    wants, has = ("the CPU", "GPUs") if group.gpus == 0 else ("GPUs", "the CPU")
    install = f"python -m {install_cpu.__name__}" if group.gpus == 0 else "pip install 'sluice-rl[vllm]'"
    return Problem(
        where=str(group.location),
        what=f"worker group {group.name!r} has gpus={group.gpus}, and the vLLM that is installed is built for {has}",
        why=f"a group with gpus={group.gpus} computes on {wants}",
        fix=f"{install}, or another number of GPUs",
    )
