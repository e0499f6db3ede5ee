"""Refits into vLLM on the CPU: `refit(FOLDER, FAMILY, RANKS, WAYS, WRONG)`.

Two models of a family share a config. An engine that serves the first receives the second by one transport after the
other. The result holds how far the logprobs of its samples then are from those that transformers computes for the
second, what each rank computes with, and which tensors went through vLLM's own loader. WRONG are parameters that the
engine is said to hold elsewhere.
"""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM

from ops.refit.share import digest_of
from ops.refit.transports import TRANSPORTS
from pipeline import Model
from pipeline.declare.ranks import open_store
from stages.backends import Route, Sampling
from stages.backends.model.build import build, character_tokenizer, save
from stages.backends.refit.source import Source
from tests.engines import vllm_models as tiny
from tests.shares import carried, route_of

PLAIN = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
SIGMOID = {
    "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip
CONFIGS = {
    "llama": PLAIN | {"model_type": "llama"},
    "qwen2": PLAIN | {"model_type": "qwen2", "tie_word_embeddings": True, "head_dim": None, "num_attention_heads": 2},
    "qwen3": PLAIN | {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_moe": PLAIN
    | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
       "moe_intermediate_size": 48,  # which vLLM pads to a multiple of 32
       "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": True},
    "glm4_moe": PLAIN
    | {"model_type": "glm4_moe", "num_hidden_layers": 3, "head_dim": 32, "attention_bias": True, "use_qk_norm": True}
    | SIGMOID,
    "deepseek_v3": PLAIN
    | {"model_type": "deepseek_v3", "num_hidden_layers": 3, "head_dim": None, "num_key_value_heads": 4,
       "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}
    | SIGMOID,
    "nemotron_h": {name: value for name, value in PLAIN.items() if name != "num_hidden_layers"}
    | {"model_type": "nemotron_h", "layers_block_type": ["mamba", "mlp", "attention", "mamba"], "ssm_state_size": 16,
       "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1, "conv_kernel": 4, "chunk_size": 16,
       "time_step_min": 1e-9},
    "gpt_oss": PLAIN
    | {"model_type": "gpt_oss", "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2,
       "sliding_window": 128},
    "mistral": PLAIN | {"model_type": "mistral", "sliding_window": None},
}  # fmt: skip
TOKENS = Sampling(max_tokens=24)


def made(root: Path, family: str, seed: int) -> Model:
    """Save a model with weights so large that distributions are far from flat, and nonzero biases."""
    config = {name: value for name, value in CONFIGS[family].items() if value is not None or name == "sliding_window"}
    described = Model("tiny", config=config, alphabet=tiny.ALPHABET, seed=seed)
    tokenizer = character_tokenizer(tiny.ALPHABET)
    network = build(described, tokenizer)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, parameter in network.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
            elif parameter.dim() > 1:
                parameter.mul_(4.0)
        for name, constant in network.named_buffers():
            if name.endswith("e_score_correction_bias"):
                constant.normal_(std=0.3)
    save(network, tokenizer, root / f"{family}-{seed}")
    return Model(str(root / f"{family}-{seed}"))


def computed_with(worker: Any) -> dict[str, str]:
    """Return, in a vLLM worker, the sha256 of all that its model computes with, by name. The CPU build packs the matrix
    of a linear layer and of a head; applied to the identity, the layer returns its matrix."""
    network = worker.model_runner.get_model()
    tensors = {name: tensor.detach() for name, tensor in [*network.named_parameters(), *network.named_buffers()]}
    for name, module in network.named_modules():
        if hasattr(module, "cpu_linear"):
            size = getattr(module, "input_size_per_partition", module.weight.shape[-1])
            tensors[f"matrix of {name}"] = module.cpu_linear(torch.eye(size), module.weight, None)
    return {name: sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


@patch.dict(os.environ, {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"})  # its workers then run `computed_with`
def refit(root: Path, family: str, tensor: int, ways: Sequence[str], wrong: Sequence[str] = ()) -> dict[str, Any]:
    """Return the results of refitting by these transports, one after the other."""
    first, second = (made(root, family, seed) for seed in (0, 1))
    from stages.backends.model.places import placed
    from stages.backends.vllm import api
    from stages.backends.vllm.engine import open_engine

    differing = api.differing

    async def found(llm: Any) -> list[str]:
        return [*await differing(llm), *wrong]

    reference = AutoModelForCausalLM.from_pretrained(second.source, dtype=torch.float32).eval()
    tensors, places, held = placed(reference)
    group = replace(tiny.GROUP, workers=tensor, tensor_parallel=tensor)
    backend = open_engine(tiny.context(root, group))
    source = Source(torch.device("cpu"), 0, tensors, places, held)
    groups, store = (0, 1), open_store("127.0.0.1", 1, deadline_s=240.0)
    prompt_ids = backend.encode(first, tiny.texts(groups))
    with patch.object(api, "differing", found):
        client = backend.client(first)

    async def contents() -> list[dict[str, str]]:
        return await (await client._alive()).collective_rpc(computed_with)

    far, records, computed = [], [], []
    for version, name in enumerate(ways, start=1):
        transport = TRANSPORTS[name]
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.mul_(1.0 if version == 1 else 0.9)
        share = source.share(held, transport)
        route = route_of(store, "refit", name) if transport.both_carry else Route(transport)
        with carried(source, share, version, route) if route.meeting else nullcontext():
            served = backend.serve(first, [share], version, route)
        records.append(dict(served.record))
        assert served.sha256 == digest_of([share])
        computed.append(client.call(contents()))
        sampled = backend.generate(first, prompt_ids, TOKENS, tiny.draws(groups))
        far.append(tiny.farthest(sampled, tiny.logprobs(reference, prompt_ids, sampled, 1.0)))
    loaded = client.loaded
    backend.close()
    return {
        "far": far, "loaded": sorted(loaded), "tensors": sorted(tensors), "records": records, "computed": computed,
    }  # fmt: skip
