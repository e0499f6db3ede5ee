"""Model folders that run code when they are loaded: refused by the check and at load, unless the Model trusts them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline import Model, StageError, WorkerGroup
from stages import Rollout, Train
from stages.backends import backend_problems, model_problems
from stages.backends.model.build import load_network, load_tokenizer
from stages.backends.model.folder import model_folder
from stages.backends.torch.reward_model import open_reward_model
from tests.unit.test_folder import POLICY

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


def coded(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.Own"}
    (folder / "config.json").write_text(json.dumps(config))
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
