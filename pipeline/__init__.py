"""Sluice's engine: graphs, time and data movement. It knows no model and no reward."""

from pipeline.errors import DataPlaneError, GraphError, StageError
from pipeline.fields import Field
from pipeline.graph import Graph, Model, Schedule, WorkerGroup
from pipeline.meta import KVBatchMeta
from pipeline.stage import Output, Stage, StageContext, Task

__all__ = [
    "DataPlaneError",
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
