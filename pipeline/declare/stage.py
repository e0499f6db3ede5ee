"""A stage: what it reads, what it writes, where it runs, and the code that turns one into the other.

A `Stage` is a frozen description. It loads neither torch nor ray. `setup` runs once in each worker that hosts it and
returns the runner, which does the work. The runner receives exactly the columns that the stage reads and returns
exactly those that it writes, so you can test it with a dict:

    @dataclass(frozen=True)
    class Shout(Stage):
        reads = (RESPONSE,)
        writes = (Field("shout", dtype="str"),)

        def setup(self, context):
            return lambda columns, task: {"shout": [text.upper() for text in columns["response"]]}

Three shapes. *map*: `runner(columns, task)` returns the columns, or an `Output` that adds metrics. *stream*:
`runner(columns, task)` is an async generator of `Output`s, each for whole groups of samples, which its `index` names;
other tasks of its worker, and weight swaps, run while it awaits. *transfer*: `runner(rendezvous, task)` runs on two
worker groups, first with `rendezvous.side == "source"`, which offers a payload, then with `"target"`, which takes it
and returns an `Output`. If the stage `meets`, the source also runs as `"carrier"`, concurrently with the target, and
both move the payload together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.declare.calls import fault
from pipeline.declare.fields import Field
from pipeline.declare.group import Location, caller
from pipeline.declare.runners import MEANT, example, written_fault
from pipeline.declare.sharding import Sharding
from pipeline.declare.task import Per, Shape, StageContext
from pipeline.errors import Problem, StageError, line_of_code

if TYPE_CHECKING:
    from pipeline.declare.group import Model, WorkerGroup


@dataclass(frozen=True)
class Gate:
    """The field that a stage writes only for the groups it keeps. At most `max_rounds` batches are sampled per step.

    A reason for dropping that begins with `fault` is a failure and no judgement: the run ends if more than the fraction
    `most_faults` of the groups sampled for a step are dropped for such reasons.
    """

    field: Field
    max_rounds: int = 10
    fault: str = ""
    most_faults: float = 1.0


class Stage:
    """Base of all stages. Subclasses are frozen dataclasses; these are the defaults.

    name        of the stage in this graph; the class's name in lower case unless given
    reads       fields that it reads, all of the same step
    writes      fields that it writes; no other stage writes them
    reads_back  weights of an *earlier* step that it waits for (rollout: the served weights)
    per         what it can start on: each sample, each group, or only the whole batch
    uses        models whose weights it reads
    updates     the model whose weights it changes, if any
    on          the worker group it runs on; None is the graph's host group
    group_size  samples per prompt (rollout), else None
    every       run every n-th step, counted from 1, and the last one
    sharding    how to shard its batch over the data-parallel workers of its group, which run it together; None runs it
                on one worker
    gate        drop groups: stages that it does not depend on see only the groups it keeps, and dropped groups are
                replaced; None drops nothing

    `pipeline.declare.abilities` has what only some stages need: stamping tokens, showing them, starting on runs.
    """

    name: str = ""
    reads: Sequence[Field] = ()
    writes: Sequence[Field] = ()
    reads_back: Sequence[Field] = ()
    per: Per = "sample"
    shape: ClassVar[Shape] = "map"
    on: WorkerGroup | None = None
    group_size: int | None = None
    every: int = 1
    sharding: Sharding | None = None
    gate: Gate | None = None
    location: Location

    def __new__(cls, *args: Any, **kwargs: Any) -> Stage:
        self = super().__new__(cls)
        object.__setattr__(self, "location", caller(1))
        if not cls.name:
            object.__setattr__(self, "name", cls.__name__.lower())
        return self

    @property
    def uses(self) -> tuple[Model, ...]:
        """The models whose weights the stage reads."""
        return ()

    @property
    def updates(self) -> Model | None:
        """The model whose weights the stage changes."""
        return None

    def groups(self) -> tuple[WorkerGroup, ...]:
        """Return its worker groups: one, or source and target of a transfer; empty means the host group."""
        return (self.on,) if self.on else ()

    def check(self, graph: Any) -> Iterable[Problem]:
        """Return problems of this stage in this `Graph`, beyond the general checks. Must not load torch."""
        return ()

    def meets(self, is_near: bool) -> bool:
        """Return whether both sides of a transfer move it together. `is_near` is True if all workers of both sides are
        on one machine. Raises StageError if the transfer is impossible."""
        return False

    def setup(self, context: StageContext) -> Callable[..., Any]:
        """Return the runner. Called once in each worker. A runner with `save(folder)` and `restore(folder)` is part of
        every checkpoint."""
        raise StageError(*setup_problems(self))


def kept_by(stage: Stage) -> Field | None:
    """Return the gate field of a stage, or None."""
    return stage.gate.field if stage.gate else None


def setup_problems(stage: Stage) -> Iterator[Problem]:
    """Yield a problem if the stage has no `setup` that a worker can call, or one that returns no runner."""
    says, where = f"stage {stage.name!r} ({type(stage).__name__})", str(stage.location)
    is_defined = type(stage).setup is not Stage.setup
    if not is_defined or (wrong := fault(stage.setup, "context")):
        yield Problem(
            where=where,
            what=f"{says} has a setup() that {wrong}" if is_defined else f"{says} does not define setup()",
            why="it returns the runner, which does the work",
            fix="def setup(self, context): return lambda columns, task: {...}",
        )
    elif (line := line_of_code(stage.setup)) and (wrong := written_fault(type(stage).setup, stage.shape)):
        yield runner_problem(stage, wrong, line)


def runner_problem(stage: Stage, wrong: str, line: str) -> Problem:
    """Return the problem of a runner at a line of the user's code, or, if `line` is "", at the stage's."""
    return Problem(
        where=line or str(stage.location),
        what=f"the runner of stage {stage.name!r} {wrong}",
        why=MEANT[stage.shape],
        fix=example(stage.shape),
    )


@dataclass(frozen=True)
class External(Stage):
    """Fields that an external process writes straight into the data plane.

    Nothing runs for it. The store is polled once per second. If a field has not arrived `timeout_s` after its batch was
    admitted, the run ends with an error that names it. `reads` are fields that the process reads; they stay until the
    fields that it writes have been read.
    """

    fields: tuple[Field, ...]
    name: str = "external"
    timeout_s: float = 600.0
    reads: tuple[Field, ...] = ()
    shape: ClassVar[Shape] = "external"

    @property
    def writes(self) -> Sequence[Field]:  # type: ignore[override]
        return self.fields

    def check(self, graph: Any) -> Iterable[Problem]:
        """Check that each ragged dimension is that of a field which a stage of the graph writes: it has the lengths."""
        others = [stage for stage in (graph.source, *graph.stages) if stage.shape != "external"]
        known = {field.ragged for stage in others for field in stage.writes}
        for field in self.fields:
            if field.ragged and field.ragged not in known:
                yield Problem(
                    where=str(self.location),
                    what=f"field {field.name!r} of {self.name!r} has the dimension {field.ragged}, which no stage "
                    "writes",
                    why="the lengths of a field from outside are those of a field that a stage wrote",
                    fix="use a dimension of such a field, as N T, or a fixed size, as N 8",
                )
