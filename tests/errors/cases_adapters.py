"""Adapters that vLLM would not compute as the trainer does."""

from graphs.quickstart import TINY_QWEN3
from tests.errors.harness import Case

IMPORT = "from stages import LoRA\n\n\n"
ON_A_GPU = 'WorkerGroup("sampler", backend="vllm", gpus=1)'
LEARNER = 'WorkerGroup("learner", backend="torch", gpus=1)'
HYBRID = "'model_type': 'nemotron_h', 'layers_block_type': ['mamba', 'moe', 'attention'], 'n_groups': 1"
ON_CPUS = {name: f'WorkerGroup("{name}", backend="torch")' for name in ("sampler", "learner")}
MIXTURE = "'model_type': 'qwen3_moe', 'num_experts': 4, 'moe_intermediate_size': 64"


def adapted(name: str, config: str, lora: str = "LoRA()", **lines: str) -> Case:
    """Return a case of a graph whose model, of this config, has an adapter."""
    policy = f"Model('tiny', config={{{config}}}, alphabet=task.alphabet, lora={lora})"
    return Case(name, {"policy": policy, "learner": LEARNER} | lines, at=("policy",), top=IMPORT)


LATENT = "'model_type': 'deepseek_v3', 'q_lora_rank': None"
CASES = [
    adapted("adapter_of_a_latent_that_queries_lack", LATENT, "LoRA(targets=('o_proj', 'q_a_proj'))", **ON_CPUS),
    adapted("adapter_with_a_target_twice", LATENT, "LoRA(targets=('q_proj', 'o_proj', 'q_proj'))", **ON_CPUS),
    adapted("adapter_of_a_rank_above_its_matrix", repr(TINY_QWEN3)[1:-1], "LoRA(rank=128)", **ON_CPUS),
    adapted(
        "adapter_of_projections_around_experts",
        f"{HYBRID}, 'moe_latent_size': 64",
        "LoRA(targets=('in_proj', 'fc1_latent_proj'))",
        sampler=ON_A_GPU,
    ),
    adapted(
        "adapter_of_copied_mamba_heads",
        HYBRID,
        sampler='WorkerGroup("sampler", backend="vllm", gpus=2, tensor_parallel=2)',
    ),
    adapted(
        "adapter_of_a_mixture_on_a_cpu",
        MIXTURE,
        sampler='WorkerGroup("sampler", backend="vllm")',
        learner='WorkerGroup("learner", backend="torch")',
    ),
    adapted("adapter_of_a_convolution", HYBRID, "LoRA(targets=('in_proj', 'conv1d'))", sampler=ON_A_GPU),
]
