"""Impossible schedules, and stages with wrong claims about runs and versions, that a check finds."""

from tests.errors.harness import Case

IMPORT = "from stages import Filter, TruncatedIS\n\n\n"
CORRECTED = "Train(policy, on=learner, loss=ClippedLoss(correction=TruncatedIS(cap=2.0)), lr=1e-3)"
JUDGE = '''from stages.vocabulary import RESPONSE


@dataclass(frozen=True)
class Judge(Stage):
    """Needs the weights of its step, group by group."""

    on: WorkerGroup | None = None
    models: tuple[Model, ...] = ()
    name: str = "judge"
    per: str = "group"
    reads: tuple = (RESPONSE,)
    writes: tuple = (Field("model_reward", dtype="float32"),)

    @property
    def uses(self):
        return self.models
    setup = lambda *_: dict

'''


def schedule(
    name: str, text: str, *, at: tuple[str, ...] = ("made",), top: str = "", code: int = 2, **lines: str
) -> Case:
    """Return a case of a Schedule with these arguments, in a graph that corrects for older samples."""
    made = {"schedule": f"Schedule(steps=steps, {text})", "train": CORRECTED} | lines
    return Case(name, made, at=at, top=IMPORT + top, code=code)


def stamped(name: str, text: str) -> Case:
    """Return a case of a rollout that stamps this field."""
    top = f"class Stamped(Rollout):\n    stamps = {text}\n\n\n"
    return Case(
        name, {"rollout": "Stamped(policy, on=sampler, samples_per_prompt=2, max_tokens=3)"}, ("rollout",), top=top
    )


CASES = [
    schedule("depth_beyond_staleness", "max_staleness=1, pipeline_depth=2"),
    schedule("depth_below_zero", "max_staleness=1, pipeline_depth=-1"),
    schedule("depth_is_a_fraction", "max_staleness=1, pipeline_depth=0.5"),
    schedule("on_stale_misspelled", "max_staleness=1, on_stale='discard'"),
    schedule("refit_misspelled", "max_staleness=1, refit='inflight'"),
    schedule("on_divergence_misspelled", "on_divergence='halt'"),
    schedule("refit_is_a_bool", "max_staleness=1, refit=True"),
    schedule("capacity_below_staleness", "max_staleness=3, capacity=8"),
    schedule("keep_one_checkpoint", "checkpoint_every=2, keep_checkpoints=1"),
    schedule("keep_checkpoints_is_a_text", "checkpoint_every=2, keep_checkpoints='all', keep_every=-4"),
    schedule("keep_every_of_all_checkpoints", "checkpoint_every=2, keep_every=4"),
    schedule("keep_every_between_checkpoints", "checkpoint_every=4, keep_checkpoints=3, keep_every=10"),
    schedule("keep_every_of_no_checkpoints", "keep_checkpoints=3, keep_every=10"),
    schedule("capacity_bytes_of_0", "capacity_bytes=0"),
    schedule("capacity_bytes_below_a_batch", "capacity_bytes=100", code=0),
    schedule(
        "dropping_without_versions",
        "max_staleness=1, on_stale='drop'",
        rollout="Unstamped(policy, on=sampler, samples_per_prompt=2, max_tokens=3)",
        top="class Unstamped(Rollout):\n    stamps = None\n\n\n",
    ),
    schedule(
        "dropping_and_a_filter_behind_the_trained_model",
        "max_staleness=1, on_stale='drop'",
        at=("extra",),
        extra="(Judge(on=learner, models=(policy,)), Filter(learnable))",
        top=JUDGE + "def learnable(model_reward: list[float]) -> bool:\n    return True\n\n\n",
    ),
    stamped("stamps_a_field_that_it_does_not_write", "Field('age', dtype='int32', dims='N T')"),
    stamped("stamps_a_number_a_sample", "Field('truncated', dtype='bool')"),
    Case(
        "weights_now_and_then",
        {"refit": "Seldom(policy, source=learner, target=sampler)"},
        ("refit",),
        top="class Seldom(Refit):\n    every = 2\n\n\n",
    ),
    Case(
        "rollout_per_batch",
        {"rollout": "Whole(policy, on=sampler, samples_per_prompt=2, max_tokens=3)"},
        ("rollout",),
        top="class Whole(Rollout):\n    per = 'batch'\n\n\n",
    ),
    Case("scored_at_once_below_zero", {"prev": "PrevLogprobs(policy, on=learner, at_once=-1)"}),
    Case("scored_at_once_is_a_text", {"prev": "PrevLogprobs(policy, on=learner, at_once='8')"}),
    Case(
        "runs_of_nothing",
        {"prev": "Runs(policy, on=learner)"},
        ("prev",),
        top="class Runs(PrevLogprobs):\n    run_samples = 0\n\n\n",
    ),
]
