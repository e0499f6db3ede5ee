"""The names a user may import from `pipeline`: exactly this list."""

import pipeline

NAMES = [
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


def test_public_names():
    assert sorted(pipeline.__all__) == NAMES
    assert len(NAMES) <= 15


def test_every_public_name_is_there_and_says_what_it_is():
    for name in NAMES:
        assert getattr(pipeline, name).__doc__, name
