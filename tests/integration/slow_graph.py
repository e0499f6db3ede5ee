"""A graph whose workers are busy for `busy_s` at a time, each in its own way. Loaded by path, as users' graphs are."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import Field, Graph, Output, Schedule, Stage, StageContext, Task, WorkerGroup
from tests.integration.async_graph import (
    LEARNER,
    PROMPT,
    TOKENS,
    Learn,
    Numbers,
    Publish,
    Samples,
    Score,
)

SPUN = Field("spun", dtype="float32")


@dataclass(frozen=True, kw_only=True)
class Sleep(Samples):
    """Writes one token per sample after a call that releases the GIL."""

    busy_s: float

    def setup(self, context: StageContext) -> Any:
        import torch

        from pipeline.declare.columns import Ragged

        def run(columns: dict, task: Task) -> dict:
            time.sleep(self.busy_s)
            lengths = (1,) * len(columns["prompt"])
            versions = torch.full((len(lengths),), context.shared["version"], dtype=torch.int32)
            return {
                "tokens": Ragged(torch.zeros(len(lengths), dtype=torch.int64), lengths),
                "versions": Ragged(versions, lengths),
            }

        return run


@dataclass(frozen=True)
class Spin(Stage):
    """A stream that computes in Python and blocks its event loop."""

    busy_s: float
    name: str = "spin"
    per: str = "group"
    shape: str = "stream"
    on: WorkerGroup | None = LEARNER
    reads: Sequence[Field] = (PROMPT,)
    writes: Sequence[Field] = (SPUN,)

    def setup(self, context: StageContext) -> Any:
        import torch

        async def run(columns: dict, task: Task) -> Any:
            until_s = time.monotonic() + self.busy_s
            while time.monotonic() < until_s:
                pass
            yield Output({"spun": torch.zeros(len(columns["prompt"]))}, index=range(len(columns["prompt"])))

        return run


@dataclass(frozen=True)
class Wait(Publish):
    """Delays the first weights. If the file `hung` does not exist, their source creates it and stops its process."""

    busy_s: float = 0.0
    hung: str = ""

    def setup(self, context: StageContext) -> Any:
        transfer = super().setup(context)

        def run(rendezvous: Any, task: Task) -> Output:
            if rendezvous.side == "source" and task.step < 0:
                time.sleep(self.busy_s)
                if not Path(self.hung).exists():
                    Path(self.hung).touch()
                    os.kill(os.getpid(), signal.SIGSTOP)
                    time.sleep(60.0)  # a thread keeps running until the signal arrives
            return transfer(rendezvous, task)

        return run


@dataclass(frozen=True)
class Read(Score):
    """Reads the output of `Spin` as well."""

    reads: Sequence[Field] = (TOKENS, SPUN)


def graph(busy_s: float = 1.0, hung: str = "hung") -> Graph:
    """Run one step."""
    stages = (Sleep(busy_s=busy_s), Spin(busy_s), Read(), Learn(0.0), Wait(busy_s=busy_s, hung=hung))
    return Graph(name="slow", source=Numbers(4), stages=stages, schedule=Schedule(steps=1, keep_groups=0))
