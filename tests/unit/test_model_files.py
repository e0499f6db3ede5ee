"""Model folders that run code when they are loaded: refused by the check and at load, unless the Model trusts them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ops.quantize import dequantized
from pipeline import Model, StageError, WorkerGroup
from stages import Rollout, Train
from stages.backends import backend_problems, model_problems
from stages.backends.model.build import load_network, load_tokenizer
from stages.backends.model.folder import model_folder
from stages.backends.model.quantized_folder import quantized_folder
from stages.backends.torch.reward_model import open_reward_model
from tests.unit.test_folder import DEEPSEEK, GLM, MIXTURE, POLICY
from tests.unit.tiny import QWEN3

CODE = """from pathlib import Path

from transformers import Qwen3ForCausalLM

(Path(r"{folder}") / "ran").touch()


class Own(Qwen3ForCausalLM):
    pass
"""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(POLICY, tmp_path_factory.mktemp("sound"))


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def configured(**change: object) -> Callable[[Path], None]:
    """Change numbers of a folder's config, or leave out those that are `...`."""

    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | change
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))

    return damage


def coded(folder: Path) -> None:
    configured(auto_map={"AutoModelForCausalLM": "modeling_own.Own"})(folder)
    (folder / "modeling_own.py").write_text(CODE.format(folder=folder))


def coded_tokenizer(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | {"auto_map": {"AutoTokenizer": [None, "own.Own"]}})
    )


@pytest.fixture
def copied(sound: Path, tmp_path: Path) -> Callable[[Callable[[Path], None]], Path]:
    def copy(change: Callable[[Path], None]) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(sound, folder)
        change(folder)
        return folder

    return copy


def load(model: Model) -> torch.nn.Module:
    return load_network(model, load_tokenizer(model), dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("change", "says"),
    [(pickled, "pytorch_model.bin"), (coded, "modeling_own.Own"), (coded_tokenizer, "own.Own")],
)
def test_a_folder_that_runs_code_is_refused(copied, change: Callable[[Path], None], says: str) -> None:
    folder = copied(change)
    model = Model(str(folder))
    checked = [str(problem) for problem in model_problems(model)]
    assert len(checked) == 1 and says in checked[0] and "Model(..., trust_remote_code=True)" in checked[0]
    device = torch.device("cpu")
    loads: list[Callable[[], object]] = [
        lambda: load_tokenizer(model),
        lambda: load_network(model, load_tokenizer(POLICY), dtype=torch.float32, device=device),
        lambda: model_folder(model, None),
        lambda: open_reward_model(model, dtype=torch.float32, device=device),
    ]
    for opens in loads:
        with pytest.raises(StageError) as raised:
            opens()
        assert [str(problem) for problem in raised.value.problems] == checked
    assert not (folder / "ran").exists()


def test_transformers_itself_gets_neither_pickles_nor_code(copied, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hub name the files are not known before it is fetched."""
    monkeypatch.setattr("stages.backends.model.build.refuse_code", lambda model: None)
    folder = copied(coded)
    pickled(folder)
    with pytest.raises(StageError, match=r"cannot be loaded: OSError: .*safetensors"):
        load(Model(str(folder)))
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("change", [pickled, coded])
def test_a_trusted_folder_loads(copied, sound: Path, change: Callable[[Path], None], tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = copied(change)
    model = Model(str(folder), trust_remote_code=True)
    assert not list(model_problems(model)) and model.frozen().trust_remote_code
    network = load(model)
    assert (type(network).__name__ == "Own") == (folder / "ran").exists() == (change is coded)
    expected = load(Model(str(sound))).state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in network.state_dict().items())


def test_python_files_that_nothing_names_are_no_code(copied) -> None:
    folder = copied(lambda folder: None)
    (folder / "train.py").write_text("raise SystemExit")
    assert not list(model_problems(Model(str(folder))))
    load(Model(str(folder)))


@pytest.mark.parametrize(("files", "says"), [("*.safetensors", "no weights"), ("tokenizer*", "no tokenizer")])
def test_a_folder_that_lacks_files_is_refused(copied, files: str, says: str) -> None:
    def remove(folder: Path) -> None:
        for path in folder.glob(files):
            path.unlink()

    (problem,) = model_problems(Model(str(copied(remove))))
    assert says in problem.what


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": ...}, r"config.json: it has no 'hidden_size'"),
        ({"hidden_size": "64"}, r"config.json: hidden_size='64'; it must be a whole number, 1 or more"),
        ({"num_hidden_layers": -1}, r"num_hidden_layers=-1; it must be a whole number"),
        ({"num_key_value_heads": 3}, r"num_attention_heads=4; it must be a multiple of num_key_value_heads=3"),
        ({"num_attention_heads": 0, "head_dim": None}, r"num_attention_heads=0; it must be a whole number"),
        ({"num_key_value_heads": None, "head_dim": None}, ""),
        ({"model_type": "gpt2", "hidden_size": ...}, ""),
    ],
)  # fmt: skip
def test_a_config_with_wrong_numbers_is_refused_once(copied, change: dict, says: str) -> None:
    """By the check of the model alone: a backend's own check does not divide such numbers."""

    model = Model(str(copied(configured(**change))))
    found = [str(problem) for problem in model_problems(model)]
    assert len(found) == bool(says) and all(says in text for text in found)
    if says and "has no" not in says:
        group = WorkerGroup("learner", backend="megatron", workers=2, tensor_parallel=2)
        found = [str(problem) for problem in backend_problems(group, Train(model, on=group, lr=1))]
        assert not [text for text in found if "needs the package" not in text]  # of an engine that is not installed
        config = json.loads((Path(model.source) / "config.json").read_text())
        (built,) = model_problems(Model("built", config=config, alphabet="ab"))
        assert says.split("; ")[1] in built.why


def in_two_files(folder: Path) -> None:
    """Move the weights of a folder into two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"model-{1 + i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in {*names.values()}:
        held = {name: tensor for name, tensor in tensors.items() if names[name] == file}
        save_file(held, folder / file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def indexed(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        in_two_files(folder)
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def written(name: str, data: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data((folder / name).read_bytes())) and None


def without(*tensors: str, prefix: str = "") -> Callable[[Path], None]:
    """Leave tensors out, and cut a prefix off the names of the others."""

    def damage(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        left = {name.removeprefix(prefix): tensor for name, tensor in held.items() if name not in tensors}
        save_file(left, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


WEIGHTS, INDEX, PART = "model.safetensors", "model.safetensors.index.json", "model-1.safetensors"
KEYS = "model.layers.1.self_attn.k_proj.weight"
NO_SCALE = rf"{WEIGHTS}: it has {KEYS} in 8-bit floats, and there is no {KEYS}_scale_inv; "
NO_CONFIG = r"it has model.layers.0.mlp.down_proj.weight and 13 more in 8-bit floats, and config.json has no quantiz"


def eight_bit(folder: Path) -> None:
    """Quantize the matrices of a folder's layers, in one file."""
    made = quantized_folder(folder, folder)
    (file,) = made.glob("*.safetensors")
    shutil.copyfile(file, folder / WEIGHTS)
    shutil.copyfile(made / "config.json", folder / "config.json")
    shutil.rmtree(folder / "models")


def after(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    """Quantize a folder, and then change it."""

    def damage(folder: Path) -> None:
        for change in (eight_bit, *changes):
            change(folder)

    return damage


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (written(WEIGHTS, lambda data: data[:-1]), rf"{WEIGHTS}: it cannot be read: it has [\d,]+ bytes, and its"),
        (written(WEIGHTS, lambda data: data + b"x"), "and its header describes"),
        (written(WEIGHTS, lambda data: data[:100]), "its 100 bytes do not begin with a safetensors header"),
        (written(WEIGHTS, lambda data: data[:5]), "its 5 bytes do not begin with a safetensors header"),
        (written(WEIGHTS, lambda data: data[:9] + b"?" + data[10:]), f"{WEIGHTS}: it cannot be read: "),
        (written("tokenizer.json", lambda data: data[:-9]), "tokenizer.json: it cannot be read: "),
        (written("tokenizer_config.json", lambda data: b"[1]"), "tokenizer_config.json: it cannot be read: it is no J"),
        (indexed(lambda files: files.update(more="absent.safetensors")), "absent.safetensors: it cannot be read: No "),
        (indexed(lambda files: files.update(more=PART, most=PART)), f"{PART}: it has no more and 1 more; .* says that"),
        (indexed(lambda files: files.clear()), ""),  # no tensor: transformers says so
        (configured(vocab_size=99), r"embed_tokens.weight has the shape .* asks for \[99, 32\]: vocab_size=99"),
        (configured(num_key_value_heads=4), "k_proj.weight has the shape .*: hidden_size=32, num_attention_heads"),
        (configured(intermediate_size=8), "mlp.gate_proj.weight has the shape .*: intermediate_size=8, hidden_size=32"),
        (configured(num_hidden_layers=3), "its weights have no model.layers.2.input_layernorm.weight; config"),
        (configured(num_hidden_layers=10**15), "its weights have no model.layers.2."),
        (without(KEYS), f"its weights have no {KEYS}"),
        (configured(vocab_size=99, model_type="gpt2"), ""),
        (configured(vocab_size=99, quantization_config={"bits": 4}), ""),
        (configured(num_hidden_layers=1), ""),
        (eight_bit, ""),
        (after(in_two_files), ""),
        (after(without(f"{KEYS}_scale_inv")), NO_SCALE),
        (after(configured(quantization_config=...)), NO_CONFIG),
        (after(configured(quantization_config=None)), NO_CONFIG),
        (without("lm_head.weight", prefix="model."), ""),  # as AutoModel saves it
        (in_two_files, ""),
    ],
)  # fmt: skip
def test_weights_that_are_not_those_of_the_config_are_refused(copied, change, says: str) -> None:
    model = Model(str(copied(change)))
    found = [str(problem) for problem in model_problems(model)]
    assert len(found) == bool(says) and all(re.search(says, text) for text in found), found


@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_8_bit_weights_are_loaded_with_their_scales(copied, sound: Path, monkeypatch, on_a_gpu: bool) -> None:
    """Also where transformers would keep them as they are."""
    if on_a_gpu:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    model = Model(str(copied(eight_bit)))
    found = load_network(model, load_tokenizer(model), dtype=torch.float32, device=torch.device("cpu")).state_dict()
    exact, stored = load_file(sound / WEIGHTS), load_file(Path(model.source) / WEIGHTS)
    for name, tensor in exact.items():
        scale = stored.get(f"{name}_scale_inv")
        expected = tensor if scale is None else dequantized(stored[name], scale)
        assert torch.equal(found[name], expected) and (expected - tensor).abs().max() <= tensor.abs().max() / 16


@pytest.mark.parametrize(
    ("change", "says"),
    [(without(f"{KEYS}_scale_inv"), NO_SCALE), (configured(quantization_config=...), NO_CONFIG)],
)
def test_8_bit_weights_without_scales_are_refused_at_load_too(copied, change, says: str, tmp_path: Path) -> None:
    """A model of a hub is not there before."""
    model = Model(str(copied(after(change))))
    for load_one in (load, partial(model_folder, run_dir=tmp_path)):
        with pytest.raises(StageError, match=says):
            load_one(model)


_LAYER = "model.layers.1"


@pytest.mark.parametrize(
    ("family", "tensors"),
    [
        (QWEN3, ["lm_head.weight"]),
        (QWEN3, [f"{_LAYER}.self_attn.k_norm.weight", f"{_LAYER}.self_attn.q_norm.weight"]),
        ({**QWEN3, "model_type": "qwen2"}, [f"{_LAYER}.self_attn.q_proj.bias"]),
        (MIXTURE, [f"{_LAYER}.mlp.gate.weight"]),
        (GLM, [f"{_LAYER}.mlp.gate.e_score_correction_bias", f"{_LAYER}.mlp.shared_experts.up_proj.weight"]),
        (DEEPSEEK, [f"{_LAYER}.self_attn.q_a_proj.weight"]),
        ({**QWEN3, "model_type": "gpt2"}, ["transformer.h.0.attn.c_attn.weight"]),
    ],
)
def test_weights_that_would_stay_random_are_refused_at_load(tmp_path: Path, family: dict, tensors: list[str]) -> None:
    folder = model_folder(Model("a", config=family, alphabet="0123"), tmp_path)
    load(Model(str(folder)))
    without(*tensors)(folder)
    assert not list(model_problems(Model(str(folder))))  # which knows less
    with pytest.raises(StageError) as raised:
        load(Model(str(folder)))
    more = f" and {len(tensors) - 1} more" if tensors[1:] else ""
    assert f"has no weights {tensors[0]}{more}; its config.json asks" in str(raised.value)


@pytest.mark.parametrize(
    "family",
    [QWEN3, MIXTURE, GLM, DEEPSEEK, {**QWEN3, "model_type": "llama"}, {**QWEN3, "model_type": "qwen2"}],
)
@pytest.mark.parametrize("change", [{}, {"head_dim": ...}, {"tie_word_embeddings": True}])
def test_what_transformers_writes_is_not_refused(tmp_path: Path, family: dict, change: dict) -> None:
    """Also where a config leaves numbers to the family."""
    config = {name: value for name, value in (family | change).items() if value is not ...}
    folder = model_folder(Model("a", config=config, alphabet="0123"), tmp_path)
    assert not list(model_problems(Model(str(folder))))
    configured(**change)(folder)
    assert not list(model_problems(Model(str(folder))))
    load(Model(str(folder)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"v_head_dim": 8}, r"0.self_attn.kv_b_proj.weight has the shape .*asks for .*v_head_dim=8"),
        ({"kv_lora_rank": 4}, r"0.self_attn.kv_a_proj_with_mqa.weight has the shape"),
        ({"first_k_dense_replace": 2}, r"its weights have no model.layers.1.mlp.gate_proj.weight"),
    ],
)
def test_latent_attention_and_the_layers_before_a_mixture_are_checked(tmp_path: Path, change: dict, says: str) -> None:
    folder = model_folder(Model("a", config=DEEPSEEK, alphabet="0123"), tmp_path)
    configured(**change)(folder)
    (problem,) = model_problems(Model(str(folder)))
    assert re.search(says, str(problem))


@pytest.mark.parametrize("backend", ["vllm", "megatron"])
def test_backends_with_classes_of_their_own_refuse_to_trust(sound: Path, backend: str) -> None:
    group = WorkerGroup("workers", backend=backend)
    for trusts in (False, True):
        model = Model(str(sound), trust_remote_code=trusts)
        stage = (
            Rollout(model, on=group, samples_per_prompt=2, max_tokens=2) if backend == "vllm" else Train(model, lr=1)
        )
        found = [problem for problem in backend_problems(group, stage) if "trust_remote_code" in problem.what]
        assert len(found) == trusts and all(problem.where == str(model.location) for problem in found)
