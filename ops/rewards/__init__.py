"""Answer checking. A reward is a plain function whose parameter names are fields; nothing here loads torch.

    def brevity(response: str) -> float:
        return 1.0 / (1 + len(response))

A reward with parameters is a frozen dataclass that is called like a function, such as `Overlong`. `text` compares
texts, `number` final numbers, `symbolic` mathematics; `program` runs
code in a sandbox; `format` checks tags and boxes, `length` counts tokens, and `turns` adds up the rewards of turns.
"""

from ops.rewards.batched import SampleError, batched
from ops.rewards.format import boxed, last_boxed, tagged
from ops.rewards.length import Overlong, overlong_penalty
from ops.rewards.model import model_reward
from ops.rewards.number import final_number, gsm8k_match, number_match
from ops.rewards.program import PassesTests
from ops.rewards.symbolic import MathVerify, math_verify
from ops.rewards.text import digit_match, exact_match, regex_match
from ops.rewards.turns import turn_sum

__all__ = [
    "MathVerify",
    "Overlong",
    "PassesTests",
    "SampleError",
    "batched",
    "boxed",
    "digit_match",
    "exact_match",
    "final_number",
    "gsm8k_match",
    "last_boxed",
    "math_verify",
    "model_reward",
    "number_match",
    "overlong_penalty",
    "regex_match",
    "tagged",
    "turn_sum",
]
