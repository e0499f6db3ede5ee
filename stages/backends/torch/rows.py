"""Which networks keep the samples of a packed row apart, as transformers computes them."""

from __future__ import annotations

from transformers import PreTrainedModel

APART = frozenset(  # each is tested: packed rows have the logprobs of samples alone
    """
    llama qwen2 qwen3 qwen3_moe glm4_moe deepseek_v3 gpt_oss qwen2_5_vl qwen3_vl
    cohere2 deepseek_v2 exaone4 gemma gemma2 gemma3_text glm4 gpt2 gpt_neox granite granitemoe
    mistral mixtral olmo2 olmo3 olmoe qwen2_moe smollm3
    """.split()
)


def apart(network: PreTrainedModel) -> bool:
    """Whether the samples of a packed row do not see each other. Of other families, a state or convolution would pass
    from one sample to the next, or attention and positions would be those of the row; they are computed in rectangles.
    """
    return network.config.model_type in APART
