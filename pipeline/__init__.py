"""Sluice's engine: graphs, time and data movement. It knows no model and no reward."""

from pipeline import precedence, starting  # noqa: F401 - first: where the other packages are found; Ctrl-C
from pipeline.declare.backend import Backend
from pipeline.declare.fields import Field
from pipeline.declare.graph import Graph, Schedule
from pipeline.declare.group import Model, WorkerGroup
from pipeline.declare.handle import KVBatchMeta
from pipeline.declare.stage import External, Stage
from pipeline.declare.task import Output, StageContext, Task
from pipeline.errors import DataPlaneError, GraphError, StageError

__all__ = [
    "Backend",
    "DataPlaneError",
    "External",
    "Field",
    "Graph",
    "GraphError",
    "KVBatchMeta",
    "Model",
    "Output",
    "Schedule",
    "Stage",
    "StageContext",
    "StageError",
    "Task",
    "WorkerGroup",
]
