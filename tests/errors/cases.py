"""Broken graphs, files and flags that a check finds before anything runs."""

from graphs.quickstart import TINY_QWEN3
from tests.errors.harness import SCORE, Case, live_text

NUMBER = "Field('number', dtype='float32')"
TEXT = "Field('text', dtype='str')"
OTHERWISE = (
    "Field('reward', dtype='float64')",
    "Field('advantage', dtype='float32', dims='N T')",
    "Field('response_ids', dtype='int64', dims='N T', unit='nat')",
)
SCORERS = 'WorkerGroup("scorers", {})'
FILE = 'Prompts("train.jsonl", batch=batch)'
ON_GPUS = {
    "sampler": 'WorkerGroup("sampler", backend="vllm", gpus=1)',
    "learner": 'WorkerGroup("learner", backend="megatron", gpus=1)',
}
ROWS = '{"prompt": "1+1=", "answer": "2"}\n'


def scored(name: str, function: str, reward: str = "Reward(score)", **more) -> Case:
    """Return a case of a reward function; the text has `# here` where the error must point."""
    return Case(name, {"reward": reward}, at=more.pop("at", ()), top=function + "\n\n", **more)


def parameter(name: str, define: str) -> Case:
    """Return a case of a parameter of graph()."""
    return Case(name, define=define + "  # here")


def data(name: str, content: str | bytes | None, source: str = FILE, at: tuple[str, ...] = ()) -> Case:
    """Return a case of a data file."""
    return Case(name, {"source": source}, at=at, files={} if content is None else {"train.jsonl": content})


GRAPHS = [
    Case("read_of_nothing", {"extra": "(Step(reads=(Field('verdict', dtype='float32'),)),)"}),
    Case("read_misspelled", {"extra": "(Step(reads=(Field('advantge', dtype='float32'),)),)"}),
    Case("kl_without_reference", {"train": "Train(policy, on=learner, loss=ClippedLoss(kl=0.1), lr=1e-3)"}),
    Case("two_writers", {"extra": "(Reward(exact_match, name='second'),)"}),
    Case(
        "two_refits",
        {
            "refit": "Refit(policy, source=learner, target=sampler)",
            "extra": "(Refit(policy, source=learner, target=learner),)",
        },
    ),
    Case(
        "two_refits_named",
        {"extra": "(Second(policy, source=learner, target=sampler),)"},
        top="class Second(Refit):\n    name = 'second'\n\n\n",
    ),
    Case("cycle", {"extra": f"(Step('a', ({NUMBER},), ({TEXT},)), Step('b', ({TEXT},), ({NUMBER},)))"}),
    Case("reads_itself", {"extra": f"(Step('echo', ({NUMBER},), ({NUMBER},)),)"}),
    Case("dtype_dims_unit", {"extra": f"(Step(reads=({', '.join(OTHERWISE)})),)"}),
    Case("frozen_model_trained", {"train": "Train(policy.frozen(), on=learner, loss=ClippedLoss(), lr=1e-3)"}),
    Case(
        "model_that_nobody_refits",
        {
            "scorers": 'WorkerGroup("other", backend="torch")',
            "rollout": "Rollout(policy, on=scorers, samples_per_prompt=2)",
            "reward": "Reward(exact_match)",
        },
        at=("rollout",),
    ),
    Case(
        "too_few_gpus",
        {
            "sampler": 'WorkerGroup("sampler", backend="torch", gpus=1)',
            "learner": 'WorkerGroup("learner", backend="torch", gpus=1)',
        },
        at=("made",),
        args=("--check", "--gpus", "1"),
    ),
    Case("gpus_not_divisible", {"scorers": SCORERS.format("workers=2, gpus=3")}),
    Case("workers_do_not_divide_the_batch", {"scorers": SCORERS.format("workers=3")}),
    Case("worker_group_of_no_threads", {"scorers": SCORERS.format("threads=0")}),
    Case("worker_group_numbers", {"scorers": SCORERS.format("workers=0, gpus=-1, cpus=None, threads='2'")}),
    Case("worker_group_name", {"scorers": 'WorkerGroup("my/scorers")'}),
    Case(
        "worker_group_declared_twice",
        {"extra": "(Step(), Reward(exact_match, name='again', on=WorkerGroup('sampler', workers=4)))"},
    ),
    Case(
        "both_ends_of_a_transfer_have_one_name", {"learner": 'WorkerGroup("sampler", backend="torch")'}, at=("refit",)
    ),
    Case("unknown_backend", {"sampler": 'WorkerGroup("sampler", backend="vlm")'}),
    Case("model_on_the_python_backend", {"sampler": 'WorkerGroup("sampler")'}),
    Case("capacity_too_small", {"schedule": "Schedule(steps=steps, capacity=3)"}, at=("made",)),
    Case("staleness_without_correction", {"schedule": "Schedule(steps=steps, max_staleness=2)"}, at=("made",)),
    Case(
        "schedule_numbers",
        {"schedule": "Schedule(steps=0, max_staleness=-1, capacity=2.5, checkpoint_every=None, keep_groups=True)"},
        at=("made",),
    ),
    Case("schedule_is_a_number", {"schedule": "steps"}, at=("made",)),
    Case("two_stages_of_one_name", {"extra": "(Step('more'), Step('more'))"}),
    Case("two_rewards", {"extra": "(Reward(exact_match),)"}),
    Case("two_stages_write_one_field", {"extra": "(Step('more', writes=reward.writes),)"}),
    Case("two_stages_of_one_name_write_one_field", {"extra": "(Step('more', writes=(Field('x', dtype='str'),)),) * 2"}),
    Case("refit_with_a_name", {"refit": "Refit(policy, source=learner, target=sampler, name='r2')"}),
    Case(
        "evaluate_with_a_name",
        {"extra": "(Evaluate(policy, task, on=sampler, name='eval2'),)"},
        top="from stages import Evaluate\n\n\n",
    ),
    Case("stage_named_samples", {"extra": "(Step('samples'),)"}),
    Case("graph_name_is_a_path", {"made": 'Graph(name="runs/small", source=source, stages=stages, schedule=schedule)'}),
    Case(
        "host_is_a_text", {"made": 'Graph(name="small", source=source, stages=stages, schedule=schedule, host="local")'}
    ),
    Case("class_instead_of_a_stage", {"source": "Prompts"}, at=("made",)),
    Case("stages_is_one_stage", {"stages": "rollout"}, at=("made",)),
    Case("stages_is_none", {"stages": "None"}, at=("made",)),
    Case("stage_is_none", {"reward": "None"}, at=("made",)),
    Case("worker_group_by_name", {"prev": 'PrevLogprobs(policy, on="learner")'}),
    Case("model_by_name", {"prev": 'PrevLogprobs("tiny", on=learner)', "train": 'Train("tiny", on=learner, lr=1e-3)'}),
    Case("field_by_name", {"extra": "(Step(reads='reward'), Step('other', writes=('verdict',)))"}),
    Case("batch_of_nothing", {"source": "Prompts(task, batch=0)"}),
    Case("batch_is_a_text", {"source": 'Prompts(task, batch="x")'}),
    Case("source_reads", {"source": f"Step('source', ({NUMBER},), ({NUMBER},))"}),
    Case("two_stages_make_samples", {"extra": "(Step(group_size=4),)"}),
    Case("too_many_samples", {"rollout": "Rollout(policy, on=sampler, samples_per_prompt=1000)"}),
    Case("unknown_unit", {"extra": "(Step(per='epoch', every=0),)"}),
    Case("writes_now_and_then", {"extra": f"(Step(writes=({NUMBER},), every=2), Step('reader', reads=({NUMBER},)))"}),
    Case("refit_to_itself", {"refit": "Refit(policy, source=learner, target=learner)"}),
    Case("wrong_type_of_a_parameter", {"rollout": 'Rollout(policy, on=sampler, temperature="hot")'}),
    Case("unknown_advantage", {"advantage": 'Advantage("gae", eps=0)'}),
    Case("temperature_of_0", {"rollout": "Rollout(policy, on=sampler, samples_per_prompt=2, temperature=0)"}),
    Case("top_p_of_2", {"rollout": "Rollout(policy, on=sampler, samples_per_prompt=2, top_p=2)"}),
    Case(
        "longer_than_the_model",
        {
            "rollout": "Rollout(policy, on=sampler, samples_per_prompt=2, max_tokens=64)",
            "policy": f"Model('tiny', config={TINY_QWEN3 | {'max_position_embeddings': 64}!r}, alphabet=task.alphabet)",
            "extra": "(Evaluate(policy, task, on=sampler),)",
        },
        at=("rollout", "extra"),
        top="from stages import Evaluate\n\n\n",
    ),
    Case("learning_rate_below_0", {"train": "Train(policy, on=learner, loss=ClippedLoss(), lr=-1e-3)"}),
    Case(
        "minibatches_that_do_not_divide",
        {"train": "Train(policy, on=learner, loss=ClippedLoss(), lr=1e-3, minibatches=3)"},
    ),
    Case("model_folder_is_missing", {"policy": 'Model("./checkpoints/last")'}),
    Case("model_without_an_alphabet", {"policy": 'Model("tiny", config={})'}),
    Case("unknown_task", {"task": 'Generated("revers")'}),
    Case("field_of_no_dtype", {"extra": "(Step(writes=(Field('number', dtype='float'),)),)"}),
    Case(
        "several_at_once",
        {
            "scorers": SCORERS.format("workers=3"),
            "source": FILE,
            "advantage": 'Advantage("gae")',
            "train": "Train(policy, on=learner, loss=ClippedLoss(), lr=-1, minibatches=3)",
            "extra": "(Step(reads=(Field('advantge', dtype='float32'),)),)",
        },
    ),
]

FILES = [
    Case("no_graph_named", graph=None, args=()),
    Case("no_such_file", graph="grpah.py"),
    Case("graph_is_a_folder", graph="data", files={"data/other.py": ""}),
    Case("graph_in_utf16", text=None, files={"graph.py": "def graph(): ...".encode("utf-16")}),
    Case("graph_is_a_text_file", graph="notes.txt", files={"notes.txt": "steps: 3\n"}),
    Case("no_graph_function", text="steps = 3\n"),
    Case("graph_is_no_function", text="graph = 3\n"),
    Case("syntax_error", text='"""A graph."""\ndef graph(:  # here\n    pass\n'),
    Case("import_error", text="import torchvision_of_mine  # here\n"),
    Case("own_module_is_misspelt", text="import losess  # here\n", files={"losses.py": ""}),
    Case("own_module_by_a_dot", text="from .losses import mine  # here\n", files={"losses.py": "mine = 1\n"}),
    Case(
        "own_module_imports_a_hidden_one",
        {},
        text="import near\n",
        files={"near.py": "from stages.mine import Shout\n", "stages/mine.py": "Shout = 1\n"},
    ),
    Case("top_level_raises", text="SIZES = {}\nSIZE = SIZES['small']  # here\n"),
    Case("top_level_exits", text="import sys\nsys.exit(0)  # here\n"),
    Case("graph_raises", text="def graph(steps: int = 1):\n    return 1 / 0  # here\n"),
    Case("graph_returns_none", text="def graph(steps: int = 1):  # here\n    steps += 1\n"),
    parameter("no_default_and_a_quoted_type", "def graph(steps: 'int', batch: int = 4) -> Graph:"),
    parameter("star_arguments", "def graph(*sizes, **more) -> Graph:"),
    parameter("graph_is_async", "async def graph(steps: int = 2, batch: int = 4) -> Graph:"),
    parameter("positional_only", "def graph(steps: int = 2, /, batch: int = 4) -> Graph:"),
    parameter("no_default", "def graph(steps: int, batch=4) -> Graph:"),
    parameter(
        "unsupported_types",
        "def graph(sizes: list[int] = [], mode: Literal[1, 'a'] = 1, either: int | str = 1) -> Graph:",
    ),
    parameter("no_type", "def graph(steps=2, batch=4, limit=None) -> Graph:"),
    parameter(
        "default_of_another_type",
        "def graph(steps: int = '2', batch: int = 4, size: Literal['s', 'l'] = 'm') -> Graph:",
    ),
    parameter("unknown_type", "def graph(steps: 'Stepz' = 2, batch: int = 4) -> Graph:"),
    parameter("parameter_named_as_a_flag", "def graph(steps: int = 2, batch: int = 4, gpus: int = 0) -> Graph:"),
]

FLAGGED = (
    "def graph(steps: int = 2, batch: int = 4, lr: float = 0.1, fast: bool = False, size: Literal['s', 'l'] = 's'):"
)
FLAGS = [
    Case("whole_number_expected", define=FLAGGED, args=("--steps", "2.5")),
    Case("whole_number_of_many_digits", define=FLAGGED, args=("--steps", f"{10**26}")),
    Case("number_expected", define=FLAGGED, args=("--lr", "small")),
    Case("bool_expected", define=FLAGGED, args=("--fast", "maybe")),
    Case(
        "fixes_of_flags_that_are_given",
        {
            "train": "Train(policy, on=learner, lr=lr, minibatches=minibatches, schedule=decay, warmup=warmup)",
        },
        define="def graph(steps: int = 2, batch: int = 4, lr=1.0, minibatches=2, schedule='cosine', warmup=-1):"
        "\n    decay = schedule",
        args=("--check", "--lr=-1", "--minibatches", "3", "--schedule", "step"),
    ),
    Case(
        "fix_of_a_warning_is_a_flag_that_is_given",
        {"made": 'Graph(name="small", source=source, stages=stages, schedule=Schedule(steps=2, capacity_bytes=room))'},
        define="def graph(batch: int = 4, capacity_bytes: int = 0) -> Graph:\n    room, steps = capacity_bytes, 2",
        args=("--check", "--capacity-bytes", "100"),
        code=0,
    ),
    Case("choice_expected", define=FLAGGED, args=("--size", "m")),
    Case("gpus_below_0", define=FLAGGED, args=("--check", "--gpus", "-1")),
    Case("gpus_that_were_not_measured", args=("--plan", "--on", "a100:8")),
    Case("gpus_on_which_no_model_is_known", ON_GPUS, at=("policy",), args=("--plan", "--on", "h200:2")),
    Case("an_assumption_about_no_gpus", args=("--plan", "--assume", "mean=400")),
    Case("assumptions_that_are_none", args=("--plan", "--on", "h200", "--assume", "mean=0", "--assume", "rows=3")),
    Case(
        "flags_of_a_run_and_its_graph",
        {"train": "Train(policy, on=learner, lr=-1)"},
        args=(
            *("--check", "--run-dir", "graph.py", "--mirror", "nowhere://runs"),
            *(word for flag in ("--tensorboard", "--wandb", "--mlflow") for word in (flag, "https://me:secret@here")),
        ),
    ),
    Case("run_dir_that_no_check_can_make", args=("--check", "--run-dir", "/proc/run")),
    Case("run_dir_that_no_plan_can_make", args=("--plan", "--run-dir", "graph.py/run")),
    Case("unknown_flag", define=FLAGGED, args=("--stepz", "3")),
    Case("unknown_flag_like_no_other", define=FLAGGED, args=("--quantize=4",)),
    Case("value_is_missing", define=FLAGGED, args=("--steps",)),
    Case("value_is_empty", args=("--check", "--run-dir", "")),
    Case("flag_in_capitals", args=("--STEPS", "3")),
    Case("flag_of_one_letter", define=FLAGGED, args=("-s", "3")),
    Case("flag_with_a_dash_of_an_editor", args=("\u2014steps", "3")),
    Case("flags_after_two_hyphens", args=("--check", "--", "--steps", "3")),
    Case("two_modes", args=("--check", "--plan")),
    Case("unknown_executor", args=("--executor", "slurm")),
    Case("run_deadline_of_0", args=("--check", "--deadline-s", "0")),
    Case("restarts_below_0", args=("--check", "--restarts", "-2")),
    Case("flag_makes_it_wrong", args=("--check", "--steps", "0"), at=("made",)),
]

DATA = [
    data("data_file_is_missing", None, at=("source",)),
    Case("data_file_misspelled", {"source": FILE}, files={"trian.jsonl": ROWS}),
    data("data_file_is_a_folder", None, 'Prompts(".", batch=batch)', at=("source",)),
    data("data_file_is_empty", "\n\n"),
    data("data_is_not_json", ROWS + "{'prompt': 1}\n"),
    data("data_line_is_a_list", '["1+1=", "2"]\n'),
    data("data_column_is_missing", '{"promt": "1+1=", "answer": "2"}\n'),
    data("data_column_is_a_number", '{"prompt": "1+1=", "answer": 2}\n'),
    data("data_prompt_is_empty", '{"prompt": "", "answer": "2"}\n'),
    data("data_prompt_has_half_a_pair", '{"prompt": "\\ud83d", "answer": "2"}\n'),
    data("data_is_not_utf8", b'{"prompt": "\xff", "answer": "2"}\n'),
    data("data_of_many_bad_lines", '{"question": "1+1="}\n' * 5),
    data("source_is_a_number", None, "Prompts(3, batch=batch)", at=("source",)),
]

REWARDS = [
    scored("reward_is_a_lambda", "", "Reward(lambda response: 1.0)", at=("reward",)),
    scored("reward_is_a_number", "", "Reward(3)", at=("reward",)),
    scored("reward_without_a_function", "", "Reward()", at=("reward",)),
    scored("reward_takes_anything", "def score(*fields, **more):  # here\n    return 1.0\n"),
    scored("reward_reads_nothing", "def score():  # here\n    return 1.0\n"),
    scored("reward_reads_a_field_of_no_stage", "def score(respnse: str):\n    return 1.0\n", at=("reward",)),
    scored("reward_reads_weights", "def score(response: str, trained_weights: int):  # here\n    return 1.0\n"),
    scored("rewards_of_one_name", "", "Reward(exact_match, exact_match)", at=("reward",)),
    scored("reward_weights", "", "Reward(exact_match, weights=(1.0, float('nan')))", at=("reward",)),
]


def returning(name: str, value: str) -> Case:
    """Return a case of a reward that returns something other than a number during the run."""
    body = f"def score(prompt: str, answer: str):  # here\n    return {value}\n\n\n"
    return Case(name, text=live_text(body), args=("--executor", "local", "--run-dir", "run"), code=3)


RUNNING = [
    returning("reward_returns_none", "None"),
    returning("reward_returns_nan", "float('nan')"),
    returning("reward_returns_a_text", "answer"),
    returning("reward_raises", "1.0 / (int(prompt[1]) - int(prompt[1]))"),
    Case(
        "graph_leaves_its_folder",
        text=live_text(
            "import os\n\nos.chdir('/')\n\n\ndef score(prompt: str):  # here\n    return {}['x']\n\n\n",
        ),
        args=("--executor", "local", "--run-dir", "my run"),
        code=3,
    ),
    Case(
        "reward_in_sum_is_too_large",
        text=live_text(SCORE, reward="Reward(score, weights=1e39)  # here"),
        args=("--executor", "local", "--run-dir", "run"),
        code=3,
    ),
]

CHECKED = [*GRAPHS, *FILES, *FLAGS, *DATA, *REWARDS]
