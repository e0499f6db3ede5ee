"""Saves the inputs of a failed task and runs the task again on them, in this process, without a data plane. What
the task returns passes the checks of a put.

runs/x/failures/step_000003_reward/   task.json  columns.json  columns.safetensors
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shlex
import shutil
import sys
import traceback
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipeline.data_plane.checks import PartitionSchema, check_put
from pipeline.data_plane.tensordicts import given
from pipeline.declare.columns import Columns, Ragged, in_order
from pipeline.declare.graph import Graph
from pipeline.declare.group import WorkerGroup
from pipeline.declare.handle import keys_of
from pipeline.declare.stage import Stage
from pipeline.declare.task import Output, StageContext, Task
from pipeline.errors import GraphError, Problem, SluiceError, as_os_error, user_error, user_line
from pipeline.executors import returned
from pipeline.plan.planner import sample_fields, with_samples
from pipeline.precedence import for_another_python
from pipeline.rundir import RUNS, RunDir


def save_inputs(folder: Path, task: Task, columns: Columns) -> None:
    """Write task and columns to `folder`, in place of what it holds. Texts go to JSON, tensors to safetensors. A disk
    that is full or fails leaves none: the failure that they are for says more."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with as_os_error(folder):
            _write(folder, task, columns)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)


def _write(folder: Path, task: Task, columns: Columns) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    texts: dict[str, Any] = {}
    tensors = {}
    for name, column in columns.items():
        if isinstance(column, list):
            texts[name] = column
        elif isinstance(column, Ragged):
            tensors[name] = column.values.contiguous()
            texts[f"{name}.lengths"] = column.lengths
        else:
            tensors[name] = column.contiguous()
    save_file(tensors, folder / "columns.safetensors")
    (folder / "columns.json").write_bytes(msgspec.json.encode(texts))
    (folder / "task.json").write_bytes(msgspec.json.encode(task))


def load_inputs(folder: Path) -> tuple[Task, Columns]:
    """Read what `save_inputs` wrote. Raises GraphError if the folder is something else."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    missing = [name for name in ("task.json", "columns.json", "columns.safetensors") if not (folder / name).is_file()]
    if missing:
        raise GraphError(
            Problem(
                where=f"--replay {folder}",
                what=f"{missing[0]} does not exist",
                why="a replay needs the inputs of a failed task",
                fix=_nearest(folder),
            )
        )
    try:
        texts = msgspec.json.decode((folder / "columns.json").read_bytes(), type=dict[str, list[Any]])
        tensors = load_file(folder / "columns.safetensors")
        task = msgspec.json.decode((folder / "task.json").read_bytes(), type=Task)
    except (msgspec.DecodeError, SafetensorError) as error:
        raise GraphError(
            Problem(
                where=f"--replay {folder}",
                what=f"the saved inputs cannot be read: {error}",
                why="the failed run wrote them completely",
                fix="replay another failure, or run the graph again",
            )
        ) from error
    columns: Columns = {name: texts[name] for name in texts if not name.endswith(".lengths")}
    for name, tensor in tensors.items():
        lengths = texts.get(f"{name}.lengths")
        columns[name] = tensor if lengths is None else Ragged(tensor, tuple(lengths))
    return task, columns


def _nearest(folder: Path) -> str:
    """What to type instead of a folder without inputs: the newest one that has some, of a run there or in runs/."""
    near = [folder.glob("*/task.json"), folder.glob("failures/*/task.json"), folder.parent.glob("*/task.json")]
    found = [*itertools.chain(*near)] or [*Path(RUNS).glob("*/failures/*/task.json")]
    if not found:
        return "name a folder in failures/ of a run; neither this one nor runs/ has any"
    return f"--replay {shlex.quote(str(max(found, key=lambda file: file.stat().st_mtime).parent))}"


def run_again(graph: Graph, folder: Path, task: Task, columns: Columns) -> Output:
    """Run the failed task on its saved inputs and return its output. Raises SluiceError if it fails again.

    A stage with a model runs with the initial weights, not those of the failed step.
    """
    stages = {stage.name: stage for stage in graph.all_stages()}
    stage = stages.get(task.stage)
    if stage is None or stage.shape in ("transfer", "external"):
        raise GraphError(
            Problem(
                where=f"--replay {folder}",
                what=f"stage {task.stage!r} cannot be run on its own",
                why="it is not in this graph" if stage is None else f"its shape is {stage.shape!r}",
                fix=f"use the graph file of that run, {RunDir(folder.parent.parent).graph}"
                if stage is None
                else "run the graph again",
            )
        )
    group = stage.groups()[0] if stage.groups() else graph.host
    _check_interpreter(group, folder)
    context = context_of(graph, group)
    try:
        return _run(graph, stage, stage.setup(context), task, columns)
    except Exception as error:
        if not isinstance(error, SluiceError) and not user_line(error):
            traceback.print_exception(error)
        when = f"failed again at step {task.step + 1}"
        raise user_error(error, stage=stage.name, where=str(stage.location), when=when) from error


def context_of(graph: Graph, group: WorkerGroup) -> StageContext:
    """The context of a stage that runs on its own, in this process."""
    return StageContext(
        group=group,
        rank=0,
        seed=graph.schedule.seed,
        group_size=graph.group_size,
        run_dir=None,
        shared={},
        steps=graph.schedule.steps,
        max_staleness=graph.schedule.max_staleness,
    )


def _check_interpreter(group: WorkerGroup, folder: Path) -> None:
    """Raise GraphError if the group has its own interpreter and this is another one."""
    if group.interpreter in (None, os.path.abspath(sys.executable)):
        return
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in for_another_python().items())
    raise GraphError(
        Problem(
            where=f"--replay {folder}",
            what=f"worker group {group.name!r} has python={str(group.python)!r}, and this is another interpreter",
            why="a replay runs the stage in its own process",
            fix=f"run this command with it: {variables} {shlex.quote(str(group.interpreter))} -m pipeline.run ...",
        )
    )


def _run(graph: Graph, stage: Stage, runner: Any, task: Task, columns: Columns) -> Output:
    """Run the task and check what it returns, as a worker and a put do."""
    size = graph.group_size
    keys = keys_of(task.groups, size)
    if task.shard:
        keys = tuple(keys[i] for i in task.shard.index)
    produced = runner(given(stage, columns), task)
    outputs = asyncio.run(_all_of(produced)) if stage.shape == "stream" else [produced]
    schema = PartitionSchema.of(graph.name, sample_fields(with_samples(graph)), ())
    made: list[tuple[Output, Sequence[int]]] = []
    left = set(task.groups)
    for output in (returned.output(stage, one, graph.all_stages()) for one in outputs):
        left -= {task.groups[position] for position in output.cancelled}
        if output.open is not None:
            returned.open_samples(stage, output.open)
        if not returned.finishes(output):
            continue
        index = returned.rows(stage, output, task, len(keys), size)
        returned.check_lengths(stage, columns, output, index, keys)
        if index and output.columns:
            check_put(schema, [keys[i] for i in index], output.columns, stage=stage.name)
        left -= {task.groups[i // size] for i in index}
        made.append((output, index))
    if left and stage.shape == "stream":
        raise returned.unfinished(stage, left)
    return _joined(made)


async def _all_of(produced: AsyncIterator[Output]) -> list[Output]:
    return [output async for output in produced]


def _joined(made: Sequence[tuple[Output, Sequence[int]]]) -> Output:
    """Return the outputs as one, with the mean of their metrics, weighted by samples."""
    if len(made) == 1:
        return made[0][0]
    samples = sum(len(index) for _, index in made)
    metrics: dict[str, float] = {}
    for output, index in made:
        for name, value in output.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value * len(index) / max(1, samples)
    columns, index = in_order([(output.columns, index) for output, index in made]) if made else ({}, ())
    return Output(columns, metrics, index)
