"""Invalid reward functions, shipped rewards and reward models that a check finds."""

from tests.errors.harness import Case

IMPORT = """from functools import partial

from ops.rewards import MathVerify, Overlong, boxed, math_verify, model_reward, overlong_penalty, regex_match, tagged
from stages import RewardModel


"""
PROGRAMS = (
    "from ops.rewards import PassesTests\nfrom ops.sandbox import SandboxLimits\n"
    "from ops.sandbox.containers import Containers\n\n\n"
)
JUDGE = "async def judge(response: str) -> float:\n    return 1.0\n\n\n"
JUDGES = 'WorkerGroup("judges", {})'


def reward(name: str, text: str, *, at: tuple[str, ...] = ("reward",), top: str = "", **lines: str) -> Case:
    """Return a case of a Reward with these arguments."""
    return Case(name, {"reward": f"Reward({text})"} | lines, at=at, top=IMPORT + top)


def function(name: str, text: str, at: tuple[str, ...] = (), given: str = "score") -> Case:
    """Return a case of a reward function; the text has `# here` where the error must point."""
    return reward(name, given, at=at, top=text + "\n\n")


def judged(
    name: str, parameters: str, group: str = 'backend="torch"', at: tuple[str, ...] = ("extra",), **lines
) -> Case:
    """Return a case of a reward model."""
    made = {"scorers": JUDGES.format(group), "extra": f"(RewardModel({parameters}),)"}
    return Case(name, made | {"reward": "Reward(exact_match, model_reward)"} | lines, at=at, top=IMPORT)


JUDGE_MODEL = 'Model("judge", config={"model_type": "qwen3"}, alphabet=task.alphabet)'

FUNCTIONS = [
    function("reward_is_an_async_generator", "async def score(response: str):  # here\n    yield 1.0\n"),
    function(
        "reward_is_async_and_batched",
        "from ops.rewards import batched\n\n\n@batched  # here\nasync def score(response: list[str]):\n    return []\n",
    ),
    function("reward_is_named_mean", "def mean(response: str):  # here\n    return 1.0\n", given="mean"),
    function("reward_in_capitals", "def Brevity(response: str):  # here\n    return 1.0\n", given="Brevity"),
    function("reward_by_position_only", "def score(response: str, /):  # here\n    return 1.0\n"),
    function("reward_reads_a_name_in_capitals", "def score(Response: str):  # here\n    return 1.0\n"),
    function("reward_of_defaults_only", "def score(response: str = ''):  # here\n    return 1.0\n"),
    function("reward_reads_an_extra_column", "def score(response: str, level: str):\n    return 1.0\n", at=("reward",)),
    function(
        "reward_of_another_library",
        "def score(prompts, completions):\n    return [1.0] * len(prompts)\n",
        at=("reward",),
    ),
    function(
        "reward_is_a_class",
        "class Score:\n    def __call__(self, response: str):\n        return 1.0\n",
        at=("reward",),
        given="Score",
    ),
    reward("reward_is_called", "exact_match()"),
    reward("rewards_as_a_list", "[exact_match, boxed]"),
    reward("reward_by_name", '"exact_match"'),
    reward("reward_is_a_partial", "partial(exact_match, answer='2')"),
    reward("weights_by_name", "exact_match, boxed, weights={'exact_match': 1.0, 'boxed': 0.1}"),
    reward("one_weight_for_two", "exact_match, boxed, weights=0.5"),
    reward("weight_is_a_text", "exact_match, weights=('1.0',)"),
    reward("reward_on_a_group_by_name", "exact_match, on='scorers'"),
    reward("concurrency_of_0", "judge, concurrency=0", top=JUDGE),
    reward("timeout_of_0", "judge, timeout_s=0", top=JUDGE),
    reward("retries_is_a_fraction", "judge, retries=1.5", top=JUDGE),
    reward("retries_of_no_async_function", "exact_match, retries=2"),
]
SHIPPED = [
    reward("overlong_cache_is_too_large", "exact_match, Overlong(max_tokens=3, cache=4)"),
    reward("overlong_without_a_cache", "exact_match, Overlong(max_tokens=3)"),
    reward("overlong_formula_as_a_reward", "exact_match, overlong_penalty"),
    reward("pattern_is_broken", r"regex_match(r'answer is (\d+')"),
    reward("pattern_without_the_group", r"regex_match(r'answer is \d+', group=1)"),
    reward("pattern_is_not_given", "regex_match"),
    reward("tagged_without_tags", "tagged()"),
    reward("tags_with_brackets", "tagged('<think>', '<answer>')"),
    reward("tag_twice", "tagged('think', 'think')"),
    reward("tagged_is_not_called", "tagged"),
    reward("math_verify_timeout_of_0", "MathVerify(timeout_s=0)"),
    reward("math_verify_on_timeout_is_a_text", "MathVerify(on_timeout='0', on_error='wrong')"),
    reward("math_verify_without_processes", "MathVerify(processes=0)"),
    reward("math_verify_answer_after_nothing", "MathVerify(answer_after=None)"),
    reward("tests_of_no_program", "PassesTests(around='import math', at_once=0)", top=PROGRAMS),
    reward("tests_in_forks_of_a_shell", "PassesTests(command=('sh', 'run.sh'), forks=True)", top=PROGRAMS),
    reward("tests_of_a_command_line", "PassesTests(command='python3 main.py', limits=5)", top=PROGRAMS),
    reward(
        "tests_without_processes_or_seconds",
        "PassesTests(limits=SandboxLimits(seconds=float('nan'), processes=0, memory_bytes=-1), containers='gcc:14')",
        top=PROGRAMS,
    ),
    reward(
        "tests_in_a_container_that_is_an_option",
        "PassesTests(containers=Containers(image='--privileged', client='docker'))",
        top=PROGRAMS,
    ),
    reward("math_verify_is_not_called", "MathVerify"),
    reward("model_reward_without_a_model", "exact_match, model_reward"),
]
MODELS = [
    judged("reward_model_on_the_host", JUDGE_MODEL),
    judged("reward_model_on_python", f"{JUDGE_MODEL}, on=scorers", group="workers=2", at=("scorers",)),
    judged(
        "reward_model_fully_sharded",
        f"{JUDGE_MODEL}, on=scorers",
        'backend="torch", workers=2, fully_sharded=True',
        at=("scorers",),
    ),
    judged("reward_model_is_the_policy", "policy, on=scorers"),
    judged("reward_model_is_missing", 'Model("./judge"), on=scorers'),
    judged("reward_model_microbatch_below_0", f"{JUDGE_MODEL}, on=scorers, microbatch=-1"),
    judged("reward_model_chat_is_a_text", f"{JUDGE_MODEL}, on=scorers, chat='yes'"),
    judged("reward_model_by_name", '"judge", on=scorers'),
]
COLUMNS = [
    function("reward_misspells_a_field", "def score(respnse):\n    return 1.0\n", at=("reward",)),
    function("reward_misspells_a_column", "def score(answers):\n    return 1.0\n", at=("reward",)),
    function("reward_reads_the_ground_truth", "def score(ground_truth):\n    return 1.0\n", at=("reward",)),
]
CASES = [*FUNCTIONS, *SHIPPED, *MODELS, *COLUMNS]
