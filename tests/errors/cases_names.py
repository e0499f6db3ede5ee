"""Names that the engine reserves, and stages that no worker could set up."""

from tests.errors.harness import Case


def stage(name: str, parameters: str) -> Case:
    """Return a case of an additional stage."""
    return Case(name, {"extra": f"(Step({parameters}),)"})


def defined(name: str, body: str) -> Case:
    """Return a case of an additional stage with this body; a line of it that ends in `# here` must be pointed at."""
    at = () if "# here" in body else None
    return Case(name, {"extra": "(Mine(),)"}, at=at, top=f"class Mine(Stage):\n{body}\n\n\n")


LOCK = (
    "import threading\nHELD = threading.Lock()\n"
    "def locked(response: str) -> float:\n    return float(HELD.locked())\n\n\n"
)
CASES = [
    Case("reward_with_a_lock", {"reward": "Reward(locked)"}, top=LOCK),
    Case(
        "backend_with_a_lock",
        {"sampler": "WorkerGroup('sampler', backend=Backend(name='own', can=('sample',), opener=open_own))"},
        at=("sampler",),
        top="import threading\nfrom pipeline import Backend\nHELD = threading.Lock()\n"
        "def open_own(context): return HELD\n\n\n",
    ),
    defined("stage_writes_a_field_and_no_tuple", "    name = 'mine'\n    writes = (Field('x', dtype='str'))"),
    defined("stage_writes_none", "    name = 'mine'\n    writes = None"),
    stage("stage_named_step", "'step'"),
    defined(
        "stage_reads_back_a_sample",
        "    name = 'mine'\n    reads_back = (Field('response', dtype='str'),)\n    setup = lambda *_: dict",
    ),
    stage("stage_named_time", "'time'"),
    stage("stage_named_stored", "'stored'"),
    stage("stage_named_dropped", "'dropped'"),
    stage("stage_named_version", "'version'"),
    stage("stage_named_checkpoint", "'checkpoint'"),
    stage("stage_name_with_a_slash", "'reward/extra'"),
    stage("stage_without_a_name", "' '"),
    stage("stage_name_of_300_characters", "'n' * 300, per='step'"),
    Case("worker_group_name_of_300_characters", {"scorers": "WorkerGroup('n' * 300, workers=0)"}),
    Case(
        "graph_name_of_300_characters",
        {"made": "Graph(name='n' * 300, source=source, stages=stages, schedule=schedule)"},
    ),
    stage("field_name_of_300_characters", "'count', writes=(Field('n' * 300, dtype='int64'),)"),
    defined(
        "writes_raises", "    name = 'mine'\n    writes = property(lambda self: self.kept)\n    setup = lambda *_: dict"
    ),
    stage("field_named_step", "'count', writes=(Field('step', dtype='int64'),)"),
    Case("column_named_key", {"source": "Prompts(task, batch=batch, extra=('key',))"}),
    Case(
        "group_named_host_beside_another_host",
        {
            "scorers": 'WorkerGroup("host")',
            "made": 'Graph(name="small", source=source, stages=stages, schedule=schedule, host=sampler)',
        },
        at=("scorers",),
    ),
    defined(
        "gate_is_a_field", "    name = 'mine'\n    gate = Field('kept', dtype='bool')\n    setup = lambda *_: dict"
    ),
    defined("stage_without_setup", "    name = 'mine'"),
    defined("setup_takes_no_context", "    name = 'mine'\n\n    def setup(self):\n        return dict"),
    defined("setup_is_async", "    name = 'mine'\n\n    async def setup(self, context):\n        return dict"),
    defined("setup_returns_nothing", "    name = 'mine'\n\n    def setup(self, context):  # here\n        pass"),
    defined(
        "runner_takes_no_task",
        "    name = 'mine'\n\n    def setup(self, context):  # here\n        return lambda columns: {}",
    ),
    defined(
        "stream_yields_nothing",
        "    name = 'mine'\n    shape = 'stream'\n\n    def setup(self, context):  # here\n"
        "        async def run(columns, task):\n            return {}\n\n        return run",
    ),
    defined("shape_is_misspelt", "    name = 'mine'\n    shape = 'strem'\n    setup = lambda *_: dict"),
]
