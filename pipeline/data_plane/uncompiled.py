"""Imports tensordict without torch's compiler, which is 2 of the 4 or 5 CPU seconds of importing TransferQueue.

At import tensordict, a dependency of TransferQueue, marks a few functions for `torch.compile`, and marking loads the
whole compiler. Nothing here compiles tensordict's functions. A stage that does can import torch._dynamo at the top of
its file; then the marks are applied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

MARKS = ("allow_in_graph", "assume_constant_result")


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside this context tensordict's marks do nothing, unless the compiler is already loaded."""
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
    """Wrap the mark: it does nothing for tensordict, and still works for other modules that import it meanwhile."""

    def marked(function: Any) -> Any:
        asking = sys._getframe(1).f_globals["__name__"]
        return function if asking.startswith("tensordict.") else mark(function)

    return marked
