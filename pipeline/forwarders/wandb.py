"""Weights & Biases: a run in PROJECT or ENTITY/PROJECT. Keys come from the environment or from `wandb login`.

WANDB_MODE=offline keeps it on this machine, in a folder each time. A run that W&B or an earlier folder already has
continues after its last step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.forwarders import Described

DONE = "sluice.step"  # a file in the folder of an offline run


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
    return WeightsAndBiases(opened, Path(opened.dir).parent)


class WeightsAndBiases:
    """One run of W&B."""

    def __init__(self, run: Any, folder: Path) -> None:
        self._run, self._last = run, folder / DONE
        earlier = [int(file.read_text()) for file in folder.parent.glob(f"offline-run-*-{run.id}/{DONE}")]
        self.done = run.step - 1 if run.resumed else max(earlier, default=-1)

    def put(self, step: int, at_s: float, values: Mapping[str, float]) -> None:
        self._run.log({**values, "_timestamp": at_s}, step=step)
        if self._run.offline:
            self._last.write_text(str(step))

    def close(self, state: str) -> None:
        self._run.finish(exit_code=int(state in ("failed", "interrupted")))
