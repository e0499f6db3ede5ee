"""The quickstart with another transport, whose sampler can die during a refit. Loaded by path, as users' graphs are."""

import os
import signal
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

from graphs import quickstart
from ops.comm.stateless_group import StatelessGroup
from pipeline import Graph, StageContext, Task
from stages import Refit, TransportName


@dataclass(frozen=True)
class Fatal(Refit):
    """Kills the first worker of the target twice, if `dies`.

    In the refit after the first step it dies before it meets the source, and in the next one when a message arrives.
    Files whose names begin with `done` record this."""

    _: KW_ONLY
    dies: bool = False
    done: str = ""

    def setup(self, context: StageContext) -> Callable[..., Any]:
        run = Refit.setup(self, context)

        def fatal(rendezvous: Any, task: Task) -> Any:
            done = Path(f"{self.done}{task.step}")
            if self.dies and rendezvous.side == "target" and context.rank == 0 <= task.step < 2 and not done.exists():
                done.touch()
                if task.step == 0:
                    end()
                StatelessGroup.recv = end  # type: ignore[method-assign]
            return run(rendezvous, task)

        return fatal


def end(*_: Any) -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def graph(
    transport: TransportName = "auto", workers: int = 1, dies: bool = False, done: str = "", max_staleness: int = 0
) -> Graph:
    """Run three steps."""
    made = quickstart.graph(
        steps=3, evaluate_every=3, warm_start_steps=20, prompts_per_step=8, samples_per_prompt=4, threads=1,
        max_staleness=max_staleness, refit="in_flight" if max_staleness else "drain",
    )  # fmt: skip
    sampler = replace(made.host, workers=workers)
    stages = []
    for stage in made.stages:
        if isinstance(stage, Refit):
            stage = Fatal(
                stage.model, source=stage.source, target=sampler, transport=transport, dies=dies, done=done
            )  # fmt: skip
        elif stage.on == made.host:
            stage = replace(stage, on=sampler)
        stages.append(stage)
    return replace(made, host=sampler, stages=tuple(stages))
