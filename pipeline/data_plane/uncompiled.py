"""tensordict without torch's compiler, which is 2 of the 4 or 5 CPU seconds that importing TransferQueue takes.

tensordict, which TransferQueue imports, marks a few of its functions for `torch.compile` as it is imported, and the
marking loads the whole compiler. Nothing here compiles tensordict's functions. Who does, in a stage of their own,
imports torch._dynamo at the top of that file; then the marks are made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

MARKS = ("allow_in_graph", "assume_constant_result")


@contextmanager
def uncompiled() -> Iterator[None]:
    """While it is open, tensordict's marks do nothing, unless the compiler is there already."""
    import torch.compiler

    marks = {} if "torch._dynamo" in sys.modules else {name: getattr(torch.compiler, name) for name in MARKS}
    for name, mark in marks.items():
        setattr(torch.compiler, name, _but_for_tensordict(mark))
    try:
        yield
    finally:
        for name, mark in marks.items():
            setattr(torch.compiler, name, mark)


def _but_for_tensordict(mark: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The mark, for all other callers: whoever imports it meanwhile keeps it."""

    def marked(function: Any) -> Any:
        asking = sys._getframe(1).f_globals["__name__"]
        return function if asking.startswith("tensordict.") else mark(function)

    return marked
