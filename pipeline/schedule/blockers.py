"""What can block a stage at a step, besides missing sample fields. Each names the condition that the stage waits for.

Plain data with one type each, so a stage called "checkpoint" or a weights field called "stop" cannot collide.

    reader.blockers = {Weights("trained_weights"), StageDone("logprobs", 3)}
    [str(blocker) for blocker in reader.blockers]       # for messages: trained_weights, logprobs 3
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Weights(msgspec.Struct, frozen=True, gc=False):
    """The step's weights are present in this field."""

    field: str

    def __str__(self) -> str:
        return self.field


class StageDone(msgspec.Struct, frozen=True, gc=False):
    """Stage `stage` has acknowledged all of step `step`."""

    stage: str
    step: int

    def __str__(self) -> str:
        return f"{self.stage} {self.step}"


class Version(msgspec.Struct, frozen=True, gc=False):
    """Policy version `number` is published."""

    number: int

    def __str__(self) -> str:
        return f"version {self.number}"


class Checkpoint(msgspec.Struct, frozen=True, gc=False):
    """The checkpoint after `steps` steps is written."""

    steps: int

    def __str__(self) -> str:
        return f"checkpoint {self.steps}"


class Stopped(msgspec.Struct, frozen=True, gc=False):
    """The run was asked to stop: this stage will not run at this step."""

    def __str__(self) -> str:
        return "stop"


STOPPED = Stopped()
Blocker: TypeAlias = Weights | StageDone | Version | Checkpoint | Stopped
