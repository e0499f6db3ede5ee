"""A checkpoint's model as a Hugging Face folder: the same bits, or one error and no folder."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from pipeline.cli import model_folder
from pipeline.engine.driver import Driver
from pipeline.executors.local import LocalExecutor
from pipeline.plan.planner import plan
from pipeline.rundir import RunDir
from stages.backends.model.places import pieces
from tests.drafts import write_checkpoint
from tests.errors.harness import PROBLEM, command
from tests.unit import tiny_graph


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with checkpoints after steps 1, 2 and 3."""
    folder = tmp_path_factory.mktemp("exported")
    graph = tiny_graph.graph(steps=3)
    Driver(graph, plan(graph)[0], LocalExecutor(), run_dir=RunDir(folder / "run").create()).execute()
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of it, which a test may change."""
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path


def export(folder, *argv):
    return command(folder, "run", *argv, program="export")


def refused(folder, *argv, code=2):
    """Return the only line of an export that fails, and check that it leaves nothing."""
    before = sorted(folder.rglob("*"))
    found, out, err = export(folder, *argv)
    (line,) = err.splitlines()
    assert (found, out) == (code, "")
    assert sorted(folder.rglob("*")) == before
    return PROBLEM.fullmatch(line)


@pytest.mark.parametrize("step", [1, None])
@pytest.mark.parametrize("file_bytes", [20_000, 1 << 30])
def test_transformers_loads_the_same_bits(folder, monkeypatch, step, file_bytes):
    monkeypatch.setattr(model_folder, "FILE_BYTES", file_bytes)
    code, out, err = export(folder, "--model", "model", *(["--step", str(step)] if step else []))
    assert (code, err) == (0, "")
    assert out.startswith(f"model: the model after step {step or 3}, ")
    saved = load_file(RunDir(folder / "run").checkpoint(step or 3) / "train/weights.safetensors")
    network, report = AutoModelForCausalLM.from_pretrained(folder / "model", output_loading_info=True)
    assert not any(report.values()), report
    found = network.state_dict()
    assert found.keys() == saved.keys()
    assert all(found[name].dtype == saved[name].dtype and torch.equal(found[name], saved[name]) for name in saved)
    assert AutoTokenizer.from_pretrained(folder / "model").decode([2, 3]) == "01"
    assert len(list((folder / "model").glob("*.safetensors"))) == (1 if file_bytes > 20_000 else 4)


def test_a_mixture_has_one_tensor_per_expert_as_published_folders_do(folder, monkeypatch):
    """Its checkpoint holds them fused. bfloat16 weights stay so, whatever the configuration says."""
    small = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 12}
    config = Qwen3MoeConfig(**small, **heads, num_experts=4, num_experts_per_tok=2)
    network = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    run = RunDir(folder / "run")

    def save(place):
        from pipeline.declare.saved_model import write_tensors_json
        from stages.backends.model.tensor_files import write_tensors
        from stages.backends.model.weights import weights

        (place / "train/model").mkdir(parents=True)
        write_tensors(weights(network), place / "train/weights.safetensors")
        config.dtype = "float32"
        config.save_pretrained(place / "train/model")
        write_tensors_json(place / "train/model", pieces(network, "weights.safetensors"))

    write_checkpoint(run, graph="tiny", steps=4, next_group=0, seed=0, save=save)
    assert export(folder, "--model", "model")[0] == 0
    names = load_file(folder / "model/model.safetensors").keys()
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in names
    assert not any("gate_up_proj" in name for name in names)
    found = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in network.state_dict().items())
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_a_missing_step_lists_those_there_are(folder):
    found = refused(folder, "--model", "model", "--step", "7")
    assert found["what"] == "there is no checkpoint after step 7"
    assert found["why"] == "the run has 3 checkpoints, after steps 1, 2, 3"
    assert found["fix"] == "--step 3"


@pytest.mark.parametrize("name", ["weights.safetensors", "model/tensors.json", "model/config.json"])
def test_a_damaged_file_is_named_and_without_a_step_the_checkpoint_before_is_taken(folder, name):
    path = RunDir(folder / "run").checkpoint(3) / "train" / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    found = refused(folder, "--model", "model", "--step", "3", code=6)
    assert found["where"].endswith(f"step_000003/train/{name}")
    assert (found["what"], found["fix"]) == ("size or sha256 differ from the manifest", "--step 2")
    code, out, err = export(folder, "--model", "model")
    assert code == 0 and "after step 2" in out and "warning" in err


def test_the_target_is_a_new_folder_outside_of_the_run(folder):
    (folder / "full").mkdir()
    assert refused(folder, "--model", "full")["what"] == "it already exists"
    assert refused(folder, "--model", "run/checkpoints/model")["what"] == "it lies inside the run directory"
    assert refused(folder, "--model", "full/../run/model")["what"] == "it lies inside the run directory"
    assert refused(folder, "--step", "2")["what"] == "no --model is given"


def test_a_checkpoint_that_describes_no_model_or_not_all_of_it_is_refused(folder):
    run = RunDir(folder / "run")

    def rewritten(change):
        old = folder / "old"
        shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(run.checkpoint(3) / "train", old / "train")
        change(old / "train/model/tensors.json")

        def save(place):
            shutil.copytree(old / "train", place / "train")

        write_checkpoint(run, graph="tiny", steps=3, next_group=12, seed=0, save=save)

    def short(path):
        tensors = json.loads(path.read_bytes())
        tensors["model.norm.weight"]["shape"] = [33]
        path.write_text(json.dumps(tensors))

    rewritten(short)
    found = refused(folder, "--model", "model", code=6)
    assert found["what"] == "the saved files have 32 of the 33 numbers of tensor 'model.norm.weight'"
    rewritten(lambda path: path.unlink())
    said = refused(folder, "--model", "model")
    assert said["what"] == "the checkpoint describes no model"
    assert said["why"] == "a backend that saves the model's description writes it beside the weights"
