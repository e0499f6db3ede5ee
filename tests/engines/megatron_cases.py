"""Tiny models, a frozen batch, and measurements of a Megatron engine on it; as a script, ranks 0 and 2, or 1 and 3.

    python -m tests.engines.megatron_cases FOLDER RANK PORT

It forks the second rank, which takes part in the cases of four ranks only. Each rank writes
FOLDER/<case>-<rank>.safetensors and .json.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from msgspec import structs
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from ops.logprobs import entropy, selected_logprobs
from ops.vocab_parallel import logprobs_and_entropy
from pipeline import Model
from pipeline.declare.columns import Ragged
from pipeline.declare.ranks import RankLayout, Ranks
from pipeline.declare.sharding import Microbatching, Packed, Plain, Shard, Sharding
from stages.backends.interface import Batch, Optimization
from stages.backends.megatron import layers
from stages.backends.megatron.engine import MegatronEngine
from stages.backends.megatron.folder import gathered
from stages.backends.megatron.groups import Groups, join
from stages.backends.megatron.learner import MegatronLearner
from stages.backends.megatron.parts import stage_layers
from stages.lora import LoRA
from stages.losses import ClippedLoss, TruncatedIS
from tests.engines.gathered_attention import GatheredAttention
from tests.shares import weight_hash

VOCAB = 131  # not a multiple of 2, so two tensor-parallel ranks pad it
TEMPERATURE = 0.7
LOSS = ClippedLoss(clip=(0.2, 0.2), kl=0.01, correction=TruncatedIS(cap=2.0), entropy=0.01)
OPTIMIZATION = Optimization(lr=1e-3, eps=1e-5, weight_decay=0.1, clip_grad=1.0)
GROUPS = (5, 3)  # samples of each prompt of a grouped batch
DEADLINE_S = 120.0
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 40,  # also a token of texts
}
_MIXTURE = {  # routed by sigmoids, with a shared expert, after a dense layer
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
FAMILIES = {
    "llama": {
        "head_dim": 8,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": {
        "head_dim": 8,
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "glm4_moe": _MIXTURE
    | {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    },
    "deepseek_v3": _MIXTURE
    | {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.2,
            "original_max_position_embeddings": 16,
        },
    },
}
FAMILIES["nemotron_h"] = {
    "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
    "head_dim": 8,
    "tie_word_embeddings": False,
    "ssm_state_size": 6,
    "mamba_num_heads": 8,
    "mamba_head_dim": 4,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 8,
    "time_step_min": 1e-9,  # transformers has no shorter time steps; vLLM and Megatron-core have
}
FAMILIES["nemotron_h, experts"] = FAMILIES["nemotron_h"] | {
    "layers_block_type": ["mamba", "moe", "attention", "moe"],
    "moe_shared_expert_intermediate_size": 40,
    **{name: size for name, size in _MIXTURE.items() if name != "first_k_dense_replace"},
    "n_shared_experts": 1,
}
FAMILIES["nemotron_h, latent"] = FAMILIES["nemotron_h, experts"] | {
    "moe_latent_size": 20,
    "tie_word_embeddings": True,  # transformers has two embeddings all the same
}
FAMILIES["qwen3_moe, as routed"] = FAMILIES["qwen3_moe"] | {
    "norm_topk_prob": False,
    "partial_rotary_factor": 0.5,  # heads are turned as a whole all the same
}
FAMILIES["deepseek_v3, plain"] = FAMILIES["deepseek_v3"] | {
    "q_lora_rank": None,
    "rope_interleave": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
}
SHAPES = {  # sizes that ranks do not divide evenly, or one expert per token
    "qwen3, 3 layers": FAMILIES["qwen3"] | {"num_hidden_layers": 3},
    "llama, 5 layers": FAMILIES["llama"] | {"num_hidden_layers": 5},
    "qwen3, 1 key-value head": FAMILIES["qwen3"] | {"num_key_value_heads": 1},
    "glm4_moe, 1 expert": FAMILIES["glm4_moe"] | {"num_experts_per_tok": 1},
    "qwen2, 1 key-value head": FAMILIES["qwen2"] | {"num_key_value_heads": 1},
}


@dataclass(frozen=True)
class Case:
    """One model on one layout of two or four ranks; `microbatching` as in a stage. The samples of a `grouped` batch
    share prompts. With `replay`, most tokens have given experts."""

    family: str
    layout: RankLayout
    expert: int = 1
    expert_tensor: int | None = None
    microbatching: Microbatching = field(default_factory=lambda: Plain(4))
    recompute: bool | Literal["mlp"] = False
    grouped: bool = False
    lora: LoRA | None = None
    replay: bool = False

    @property
    def alone(self) -> str:
        """What is to have the numbers of this case: one rank's measurement."""
        grouped, replay = "grouped " * self.grouped, "replay " * self.replay
        return f"{grouped}{replay}{'adapter ' if self.lora else ''}{self.family}"


ADAPTER = LoRA(rank=4, alpha=8)
AROUND = LoRA(  # all layers of a NemotronH, and the projections around its experts
    rank=4, alpha=8, targets=(*ADAPTER.names("nemotron_h"), "fc1_latent_proj", "fc2_latent_proj")
)
CASES = {
    "tensor": Case("qwen3", RankLayout(tensor=2)),
    "tensor, bias": Case("qwen2", RankLayout(tensor=2), microbatching=Packed(64)),
    "tensor, untied": Case("llama", RankLayout(tensor=2)),
    "data": Case("qwen3", RankLayout(data=2), microbatching=Packed(64)),
    "pipeline, tied": Case("qwen3", RankLayout(pipeline=2)),
    "pipeline, recomputed": Case("llama", RankLayout(pipeline=2), microbatching=Packed(64), recompute=True),
    "expert": Case("qwen3_moe", RankLayout(data=2), expert=2),
    "expert, packed": Case("qwen3_moe", RankLayout(data=2), expert=2, microbatching=Packed(64)),
    "pipeline, experts": Case("qwen3_moe", RankLayout(pipeline=2)),
    "pipeline, 3 layers": Case("qwen3, 3 layers", RankLayout(pipeline=2)),
    "tensor, 1 key-value head": Case("qwen3, 1 key-value head", RankLayout(tensor=2)),
    "tensor, 1 key-value head, bias": Case("qwen2, 1 key-value head", RankLayout(tensor=2), microbatching=Packed(64)),
    "tensor, experts divided": Case("qwen3_moe", RankLayout(tensor=2)),
    "tensor, experts whole": Case("qwen3_moe", RankLayout(tensor=2), expert_tensor=1),
    "tensor, experts apart": Case(
        "qwen3_moe", RankLayout(tensor=2), expert=2, expert_tensor=1, microbatching=Packed(64), recompute=True
    ),
    "context": Case("qwen3", RankLayout(context=2), microbatching=Packed(64)),
    "context, experts": Case("qwen3_moe", RankLayout(context=2), expert=2, microbatching=Packed(64), recompute=True),
    "shared, tensor": Case("qwen2", RankLayout(tensor=2), microbatching=Packed(40), grouped=True),
    "shared, data": Case("qwen3", RankLayout(data=2), microbatching=Packed(40), grouped=True),
    "shared, pipeline": Case("llama", RankLayout(pipeline=2), microbatching=Packed(40), recompute=True, grouped=True),
    "shared, expert": Case("qwen3_moe", RankLayout(data=2), expert=2, microbatching=Packed(64), grouped=True),
    "adapter, tensor": Case("qwen3", RankLayout(tensor=2), lora=ADAPTER),
    "adapter, data": Case("qwen2", RankLayout(data=2), microbatching=Packed(64), recompute=True, lora=ADAPTER),
    "adapter, pipeline": Case("qwen3", RankLayout(pipeline=2), lora=ADAPTER),
    "adapter, experts": Case("qwen3_moe", RankLayout(tensor=2), lora=ADAPTER),
    "adapter, latent": Case("deepseek_v3", RankLayout(tensor=2), expert=2, expert_tensor=1, lora=ADAPTER),
    "adapter, latent, plain": Case("deepseek_v3, plain", RankLayout(pipeline=2), lora=ADAPTER),
    "adapter, glm": Case("glm4_moe", RankLayout(tensor=2), microbatching=Packed(64), recompute="mlp", lora=ADAPTER),
    "adapter, hybrid, tensor": Case("nemotron_h", RankLayout(tensor=2), microbatching=Packed(64), lora=ADAPTER),
    "adapter, hybrid, pipeline": Case("nemotron_h, latent", RankLayout(pipeline=2), recompute="mlp", lora=AROUND),
    "adapter, hybrid, experts": Case(
        "nemotron_h, latent", RankLayout(tensor=2), expert=2, expert_tensor=1, lora=AROUND
    ),
    "glm, tensor": Case("glm4_moe", RankLayout(tensor=2)),
    "glm, pipeline": Case("glm4_moe", RankLayout(pipeline=2), microbatching=Packed(64), recompute=True),
    "glm, shared, expert": Case("glm4_moe", RankLayout(data=2), expert=2, microbatching=Packed(64), grouped=True),
    "latent, tensor, experts apart": Case("deepseek_v3", RankLayout(tensor=2), expert=2, expert_tensor=1),
    "latent, pipeline": Case("deepseek_v3", RankLayout(pipeline=2), recompute=True),
    "latent, expert": Case("deepseek_v3", RankLayout(data=2), expert=2, microbatching=Packed(64)),
    "latent, context": Case("deepseek_v3", RankLayout(context=2), microbatching=Packed(64)),
    "hybrid, tensor": Case("nemotron_h", RankLayout(tensor=2), microbatching=Packed(64)),
    "hybrid, pipeline": Case("nemotron_h", RankLayout(pipeline=2), recompute="mlp"),
    "hybrid, experts, tensor": Case("nemotron_h, latent", RankLayout(tensor=2), microbatching=Packed(64)),
    "hybrid, experts, apart": Case("nemotron_h, experts", RankLayout(data=2), expert=2),
    "hybrid, shared, data": Case("nemotron_h", RankLayout(data=2), microbatching=Packed(40), grouped=True),
    "replay, tensor": Case(
        "glm4_moe", RankLayout(tensor=2), expert=2, expert_tensor=1, microbatching=Packed(64), replay=True
    ),
    "replay, pipeline": Case(
        "qwen3_moe", RankLayout(pipeline=2), microbatching=Packed(40), recompute="mlp", replay=True
    ),
    "replay, context": Case("qwen3_moe", RankLayout(context=2), expert=2, microbatching=Packed(64), replay=True),
    "replay, shared": Case(
        "deepseek_v3", RankLayout(data=2), expert=2, microbatching=Packed(64), grouped=True, replay=True
    ),
    "latent, shared, tensor": Case("deepseek_v3, plain", RankLayout(tensor=2), microbatching=Packed(40), grouped=True),
}
OF_FOUR = {
    "4, pipeline, 5 layers": Case("llama, 5 layers", RankLayout(pipeline=4), microbatching=Packed(64)),
    "4, tensor, 2 key-value heads": Case("qwen3", RankLayout(tensor=4)),
    "4, expert and pipeline": Case("qwen3_moe", RankLayout(data=2, pipeline=2), expert=2),
    "4, expert and tensor": Case("qwen3_moe", RankLayout(data=2, tensor=2), expert=2),
    "4, context and data": Case("llama", RankLayout(context=2, data=2), microbatching=Packed(64)),
    "4, context and tensor": Case("qwen3", RankLayout(context=2, tensor=2), microbatching=Packed(64)),
    "4, context and pipeline": Case("qwen3", RankLayout(context=2, pipeline=2), microbatching=Packed(64)),
    "4, experts apart, twice": Case("qwen3_moe", RankLayout(data=2, tensor=2), expert=2, expert_tensor=1),
}


def make_folder(family: str, folder: Path, **sizes: int) -> Path:
    """Save a model with random weights, norms and biases included, with transformers. `sizes` override its config."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        network = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family.partition(",")[0], **_COMMON | (FAMILIES | SHAPES)[family] | sizes)
        )
        for name, parameter in network.named_parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
            if name.endswith(("in_proj.weight", "conv1d.weight")):
                parameter.data.mul_(3.0)  # so that much of what a state holds comes from earlier positions
            elif name.endswith("A_log"):
                parameter.data.sub_(3.0)
        for name, constant in network.named_buffers():
            if name.endswith("e_score_correction_bias"):
                constant.copy_(torch.randn_like(constant) * 0.3)
    network.save_pretrained(folder)
    return folder


def frozen_batch(*, grouped: bool = False) -> Batch:
    """Return eight samples of various lengths, with made-up logprobs near those of an untrained model, and tokens that
    no policy drew. Each token has an advantage of its own. Grouped samples are five of one prompt and three of another,
    and have one advantage each."""
    generator = torch.Generator().manual_seed(5)

    def ids(lengths: tuple[int, ...]) -> Ragged:
        return Ragged(torch.randint(0, VOCAB, (sum(lengths),), generator=generator), lengths)

    prompts, responses = ids((5, 3, 9, 4, 7, 1, 6, 2)), ids((7, 12, 2, 20, 1, 9, 4, 15))
    if grouped:
        prompts = Ragged.of([prompts.rows()[2]] * GROUPS[0] + [prompts.rows()[4]] * GROUPS[1])

    def logprobs() -> Ragged:
        noise = torch.randn(sum(responses.lengths), generator=generator)
        return Ragged(-5.0 + 0.2 * noise, responses.lengths)

    advantage = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, 0.0, -0.3, 0.7])
    if not grouped:  # each token has its own
        factors = [1.0 + torch.arange(length) % 3 for length in responses.lengths]
        advantage = Ragged.of([each * factor_T for each, factor_T in zip(advantage, factors)])
    sampled = Ragged(torch.arange(sum(responses.lengths)) % 4 != 2, responses.lengths)
    return Batch(prompts, responses, advantage, logprobs(), logprobs(), logprobs(), sampled=sampled)


def given_experts(batch: Batch, layers: int, *, grouped: bool) -> Ragged:
    """Return two of four experts for most tokens and layers, and none for every fifth token. Samples that share a
    prompt have the same ones for it."""
    generator = torch.Generator().manual_seed(9)

    def experts(tokens: int) -> torch.Tensor:
        made = torch.rand(tokens, layers, 4, generator=generator).topk(2).indices.to(torch.uint8)
        made[::5] = 255
        return made

    firsts = [0] * GROUPS[0] + [GROUPS[0]] * GROUPS[1] if grouped else range(len(batch))
    prompts = [experts(length) for length in batch.prompt_ids.lengths]
    responses = [experts(length - 1) for length in batch.response_ids.lengths]
    return Ragged.of([torch.cat([prompts[first], own]).flatten() for first, own in zip(firsts, responses)])


def shards_of(
    batch: Batch, microbatching: Microbatching, ranks: int, minibatches: int = 1, groups: Sequence[int] = ()
) -> list[Shard]:
    """Return the shards of the batch for the data-parallel ranks. Samples of `groups` share prompts in packed rows.
    Updates count the tokens that the policy drew."""
    lengths = {"P": batch.prompt_ids.lengths, "T": batch.response_ids.lengths}
    shards = Sharding.of(microbatching, minibatches=minibatches, shares=True).shards(lengths, ranks, groups)
    drawn = [int(row.sum()) for row in batch.sampled.rows()] if batch.sampled else batch.response_ids.lengths
    counts = [
        sum(
            drawn[shard.index[i]]
            for shard in shards
            for part in shard.updates[number].microbatches
            for i in part.samples
        )
        for number in range(minibatches)
    ]
    return [
        structs.replace(
            shard, updates=tuple(structs.replace(update, tokens=n) for update, n in zip(shard.updates, counts))
        )
        for shard in shards
    ]


def gradients(learner: MegatronLearner, batch: Batch, shard: Shard) -> dict[str, torch.Tensor]:
    """Return the gradients of the first update by Hugging Face name, on rank 0."""
    network, groups = learner.network, learner.groups
    with groups.computing():
        learner._backward(batch, LOSS, TEMPERATURE, shard.updates[0], shard.packed)
        finalize_model_grads([learner.buffered], None, pg_collection=groups.process, force_all_reduce=True)
    made = {name: getattr(held, "main_grad", torch.zeros_like(held)) for name, held in network.weights.items()}
    found = {name: tensor.clone() for name, tensor in gathered(made, network.shape, groups, network.part)}
    learner.buffered.zero_grad_buffer()
    return found


def measure(engine: MegatronEngine, folder: Path, case: Case) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return logprobs before the first update, its gradients, weights and logprobs after two updates, and metrics.

    Raises AssertionError if the exported weights are not byte for byte those that were loaded."""
    model, whole = Model(str(folder), lora=case.lora, router_replay=case.replay), frozen_batch(grouped=case.grouped)
    if case.replay:
        layers = len(engine.network(model).shape.sparse)
        whole = replace(whole, routes=given_experts(whole, layers, grouped=case.grouped))
    ranks = engine.groups.ranks
    groups = GROUPS if case.grouped else ()
    shard = shards_of(whole, case.microbatching, ranks.layout.data, groups=groups)[ranks.replica]
    wanted = case.grouped and isinstance(case.microbatching, Packed) and case.microbatching.shared
    assert (shard.shared > 0) == wanted
    batch = whole.at(shard.index)
    given = (batch.prompt_ids, batch.response_ids, shard)
    learner = engine.learner(model, replace(OPTIMIZATION, checkpoint_activations=case.recompute))
    numbers = [layer.layer_number for layer in learner.network.decoder.layers]  # Megatron-core counts from 1
    part = learner.network.part
    if case.grouped:
        mixers = [layer.self_attention for layer in learner.network.decoder.layers]
        cores = [mixer.core_attention for mixer in mixers if hasattr(mixer, "core_attention")]
        assert {core.recomputed for core in cores} == {case.recompute is True}
    assert numbers == [layer + 1 for layer in stage_layers(len(learner.network.shape.layers), part.stages)[part.stage]]
    loaded = engine.trained_weights(model)

    def scored() -> Ragged:
        if batch.routes is None:
            return engine.score(model, *given, temperature=TEMPERATURE)
        return engine.score_replayed(model, *given, temperature=TEMPERATURE, routes=batch.routes)

    before = scored()
    as_loaded = before
    if case.replay:
        as_loaded = engine.score(model, *given, temperature=TEMPERATURE)
        assert not torch.equal(before.values, as_loaded.values)
    found, metrics = gradients(learner, batch, shard), {}
    if ranks.rank == 0 and case.lora is None:
        saved = load_file(folder / "model.safetensors")
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(held, saved[name].to(held.dtype)) for name, held in loaded.items())
    for number in range(2):
        made = learner.update(batch, LOSS, temperature=TEMPERATURE, update=shard.updates[0], packed=shard.packed)
        metrics |= {f"{number} {name}": value for name, value in made.items()}
    trained = engine.trained_weights(model)
    after = scored()
    frozen = engine.score(model.frozen(), *given, temperature=TEMPERATURE)
    again = engine.trained_weights(model)
    metrics["frozen is as before"] = float(torch.equal(frozen.values, as_loaded.values))
    metrics["trained is unchanged"] = float(weight_hash(again) == weight_hash(trained))
    own = replace(batch, old_logprobs=None)
    made = learner.update(own, LOSS, temperature=TEMPERATURE, update=shard.updates[0], packed=shard.packed)
    metrics |= {f"own {name}": value for name, value in made.items()}
    lost = (learner.own_logprobs().values - after.values).abs().max().item()
    metrics["own are those scored"] = float(lost < 1e-5)
    tensors = {f"gradient {name}": tensor for name, tensor in found.items()}
    tensors |= {f"weight {name}": tensor for name, tensor in trained.items()}
    tensors |= {f"sample {i} before": row.clone() for i, row in zip(shard.index, before.rows())}
    tensors |= {f"sample {i} after": row.clone() for i, row in zip(shard.index, after.rows())}
    return tensors, metrics


def checkpointed(folder: Path, out: Path, groups: Groups) -> dict[str, float]:
    """Check that two updates, a save, and two more in another learner equal four updates, bit for bit."""
    model, whole, ranks = Model(str(folder)), frozen_batch(), groups.ranks
    cut = Packed(64) if ranks.layout.context > 1 else Plain(2)
    shard = shards_of(whole, cut, ranks.layout.data)[ranks.replica]
    batch = whole.at(shard.index)

    def train(learner: MegatronLearner) -> None:
        for _ in range(2):
            learner.update(batch, LOSS, temperature=TEMPERATURE, update=shard.updates[0], packed=shard.packed)

    first = MegatronEngine(groups)
    learner = first.learner(model, OPTIMIZATION)
    train(learner)
    if ranks.rank == 0:
        out.mkdir()
    dist.barrier()
    learner.save(out)
    first.describe(model, out / "model")
    first.export(model, out / "as saved")
    sizes = {"saved bytes": float(learner.saved_bytes())}
    train(learner)
    second = MegatronEngine(groups)
    resumed = second.learner(model, OPTIMIZATION)
    resumed.restore(out)
    train(resumed)
    hashes = [weight_hash(engine.trained_weights(model)) for engine in (first, second)]
    first.export(model, out / "exported")
    return sizes | {"resumed is the same": float(hashes[0] == hashes[1]), "updates": float(resumed.updates)}


def _vocabulary(rank: int) -> dict[str, float]:
    """Return the largest differences of vocabulary-parallel logprobs, entropy and gradients from those of one rank."""
    logits = torch.randn(9, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ids = torch.randint(0, VOCAB, (9,), generator=torch.Generator().manual_seed(2))
    first, stop = (0, 66) if rank == 0 else (66, VOCAB)
    mine = logits[:, first:stop].clone().requires_grad_()
    whole = logits.clone().requires_grad_()
    logprobs, entropies = logprobs_and_entropy(mine, ids, group=dist.group.WORLD, first=first, temperature=TEMPERATURE)
    weights = torch.linspace(-1, 1, 9, dtype=torch.float64)
    (logprobs * weights + entropies * weights.flip(0)).sum().backward()
    dense, dense_entropies = selected_logprobs(whole / TEMPERATURE, ids), entropy(whole / TEMPERATURE)
    (dense * weights + dense_entropies * weights.flip(0)).sum().backward()
    pairs = ((logprobs, dense), (entropies, dense_entropies), (mine.grad, whole.grad[:, first:stop]))
    return {f"difference {i}": float((one - two).abs().max().detach()) for i, (one, two) in enumerate(pairs)}


def _train(engine: MegatronEngine, folder: Path, out: Path, *, restore: bool) -> dict[str, torch.Tensor]:
    """Return the weights after four updates. `out` holds the state after the first two, restored or saved here."""
    model, whole, ranks = Model(str(folder)), frozen_batch(), engine.groups.ranks
    shard = shards_of(whole, Plain(2), ranks.layout.data)[ranks.replica]
    learner = engine.learner(model, OPTIMIZATION)
    for part in range(2):
        if restore and part == 0:
            learner.restore(out)
            continue
        for _ in range(2):
            learner.update(whole.at(shard.index), LOSS, temperature=TEMPERATURE, update=shard.updates[0], packed=False)
        if part == 0:
            learner.save(out)
    return engine.trained_weights(model)


def _saved_by_one(folder: Path, store: dist.Store, rank: int) -> None:
    """Save the state of a single rank, then continue from it with two data-parallel ranks."""
    out = folder / "saved by one"
    if rank == 0:
        out.mkdir()
        engine = MegatronEngine(join(Ranks(), 1, torch.device("cpu"), 0))
        save_file(_train(engine, folder / "qwen3", out, restore=False), folder / "one.safetensors")
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    ranks = Ranks.join(RankLayout(data=2), rank, dist.PrefixStore("two", store), device="cpu", deadline_s=DEADLINE_S)
    engine = MegatronEngine(join(ranks, 1, torch.device("cpu"), 0))
    weights = _train(engine, folder / "qwen3", out, restore=True)
    if rank == 0:
        save_file(weights, folder / "two.safetensors")
    parallel_state.destroy_model_parallel()
    ranks.leave()


def _as_rank(folder: Path, rank: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False, use_libuv=False)
    _measured(folder, store, rank, OF_FOUR)
    _saved(folder, store, rank, "4, saved by experts apart", "qwen3_moe", RankLayout(data=2, tensor=2), 4, 1)
    if rank > 1:
        return
    _saved_by_one(folder, store, rank)
    _measured(folder, store, rank, CASES)
    for name, family, layout, expert in (
        ("saved by tensor", "qwen3", RankLayout(tensor=2), 1),
        ("saved by data", "qwen3", RankLayout(data=2), 1),
        ("saved by expert", "qwen3_moe", RankLayout(data=2), 2),
        ("saved by pipeline", "qwen3", RankLayout(pipeline=2), 1),
        ("saved by context", "qwen3", RankLayout(context=2), 1),
    ):
        _saved(folder, store, rank, name, family, layout, expert)


@contextmanager
def _joined(store: dist.Store, rank: int, name: str, layout: RankLayout, *experts: int | None) -> Iterator[Groups]:
    """The process groups of ranks that meet under a name, closed at the end."""
    ranks = Ranks.join(layout, rank, dist.PrefixStore(name, store), device="cpu", deadline_s=DEADLINE_S)
    expert, expert_tensor = experts
    yield join(ranks, expert or 1, torch.device("cpu"), 0, expert_tensor)
    parallel_state.destroy_model_parallel()
    ranks.leave()
    gc.collect()  # each group that is left has three threads, which wake up a hundred times a second


def _measured(folder: Path, store: dist.Store, rank: int, cases: Mapping[str, Case]) -> None:
    """Write what `measure` returns for each case. Those of the same ranks share their process groups."""
    alike: dict[tuple[RankLayout, int, int | None], list[str]] = {}
    for name, case in cases.items():
        alike.setdefault((case.layout, case.expert, case.expert_tensor), []).append(name)
    for given, names in alike.items():
        with _joined(store, rank, names[0], *given) as groups:
            for name in names:
                tensors, metrics = measure(MegatronEngine(groups), folder / cases[name].family, cases[name])
                save_file(tensors, folder / f"{name}-{rank}.safetensors")
                (folder / f"{name}-{rank}.json").write_text(json.dumps(metrics))
                print(name, flush=True)


def _saved(
    folder: Path,
    store: dist.Store,
    rank: int,
    name: str,
    family: str,
    layout: RankLayout,
    expert: int,
    expert_tensor: int | None = None,
) -> None:
    """Write what `checkpointed` returns, and for tensor-parallel ranks what `_vocabulary` does."""
    with _joined(store, rank, name, layout, expert, expert_tensor) as groups:
        found = checkpointed(folder / family, folder / name, groups)
        found |= _vocabulary(rank) if layout == RankLayout(tensor=2) else {}
    (folder / f"{name}-{rank}.json").write_text(json.dumps(found))
    print(name, flush=True)


def main(folder: Path, rank: int, port: int) -> None:
    """Run this rank and, in a fork, the rank two above it. Exit with an error if either fails."""
    torch.set_num_threads(1)
    layers.SlicedAttention = GatheredAttention  # type: ignore[assignment,misc] # Transformer Engine's needs a GPU
    fork = os.fork()
    if not fork:
        _as_rank(folder, rank + 2, port)
        return
    _as_rank(folder, rank, port)
    _, status = os.waitpid(fork, 0)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
