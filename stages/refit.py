"""Refit: the trained weights become the served weights. Two-sided; both worker groups are inside it together.

    Refit(policy, source=learner, target=sampler)

Every rank of the source offers its part, and every rank of the target brings what it needs into its own storage. The
receiving side adds up what it serves then, and a difference from what was offered is an error, so an acknowledged
version says which bytes generate, by a hash that does not depend on how ranks divide the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass

from pipeline import Graph, Model, Output, Stage, StageContext, Task, WorkerGroup
from pipeline.errors import Problem
from pipeline.stage import Rendezvous
from stages.backends import backend_problems, engine, model_problems
from stages.vocabulary import MADE_BY, SERVED_WEIGHTS, TRAINED_WEIGHTS


@dataclass(frozen=True)
class Refit(Stage):
    """Pushes the trained copy of `model` on `source` into the served copy on `target`.

    The version counts the steps that are behind it: the first publication, before the first step of a new run, is
    version 0, so that the sampler starts from the trainer's weights. Metrics: `size_bytes` of the model, and how it
    came: `received_bytes`, `lookups` (0 once it is warm), and milliseconds of each part.
    """

    model: Model
    _: KW_ONLY
    source: WorkerGroup
    target: WorkerGroup

    name = "refit"
    shape = "transfer"
    reads = (TRAINED_WEIGHTS,)
    writes = (SERVED_WEIGHTS,)
    per = "batch"
    hints = MADE_BY

    @property
    def uses(self) -> tuple[Model, ...]:
        """The model whose weights travel."""
        return (self.model,)

    def groups(self) -> tuple[WorkerGroup, ...]:
        """Source and target."""
        return (self.source, self.target)

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Both backends; the model; weights that are the same type at both ends."""
        yield from backend_problems(self.source, self, "train")
        yield from backend_problems(self.target, self, "sample")
        yield from model_problems(self.model)
        if (self.source.gpus > 0) != (self.target.gpus > 0):
            yield Problem(
                where=str(self.location),
                what=f"stage {self.name!r} goes from {self.source.gpus} GPUs to {self.target.gpus}",
                why="the torch backend has bfloat16 weights on a GPU and float32 weights on a CPU",
                fix="gpus on both worker groups, or on neither",
            )

    def setup(self, context: StageContext) -> Callable[[Rendezvous, Task], Output]:
        """Opens the backend; which copy of the model is meant depends on the side."""
        backend = engine(context)

        def run(rendezvous: Rendezvous, task: Task) -> Output:
            if rendezvous.side == "source":
                rendezvous.offer(backend.share(self.model, near=rendezvous.is_near))
                return Output()
            shares = rendezvous.take()
            version = task.step + 1
            served = backend.serve(self.model, shares, version)
            metrics = {"size_bytes": float(shares[0].model_bytes), **served.record}
            return Output(metrics=metrics, weights=(version, served.sha256))

        return run
