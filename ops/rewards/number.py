"""Rewards that compare the last number of a text. Decimal numbers only; `ops.rewards.symbolic` parses mathematics.

final_number("so it is $1,250.50.")                   # Decimal("1250.50")
gsm8k_match("... 16 - 7 = 9 eggs", "... #### 9")      # 1.0
"""

from __future__ import annotations

import re
from decimal import Decimal

# A sign between two numbers or words does not count: 7-3 ends in 3, "is -3" in -3.
_UNSIGNED = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)"
_NUMBER = re.compile(rf"(?<![\w.)])[-\u2212]\$?{_UNSIGNED}|{_UNSIGNED}")
GSM8K_MARK = "####"


def final_number(text: str) -> Decimal | None:
    """Return the last decimal number of a text, or None.

    Commas may separate thousands; a minus sign and a dollar sign before the number are accepted.
    """
    found = [match.group() for match in _NUMBER.finditer(text)]
    if not found:
        return None
    return Decimal(found[-1].replace(",", "").replace("$", "").replace("\u2212", "-"))


def number_match(response: str, answer: str) -> float:
    """Return 1.0 if the last number of the response equals the last number of the answer, else 0.0.

    Raises ValueError if the answer has no number.
    """
    expected = final_number(answer)
    if expected is None:
        raise ValueError("the answer has no number")
    return float(final_number(response) == expected)


def gsm8k_match(response: str, answer: str) -> float:
    """Return `number_match` for answers in GSM8K's format: the solution, then `#### ` and the number.

    In the response, only the text after its last `####` counts, or all of it if it has none. Raises ValueError if the
    answer has no number after `####`. Data: Cobbe et al. 2021, arXiv 2110.14168.
    """
    _, mark, expected = answer.rpartition(GSM8K_MARK)
    if not mark:
        raise ValueError(f"the answer has no {GSM8K_MARK}")
    return number_match(response.rpartition(GSM8K_MARK)[2], expected)
