"""Pickles objects of the user's for processes that cannot import their classes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import cloudpickle


def pickled(value: object) -> bytes:
    """Pickle an object, with its class if that is the user's: other processes cannot import a graph's file."""
    with _by_value(type(value).__module__):
        return cloudpickle.dumps(value)


@contextmanager
def _by_value(name: str) -> Iterator[None]:
    module = sys.modules.get(name)
    if module is None or name.partition(".")[0] in ("ops", "stages", "builtins"):
        yield
        return
    known = module.__name__ in cloudpickle.list_registry_pickle_by_value()
    if not known:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        if not known:
            cloudpickle.unregister_pickle_by_value(module)
