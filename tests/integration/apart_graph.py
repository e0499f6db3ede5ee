"""The async graph with two samplers, of which the second takes `late_s` seconds to receive a version."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

from pipeline import Graph, Output, Schedule, StageContext, Task, WorkerGroup
from tests.integration.async_graph import LEARNER, Learn, Numbers, Publish, Sample, Score

SAMPLERS = WorkerGroup("sampler", backend="torch", workers=2)


@dataclass(frozen=True)
class PublishApart(Publish):
    """Serves the samplers one after the other."""

    late_s: float = 0.0

    def groups(self) -> tuple[WorkerGroup, ...]:
        return (LEARNER, SAMPLERS)

    def setup(self, context: StageContext) -> Any:
        transfer = super().setup(context)

        def run(rendezvous: Any, task: Task) -> Output:
            if rendezvous.side == "target":
                time.sleep(context.rank * self.late_s)
            return transfer(rendezvous, task)

        return run


def graph(
    late_s: float = 1.0, token_s: float = 0.01, max_staleness: int = 0, refit: Literal["drain", "in_flight"] = "drain"
) -> Graph:
    """Run three steps."""
    stages = (Sample(on=SAMPLERS, token_s=token_s, tail=1), Score(), Learn(0.0), PublishApart(late_s=late_s))
    schedule = Schedule(steps=3, max_staleness=max_staleness, refit=refit, keep_groups=0)
    return Graph(name="apart", source=Numbers(4), stages=stages, schedule=schedule)
