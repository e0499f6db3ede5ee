"""The reward model stage: scores equal those of transformers for any microbatch size; other models are refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ops.rewards import exact_match, model_reward
from pipeline import Graph, Model, Schedule, StageContext, StageError, Task, WorkerGroup, run
from stages.backends import BACKENDS, Backend, engine
from stages.backends.model.build import byte_tokenizer, save
from stages.backends.torch.reward_model import open_reward_model
from stages.prompts import Prompts
from stages.reward import Reward
from stages.reward_model import RewardModel
from stages.tasks import Generated
from stages.train import Train
from tests.unit.tiny import QWEN3

torch.set_num_threads(1)
CPU = torch.device("cpu")
CONFIG = QWEN3 | {"initializer_range": 0.1}
JUDGE = Model("judge", config=CONFIG, alphabet="bytes")
ENCODER_CONFIG = {key: CONFIG[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")}
ENCODER_CONFIG |= {
    "model_type": "bert",
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
ENCODER = Model("encoder", config=ENCODER_CONFIG, alphabet="bytes")  # attends to later tokens, so to padding as well
GROUP = WorkerGroup("judge", backend="torch", threads=1)
PROMPTS = ["1+1=", "1+1=", "name a river > ", "é?"]
RESPONSES = ["2", "", "the Rhine, which is long", "ß" * 9]


def opened(model=JUDGE):
    return open_reward_model(model, dtype=torch.float32, device=CPU)


def scores(judge, microbatch=0, chat=False):
    return judge.scores(PROMPTS, RESPONSES, chat=chat, microbatch=microbatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A reward model saved by transformers whose tokenizer appends <eos> and has a chat template."""
    judge, path = opened(), tmp_path_factory.mktemp("judge")
    closed = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", judge.tokenizer.eos_token_id)])
    judge.tokenizer.backend_tokenizer.post_processor = closed
    judge.tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    save(judge.network, judge.tokenizer, path)
    return path


@pytest.mark.parametrize("chat", [False, True])
def test_the_score_is_that_of_transformers(folder, chat):
    tokenizer, network = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForSequenceClassification.from_pretrained(folder),
    )
    expected = []
    for prompt, response in zip(PROMPTS, RESPONSES):
        text = f"<user>{prompt}<assistant>{response}" if chat else prompt + response
        with torch.no_grad():
            inputs = tokenizer(text, add_special_tokens=not chat, return_tensors="pt")
            expected.append(network(**inputs).logits.item())
    made = scores(opened(Model(str(folder))), chat=chat)
    assert made.dtype == torch.float32
    torch.testing.assert_close(made, torch.tensor(expected), atol=1e-6, rtol=0)
    assert made.std() > 0.01


@pytest.mark.parametrize("model", [JUDGE, ENCODER], ids=["decoder", "encoder"])
@pytest.mark.parametrize("microbatch", [2, 3, 0])
def test_the_score_does_not_depend_on_the_microbatch(microbatch, model):
    judge = opened(model)
    assert scores(judge, 1).std() > 0.001
    torch.testing.assert_close(scores(judge, microbatch), scores(judge, 1), atol=1e-6, rtol=0)


def test_a_model_without_a_padding_token_scores_one_by_one():
    judge = opened()
    expected = scores(judge)
    judge.network.config.pad_token_id = None
    torch.testing.assert_close(scores(judge), expected, atol=1e-6, rtol=0)


def test_it_is_built_from_its_seed_alone():
    torch.manual_seed(1)
    first = scores(opened())
    torch.manual_seed(2)
    assert torch.equal(scores(opened()), first)
    assert not torch.equal(scores(opened(replace(JUDGE, seed=1))), first)


def test_the_stage_writes_a_field_that_a_reward_reads():
    context = StageContext(group=GROUP, rank=0, seed=0, group_size=2, run_dir=None, shared={})
    stage, task = RewardModel(JUDGE, on=GROUP, microbatch=2), Task(stage="reward_model", step=0, groups=(0, 1))
    out = stage.setup(context)({"prompt": PROMPTS, "response": RESPONSES}, task)
    assert list(out.columns) == ["model_reward"]
    torch.testing.assert_close(out.columns["model_reward"], scores(opened()), atol=1e-6, rtol=0)
    assert out.metrics["mean"] == pytest.approx(out.columns["model_reward"].mean().item())
    columns = {"response": RESPONSES, "answer": ["2"] * 4} | out.columns
    summed = Reward(exact_match, model_reward, weights=(1, 0.5)).setup(context)(columns, task)
    expected = torch.tensor([1.0, 0, 0, 0]) + 0.5 * out.columns["model_reward"]
    torch.testing.assert_close(summed.columns["reward"], expected)


GRAPH = """
from ops.rewards import digit_match, model_reward
from pipeline import Graph, Model, Schedule, WorkerGroup
from stages import *

CONFIG = {config!r}

async def later(response: str) -> float:
    return 0.25

def graph() -> Graph:
    task = Generated("reverse", digits=2, held_out=10)
    policy = Model("policy", config=CONFIG, alphabet=task.alphabet)
    judge = Model("judge", config=CONFIG, alphabet="bytes")
    sampler = WorkerGroup("sampler", backend="torch", threads=1)
    learner = WorkerGroup("learner", backend="torch", threads=1)
    scorer = WorkerGroup("judge", backend="torch", workers=2, threads=1)
    return Graph(
        name="judged",
        source=Prompts(task, batch=4),
        stages=(
            Rollout(policy, on=sampler, samples_per_prompt=2, max_tokens=3),
            RewardModel(judge, on=scorer, microbatch=3),
            Reward(digit_match, model_reward, later, weights=(1, 0.5, 1)),
            PrevLogprobs(policy, on=learner),
            Advantage("group_relative"),
            Train(policy, on=learner, loss=ClippedLoss(), lr=1e-3),
            Refit(policy, source=learner, target=sampler),
        ),
        schedule=Schedule(steps=1),
    )
"""


def test_a_graph_with_a_reward_model_runs(tmp_path, capsys):
    (tmp_path / "graph.py").write_text(GRAPH.format(config=CONFIG))
    argv = [str(tmp_path / "graph.py"), "--executor", "local", "--run-dir", str(tmp_path / "run")]
    assert run.main(argv) == 0, capsys.readouterr().err
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["reward/model_reward"] == pytest.approx(line["reward_model/mean"])
    expected = line["reward/digit_match"] + 0.5 * line["reward/model_reward"] + 0.25
    assert line["reward/mean"] == pytest.approx(expected)
    assert line["reward/model_reward"] != 0


def test_two_stages_share_one_model_of_a_worker():
    context = StageContext(group=GROUP, rank=0, seed=0, group_size=2, run_dir=None, shared={})
    for stage in (RewardModel(JUDGE, on=GROUP), RewardModel(JUDGE.frozen(), on=GROUP, name="second")):
        stage.setup(context)
    assert len(engine(context)._reward_models) == 1


def test_a_text_that_is_too_long_or_empty_is_named():
    judge = opened()
    text = (
        r"sample 1 of the task, '1\+1=x*': prompt and response have 65 tokens for the reward model 'judge'; .* 1 to 64 "
    )
    with pytest.raises(StageError, match=text):
        judge.scores(["1+1="] * 2, ["2", "x" * 61], chat=False, microbatch=0)
    with pytest.raises(StageError, match="have 0 tokens"):
        judge.scores([""], [""], chat=False, microbatch=0)


def test_a_chat_template_is_needed_before_the_first_step():
    context = StageContext(group=GROUP, rank=0, seed=0, group_size=2, run_dir=None, shared={})
    with pytest.raises(StageError, match="the tokenizer of 'judge' has no chat template; chat=True uses it"):
        RewardModel(JUDGE, on=GROUP, chat=True).setup(context)


def test_what_is_no_reward_model_is_refused(tmp_path, folder):
    from stages.backends.model.build import build

    policy = Model("policy", config=CONFIG, alphabet="bytes")
    save(build(policy, byte_tokenizer()), byte_tokenizer(), tmp_path / "policy")
    with pytest.raises(StageError, match=r"has no weights score.weight; a head that was not loaded scores at random"):
        opened(Model(str(tmp_path / "policy")))
    two = build(policy, byte_tokenizer(), AutoModelForSequenceClassification, num_labels=2)
    save(two, byte_tokenizer(), tmp_path / "two")
    with pytest.raises(StageError, match="has 2 labels; the reward is one number per sample"):
        opened(Model(str(tmp_path / "two")))
    (tmp_path / "config.json").write_text("{}")
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(StageError, match=r"cannot be loaded: .* Hugging Face sequence classification model"):
        opened(Model(str(tmp_path)))


def test_the_byte_tokenizer_says_every_text():
    tokenizer = byte_tokenizer()
    text = "Janet\u2019s 16 \u00a3\u4e2d\n\t \U0001f600\x00<eos"
    ids = tokenizer(text).input_ids
    assert ids == [ids_of_byte(tokenizer, byte) for byte in text.encode()]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(tokenizer) == 258
    assert tokenizer.decode([*ids[5:6], tokenizer.eos_token_id], skip_special_tokens=True) == "\ufffd"


def ids_of_byte(tokenizer, byte):
    """Return the id of the token of one byte, the last token of every text that ends with this byte."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return tokenizer.convert_tokens_to_ids(bytes_to_unicode()[byte])


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        (RewardModel(JUDGE), "stage 'reward_model' computes with a model and names no worker group"),
        (
            RewardModel(JUDGE, on=WorkerGroup("judge", backend="python")),
            "worker group 'judge' has the backend 'python' and a stage that needs a model",
        ),
        (
            RewardModel(JUDGE, on=WorkerGroup("judge", backend="another")),
            "worker group 'judge' has the backend 'another' and a RewardModel; reward models run on torch. "
            "Fix: backend='torch'",
        ),
        (
            RewardModel(JUDGE, on=WorkerGroup("judge", backend="torch", workers=2, fully_sharded=True)),
            "worker group 'judge' shards its models across workers and has a RewardModel",
        ),
        (
            RewardModel(replace(JUDGE, warm_start=object()), on=GROUP),
            "the reward model 'judge' has a warm start; a warm start trains a language model",
        ),
        (
            RewardModel(JUDGE, on=GROUP, microbatch=-1),
            "stage 'reward_model' has microbatch=-1; microbatch is the number of samples per pass, or 0 for all.",
        ),
        (RewardModel(JUDGE, on=GROUP, chat="yes"), "stage 'reward_model' has chat='yes'"),
        (RewardModel(Model("./nowhere"), on=GROUP), "the folder './nowhere' does not exist"),
        (
            RewardModel(Model("policy"), on=GROUP),
            "stage 'reward_model' scores with 'policy', which is trained as the policy",
        ),
    ],
)
def test_problems(stage, text, monkeypatch):
    monkeypatch.setitem(BACKENDS, "another", Backend(name="another", opener=lambda context: None, can=("reward",)))
    train = Train(Model("policy"), on=WorkerGroup("learner", backend="torch"), lr=1e-6)
    graph = Graph(name="g", source=Prompts(Generated()), stages=(stage, train), schedule=Schedule(steps=1))
    found = [str(problem) for problem in stage.check(graph)]
    assert any(text in problem for problem in found), found
    assert all(Path(problem.partition(":")[0]).name in ("test_reward_model.py", "graph") for problem in found)


def test_a_right_stage_has_no_problem():
    stage = RewardModel(JUDGE, on=GROUP, microbatch=4)
    graph = Graph(name="g", source=Prompts(Generated()), stages=(stage,), schedule=Schedule(steps=1))
    assert list(stage.check(graph)) == []
