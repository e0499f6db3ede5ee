"""Weights & Biases: a run in PROJECT or ENTITY/PROJECT. Keys come from the environment or from `wandb login`.

WANDB_MODE=offline keeps it on this machine. A run that W&B already has continues after its last step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.forwarders import Described


def errors() -> tuple[type[Exception], ...]:
    import wandb

    return (wandb.errors.Error, OSError)


def open_sink(where: str, run: Described) -> WeightsAndBiases:
    import wandb

    entity, _, project = where.rpartition("/")
    settings = wandb.Settings(console="off", silent=True, x_disable_stats=True, x_disable_meta=True, disable_git=True)
    opened = wandb.init(
        entity=entity or None, project=project, id=run.key, name=run.name, resume="allow", save_code=False,
        config={"graph": run.graph, **run.flags}, settings=settings,
    )  # fmt: skip
    return WeightsAndBiases(opened)


class WeightsAndBiases:
    """One run of W&B."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self.done = run.step - 1 if run.resumed else -1

    def put(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, state: str) -> None:
        self._run.finish(exit_code=int(state in ("failed", "interrupted")))
