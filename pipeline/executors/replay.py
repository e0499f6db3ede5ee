"""Saves the inputs of a failed task and runs the task again on them, in this process, without a data plane.

runs/x/failures/step_000003_reward/   task.json  columns.json  columns.safetensors
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipeline.data_plane.tensordicts import given
from pipeline.declare.columns import Columns, Ragged, in_order
from pipeline.declare.graph import Graph
from pipeline.declare.group import WorkerGroup
from pipeline.declare.stage import Stage
from pipeline.declare.task import Output, StageContext, Task
from pipeline.errors import GraphError, Problem, SluiceError, user_error, user_line
from pipeline.executors import returned
from pipeline.precedence import for_another_python


def save_inputs(folder: Path, task: Task, columns: Columns) -> None:
    """Write task and columns to `folder`, creating it. Texts go to JSON, tensors to safetensors. A disk that is full or
    fails leaves none: the failure that they are for says more."""
    from safetensors import SafetensorError

    try:
        _write(folder, task, columns)
    except (OSError, SafetensorError):
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
                fix="name a folder in RUN/failures",
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
                fix="use the graph file of that run, RUN/graph.py" if stage is None else "run the graph again",
            )
        )
    group = stage.groups()[0] if stage.groups() else graph.host
    _check_interpreter(group, folder)
    context = StageContext(
        group=group,
        rank=0,
        seed=graph.schedule.seed,
        group_size=graph.group_size,
        run_dir=None,
        shared={},
        steps=graph.schedule.steps,
    )
    try:
        return _run(stage, stage.setup(context), task, columns, graph.all_stages())
    except Exception as error:
        if not isinstance(error, SluiceError) and not user_line(error):
            traceback.print_exception(error)
        when = f"failed again at step {task.step + 1}"
        raise user_error(error, stage=stage.name, where=str(stage.location), when=when) from error


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


def _run(stage: Stage, runner: Any, task: Task, columns: Columns, stages: Sequence[Stage]) -> Output:
    if stage.shape != "stream":
        return returned.output(stage, runner(given(stage, columns), task), stages)

    async def gathered() -> list[Output]:
        made = [returned.output(stage, one, stages) async for one in runner(given(stage, columns), task)]
        return [output for output in made if output.columns]

    outputs = asyncio.run(gathered())
    if not outputs:
        return Output()
    samples = sum(len(output.index or ()) for output in outputs)
    made, index = in_order([(output.columns, output.index or range(0)) for output in outputs])
    metrics = {
        name: sum(output.metrics[name] * len(output.index or ()) for output in outputs) / samples
        for name in outputs[0].metrics
    }
    return Output(made, metrics, index)
