"""Optional abilities of stages, beyond what every `Stage` has. A stage has an ability if it matches the protocol."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pipeline.declare.fields import Field
from pipeline.declare.group import WorkerGroup
from pipeline.declare.task import ServerAddress, StageContext

if TYPE_CHECKING:
    from pipeline.declare.stage import Stage


@runtime_checkable
class Stamps(Protocol):
    """`stamps` is the output field that records which policy version sampled each token."""

    stamps: Field | None


@runtime_checkable
class Shows(Protocol):
    """`shows` are ragged output fields that are kept with the samples of a run."""

    shows: Sequence[Field]

    def vocabulary(self, context: StageContext) -> Sequence[bytes]:
        """Return the UTF-8 bytes of each token, by id. Called once, after `setup`."""


@runtime_checkable
class TakesTensorDict(Protocol):
    """With `takes_tensordict`, the runner gets its columns as one TensorDict, ragged ones as jagged nested tensors."""

    takes_tensordict: bool


@runtime_checkable
class StartsOnRuns(Protocol):
    """A stage per batch that starts on runs of `run_samples` samples, rounded up to whole groups, in canonical order,
    each as soon as it is complete; None is the whole batch at once."""

    run_samples: int | None


@runtime_checkable
class CorrectsOffPolicy(Protocol):
    """`corrects_off_policy` is True if the stage corrects for older samples, as max_staleness > 0 requires."""

    corrects_off_policy: bool


@runtime_checkable
class Bounds(Protocol):
    """`bounds` has the most entries per sample of ragged dimensions that the stage writes, by their symbol."""

    bounds: Mapping[str, int]


@runtime_checkable
class ReportsAs(Protocol):
    """`reports_as` begins the names of metrics that a stage returns, besides its own name: "eval" of `Evaluate`."""

    reports_as: str


@runtime_checkable
class Replays(Protocol):
    """A stage that makes a kept sample again, or judges it again."""

    def replayed(self, sample: Mapping[str, Any], context: StageContext, *, live: bool) -> tuple[list[str], bool]:
        """Return lines that say how it went, and whether it went as before. With `live`, a stage that samples does that
        too. `sample` are the kept fields, with its `key`."""


@runtime_checkable
class HasServer(Protocol):
    """A stage whose workers ask those of another group, `server`, if that is not None: they run no tasks."""

    @property
    def server(self) -> WorkerGroup | None:
        """The group."""

    def serve(self, context: StageContext, host: str) -> ServerAddress:
        """Listen at the address `host`, on each worker of the group. Called again if the address may have changed. What
        has to end with the worker is in `context.shared`."""


def server_of(stage: object) -> WorkerGroup | None:
    """Return the group that serves a stage, or None."""
    group = stage.server if isinstance(stage, HasServer) else None
    return group if isinstance(group, WorkerGroup) else None


def stamped_by(stage: object) -> Field | None:
    """Return the field in which a stage records token versions, or None."""
    return stage.stamps if isinstance(stage, Stamps) else None


def stamps_of(stages: Iterable[object]) -> Field | None:
    """Return the token version field of the first stage that has one, or None."""
    return next((field for field in map(stamped_by, stages) if field), None)


def shown_by(stage: object) -> Sequence[Field]:
    """Return the per-token fields that a stage keeps with the samples."""
    return stage.shows if isinstance(stage, Shows) else ()


def run_of(stage: object) -> int | None:
    """Return how many samples a stage per batch starts on; None is the whole batch."""
    return stage.run_samples if isinstance(stage, StartsOnRuns) else None


def corrects(stage: object) -> bool:
    """Return whether a stage corrects for samples of an older policy."""
    return isinstance(stage, CorrectsOffPolicy) and stage.corrects_off_policy


def bounds_of(stage: object) -> Mapping[str, int]:
    """Return the most entries per sample of each ragged dimension that a stage limits, by symbol."""
    return stage.bounds if isinstance(stage, Bounds) else {}


def prefixes_of(stage: Stage) -> tuple[str, ...]:
    """Return what the names of a stage's metrics may begin with, before the slash."""
    return (stage.name, stage.reports_as) if isinstance(stage, ReportsAs) else (stage.name,)


def takes_tensordict(stage: object) -> bool:
    """Return whether a stage wants its columns as a TensorDict."""
    return isinstance(stage, TakesTensorDict) and stage.takes_tensordict
