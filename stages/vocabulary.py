"""The standard fields of RL post-training. `hint` is the fix if a stage reads the field and no stage writes it.

`N` samples, `P` prompt tokens, `T` response tokens.
"""

from pipeline import Field

_ROLLOUT = "add Rollout(policy, on=sampler)"

PROMPT = Field("prompt", dtype="str", hint='write source=Prompts("train.jsonl")')
ANSWER = Field("answer", dtype="str", hint='write Prompts(..., answer="answer")')
# JSON text: a list of {"role": ..., "content": ...}
MESSAGES = Field("messages", dtype="str", hint="write Prompts(..., chat=True)")
# name of the prompt's source
DATASET = Field("dataset", dtype="str", hint="write Prompts(Mixture(...)), or Prompts(Dataset(..., name=...))")
# the image files of the prompt, framed by stages.images
IMAGES = Field("images", dtype="uint8", dims="N ImageBytes", unit="byte", hint='write Prompts(..., images="image")')
PROMPT_IDS = Field("prompt_ids", dtype="int64", dims="N P", unit="token", low=0, hint=_ROLLOUT)
RESPONSE = Field("response", dtype="str", hint=_ROLLOUT)
RESPONSE_IDS = Field("response_ids", dtype="int64", dims="N T", unit="token", low=0, hint=_ROLLOUT)
# of the weights that drew a token; -1 for a token that the policy did not draw, such as a tool's answer
TOKEN_VERSIONS = Field("token_versions", dtype="int32", dims="N T", unit="version", low=-1, hint=_ROLLOUT)
ROLLOUT_LOGPROBS = Field("rollout_logprobs", dtype="float32", dims="N T", unit="nat", high=0.0, hint=_ROLLOUT)
TRUNCATED = Field("truncated", dtype="bool", hint=_ROLLOUT)
_EPISODE = "add Episode(policy, environment, on=sampler)"
# of an episode: what was said, as JSON; how it ended; the response tokens so far and the reward, at each turn's end
CONVERSATION = Field("conversation", dtype="str", hint=_EPISODE)
END = Field("end", dtype="str", hint=_EPISODE)
LOST = "lost:"  # how the `end` of an episode begins that the machines have failed
FAILED = "failed:"  # and of one in which the policy made its environment fail
TURN_ENDS = Field("turn_ends", dtype="int64", dims="N U", unit="token", low=0, hint=_EPISODE)
TURN_REWARDS = Field("turn_rewards", dtype="float32", dims="N U", hint=_EPISODE)
MODEL_REWARD = Field("model_reward", dtype="float32", hint='add RewardModel(Model("the reward model"), on=judge)')
REWARD = Field("reward", dtype="float32", hint="add Reward(exact_match)")
KEPT = Field("kept", dtype="bool", hint="add Filter()")
PREV_LOGPROBS = Field(
    "prev_logprobs",
    dtype="float32",
    dims="N T",
    unit="nat",
    high=0.0,
    hint="add PrevLogprobs(policy, on=learner), or Train(prev='own')",
)
REF_LOGPROBS = Field(
    "ref_logprobs",
    dtype="float32",
    dims="N T",
    unit="nat",
    high=0.0,
    hint="add RefLogprobs(policy.frozen(), on=learner)",
)
ADVANTAGE = Field(
    "advantage",
    dtype="float32",
    hint='add Advantage("group_relative"); after Advantage("turn"), write Train(advantage="token")',
)
TOKEN_ADVANTAGES = Field(
    "token_advantages",
    dtype="float32",
    dims="N T",
    hint='add Advantage("turn"); after another kind, write Train(advantage="sample")',
)
TRAINED_WEIGHTS = Field(
    "trained_weights", dtype="weights", dims="", unit="version", hint="add Train(policy, on=learner, lr=1e-6)"
)
SERVED_WEIGHTS = Field(
    "served_weights", dtype="weights", dims="", unit="version", hint="add Refit(policy, source=learner, target=sampler)"
)

_STANDARD = {value.name: value for value in list(globals().values()) if isinstance(value, Field)}


def field_named(name: str, dtype: str = "str") -> Field | None:
    """The standard field of this name, or a per-sample field of `dtype`; None if the name is invalid."""
    if name in _STANDARD:
        return _STANDARD[name]
    try:
        return Field(name, dtype=dtype)
    except ValueError:  # the caller reports it
        return None
