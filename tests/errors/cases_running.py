"""Errors that occur only during a run: bad rows, rewards, rules, models and stages."""

import json

from tests.errors.harness import SCORE, Case, live_text

RUN = ("--executor", "local", "--run-dir", "run")
IMPORT = """import asyncio

from ops.rewards import SampleError, batched, boxed, gsm8k_match, number_match
from stages import Dynamic, Evaluate, Filter, Packed, RewardModel


"""
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
GROUP = 'WorkerGroup("{0}", backend="torch", threads=1)'
FILE = 'Prompts("train.jsonl", batch=batch)'
ANSWERED = 'Prompts("train.jsonl", batch=batch, extra=("response",), shuffle=False)'
IMAGES = "Prompts(\"train.jsonl\", batch=12, extra=Field('image', dtype='uint8', dims='N B'), shuffle=False)"
FILTERED = 'Graph(name="live", source=source, stages=(reward, *count), schedule=schedule)'


def policy(**config) -> str:
    """Return the text of a policy with a few thousand weights."""
    return f'Model("tiny", config={MODEL | config}, alphabet=task.alphabet)'


SMALL = {
    "policy": policy(),
    "sampler": GROUP.format("sampler"),
    "learner": GROUP.format("learner"),
    "stages": "(rollout, reward, prev, advantage, train, refit, *extra)",
}


def trained(name: str, lines: dict[str, str], at: tuple[str, ...] = (), top: str = "", **more) -> Case:
    """Return a run of a whole graph with a small policy."""
    return Case(name, SMALL | lines, at=at, top=IMPORT + top, args=RUN, code=3, **more)


def live(name: str, top: str = "", train: str = "", code: int = 3, **lines: str) -> Case:
    """Return a run without a model; the error must point at a line that ends in `# here`."""
    files = {"train.jsonl": train, "dog.png": b"\x89PNG"} if train else {}
    return Case(name, text=live_text(IMPORT + top + SCORE, **lines), files=files, args=RUN, code=code)


def rows(count: int, bad: dict[int, dict], **more: str) -> str:
    """Return the text of a file with `count` rows; those in `bad`, by line number, have other values."""
    made = ({"prompt": f"{i}>", "answer": str(i), **more, **bad.get(i, {})} for i in range(1, count + 1))
    return "".join(json.dumps(row) + "\n" for row in made)


def staged(name: str, body: str, code: int) -> Case:
    """Return a run with a user's stage `Length` whose runner has this body."""
    top = f"""@dataclass(frozen=True)
class Length(Stage):
    reads = (Field("prompt", dtype="str"),)
    writes = (Field("length", dtype="float32"),)

    def setup(self, context):
        return lambda columns, task: {body}


@dataclass(frozen=True)
class Longest(Stage):
    reads = (Field("length", dtype="float32"),)

    def setup(self, context):
        return lambda columns, task: None


"""
    stages = "(reward, count, Length(), Longest())"
    return live(name, top, code=code, made=f'Graph(name="live", source=source, stages={stages}, schedule=schedule)')


def ruled(name: str, body: str, parameters: str = "", here: tuple[str, str] = ("  # here", "")) -> Case:
    """Return a run with a Filter of this rule; the error points at the rule, or at the stage."""
    top = f"def learnable(reward: list[float]) -> bool:{here[0]}\n    {body}\n\n\n"
    return live(name, top, count=f"(Filter(learnable{parameters}), Count(Model('counter'))){here[1]}", made=FILTERED)


DATA = [
    live("row_1500_is_wrong", train=rows(1600, {1500: {"answer": None}}), source=FILE),
    live("row_1500_is_no_json", train=rows(1499, {}) + '{"prompt": "1500>\n' + rows(50, {}), source=FILE),
    live("late_image_is_missing", train=rows(12, {10: {"image": "cat.png"}}, image="dog.png"), source=IMAGES),
    live(
        "answer_without_a_number",
        train=rows(4, {3: {"answer": "none"}}, response="3"),
        source=ANSWERED,
        reward="Reward(number_match)",
    ),
    live("answer_without_its_mark", train=rows(4, {}, response="3"), source=ANSWERED, reward="Reward(gsm8k_match)"),
]
REWARDS = [
    live(
        "async_reward_raises",
        "async def judge(prompt: str) -> float:  # here\n    raise ConnectionError('the judge does not answer')\n\n\n",
        reward="Reward(judge, retries=1)",
    ),
    live(
        "async_reward_is_late",
        "async def judge(prompt: str) -> float:  # here\n    await asyncio.sleep(60)\n\n\n",
        reward="Reward(judge, timeout_s=0.05)",
    ),
    live(
        "batched_reward_returns_too_few",
        "@batched  # here\ndef novelty(prompt: list[str]) -> list[float]:\n    return [1.0] * (len(prompt) - 1)\n\n\n",
        reward="Reward(novelty)",
    ),
    live(
        "batched_reward_blames_a_sample",
        "@batched  # here\ndef novelty(prompt: list[str]) -> list[float]:\n    raise SampleError(2, 'none')\n\n\n",
        reward="Reward(novelty)",
    ),
    live(
        "batched_reward_returns_none",
        "@batched  # here\ndef novelty(prompt: list[str]) -> list[float]:\n    [len(text) for text in prompt]\n\n\n",
        reward="Reward(novelty)",
    ),
    live(
        "reward_is_infinite",
        "def surprise(prompt: str) -> float:  # here\n    return float('inf')\n\n\n",
        reward="Reward(surprise)",
    ),
]
FILTERS = [
    ruled("filter_drops_everything", "return reward[0] > 1", ", max_rounds=2", here=("", "  # here")),
    ruled("rule_returns_nothing", "reward[0] > 0"),
    ruled("rule_returns_a_number", "return sum(reward)"),
    ruled("rule_raises", "return reward[1] > 0"),
]
STAGES = [
    staged("stage_returns_another_column", '{"len": [1.0]}', 3),
    staged("stage_returns_nothing", "None", 3),
    staged("stage_returns_a_metric_that_is_a_text", '__import__("pipeline").Output({}, metrics={"size": "many"})', 3),
    staged(
        "stage_returns_times_of_a_part",
        '__import__("pipeline").Output({"length": __import__("torch").ones(len(columns["prompt"]))}, times={0: None})',
        3,
    ),
    staged("stage_counts_open_samples", '__import__("pipeline").Output({}, open={"environment": 4})', 3),
    staged("stage_returns_too_few", '{"length": __import__("torch").ones(1)}', 4),
    staged("stage_returns_another_dtype", '{"length": __import__("torch").ones(len(columns["prompt"])).double()}', 4),
    staged("stage_returns_a_list", '{"length": [float(len(text)) for text in columns["prompt"]]}', 4),
    staged("stage_returns_none_in_a_column", '{"length": None}', 4),
    staged("stage_returns_nan", '{"length": __import__("torch").ones(len(columns["prompt"])) / 0}', 4),
    staged("stage_raises", '{"length": columns["response"]}', 3),
]
MODELS = [
    trained(
        "sample_is_longer_than_the_packed_budget",
        {"prev": "PrevLogprobs(policy, on=learner, microbatch=Packed(tokens=5))"},
        at=("prev",),
    ),
    trained(
        "sample_is_longer_than_the_dynamic_budget",
        {"train": "Train(policy, on=learner, lr=1e-3, minibatches=2, microbatch=Dynamic(tokens=6))"},
        at=("train",),
    ),
    trained(
        "stop_is_several_tokens",
        {"rollout": "Rollout(policy, on=sampler, samples_per_prompt=2, max_tokens=3, stop=('12',))"},
        at=("rollout",),
    ),
    trained("vocabulary_is_too_small", {"policy": policy(vocab_size=4)}, at=("policy",)),
    trained("unknown_model_type", {"policy": policy(model_type="qwen9")}, at=("policy",)),
    trained("unknown_activation", {"policy": policy(hidden_act="nope")}, at=("policy",)),
    trained(
        "reward_model_reads_less",
        {
            "reward": "Reward(exact_match, judged)",
            "extra": f"(RewardModel({policy(max_position_embeddings=5)}.frozen(), on=scorers),)".replace(
                '"tiny"', '"judge"'
            ),
            "scorers": GROUP.format("judges"),
        },
        top="def judged(model_reward: float) -> float:\n    return model_reward\n\n\n",
    ),
    trained(
        "held_out_row_is_wrong",
        {"extra": '(Evaluate(policy, "test.jsonl", on=sampler, max_tokens=8),)'},
        files={"test.jsonl": rows(1200, {1100: {"answer": 7}})},
    ),
    trained(
        "transport_raises",
        {"refit": "Refit(policy, source=learner, target=sampler, transport=Mail())"},
        top="""from ops.refit.transports import Receiver, Sender, Transport


class Mail(Transport):
    name = "mail"
    sender = lambda self: Outbox()
    receiver = lambda self: Inbox()


class Outbox(Sender):
    def offer(self, memory):
        raise ConnectionError("the post office is closed")  # here


class Inbox(Receiver):
    def receive(self, meeting, shares, version):
        return {}


""",
    ),
]
CASES = [*DATA, *REWARDS, *FILTERS, *STAGES, *MODELS]
