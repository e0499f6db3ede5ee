"""Building, loading, saving and hashing models."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline import Model, StageError, WorkerGroup
from pipeline.declare.task import StageContext
from stages import Generated, Supervised
from stages.backends import Optimization, Sampling, backend_problems, engine, model_problems, one_shard
from stages.backends.model.build import load_network, load_tokenizer, save
from stages.backends.model.weights import load_weights, weights
from stages.backends.torch.engine import TorchEngine
from tests.shares import weight_hash

torch.set_num_threads(1)
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "embedding_std": 0.5,
    "tie_word_embeddings": False,
}
POLICY = Model("tiny", config=CONFIG, alphabet="0123456789> \n.")
CPU = torch.device("cpu")


def built(model: Model = POLICY, dtype: torch.dtype = torch.float32) -> Any:
    return load_network(model, load_tokenizer(model), dtype=dtype, device=CPU)


def opened() -> Any:
    group = WorkerGroup("learner", backend="torch", threads=1)
    return engine(StageContext(group=group, rank=0, seed=0, group_size=1, run_dir=None, shared={}))


def test_the_seed_decides_the_weights() -> None:
    first = weight_hash(weights(built()))
    torch.rand(3)
    assert weight_hash(weights(built())) == first
    assert weight_hash(weights(built(Model("tiny", config=CONFIG, alphabet=POLICY.alphabet, seed=1)))) != first


def test_building_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    built()
    assert torch.equal(torch.rand(1), expected)


def test_the_config_is_followed() -> None:
    network = built()
    assert network.config._attn_implementation == "sdpa"
    assert network.get_input_embeddings().weight.shape == (16, 32)
    assert network.get_input_embeddings().weight.std().item() == pytest.approx(0.5, rel=0.1)
    assert network.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert (network.config.pad_token_id, network.config.eos_token_id) == (0, 1)


def test_one_token_a_character_both_ways() -> None:
    tokenizer = load_tokenizer(POLICY)
    text = "12 > 3\n.."
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text)
    assert tokenizer.decode([*ids, 1, 0], skip_special_tokens=True) == text


def test_a_folder_loads_back_with_the_auto_classes(tmp_path: Path) -> None:
    network, tokenizer = built(), load_tokenizer(POLICY)
    save(network, tokenizer, tmp_path)
    assert weight_hash(weights(AutoModelForCausalLM.from_pretrained(tmp_path))) == weight_hash(weights(network))
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again("12> .").input_ids == tokenizer("12> .").input_ids
    assert (again.pad_token_id, again.eos_token_id) == (0, 1)


def test_a_folder_is_a_model_source_and_behaves_alike(tmp_path: Path) -> None:
    save(built(), load_tokenizer(POLICY), tmp_path)
    backend, folder = opened(), Model(str(tmp_path))
    assert weight_hash(backend.trained_weights(folder)) == weight_hash(backend.trained_weights(POLICY))
    texts = ["12>", "9>"]
    made = [
        backend.generate(model, backend.encode(model, texts), Sampling(5, greedy=True), None).response_ids.values
        for model in (POLICY, folder)
    ]
    assert torch.equal(*made)


def test_the_copies_start_equal_and_only_the_trained_one_may_change() -> None:
    task = Generated("reverse", digits=2, held_out=10)
    model = Model("warm", config=CONFIG, alphabet=task.alphabet, warm_start=Supervised(task, steps=3, batch=8))
    backend: TorchEngine = opened()
    networks = [backend.network(model, "trained"), backend.network(model, "served")]
    networks += [backend.network(model.frozen(), "frozen")]
    hashes = [weight_hash(weights(network)) for network in networks]
    assert len(set(hashes)) == 1
    assert hashes[0] != weight_hash(weights(built(Model("cold", config=CONFIG, alphabet=task.alphabet))))
    assert [any(p.requires_grad for p in network.parameters()) for network in networks] == [True, False, False]
    with torch.no_grad():
        networks[0].lm_head.weight.add_(1.0)
    assert [weight_hash(weights(network)) == hashes[0] for network in networks] == [False, True, True]
    late = opened()
    trained = late.network(model, "trained")
    with torch.no_grad():
        trained.lm_head.weight.add_(1.0)
    assert weight_hash(late.served_weights(model)) == hashes[0]


def test_warm_start_learns() -> None:
    task = Generated("reverse", digits=2, held_out=10)

    def loss(steps: int) -> float:
        model = Model("m", config=CONFIG, alphabet=task.alphabet, warm_start=Supervised(task, steps=steps, lr=2e-2))
        backend = opened()
        pairs = task.held_out_pairs(10)
        prompts, answers = (backend.encode(model, list(texts)) for texts in zip(*pairs))
        scores = backend.score(model, prompts, answers, one_shard(prompts, answers), temperature=1.0)
        return -scores.values.mean().item()

    assert loss(40) < loss(1) - 0.5


def test_a_warm_start_ends_once_enough_answers_are_right() -> None:
    task = Generated("reverse", digits=2, held_out=10)
    made = []
    for until in (0.0, 0.3, None):
        warm = Supervised(task, steps=80, until=until, lr=2e-2)
        backend = opened()
        policy = Model("m", config=CONFIG, alphabet=task.alphabet, warm_start=warm)
        pairs = [task.train(index) for index in range(90)]
        prompts = backend.encode(policy, [prompt for prompt, _ in pairs])
        answers = backend.generate(policy, prompts, Sampling(3, greedy=True), None)
        texts = backend.decode(policy, answers.response_ids)
        made.append(sum(text == answer for text, (_, answer) in zip(texts, pairs)) / 90)
    assert made[0] < 0.1
    assert 0.2 < made[1] < 0.9 < made[2]


def test_the_hash_changes_with_every_part_of_the_weights() -> None:
    first = {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(2, 3)}
    same = weight_hash(first)
    assert weight_hash({"b": torch.zeros(2, 3), "a": torch.tensor([1.0, 2.0])}) == same
    one_bit = torch.tensor([1.0, 2.0])
    one_bit.view(torch.int32)[1] ^= 1
    for other in (
        {"a": one_bit, "b": first["b"]},
        {"a": first["a"], "b": torch.zeros(3, 2)},
        {"a": first["a"], "c": first["b"]},
        {"a": first["a"].view(torch.int32), "b": first["b"]},
        {"a": first["a"]},
    ):
        assert weight_hash(other) != same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_load_back_exactly(dtype: torch.dtype) -> None:
    source, target = built(dtype=dtype), built(Model("t", config=CONFIG, alphabet=POLICY.alphabet, seed=5), dtype)
    sent = weights(source)
    assert weight_hash(weights(target)) != weight_hash(sent)
    load_weights(target, sent)
    assert weight_hash(weights(target)) == weight_hash(sent)


def test_weights_are_a_snapshot_and_stay_off_the_sender() -> None:
    network = built()
    sent = weights(network)
    before = weight_hash(sent)
    with torch.no_grad():
        network.lm_head.weight.zero_()
    assert weight_hash(sent) == before


def test_tied_tensors_travel_once_and_stay_tied() -> None:
    model = Model("tied", config={**CONFIG, "tie_word_embeddings": True}, alphabet=POLICY.alphabet)
    source, target = built(model), built(Model("u", config=model.config, alphabet=POLICY.alphabet, seed=5))
    sent = weights(source)
    assert "lm_head.weight" not in sent
    load_weights(target, sent)
    assert torch.equal(target.lm_head.weight, source.lm_head.weight)
    assert target.lm_head.weight.data_ptr() == target.get_input_embeddings().weight.data_ptr()


@pytest.mark.parametrize("change", ["shape", "dtype", "missing", "extra"])
def test_other_weights_are_refused_and_nothing_is_loaded(change: str) -> None:
    network = built()
    sent = {name: tensor + 1 for name, tensor in weights(network).items()}
    match change:
        case "shape":
            sent["model.norm.weight"] = torch.ones(33)
        case "dtype":
            sent["model.norm.weight"] = torch.ones(32, dtype=torch.bfloat16)
        case "missing":
            del sent["model.norm.weight"]
        case "extra":
            sent["model.norm.bias"] = torch.ones(32)
    before = weight_hash(weights(network))
    with pytest.raises(StageError, match=r"weight 'model.norm.(weight|bias)': this model has .* and received .*"):
        load_weights(network, sent)
    assert weight_hash(weights(network)) == before


def test_a_character_that_the_alphabet_lacks_is_named() -> None:
    with pytest.raises(StageError) as caught:
        opened().encode(POLICY, ["12>", "1x2?"])
    assert str(caught.value) == (
        "prompt '1x2?': it has the characters '?', 'x'; the model's alphabet is '0123456789> \\n.'. "
        "Fix: a larger alphabet, or another prompt"
    )


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(StageError, match="it has no token; a response needs a prompt"):
        opened().encode(POLICY, [""])


def test_a_folder_without_a_model_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StageError, match=r"cannot be loaded: .* it must be a folder or hub name"):
        load_tokenizer(Model(str(tmp_path)))
    with pytest.raises(StageError, match=r"cannot be loaded: .* it must be a folder or hub name"):
        load_network(Model(str(tmp_path)), load_tokenizer(POLICY), dtype=torch.float32, device=CPU)


def test_a_vocabulary_that_is_too_small_is_refused() -> None:
    with pytest.raises(StageError, match="vocab_size is 4 and the alphabet needs 16 tokens"):
        built(Model("small", config={**CONFIG, "vocab_size": 4}, alphabet=POLICY.alphabet))


def test_one_optimizer_a_model() -> None:
    backend = opened()
    backend.learner(POLICY, Optimization(lr=1e-3))
    with pytest.raises(StageError, match="two stages train the model 'tiny'"):
        backend.learner(POLICY, Optimization(lr=1e-3))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_group_with_gpus_needs_cuda() -> None:
    group = WorkerGroup("learner", backend="torch", gpus=1)
    with pytest.raises(StageError, match="needs 1 GPU and torch sees none"):
        engine(StageContext(group=group, rank=0, seed=0, group_size=1, run_dir=None, shared={}))


@pytest.mark.parametrize(
    ("group", "text"),
    [
        (
            WorkerGroup("sampler", backend="tensorflow"),
            "worker group 'sampler' has the backend 'tensorflow'; no backend has that name. "
            "Fix: one of 'python', 'torch', 'vllm', 'megatron', or a Backend of your own",
        ),
        (
            WorkerGroup("sampler", backend="python"),
            "worker group 'sampler' has the backend 'python' and a stage that needs a model; 'python' runs plain "
            "functions only. Fix: backend='torch' or 'vllm' or 'megatron'",
        ),
        (
            WorkerGroup("sampler", backend="torch", gpus=4, workers=2),
            "worker group 'sampler' has 4 GPUs for 2 workers; a worker of the backend 'torch' computes on one GPU. "
            "Fix: gpus=2",
        ),
    ],
)
def test_problems_of_a_worker_group(group: WorkerGroup, text: str) -> None:
    (problem,) = backend_problems(group)
    assert str(problem) == f"{group.location}: {text}"
    assert Path(problem.where.rpartition(":")[0]).name == "test_torch_models.py"


def test_a_missing_package_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "transformers" else find(name))
    group = WorkerGroup("sampler", backend="torch")
    (problem,) = backend_problems(group)
    assert str(problem) == (
        f"{group.location}: worker group 'sampler' has the backend 'torch', which needs the package 'transformers'; "
        "it is not installed. Fix: pip install torch transformers"
    )


def test_problems_of_a_model(tmp_path: Path) -> None:
    def texts(model: Model) -> list[str]:
        return [str(problem).removeprefix(f"{model.location}: ") for problem in model_problems(model)]

    assert texts(POLICY) == texts(Model("Qwen/Qwen3-0.6B")) == []
    assert texts(Model("./nowhere")) == [
        "the folder './nowhere' does not exist; a model is a folder or a hub name. Fix: correct the path"
    ]
    assert texts(Model(str(tmp_path)))[0].startswith(f"the folder {str(tmp_path)!r} has no config.json;")
    assert texts(Model("t", config={"hidden_size": 4})) == [
        "the config of model 't' has no 'model_type'; it names the architecture to build. "
        "Fix: config={'model_type': 'qwen3', ...}",
        "model 't' has a config and no alphabet; a model built from a config has one token per character of "
        "its alphabet. Fix: alphabet='0123456789 ...'",
    ]
    assert texts(Model("t", config=CONFIG, alphabet="010")) == [
        "the alphabet of model 't' has a character twice; each character is one token. Fix: list each character once"
    ]
