"""What some stages can do beyond what every `Stage` does. A stage has an ability if it has what the protocol names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from pipeline.declare.fields import Field
from pipeline.declare.task import StageContext


@runtime_checkable
class Stamps(Protocol):
    """`stamps` is the field, among those that the stage writes, that says for each token which policy version sampled
    it."""

    stamps: Field | None


@runtime_checkable
class Shows(Protocol):
    """`shows` are ragged fields, among those that the stage writes, that are kept with the samples of a run."""

    shows: Sequence[Field]

    def vocabulary(self, context: StageContext) -> Sequence[bytes]:
        """What each token adds to a text, as UTF-8, by its id. Asked once, after `setup`."""


@runtime_checkable
class StartsOnRuns(Protocol):
    """A stage per batch that starts on runs of `run_samples` samples, rounded up to whole groups, in canonical order,
    each as soon as all of it is there; None is the whole batch at once."""

    run_samples: int | None


@runtime_checkable
class CorrectsOffPolicy(Protocol):
    """`corrects_off_policy` says whether the stage corrects for samples of an older policy, which max_staleness > 0
    needs."""

    corrects_off_policy: bool


def stamped_by(stage: object) -> Field | None:
    """The field in which a stage says the version of each token, if it does."""
    return stage.stamps if isinstance(stage, Stamps) else None


def stamps_of(stages: Iterable[object]) -> Field | None:
    """The field in which the first stage that does so says the version of each token."""
    return next((field for field in map(stamped_by, stages) if field), None)


def shown_by(stage: object) -> Sequence[Field]:
    """The fields per token that a stage has kept with the samples."""
    return stage.shows if isinstance(stage, Shows) else ()


def run_of(stage: object) -> int | None:
    """How many samples a stage per batch starts on; None is the whole batch."""
    return stage.run_samples if isinstance(stage, StartsOnRuns) else None


def corrects(stage: object) -> bool:
    """Whether a stage corrects for samples of an older policy."""
    return isinstance(stage, CorrectsOffPolicy) and stage.corrects_off_policy
