"""The standard fields of RL post-training. `N` samples, `P` prompt tokens, `T` response tokens."""

from collections.abc import Mapping

from pipeline import Field

PROMPT = Field("prompt", dtype="str")
ANSWER = Field("answer", dtype="str")
MESSAGES = Field("messages", dtype="str")  # JSON text: a list of {"role": ..., "content": ...}
DATASET = Field("dataset", dtype="str")  # the name of the source that a prompt came from
PROMPT_IDS = Field("prompt_ids", dtype="int64", dims="N P", unit="token", low=0)
RESPONSE = Field("response", dtype="str")
RESPONSE_IDS = Field("response_ids", dtype="int64", dims="N T", unit="token", low=0)
TOKEN_VERSIONS = Field("token_versions", dtype="int32", dims="N T", unit="version", low=0)
ROLLOUT_LOGPROBS = Field("rollout_logprobs", dtype="float32", dims="N T", unit="nat", high=0.0)
TRUNCATED = Field("truncated", dtype="bool")
MODEL_REWARD = Field("model_reward", dtype="float32")
REWARD = Field("reward", dtype="float32")
KEPT = Field("kept", dtype="bool")
PREV_LOGPROBS = Field("prev_logprobs", dtype="float32", dims="N T", unit="nat", high=0.0)
REF_LOGPROBS = Field("ref_logprobs", dtype="float32", dims="N T", unit="nat", high=0.0)
ADVANTAGE = Field("advantage", dtype="float32")
TRAINED_WEIGHTS = Field("trained_weights", dtype="weights", dims="", unit="version")
SERVED_WEIGHTS = Field("served_weights", dtype="weights", dims="", unit="version")

# What writes them: the hints of every stage that reads some.
MADE_BY: Mapping[str, str] = {
    PROMPT.name: 'write source=Prompts("train.jsonl")',
    ANSWER.name: 'write Prompts(..., answer="answer")',
    MESSAGES.name: "write Prompts(..., chat=True)",
    DATASET.name: "write Prompts(Mixture(...)), or Prompts(Dataset(..., name=...))",
    **dict.fromkeys(
        (
            PROMPT_IDS.name,
            RESPONSE.name,
            RESPONSE_IDS.name,
            TOKEN_VERSIONS.name,
            ROLLOUT_LOGPROBS.name,
            TRUNCATED.name,
        ),
        "add Rollout(policy, on=sampler)",
    ),
    MODEL_REWARD.name: 'add RewardModel(Model("the reward model"), on=judge)',
    REWARD.name: "add Reward(exact_match)",
    KEPT.name: "add Filter()",
    PREV_LOGPROBS.name: "add PrevLogprobs(policy, on=learner)",
    REF_LOGPROBS.name: "add RefLogprobs(policy.frozen(), on=learner)",
    ADVANTAGE.name: 'add Advantage("group_relative")',
    TRAINED_WEIGHTS.name: "add Train(policy, on=learner, lr=1e-6)",
    SERVED_WEIGHTS.name: "add Refit(policy, source=learner, target=sampler)",
}

_STANDARD = {value.name: value for value in list(globals().values()) if isinstance(value, Field)}


def field_named(name: str, dtype: str = "str") -> Field | None:
    """The standard field of this name, or one of `dtype` with a value a sample; None where no field can have it."""
    if name in _STANDARD:
        return _STANDARD[name]
    try:
        return Field(name, dtype=dtype)
    except ValueError:  # who asks says so
        return None
