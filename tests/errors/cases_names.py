"""Names that the engine reserves, and stages that no worker could set up."""

from tests.errors.harness import Case


def stage(name: str, parameters: str) -> Case:
    """Return a case of an additional stage."""
    return Case(name, {"extra": f"(Step({parameters}),)"})


def defined(name: str, body: str) -> Case:
    """Return a case of an additional stage with this body."""
    return Case(name, {"extra": "(Mine(),)"}, top=f"class Mine(Stage):\n{body}\n\n\n")


CASES = [
    stage("stage_named_step", "'step'"),
    stage("stage_named_time", "'time'"),
    stage("stage_named_dropped", "'dropped'"),
    stage("stage_named_version", "'version'"),
    stage("stage_named_checkpoint", "'checkpoint'"),
    stage("stage_name_with_a_slash", "'reward/extra'"),
    stage("stage_without_a_name", "' '"),
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
]
