"""Forwards the metrics of a run to other services: one interface, one file per service. None is a dependency.

A forwarder runs in a separate process and reads what the run has written; if it fails, training continues.
"""

from __future__ import annotations

import importlib
import importlib.util
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from pipeline.errors import GraphError, Problem, message_of
from pipeline.precedence import typed
from pipeline.writing import refuse_password

SERVICES = ("tensorboard", "wandb", "mlflow")  # each names a module here, a package, a flag and an extra

_KEYS = {
    "wandb": ", and set WANDB_API_KEY",
    "mlflow": ", and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
}


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """A run as services see it. `key` is unique among all runs; `flags` are the flags of graph()."""

    name: str
    key: str
    graph: str
    flags: dict[str, Any]


class Sink(Protocol):
    """One run in one service. `done` is the last step that the service already has, -1 for none."""

    done: int

    def put(self, step: int, at_s: float, values: Mapping[str, float]) -> None:
        """Send the metrics of a step, which ended `at_s` seconds after 1970; steps only increase. May raise the
        exceptions in its module's `errors`."""

    def close(self, state: str) -> None:
        """Finish; the run is "finished", "failed", "interrupted" or "unfinished"."""


def check(service: str, where: str) -> None:
    """Raise GraphError if the service's package is not installed, or `where` contains a password."""
    refuse_password(where, flag=f"--{service}", fix=f"remove it{_KEYS.get(service, '')}")
    found = importlib.util.find_spec(service)
    if found is None or found.origin is None:  # a folder of that name is not the package
        raise GraphError(
            Problem(
                where=f"--{service}",
                what=f"the package {service} is not installed",
                why="services are not dependencies of Sluice",
                fix=f"pip install 'sluice-rl[{service}]'",
            )
        )


def opened(service: str, where: str, run: Described, folder: Path) -> Sink:
    """Open the run of a folder in a service: a folder, a project or an address. Raises GraphError if it rejects it."""
    check(service, where)
    module = importlib.import_module(f"pipeline.forwarders.{service}")
    try:
        return module.open_sink(where, run)
    except module.errors() as error:
        raise failure(service, where, error, folder) from error


def errors(service: str) -> tuple[type[Exception], ...]:
    """Return the exceptions that a sink of this service may raise."""
    return importlib.import_module(f"pipeline.forwarders.{service}").errors()


def failure(service: str, where: str, error: Exception, folder: Path) -> GraphError:
    """Convert a service's exception to an error of its flag."""
    again = shlex.join([*typed("pipeline.forward"), str(folder), f"--{service}", where])
    return GraphError(
        Problem(
            where=f"--{service} {where}",
            what=message_of(error),
            why="the service rejected a request; metrics.jsonl in the run directory has every metric",
            fix=f"{again}, which continues after the last forwarded step",
        )
    )
