"""Which networks keep the samples of a packed row apart, as transformers computes them."""

from __future__ import annotations

from transformers import PreTrainedModel

APART = {  # each is tested: packed rows have the logprobs of samples alone
    "cohere2", "deepseek_v2", "deepseek_v3", "exaone4", "gemma", "gemma2", "gemma3_text", "glm4", "glm4_moe", "gpt2",
    "gpt_neox", "gpt_oss", "granite", "granitemoe", "llama", "mistral", "mixtral", "olmo2", "olmo3", "olmoe", "qwen2",
    "qwen2_5_vl", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_vl", "smollm3",
}  # fmt: skip


def apart(network: PreTrainedModel) -> bool:
    """Whether the samples of a packed row do not see each other. Of other families, a state or convolution would pass
    from one sample to the next, or attention and positions would be those of the row; they are computed in rectangles.
    """
    return network.config.model_type in APART
