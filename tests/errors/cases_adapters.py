"""Adapters that vLLM would not compute as the trainer does."""

from tests.errors.harness import Case

IMPORT = "from stages import LoRA\n\n\n"
ON_A_GPU = 'WorkerGroup("sampler", backend="vllm", gpus=1)'
LEARNER = 'WorkerGroup("learner", backend="torch", gpus=1)'
HYBRID = "'model_type': 'nemotron_h', 'layers_block_type': ['mamba', 'moe', 'attention'], 'n_groups': 1"
MIXTURE = "'model_type': 'qwen3_moe', 'num_experts': 4, 'moe_intermediate_size': 64"


def adapted(name: str, config: str, lora: str = "LoRA()", **lines: str) -> Case:
    """Return a case of a graph whose model, of this config, has an adapter."""
    policy = f"Model('tiny', config={{{config}}}, alphabet=task.alphabet, lora={lora})"
    return Case(name, {"policy": policy, "learner": LEARNER} | lines, at=("policy",), top=IMPORT)


CASES = [
    adapted(
        "adapter_of_projections_around_experts",
        HYBRID,
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
