"""Tensor-parallel ranks train on the same bytes whether one of them fetches for all or each fetches for itself."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from pipeline import StageContext, WorkerGroup
from pipeline.declare.columns import Ragged
from pipeline.record import trace
from pipeline.rundir import RunDir
from stages import Train
from stages.backends import engine
from stages.train import TrainRunner
from tests.integration import given_samples as given
from tests.integration.test_async import events
from tests.integration.test_parity import execute, losses
from tests.optional import need

need("megatron", "megatron.core")


class WatchedRunner(TrainRunner):
    """Saves the columns that this rank trains on in the run directory."""

    def __init__(self, stage: Train, context: StageContext) -> None:
        super().__init__(stage, engine(context), context)
        self.rank, self.folder = context.rank, context.run_dir

    def __call__(self, columns: Any, task: Any) -> Any:
        tensors = {}
        for name, column in columns.items():
            tensors[name] = column.values if isinstance(column, Ragged) else column
            if isinstance(column, Ragged):
                tensors[f"lengths of {name}"] = torch.tensor(column.lengths)
        save_file(tensors, self.folder / f"step_{task.step}.rank_{self.rank}.columns")
        return super().__call__(columns, task)


@dataclass(frozen=True)
class Watched(Train):
    """Trains, and saves what each rank trains on."""

    def setup(self, context: StageContext) -> WatchedRunner:
        return WatchedRunner(self, context)


def run(folder: Path, fetch: Literal["leader", "independent"]) -> RunDir:
    """Train on two tensor-parallel ranks."""
    from pipeline.executors.ray import RayExecutor
    from pipeline.executors.sent import user_modules

    learner = WorkerGroup(
        "learner", backend="megatron", workers=2, tensor_parallel=2, threads=1, cpus=0.25, fetch=fetch
    )
    run_dir = RunDir(folder)
    executor = RayExecutor(modules=user_modules(sys.modules[__name__]))
    execute(executor, run_dir, graph=given.graph("packed", learner, train=Watched))
    return run_dir


def contents(folder: Path, pattern: str) -> dict[str, str]:
    """Return the sha256 of each file."""
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.glob(pattern)}


def gets(run_dir: RunDir) -> int:
    """Return how often a rank fetched what it trains on."""
    return sum(event.stage == "train" for event in events(run_dir, trace.Got))


def test_a_leader_that_fetches_changes_no_byte(tmp_path: Path, ray_session: Any) -> None:
    leader, independent = run(tmp_path / "leader", "leader"), run(tmp_path / "independent", "independent")
    assert (gets(leader), gets(independent)) == (given.STEPS, 2 * given.STEPS)
    columns = contents(leader.path, "*.columns")
    assert len(columns) == 2 * given.STEPS and contents(independent.path, "*.columns") == columns
    for step in range(given.STEPS):
        assert columns[f"step_{step}.rank_0.columns"] == columns[f"step_{step}.rank_1.columns"]
    assert losses(leader) == losses(independent)
    trained = [contents(each.checkpoint(given.STEPS) / "train", "*.safetensors") for each in (leader, independent)]
    assert trained[0] and trained[0] == trained[1]
