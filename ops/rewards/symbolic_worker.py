"""The process that compares answers with math-verify. `ops.rewards.symbolic` runs it; it imports nothing of Sluice.

A question is `[response, answer, seconds]`. A reply is one of `["right"]`, `["wrong"]`, `["memory"]`, `["answer", why]`
(the answer cannot be read) and `["error", why]` (the library raised). The library runs in the main thread, without its
own alarms: the calling process enforces the deadline.
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
CPU_GRACE_S = 30  # the kernel ends an orphan that keeps computing this many CPU seconds after its deadline

# Plain numbers, parsed as they are. Any other answer without marks of mathematics is treated as LaTeX without its
# marks, as data sets have it: the library would take the 2 of 2\sqrt{3} for the answer.
_PLAIN = re.compile(r"\s*[-+]?\s*[$\u20ac\u00a3]?\s*[-+]?[\d.,\s]*\d\.?\s*(?:/\s*\d+)?\s*\\?%?\s*\Z")
_MARKED = re.compile(r"\\boxed|\$|\\\(|\\\[")


def main() -> None:
    """Answer until standard input closes."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library's own output must not mix with replies
    logging.disable(logging.CRITICAL)
    try:
        verdict("1", "1")  # compiles the patterns and the grammar
    except Exception as error:  # noqa: BLE001 - a package of another version may raise anything
        why = error if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        print(json.dumps(["broken", f"math-verify cannot be imported: {why}"]), file=replies, flush=True)
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
    """Return the reply to one question."""
    try:
        return verdict(response, answer)
    except MemoryError:
        return ["memory"]
    except Exception as error:  # noqa: BLE001 - the library may raise anything; the calling process names the sample
        return ["error", " ".join(f"{type(error).__name__}: {error}".split())[:300]]


def verdict(response: str, answer: str) -> list[str]:
    """Return math-verify's verdict as a reply."""
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
    """Parse the answer of a data set to expressions; empty if there are none."""
    from math_verify import parse

    text = answer if _PLAIN.match(answer) or _MARKED.search(answer) else rf"\boxed{{{answer}}}"
    return parse(text, parsing_timeout=None, raise_on_error=True)


if __name__ == "__main__":
    main()
