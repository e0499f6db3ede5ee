"""Adapters of the torch backend: what they train, what they leave alone, their files, and the checks before a run."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pipeline import Backend, Graph, Model, WorkerGroup
from pipeline.declare.columns import Ragged
from pipeline.declare.sharding import Plain, Sharding
from pipeline.engine.driver import Driver
from pipeline.errors import CheckpointError
from pipeline.executors.local import LocalExecutor
from pipeline.plan.planner import plan
from pipeline.rundir import RunDir
from stages import ClippedLoss, LoRA, Refit, Reward, Rollout
from stages.backends import Batch, Optimization, backend_problems, model_problems, one_shard
from stages.backends.model.adapters import attach, sharing
from stages.backends.model.build import load_network, load_tokenizer
from stages.backends.model.weights import weights
from stages.backends.torch.engine import TorchEngine
from stages.backends.torch.optimize import TorchLearner
from stages.backends.torch.score import score
from stages.lora import group_problems
from tests.errors.harness import PROBLEM, command
from tests.parking import Late
from tests.shares import weight_hash
from tests.unit import tiny_graph
from tests.unit.test_folder import DEEPSEEK, GLM
from tests.unit.test_torch_families import EXPERTS, GPT_OSS, NEMOTRON
from tests.unit.tiny import QWEN3

torch.set_num_threads(1)
CPU = torch.device("cpu")
BASE = Model("tiny", config=QWEN3, alphabet="0123456789")
HIDDEN = QWEN3["hidden_size"]
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # the layers with HIDDEN inputs
FULL = LoRA(rank=HIDDEN, alpha=HIDDEN, targets=TARGETS)  # scaling 1


@pytest.fixture(scope="module")
def pristine() -> Any:
    return load_network(BASE, load_tokenizer(BASE), dtype=torch.float32, device=CPU)


def adapted(pristine: Any, lora: LoRA, a: torch.Tensor | None = None) -> Any:
    """Return a network with an adapter, whose matrices A are `a` if that is given."""
    network = sharing(pristine)
    attach(network, lora, seed=0, where="here")
    for name, parameter in network.named_parameters():
        if a is not None and "lora_A" in name:
            parameter.data.copy_(a)
    return network


def targets_only(pristine: Any) -> Any:
    """Return the network with nothing else than the target layers trainable."""
    network = load_network(BASE, load_tokenizer(BASE), dtype=torch.float32, device=CPU)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name.split(".")[-2] in TARGETS)
    return network


def given(network: Any) -> Batch:
    random = torch.Generator().manual_seed(0)
    prompts, responses = (
        Ragged.of([torch.randint(2, 12, (n,), generator=random) for n in lengths]) for lengths in ((3, 1, 4), (2, 6, 5))
    )
    old = score(network, prompts, responses, one_shard(prompts, responses), temperature=1.0, pad=0)
    return Batch(prompts, responses, torch.randn(3, generator=random), old)


def learner(network: Any, **settings: Any) -> TorchLearner:
    return TorchLearner(network, Optimization(lr=1e-2, weight_decay=0.0, **settings), pad=0)


def updated(one: TorchLearner, batch: Batch) -> dict[str, float]:
    shard = one_shard(batch.prompt_ids, batch.response_ids, Sharding.of(Plain(0)))
    return one.update(batch, ClippedLoss(), temperature=1.0, update=shard.updates[0], packed=shard.packed)


def effective(network: Any) -> dict[str, torch.Tensor]:
    """Return the weights W + scaling B A of the target layers."""
    found = {}
    for name, module in network.named_modules():
        if name.rpartition(".")[2] in TARGETS:
            found[name] = module.weight.detach().clone()
            if hasattr(module, "lora_B"):
                found[name] += module.scaling * module.lora_B.weight.detach() @ module.lora_A.weight.detach()
    return found


def test_one_update_with_the_identity_is_one_of_the_layers_themselves(pristine: Any) -> None:
    """With A = 1, B = 0 and scaling 1, B has the gradient of W, and A has none: one AdamW update, without weight decay
    and with its clipping by the norm, gives W + B = the updated W."""
    one, other = learner(adapted(pristine, FULL, torch.eye(HIDDEN))), learner(targets_only(pristine))
    batch = given(pristine)
    found, expected = updated(one, batch), updated(other, batch)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-7) and expected["grad_norm"] > 0
    weights = effective(other.network)
    for name, weight in effective(one.network).items():
        torch.testing.assert_close(weight, weights[name], atol=1e-5, rtol=0.0)
    assert max(float((weights[name] - effective(pristine)[name]).abs().max()) for name in weights) > 5e-3


@pytest.mark.parametrize("alpha", [HIDDEN, 2 * HIDDEN])
def test_one_step_of_sgd_with_an_orthogonal_a_is_one_of_the_layers_themselves(pristine: Any, alpha: int) -> None:
    """With B = 0: B' = -lr s G A^T, so W + s B' A = W - lr s^2 G (A^T A) = W - (lr s^2) G, as A^T A = 1."""
    rotation = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(1)))[0]
    scaled = replace(FULL, alpha=alpha)
    ends = []
    for network, lr in ((adapted(pristine, scaled, rotation), 0.1), (targets_only(pristine), 0.1 * scaled.scaling**2)):
        one = learner(network, clip_grad=0.0)
        one.optimizer = torch.optim.SGD(one.masters.values(), lr=0.0)  # type: ignore[assignment]
        one.settings = replace(one.settings, lr=lr)
        updated(one, given(pristine))
        ends.append(effective(network))
    before = effective(pristine)
    for name, weight in ends[0].items():
        torch.testing.assert_close(weight, ends[1][name], atol=1e-5, rtol=0.0)
        assert float((weight - before[name]).abs().max()) > 1e-3


def test_roles_share_one_base_which_nothing_changes() -> None:
    policy = replace(BASE, lora=LoRA(rank=4))
    engine = TorchEngine(CPU, torch.float32)
    roles = [engine.network(policy, role) for role in ("trained", "served", "frozen")]
    bases = [dict(network.named_parameters()) for network in roles]
    assert all(bases[0][name] is bases[1][name] is bases[2][name] for name in bases[2])
    before = {name: parameter.clone() for name, parameter in bases[2].items()}
    batch = given(roles[2])
    one = engine.learner(policy, Optimization(lr=1e-2, checkpoint_activations=True))
    assert all("lora_" in name for name in one.parameters) and len(one.parameters) == 2 * 7 * 2
    updated(one, batch)
    assert all(torch.equal(bases[0][name], before[name]) for name in before)
    shard = one_shard(batch.prompt_ids, batch.response_ids)
    asked = (batch.prompt_ids, batch.response_ids, shard)
    trained, frozen = (engine.score(model, *asked, temperature=1.0).values for model in (policy, policy.frozen()))
    assert torch.equal(frozen, batch.old_logprobs.values) and not torch.equal(trained, frozen)


def test_training_an_adapter_costs_two_products_per_weight_instead_of_three() -> None:
    policy, engine = replace(BASE, lora=LoRA(rank=4)), TorchEngine(CPU, torch.float32)
    batch = given(engine.network(policy, "frozen"))
    counted = {
        (model.lora is None, training): engine.flops(model, batch.prompt_ids, batch.response_ids, training=training)
        for model in (BASE, policy)
        for training in (False, True)
    }
    forward, whole, adapter = counted[True, False], counted[True, True], counted[False, True]
    assert counted[False, False] == forward and whole == 3 * forward  # type: ignore[operator]
    assert 2 * forward < adapter < 2.1 * forward  # type: ignore[operator]  # attention has no weights


def test_a_restored_adapter_continues_bit_for_bit(tmp_path: Path) -> None:
    """A new engine draws other matrices A if its seed is another; what was saved replaces them."""
    policy = replace(BASE, lora=LoRA(rank=4))
    engines = [TorchEngine(CPU, torch.float32) for _ in range(2)]
    first, second = (engine.learner(policy, Optimization(lr=1e-2)) for engine in engines)
    batch = given(engines[0].network(policy, "frozen"))
    updated(first, batch)  # type: ignore[arg-type]
    first.save(tmp_path)
    assert second.saved_bytes() < first.saved_bytes() < 60_000  # of 87,000 bytes of weights alone
    second.restore(tmp_path)
    assert updated(first, batch) == updated(second, batch)  # type: ignore[arg-type]
    ends = [engine.trained_weights(policy) for engine in engines]
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


@pytest.mark.parametrize(
    ("saved", "now", "says"),
    [
        (LoRA(rank=4), LoRA(rank=4, targets=[*reversed(ALL)]), ""),  # the same in other words
        (LoRA(rank=4), LoRA(rank=4, alpha=8), "with alpha=32, and the model now has an adapter with alpha=8; "),
        (LoRA(rank=4), LoRA(rank=8), "with rank=4, and .* with rank=8; .* resume with lora=LoRA"),
        (LoRA(targets=("q_proj",)), LoRA(targets=("k_proj",)), r"=\('q_proj',\), and .*=\('k_proj',\); "),
        (LoRA(rank=4), None, "an adapter with rank=4, alpha=32, targets=.* now has no adapter; .* with lora=LoRA"),
        (None, LoRA(rank=4), "no adapter, and the model now has an adapter with rank=4, .*: resume without lora="),
    ],
)  # fmt: skip
def test_a_resume_with_another_adapter_is_refused(tmp_path: Path, saved: Any, now: Any, says: str) -> None:
    policies = [replace(BASE, lora=lora) for lora in (saved, now)]
    engines = [TorchEngine(CPU, torch.float32, run_dir=tmp_path) for _ in policies]
    first, second = (one.learner(policy, Optimization(lr=1e-2)) for one, policy in zip(engines, policies))
    (folder := tmp_path / "saved").mkdir()
    first.save(folder)
    engines[0].describe(policies[0], folder / "model")
    with pytest.raises(CheckpointError, match=says) if says else nullcontext():
        second.restore(folder)


def test_a_resume_with_another_backend_is_refused_and_an_older_checkpoint_is_not(tmp_path: Path) -> None:
    one, file = TorchEngine(CPU, torch.float32).learner(BASE, Optimization(lr=1e-2)), tmp_path / "learner.json"
    one.save(tmp_path)
    counters = json.loads(file.read_text())
    file.write_text(json.dumps(counters | {"backend": "megatron"}))
    with pytest.raises(CheckpointError, match=r"the backend 'megatron' saved .* now has 'torch'; .*backend='megatron'"):
        one.restore(tmp_path)
    del counters["backend"]
    file.write_text(json.dumps(counters))
    one.restore(tmp_path)


def test_a_learner_that_sleeps_leaves_the_model_too_and_goes_on_to_the_bit() -> None:
    """The frozen copy has the same tensors. The model is copied to the host once, and is back when `wake` returns."""
    policy, engine = replace(BASE, lora=LoRA(rank=4)), TorchEngine(CPU, torch.float32)
    one, frozen = engine.learner(policy, Optimization(lr=1e-2)), engine.network(policy, "frozen")
    other = TorchEngine(CPU, torch.float32).learner(policy, Optimization(lr=1e-2))
    assert isinstance(one, TorchLearner) and isinstance(other, TorchLearner)
    batch, held = given(frozen), list(frozen.parameters())
    shard = one_shard(batch.prompt_ids, batch.response_ids)
    asked = (batch.prompt_ids, batch.response_ids, shard)
    before = engine.score(policy.frozen(), *asked, temperature=1.0)
    one.parked_model = parked = Late()
    for _ in range(2):
        updated(one, batch)
        updated(other, batch)
        places = [tensor.data_ptr() for tensor in held]
        engine.sleep()
        assert not any(tensor.data_ptr() in places for tensor in held)
        assert {id(tensor) for tensor in held} == parked._places.keys()
        engine.wake()
    assert weight_hash(weights(one.network)) == weight_hash(weights(other.network))
    after = engine.score(policy.frozen(), *asked, temperature=1.0)
    assert torch.equal(after.values, before.values)
    with torch.no_grad():
        held[0].zero_()
    engine.sleep()
    assert held[0].abs().sum() > 0, "what never changes is not copied again"
    network = load_network(BASE, load_tokenizer(BASE), dtype=torch.float32, device=CPU)
    assert not learner(network)._constant(), "a refit needs the weights of a whole model"


def lora_graph(steps: int = 2, **changed: Any) -> Graph:
    """The tiny graph with an adapter."""
    graph = tiny_graph.graph(steps=steps)
    policy = replace(graph.stages[0].model, **{"lora": LoRA(rank=4, targets=("q_proj", "down_proj"))} | changed)
    stages = [replace(stage, model=policy) if hasattr(stage, "model") else stage for stage in graph.stages]
    stages[1] = Reward(height)
    return replace(graph, stages=tuple(stages))


def height(response: str) -> float:
    """A reward that differs within each group."""
    return float(sum(map(ord, response)))


def execute(folder: Path, graph: Graph, **more: Any) -> Any:
    driver = Driver(graph, plan(graph)[0], LocalExecutor(), run_dir=RunDir(folder).create(), **more)
    driver.execute()
    return driver


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two steps, a checkpoint after each."""
    folder = tmp_path_factory.mktemp("lora")
    execute(folder / "run", lora_graph())
    return folder


def test_a_checkpoint_has_the_adapter_only(finished: Path) -> None:
    saved = RunDir(finished / "run").checkpoint(2) / "train"
    names = load_file(saved / "weights.safetensors").keys()
    assert len(names) == 2 * 2 * 2 and all("lora_" in name for name in names)
    moments = load_file(saved / "optimizer.safetensors").keys()
    assert {name.partition(":")[2] for name in moments} == set(names)


def test_the_export_is_a_folder_of_peft_and_merged_it_computes_what_was_trained(finished: Path) -> None:
    code, out, err = command(finished, "run", "--model", "adapter", program="export")
    assert (code, err) == (0, "") and out.startswith("adapter: the adapter after step 2")
    config = json.loads((finished / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 32, ["down_proj", "q_proj"])
    base = config["base_model_name_or_path"]
    code, out, err = command(finished, "run", "--model", "merged", "--merge", base, program="export")
    assert (code, err) == (0, "") and out.startswith("merged: the model after step 2")
    merged = AutoModelForCausalLM.from_pretrained(finished / "merged").eval()
    policy = replace(lora_graph().stages[0].model, config=None, alphabet=None, source=base)
    engine = TorchEngine(CPU, torch.float32)
    trained = engine.network(policy, "trained")
    tensors = load_file(finished / "adapter/adapter_model.safetensors")
    trained.load_state_dict({n.removeprefix("base_model.model."): t for n, t in tensors.items()}, strict=False)
    ids = torch.tensor([[2, 3, 4, 5]])
    with torch.no_grad():
        far = [float((trained(ids).logits - other(ids).logits).abs().max())
               for other in (merged, engine.network(policy.frozen(), "frozen"))]  # fmt: skip
    assert far[0] < 1e-5 < 1e-3 < far[1]


def test_a_merge_with_a_folder_of_another_name_is_done_with_a_warning(finished: Path, tmp_path: Path) -> None:
    assert command(finished, "run", "--model", str(tmp_path / "adapter"), program="export")[0] == 0
    base = json.loads((tmp_path / "adapter/adapter_config.json").read_text())["base_model_name_or_path"]
    name = Path(base).name
    for place, path in enumerate(("other", f"{name}-base", f"{name}/other")):
        shutil.copytree(base, tmp_path / path)
        flags = ("--model", str(tmp_path / f"merged-{place}"), "--merge", str(tmp_path / path))
        code, _, err = command(finished, "run", *flags, program="export")
        (line,) = err.splitlines()
        found = PROBLEM.fullmatch(line)
        assert code == 0 and found and found["warning"] and f"{name}'" in found["what"]
        assert (tmp_path / f"merged-{place}/model.safetensors").exists()
    for place, path in enumerate((f"copy/{name}", f"models--acme--{name}/snapshots/0123abcd")):
        shutil.copytree(base, tmp_path / path)
        flags = ("--model", str(tmp_path / f"same-{place}"), "--merge", str(tmp_path / path))
        assert command(finished, "run", *flags, program="export")[::2] == (0, "")


def test_the_export_of_nemotron_h_has_the_names_of_its_folder(tmp_path: Path) -> None:
    """Which transformers' modules have not. All targets are added to the weights that they belong to."""
    execute(tmp_path / "run", lora_graph(steps=1, config=NEMOTRON, lora=LoRA(rank=2)))
    assert command(tmp_path, "run", "--model", "adapter", program="export")[::2] == (0, "")
    tensors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    base = json.loads((tmp_path / "adapter/adapter_config.json").read_text())["base_model_name_or_path"]
    assert command(tmp_path, "run", "--model", "merged", "--merge", base, program="export")[::2] == (0, "")
    one, two = (load_file(Path(folder) / "model.safetensors") for folder in (base, tmp_path / "merged"))
    layers = {name.removeprefix("base_model.model.").rsplit(".", 2)[0] for name in tensors}
    assert {name.removesuffix(".weight") for name in one if not torch.equal(one[name], two[name])} == layers
    assert len(layers) == 2 + 2 + 4 + 2 and all(name.startswith("backbone.layers.") for name in layers)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--merge", "base"), "no --model is given"),
        (("--model", "new", "--merge", "absent"), "the folder has no safetensors files"),
        (("--model", "new", "--merge", "adapter_of_another"), "has no 'model.layers.0.mlp.down_proj.weight'"),
    ],
)
def test_a_merge_with_another_model_is_refused(finished: Path, argv: tuple[str, ...], words: str) -> None:
    from safetensors.torch import save_file

    (finished / "adapter_of_another").mkdir(exist_ok=True)
    save_file({"weight": torch.zeros(1)}, finished / "adapter_of_another/model.safetensors")
    before = sorted(finished.rglob("*"))
    code, out, err = command(finished, "run", *argv, program="export")
    (line,) = err.splitlines()
    assert (code, out) == (2, "") and PROBLEM.fullmatch(line) and words in line
    assert sorted(finished.rglob("*")) == before


PLAIN = DEEPSEEK | {"q_lora_rank": None}
UNPROJECTED = {name: size for name, size in EXPERTS.items() if name != "moe_latent_size"}
MOE = {**QWEN3, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@pytest.mark.parametrize(
    ("lora", "config", "what", "fix"),
    [
        (LoRA(rank=0), QWEN3, "LoRA has rank=0", "rank=16"),
        (LoRA(rank=1000), QWEN3, "LoRA has rank=1000", "rank=16"),
        (LoRA(alpha=0), QWEN3, "LoRA has alpha=0", "alpha=32"),
        (LoRA(targets="q_proj"), QWEN3, "LoRA has targets='q_proj'", "targets=('q_proj', 'v_proj')"),
        (LoRA(targets=("q_prj",)), QWEN3, "LoRA has the target 'q_prj'", "did you mean 'q_proj'?"),
        (LoRA(targets=("gate_proj",)), MOE, "'gate_proj', which is a part of the experts", "choose from 'q_proj'"),
        (LoRA(), {"model_type": "gpt2"}, "targets='all' and the model is a 'gpt2'", "name the layers"),
        (16, QWEN3, "lora=16 of a Model", "lora=LoRA(rank=16)"),
        (LoRA(targets=("q_proj", "k_proj", "q_proj")), QWEN3, "the target 'q_proj' twice", "name 'q_proj' once"),
        (LoRA(rank=2, targets=("q_a_proj",)), PLAIN, "the target 'q_a_proj'", "choose from 'q_proj'"),
        (LoRA(rank=2, targets=("q_b_proj",)), PLAIN, "the target 'q_b_proj'", "choose from 'q_proj'"),
        (LoRA(rank=2, targets=("q_proj",)), DEEPSEEK, "the target 'q_proj'", "choose from 'q_a_proj', 'q_b_proj'"),
        (LoRA(rank=2, targets=("fc1_latent_proj",)), NEMOTRON, "the target 'fc1_latent_proj'", "choose from"),
        (LoRA(rank=2, targets=("fc1_latent_proj",)), UNPROJECTED, "the target 'fc1_latent_proj'", "choose from"),
        (
            LoRA(rank=2, targets=("in_proj",)),
            NEMOTRON | {"layers_block_type": ["mlp", "attention"]},
            "the target 'in_proj'",
            "choose from",
        ),
        (LoRA(rank=17), QWEN3, "LoRA has rank=17", "rank=16, or other targets"),
    ],
)
def test_an_adapter_is_checked_before_anything_starts(lora: Any, config: Any, what: str, fix: str) -> None:
    found = list(model_problems(Model("tiny", config=config, alphabet="01", lora=lora)))
    assert len(found) == 1 and what in found[0].what and fix in found[0].fix


@pytest.mark.parametrize("config", [QWEN3, MOE, GLM, GPT_OSS, DEEPSEEK, PLAIN, NEMOTRON, EXPERTS, UNPROJECTED])
def test_the_highest_rank_is_the_smallest_side_of_a_matrix_of_the_network(config: dict[str, Any]) -> None:
    """Of each target that the network has; the others are refused. The sizes of gpt-oss are not known to the check."""
    model, known = replace(BASE, config=config), config | {"vocab_size": 12}
    network = load_network(model, load_tokenizer(model), dtype=torch.float32, device=CPU)
    named = LoRA().names(str(config["model_type"]))
    projections = ("fc1_latent_proj", "fc2_latent_proj") if config["model_type"] == "nemotron_h" else ()
    found: dict[str, int] = {}
    for name, module in network.named_modules():
        target = name.rpartition(".")[2]
        if type(module) is torch.nn.Linear and target in (*named, *projections):
            found[target] = min(found.get(target, 512), *module.weight.shape)
    assert len(found) > 3
    for target in (*named, *projections):
        lora = LoRA(rank=found.get(target, 1), targets=(target,))
        assert bool(list(lora.problems(known, "here"))) == (target not in found), target
        if target in found and config is not GPT_OSS:
            assert len(list(replace(lora, rank=lora.rank + 1).problems(known, "here"))) == 1, target


@pytest.mark.parametrize(
    ("group", "what"),
    [
        (WorkerGroup("g", fully_sharded=True, workers=2, backend="torch"), "is fully_sharded"),
        (WorkerGroup("g", backend="vllm", speculate=2), "has speculate=2"),
        (WorkerGroup("g", backend="vllm", gpus=1, weights="fp8"), "has weights='fp8'"),
        (WorkerGroup("g", backend="megatron", workers=4, tensor_parallel=4), "has tensor_parallel=4, more than"),
        (WorkerGroup("g", backend=Backend(name="mine", can=("sample",), opener="os:open")), "the backend 'mine'"),
    ],
)
def test_a_group_that_cannot_have_adapters_is_refused(group: WorkerGroup, what: str) -> None:
    stage = Rollout(replace(BASE, lora=LoRA()), on=group, samples_per_prompt=2)
    assert what in " ".join(problem.what for problem in backend_problems(group, stage, "sample"))
    refit = Refit(BASE, source=group, target=group)
    assert what not in " ".join(problem.what for problem in backend_problems(group, refit, "sample"))


MAMBA = {"model_type": "nemotron_h", "layers_block_type": ["mamba", "moe", "attention"], "n_groups": 1}
AROUND = LoRA(targets=("q_proj", "fc2_latent_proj"))


@pytest.mark.parametrize(
    ("lora", "config", "given", "what", "why"),
    [
        (LoRA(), MOE, {}, "has the backend 'vllm' and no GPUs", "no mixture of experts"),
        (LoRA(), MOE, {"gpus": 1}, "", ""),
        (AROUND, MAMBA, {"gpus": 1}, "which does not adapt 'fc2_latent_proj'", "its experts hold this projection"),
        (LoRA(), MAMBA, {"gpus": 1}, "", ""),
        (LoRA(), MAMBA, {"gpus": 2, "tensor_parallel": 2}, "tensor_parallel=2, and an adapter of 'in_proj'", "copies"),
        (LoRA(), MAMBA | {"n_groups": 8}, {"gpus": 2, "tensor_parallel": 2}, "", ""),
        (LoRA(targets=("q_proj",)), MAMBA, {"gpus": 2, "tensor_parallel": 2}, "", ""),
    ],
)
def test_an_adapter_that_vllm_would_compute_otherwise_is_refused(
    lora: LoRA, config: Any, given: Any, what: str, why: str
) -> None:
    group = WorkerGroup("g", backend="vllm", workers=given.get("gpus", 1), **given)
    found = list(group_problems(Model("tiny", config=config, alphabet="01", lora=lora), group))
    assert [problem for problem in found if not problem.what.endswith(what) or why not in problem.why] == []
    assert len(found) == bool(what)


def test_a_target_that_is_found_missing_when_the_model_is_loaded_names_what_there_is(pristine: Any) -> None:
    from pipeline import StageError

    with pytest.raises(StageError, match="did you mean 'q_proj'"):
        attach(sharing(pristine), LoRA(targets=("q_pro",)), seed=0, where="here")
