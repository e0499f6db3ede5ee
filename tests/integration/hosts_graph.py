"""The quickstart with a sampler and a learner that do not fit on one of two small machines. Loaded by path, as users'
graphs are."""

import os
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from graphs import quickstart
from pipeline import Graph, Stage, StageContext, WorkerGroup
from stages import Refit, TransportName


@dataclass(frozen=True)
class Cut(Refit):
    """Sends the target through a network interface that does not exist, if one is named."""

    _: KW_ONLY
    interface: str = ""

    def setup(self, context: StageContext) -> Callable[..., Any]:
        if self.interface and context.group == self.target:
            os.environ["GLOO_SOCKET_IFNAME"] = self.interface
        return Refit.setup(self, context)


def graph(
    transport: TransportName = "gloo", interface: str = "", sampler_cpus: float = 5.0, learner_cpus: float = 4.0,
    steps: int = 1,
) -> Graph:  # fmt: skip
    """Run one step."""
    made = quickstart.graph(
        steps=steps, evaluate_every=steps, warm_start_steps=5, prompts_per_step=4, samples_per_prompt=4,
        refit_transport=transport,
    )  # fmt: skip
    cpus = {"sampler": sampler_cpus, "learner": learner_cpus}
    groups = {name: WorkerGroup(name, backend="torch", threads=1, cpus=asked) for name, asked in cpus.items()}
    stages = []
    for stage in made.stages:
        if isinstance(stage, Refit):
            stage = Cut(stage.model, source=stage.source, target=stage.target, transport=transport, interface=interface)
        stages.append(_on(groups, stage))
    return replace(made, host=groups["sampler"], stages=tuple(stages))


def _on(groups: dict[str, WorkerGroup], stage: Stage) -> Stage:
    """Return a stage on these groups instead of those of their names."""
    asked: dict[str, Any] = {name: getattr(stage, name, None) for name in ("on", "source", "target")}
    return replace(stage, **{name: groups[of.name] for name, of in asked.items() if isinstance(of, WorkerGroup)})
