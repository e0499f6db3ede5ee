"""The process that compares answers with math-verify. Run as a script by `ops.rewards.symbolic`; imports none of ours.

A question is `[response, answer, seconds]`, a reply one of `["right"]`, `["wrong"]`, `["memory"]`, `["answer", why]`
(the answer cannot be read) and `["error", why]` (the library raised). The library runs in the main thread, without its
own alarms: the process that asks keeps the time.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import resource
import sys
from functools import lru_cache
from typing import Any

MEMORY_BYTES = 4 << 30  # of address space
CPU_GRACE_S = 30  # an orphan that computes on is ended by the kernel so many CPU seconds after its deadline

# Read as it stands. Everything else that is not marked as mathematics is LaTeX without its marks, as data sets have it:
# the library would take the 2 of 2\sqrt{3} for the answer.
_PLAIN = re.compile(r"\s*[-+]?\s*[$\u20ac\u00a3]?\s*[-+]?[\d.,\s]*\d\.?\s*(?:/\s*\d+)?\s*\\?%?\s*\Z")
_MARKED = re.compile(r"\\boxed|\$|\\\(|\\\[")


def main() -> None:
    """Answer until standard input closes."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is not a reply
    logging.disable(logging.CRITICAL)
    try:
        verdict("1", "1")  # compiles the patterns and the grammar
    except ImportError as error:
        print(json.dumps(["broken", f"math-verify cannot be imported: {error}"]), file=replies, flush=True)
        return
    sys.set_int_max_str_digits(0)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    print(json.dumps(["ready"]), file=replies, flush=True)
    for line in sys.stdin:
        response, answer, seconds = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        last_s = math.ceil(used.ru_utime + used.ru_stime + seconds) + CPU_GRACE_S
        resource.setrlimit(resource.RLIMIT_CPU, (last_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        print(json.dumps(reply(response, answer)), file=replies, flush=True)


def reply(response: str, answer: str) -> list[str]:
    """The reply to one question."""
    try:
        return verdict(response, answer)
    except MemoryError:
        return ["memory"]
    except Exception as error:  # noqa: BLE001 - anything may come out of the library; the asking process names the sample
        return ["error", " ".join(f"{type(error).__name__}: {error}".split())[:300]]


def verdict(response: str, answer: str) -> list[str]:
    """What math-verify says, as a reply."""
    from math_verify import parse, verify

    try:
        expected = read_answer(answer)
    except Exception as error:  # noqa: BLE001 - as above
        return ["answer", " ".join(f"{type(error).__name__}: {error}".split())[:300]]
    if not expected:
        return ["answer", "math-verify finds no mathematics in it"]
    given = parse(response, parsing_timeout=None, raise_on_error=True)
    return ["right" if verify(expected, given, timeout_seconds=None, raise_on_error=True) else "wrong"]


@lru_cache(maxsize=1024)
def read_answer(answer: str) -> list[Any]:
    """The answer of a data set as expressions; an empty list where there is none."""
    from math_verify import parse

    text = answer if _PLAIN.match(answer) or _MARKED.search(answer) else rf"\boxed{{{answer}}}"
    return parse(text, parsing_timeout=None, raise_on_error=True)


if __name__ == "__main__":
    main()
