"""The Megatron backend on real engines: one rank against transformers and the torch backend, several against one."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ops.flops import Transformer, model_flops
from ops.logprobs import entropy, selected_logprobs
from ops.vocab_parallel import logprobs_and_entropy
from pipeline import Model, StageError
from pipeline.declare.ranks import RankLayout, Ranks, open_store
from pipeline.declare.sharding import Dynamic, Packed, Plain
from pipeline.errors import CheckpointError
from stages import LoRA
from stages.backends.model.build import character_tokenizer
from stages.backends.model.decoder import Decoder, Dense, Grouped, Latent, Layer, Sparse
from tests.drafts import write_checkpoint
from tests.forked import Command
from tests.optional import need
from tests.parking import Late
from tests.shares import weight_hash

REPOSITORY = Path(__file__).resolve().parents[2]
RANKS_DEADLINE_S = 240.0
FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "glm4_moe",
    "deepseek_v3",
    "nemotron_h",
    "nemotron_h, experts",
    "nemotron_h, latent",
    "qwen3_moe, as routed",
    "deepseek_v3, plain",
)
SCORED = ("glm4_moe, 1 expert",)  # and not trained: the gradient of its router is nothing but rounding
CASES = (
    "tensor",
    "tensor, bias",
    "tensor, untied",
    "data",
    "pipeline, tied",
    "pipeline, recomputed",
    "expert",
    "expert, packed",
    "pipeline, experts",
    "pipeline, 3 layers",
    "tensor, 1 key-value head",
    "tensor, 1 key-value head, bias",
    "tensor, experts divided",
    "tensor, experts whole",
    "tensor, experts apart",
    "context",
    "context, experts",
    "shared, tensor",
    "shared, data",
    "shared, pipeline",
    "shared, expert",
    "adapter, tensor",
    "adapter, data",
    "adapter, pipeline",
    "adapter, experts",
    "adapter, latent",
    "adapter, latent, plain",
    "adapter, glm",
    "adapter, hybrid, tensor",
    "adapter, hybrid, pipeline",
    "adapter, hybrid, experts",
    "glm, tensor",
    "glm, pipeline",
    "glm, shared, expert",
    "latent, tensor, experts apart",
    "latent, pipeline",
    "latent, expert",
    "latent, context",
    "hybrid, tensor",
    "hybrid, pipeline",
    "hybrid, experts, tensor",
    "hybrid, experts, apart",
    "hybrid, shared, data",
    "replay, tensor",
    "replay, pipeline",
    "replay, context",
    "replay, shared",
    "latent, shared, tensor",
    "4, pipeline, 5 layers",
    "4, tensor, 2 key-value heads",
    "4, expert and pipeline",
    "4, expert and tensor",
    "4, context and data",
    "4, context and tensor",
    "4, context and pipeline",
    "4, experts apart, twice",
)
SAVED = (
    "saved by tensor",
    "saved by data",
    "saved by expert",
    "saved by pipeline",
    "saved by context",
    "4, saved by experts apart",
)


@pytest.fixture(scope="module")
def cases() -> Any:
    need("megatron", "megatron")
    from tests.engines import megatron_cases

    return megatron_cases


@pytest.fixture(scope="module")
def folder(cases: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one model per family and shape."""
    root = tmp_path_factory.mktemp("megatron")
    for family in (*FAMILIES, *cases.SHAPES):
        cases.make_folder(family, root / family)
    return root


@pytest.fixture(scope="module")
def groups(cases: Any, running: Any) -> Iterator[Any]:
    """Process groups of one rank. The processes of several ranks start first and compute while the one-rank tests
    run."""
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    yield cases.join(Ranks(), 1, torch.device("cpu"), 0)
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def running(cases: Any, folder: Path) -> Iterator[Any]:
    """Two processes that measure all cases, one after the other; each forks a second rank."""
    store = open_store("127.0.0.1", 2, deadline_s=RANKS_DEADLINE_S)
    logs = [folder / f"rank-{rank}.log" for rank in range(2)]
    started = []
    for rank, log in enumerate(logs):
        words = ("-m", "tests.engines.megatron_cases", str(folder), str(rank), str(store.port))
        with log.open("w") as file:
            started.append(Command(*words, cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT))
    yield started, logs
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def measured(running: Any) -> None:
    """Wait until the two processes have ended successfully."""
    started, logs = running
    codes = [process.wait(RANKS_DEADLINE_S) for process in started]
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)


@pytest.fixture(scope="module")
def alone(cases: Any, groups: Any, folder: Path) -> dict[str, Any]:
    """The measurements of one rank, by family and shape; of a grouped batch as `grouped <family>`."""
    given = {family: cases.Case(family, RankLayout(), microbatching=Plain(8)) for family in (*FAMILIES, *cases.SHAPES)}
    adapted = {case.family: case.lora for case in cases.CASES.values() if case.lora}
    given |= {f"adapter {family}": replace(given[family], lora=lora) for family, lora in adapted.items()}
    given |= {f"grouped {family}": replace(given[family], grouped=True) for family in FAMILIES}
    replayed = [case for case in cases.CASES.values() if case.replay]
    given |= {case.alone: replace(given[case.family], grouped=case.grouped, replay=True) for case in replayed}
    return {
        name: cases.measure(cases.MegatronEngine(groups), folder / case.family, case) for name, case in given.items()
    }


@pytest.fixture
def engine(cases: Any, groups: Any) -> Any:
    return cases.MegatronEngine(groups)


def relative(made: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((made - wanted).norm() / wanted.norm().clamp(min=1e-30))


@pytest.mark.parametrize("family", [*FAMILIES, *SCORED])
def test_loaded_weights_give_the_logprobs_of_transformers(cases: Any, engine: Any, folder: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    batch, wanted = cases.frozen_batch(), []
    network = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float32).eval()
    with torch.no_grad():
        for prompt, response in zip(batch.prompt_ids.rows(), batch.response_ids.rows()):
            logits = network(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
            wanted.append((logits / 0.7).log_softmax(-1).gather(-1, response[:, None])[:, 0])
    for microbatching in (Plain(), Plain(3), Dynamic(48), Packed(64)):
        (shard,) = cases.shards_of(batch, microbatching, 1)
        model = Model(str(folder / family))
        scored = engine.score(model, batch.prompt_ids, batch.response_ids, shard, temperature=0.7)
        assert scored.lengths == batch.response_ids.lengths
        assert float((scored.values - torch.cat(wanted)).abs().max()) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_export_gives_back_the_same_bytes(
    engine: Any, folder: Path, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.backends.megatron import folder as exported

    monkeypatch.setattr(exported, "_FILE_BYTES", 30_000)
    engine.export(Model(str(folder / family)), tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    source = load_file(folder / family / "model.safetensors")
    assert len(set(index.values())) > 2
    assert {path.name for path in tmp_path.glob("*.safetensors")} == set(index.values())
    written: dict[str, torch.Tensor] = {}
    for file in set(index.values()):
        written |= load_file(tmp_path / file)
    assert written.keys() == source.keys() == index.keys()
    assert all(torch.equal(written[name], source[name]) for name in source)
    assert (tmp_path / "config.json").read_bytes() == (folder / family / "config.json").read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_folder_is_one_that_transformers_loads(
    cases: Any, engine: Any, folder: Path, tmp_path: Path, family: str
) -> None:
    from transformers import AutoModelForCausalLM

    engine.export(Model(str(folder / family)), tmp_path)
    one, two = (AutoModelForCausalLM.from_pretrained(path) for path in (folder / family, tmp_path))
    ids = cases.frozen_batch().prompt_ids.rows()[2][None]
    with torch.no_grad():
        assert torch.equal(one(ids).logits, two(ids).logits)


@pytest.mark.parametrize(
    "measured",
    [
        "qwen3", "qwen2", "glm4_moe", "deepseek_v3", "nemotron_h",
        "replay qwen3_moe", "replay glm4_moe", "grouped replay deepseek_v3",
    ],
)  # fmt: skip
def test_one_rank_trains_as_the_torch_backend_does(
    cases: Any, alone: dict[str, Any], folder: Path, measured: str
) -> None:
    from transformers import AutoModelForCausalLM

    from stages.backends.model.names import in_folder
    from stages.backends.torch.optimize import TorchLearner
    from stages.backends.torch.routers import Routers

    family, grouped, replay = measured.split()[-1], "grouped" in measured, "replay" in measured
    batch = cases.frozen_batch(grouped=grouped)
    (shard,) = cases.shards_of(batch, Plain(3), 1)
    network = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float32).eval()
    routers = Routers(network) if replay else None
    if routers:
        batch = replace(batch, routes=cases.given_experts(batch, routers.layers, grouped=grouped))
    learner = TorchLearner(network, cases.OPTIMIZATION, pad=0, routers=routers)
    learner._backward(batch, cases.LOSS, cases.TEMPERATURE, shard.updates[0], packed=False)
    parameters = dict(network.named_parameters())
    alike = [name for name in parameters if ".mlp.experts." not in name]  # transformers fuses those of experts
    gradients = {name: parameters[name].grad.clone() for name in alike}
    learner.optimizer.zero_grad()
    tensors, metrics = alone[measured]
    for number in range(2):
        made = learner.update(batch, cases.LOSS, temperature=cases.TEMPERATURE, update=shard.updates[0])
        assert {name.removeprefix(f"{number} ") for name in metrics if name.startswith(f"{number} ")} == made.keys()
        for name, value in made.items():
            assert metrics[f"{number} {name}"] == pytest.approx(value, rel=1e-5, abs=1e-5)
    for name, gradient in gradients.items():
        assert relative(tensors[f"gradient {in_folder(network, name)}"], gradient) < 1e-5
        assert relative(tensors[f"weight {in_folder(network, name)}"], parameters[name].detach()) < 1e-5


@pytest.mark.parametrize(
    "family",
    [
        "qwen3", "qwen2", "qwen3_moe", "glm4_moe", "deepseek_v3", "deepseek_v3, plain", "nemotron_h",
        "nemotron_h, latent",
    ],
)  # fmt: skip
def test_one_rank_trains_an_adapter_as_the_torch_backend_does(
    cases: Any, alone: dict[str, Any], folder: Path, family: str
) -> None:
    """The first values of the adapter included."""
    from stages.backends.model.adapters import attach
    from stages.backends.model.names import in_folder
    from stages.backends.model.weights import weights
    from stages.backends.torch.optimize import TorchLearner

    batch = cases.frozen_batch()
    (shard,) = cases.shards_of(batch, Plain(3), 1)
    network = cases.AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float32).eval()
    (lora,) = {case.lora for case in cases.CASES.values() if case.lora and case.family == family}
    attach(network, lora, seed=0, where="here")
    learner = TorchLearner(network, cases.OPTIMIZATION, pad=0)
    tensors, metrics = alone[f"adapter {family}"]
    for number in range(2):
        made = learner.update(batch, cases.LOSS, temperature=cases.TEMPERATURE, update=shard.updates[0])
        for name, value in made.items():
            assert metrics[f"{number} {name}"] == pytest.approx(value, rel=1e-5, abs=1e-5)
    trained = {in_folder(network, name): tensor for name, tensor in weights(network).items()}
    assert {name for name in tensors if name.startswith("weight ")} == {f"weight {name}" for name in trained}
    for name, tensor in trained.items():
        assert relative(tensors[f"weight {name}"], tensor) < near(name)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_trained_is_what_the_torch_sampler_serves(cases: Any, engine: Any, folder: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    from stages.backends import PULL
    from stages.backends.model.places import placed
    from stages.backends.refit.target import Target, acknowledged
    from stages.backends.torch.score import score

    model, batch = Model(str(folder / family)), cases.frozen_batch()
    (shard,) = cases.shards_of(batch, Plain(3), 1)
    sampler = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float32).eval()
    tensors, places, held = placed(sampler)
    target = Target(tensors, [places], 0, held)

    def served() -> torch.Tensor:
        return score(sampler, batch.prompt_ids, batch.response_ids, shard, temperature=0.7, pad=0).values

    before, learner = served(), engine.learner(model, cases.OPTIMIZATION)
    for _ in range(2):
        learner.update(batch, cases.LOSS, temperature=cases.TEMPERATURE, update=shard.updates[0])
        share = engine.share(model, PULL.transport)
        acknowledged([share], [target.receive([share], 1, PULL).summed])
        trained = engine.score(model, batch.prompt_ids, batch.response_ids, shard, temperature=0.7).values
        assert float((served() - trained).abs().max()) < 1e-4
    assert float((served() - before).abs().max()) > 1e-3


def test_packed_rows_give_the_gradients_of_padded_ones(
    cases: Any, groups: Any, alone: dict[str, Any], folder: Path
) -> None:
    for family in ("qwen3", "qwen3_moe", "nemotron_h"):
        case = cases.Case(family, RankLayout(), microbatching=Packed(70))
        tensors, metrics = cases.measure(cases.MegatronEngine(groups), folder / family, case)
        compare(tensors, metrics, *alone[family])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [30, 100])
def test_prompts_computed_once_give_the_gradients_of_prompts_computed_for_each_sample(
    cases: Any, groups: Any, alone: dict[str, Any], folder: Path, family: str, tokens: int
) -> None:
    """Logprobs, gradients, metrics and two updates: with the prompt of a group in several rows, and in one."""
    case = cases.Case(family, RankLayout(), microbatching=Packed(tokens), grouped=True)
    tensors, metrics = cases.measure(cases.MegatronEngine(groups), folder / family, case)
    compare(tensors, metrics, *alone[f"grouped {family}"])


def test_samples_of_a_group_with_different_prompts_are_refused(cases: Any, engine: Any, folder: Path) -> None:
    batch = cases.frozen_batch(grouped=True)
    batch.prompt_ids.values[9 * 2 + 4] += 1  # of the third sample
    (shard,) = cases.shards_of(batch, Packed(100), 1, groups=cases.GROUPS)
    given = (Model(str(folder / "qwen3")), batch.prompt_ids, batch.response_ids)
    with pytest.raises(StageError, match=r"samples 0 and 2 .* different tokens.*Fix: .*Packed\(tokens, shared=False\)"):
        engine.score(*given, shard, temperature=1.0)
    (plain,) = cases.shards_of(batch, Packed(100, shared=False), 1, groups=cases.GROUPS)
    assert engine.score(*given, plain, temperature=1.0).lengths == batch.response_ids.lengths


@pytest.mark.parametrize("name", CASES)
def test_several_ranks_give_the_numbers_of_one(
    cases: Any, measured: None, alone: dict[str, Any], folder: Path, name: str
) -> None:
    case = (cases.CASES | cases.OF_FOUR)[name]
    tensors, *others = (load_file(folder / f"{name}-{rank}.safetensors") for rank in range(case.layout.size))
    metrics, *other_metrics = (
        json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(case.layout.size)
    )
    assert all(metrics == other for other in other_metrics)
    found = dict(tensors)
    for other in others:
        assert not [key for key in other if not key.startswith("sample ")]  # only rank 0 writes weights and gradients
        assert all(torch.equal(found[key], other[key]) for key in found.keys() & other.keys())
        found |= other
    wanted, wanted_metrics = alone[case.alone]
    if case.replay and case.grouped:  # tokens of a shared prompt are counted once
        metrics, wanted_metrics = (
            {name: value for name, value in each.items() if "disagreement" not in name}
            for each in (metrics, wanted_metrics)
        )
    compare(found, metrics, wanted, wanted_metrics)


def test_all_cases_are_compared(cases: Any) -> None:
    assert (*cases.CASES, *cases.OF_FOUR) == CASES
    assert tuple(cases.FAMILIES) == FAMILIES
    assert {case.family for case in (cases.CASES | cases.OF_FOUR).values()} >= cases.SHAPES.keys() - {*SCORED}


def near(name: str) -> float:
    """Return how far a tensor may be from another one. A trained B is two updates of AdamW from zero, which magnify the
    rounding of small gradients. Gradients of time steps and decays sum over all later positions (1.5e-5 without
    AVX-512)."""
    if name.endswith("lora_B.weight") and not name.startswith("gradient "):
        return 1e-4
    return 3e-5 if name.startswith("gradient ") and name.endswith(("dt_bias", "A_log")) else 1e-5


def compare(
    tensors: dict[str, torch.Tensor],
    metrics: dict[str, float],
    wanted: dict[str, torch.Tensor],
    wanted_metrics: dict[str, float],
) -> None:
    """Compare gradients, updated weights, logprobs and metrics, up to rounding."""
    assert tensors.keys() == wanted.keys()
    for key, tensor in wanted.items():
        if key.startswith(("gradient ", "weight ")):
            assert relative(tensors[key], tensor) < near(key), key
        else:
            assert float((tensors[key] - tensor).abs().max()) < 1e-5, key
    assert metrics == pytest.approx(wanted_metrics, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("family", [*FAMILIES, "adapter qwen3", "adapter qwen3_moe"])
def test_scoring_with_the_frozen_copy_leaves_no_trace(alone: dict[str, Any], family: str) -> None:
    tensors, metrics = alone[family]
    assert metrics["frozen is as before"] == metrics["trained is unchanged"] == metrics["own are those scored"] == 1.0
    assert metrics["own ratio_max"] == metrics["own ratio_mean"] == 1.0
    assert not torch.equal(tensors["sample 0 before"], tensors["sample 0 after"])


@pytest.mark.parametrize("name", SAVED)
def test_a_resumed_learner_goes_on_to_the_bit(measured: None, folder: Path, name: str) -> None:
    for rank in range(4 if name.startswith("4") else 2):
        found = json.loads((folder / f"{name}-{rank}.json").read_text())
        assert found["resumed is the same"] == 1.0
        assert found["updates"] == 4


@pytest.mark.parametrize("name", SAVED)
def test_what_the_ranks_saved_is_exported_as_one_folder_with_the_same_bits(
    measured: None, folder: Path, tmp_path: Path, name: str
) -> None:
    """`learner.save` and `describe` of every rank, put together without a rank, are what the ranks gather."""
    from pipeline.cli import model_folder
    from pipeline.rundir import RunDir

    saved, run, made = folder / name, RunDir(tmp_path / "run").create(), tmp_path / "made"
    tensors: dict[str, torch.Tensor] = {}
    for path in (saved / "as saved").glob("*.safetensors"):
        tensors |= load_file(path)

    def save(place: Path) -> None:
        shutil.copytree(saved, place / "train", ignore=shutil.ignore_patterns("exported", "as saved"))

    made.mkdir()
    place, manifest = write_checkpoint(run, graph="g", steps=1, next_group=0, seed=0, save=save)
    model_folder._write(place, Path("train/model"), manifest, made)
    found = load_file(made / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items())
    assert (made / "tokenizer.json").exists() == (folder / "qwen3/tokenizer.json").exists()
    ranks = [json.loads(path.read_text())["saved bytes"] for path in folder.glob(f"{name}-?.json")]
    files = [path.stat().st_size for path in saved.glob("shard-*.safetensors")]
    assert 0 <= sum(files) - sum(ranks) < 20_000 * len(files)


def test_fewer_data_parallel_ranks_resume_what_more_saved(
    cases: Any, measured: None, engine: Any, folder: Path
) -> None:
    """Two ranks saved after two updates; one rank resumes and ends with the weights of two ranks."""
    model = Model(str(folder / "qwen3"))
    learner = engine.learner(model, cases.OPTIMIZATION)
    learner.restore(folder / "saved by data")
    assert learner.updates == 2
    batch = cases.frozen_batch()
    (shard,) = cases.shards_of(batch, Plain(2), 1)
    for _ in range(2):
        learner.update(batch, cases.LOSS, temperature=cases.TEMPERATURE, update=shard.updates[0], packed=False)
    exported = folder / "saved by data" / "exported"
    wanted = load_file(next(exported.glob("*.safetensors")))
    trained = engine.trained_weights(model)
    assert all(relative(trained[name], wanted[name]) < 1e-5 for name in wanted)


def test_more_data_parallel_ranks_resume_what_one_saved(measured: None, folder: Path) -> None:
    one, two = (load_file(folder / f"{name}.safetensors") for name in ("one", "two"))
    assert all(relative(two[name], one[name]) < 1e-5 for name in one)


def test_other_parallel_sizes_and_missing_files_are_refused(
    cases: Any, measured: None, engine: Any, folder: Path, tmp_path: Path
) -> None:
    learner = engine.learner(Model(str(folder / "qwen3")), cases.OPTIMIZATION)
    with pytest.raises(CheckpointError, match=r"written with .* = \[2, 1, 1, 2\]"):
        learner.restore(folder / "saved by tensor")
    with pytest.raises(CheckpointError, match=r"learner\.json"):
        learner.restore(tmp_path)
    learner.save(tmp_path)
    shard = tmp_path / "shard-00000-000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        learner.restore(tmp_path)


@pytest.mark.parametrize("family", ["qwen3", "glm4_moe", "deepseek_v3", "nemotron_h"])
def test_an_adapter_of_all_targets_resumes_and_another_one_is_refused(
    cases: Any, groups: Any, engine: Any, folder: Path, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(str(folder / family), lora=LoRA(rank=2, alpha=4))
    monkeypatch.setattr(engine, "tokenizer", lambda _: character_tokenizer("01"))  # most of these folders have none
    first = engine.learner(model, cases.OPTIMIZATION)
    first.save(tmp_path)
    engine.describe(model, tmp_path / "model")
    first.restore(tmp_path)
    for lora, has in ((LoRA(rank=2, alpha=5), "an adapter with alpha=5;"), (None, "no adapter;")):
        learner = cases.MegatronEngine(groups).learner(replace(model, lora=lora), cases.OPTIMIZATION)
        with pytest.raises(CheckpointError, match=rf"the checkpoint has an adapter with .*alpha=4.* now has {has}"):
            learner.restore(tmp_path)
    counters = json.loads((tmp_path / "learner.json").read_text())
    (tmp_path / "learner.json").write_text(json.dumps(counters | {"backend": "torch"}))
    with pytest.raises(CheckpointError, match=r"the backend 'torch' saved .* now has 'megatron'; "):
        first.restore(tmp_path)


def test_a_large_state_is_several_files_and_all_of_them_are_needed(
    cases: Any, engine: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.backends.megatron import checkpoint

    monkeypatch.setattr(checkpoint, "_FILE_BYTES", 20_000)
    model, batch = Model(str(folder / "qwen3")), cases.frozen_batch()
    (shard,) = cases.shards_of(batch, Plain(3), 1)
    learner = engine.learner(model, cases.OPTIMIZATION)

    def trained() -> str:
        learner.update(batch, cases.LOSS, temperature=1.0, update=shard.updates[0])
        return weight_hash(engine.trained_weights(model))

    trained()
    learner.save(tmp_path)
    files = sorted(tmp_path.glob("shard-00000-*.safetensors"))
    assert len(files) > 4
    assert max(file.stat().st_size for file in files) < 20_000 + 4_000  # plus the header
    wanted = trained()
    trained()
    learner.restore(tmp_path)
    assert trained() == wanted
    files[2].unlink()
    with pytest.raises(CheckpointError, match="are missing"):
        learner.restore(tmp_path)


@pytest.mark.parametrize("lora", [None, LoRA(rank=4)])
def test_a_learner_that_sleeps_can_be_saved_and_goes_on_to_the_bit(
    cases: Any, engine: Any, folder: Path, tmp_path: Path, lora: LoRA | None
) -> None:
    """Its state is parked elsewhere, and its gradients have no memory. The model of an adapter is parked too."""
    model, batch = Model(str(folder / "qwen3"), lora=lora), cases.frozen_batch()
    (shard,) = cases.shards_of(batch, Plain(3), 1)
    learner = engine.learner(model, cases.OPTIMIZATION)
    learner.parking, learner.parked_model = Late(), Late()
    frozen = [held for held in learner.network.parameters() if not held.requires_grad]

    def update() -> None:
        learner.update(batch, cases.LOSS, temperature=1.0, update=shard.updates[0])

    update()
    (tmp_path / "awake").mkdir()
    learner.save(tmp_path / "awake")
    update()
    wanted = weight_hash(engine.trained_weights(model))
    learner.restore(tmp_path / "awake")
    assert engine.sleep() == (0, 0), "there is no GPU to use"
    gradients = [buffer.grad_data.untyped_storage().size() for buffer in learner.buffered.buffers]
    assert gradients == [0] * len(gradients)
    assert (learner.parked_model._places.keys() == {id(held) for held in frozen}) and bool(frozen) == bool(lora)
    (tmp_path / "asleep").mkdir()
    learner.save(tmp_path / "asleep")
    name = "shard-00000-000.safetensors"
    assert (tmp_path / "asleep" / name).read_bytes() == (tmp_path / "awake" / name).read_bytes()
    engine.wake()
    update()
    assert weight_hash(engine.trained_weights(model)) == wanted


def test_an_update_that_is_not_finite_changes_nothing(cases: Any, engine: Any, folder: Path) -> None:
    model, batch = Model(str(folder / "qwen3")), cases.frozen_batch()
    (shard,) = cases.shards_of(batch, Plain(3), 1)
    learner = engine.learner(model, cases.OPTIMIZATION)
    before = weight_hash(engine.trained_weights(model))
    broken = replace(batch, advantage=torch.full((8,), float("inf")))
    made = learner.update(broken, cases.LOSS, temperature=1.0, update=shard.updates[0])
    assert (made["skipped"], learner.skipped) == (1.0, 1)
    assert weight_hash(engine.trained_weights(model)) == before
    made = learner.update(batch, cases.LOSS, temperature=1.0, update=shard.updates[0])
    assert made["skipped"] == 0.0
    assert weight_hash(engine.trained_weights(model)) != before


def test_vocabulary_parallel_logprobs_are_those_of_one_rank(measured: None, folder: Path) -> None:
    for rank in range(2):
        found = json.loads((folder / f"saved by tensor-{rank}.json").read_text())
        assert max(found[f"difference {i}"] for i in range(3)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_logprobs_and_entropy_in_blocks_are_the_dense_ones(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.vocab_parallel._CHUNK_ELEMENTS", 100)
    logits = torch.randn(11, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[:, 3] = -torch.inf  # a masked token
    ids, weights = torch.arange(11) + 4, torch.linspace(-3, 3, 11)
    blocks, dense = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    logprobs, entropies = logprobs_and_entropy(blocks, ids)
    wanted = selected_logprobs(dense, ids), entropy(dense)
    assert logprobs.dtype == wanted[0].dtype
    (logprobs * weights + entropies * weights**2).sum().backward()
    (wanted[0] * weights + wanted[1] * weights**2).sum().backward()
    near = 1e-12 if dtype == torch.float64 else 0.04  # the dense gradient is the sum of two rounded ones
    torch.testing.assert_close(logprobs, wanted[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(entropies, wanted[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(blocks.grad, dense.grad, atol=near, rtol=near)


def test_operations_are_those_of_the_whole_model(cases: Any, engine: Any, folder: Path) -> None:
    batch = cases.frozen_batch()
    done = [
        engine.flops(Model(str(folder / family)), batch.prompt_ids, batch.response_ids, training=True)
        for family in FAMILIES
    ]
    assert min(done) > 1e6
    assert done[FAMILIES.index("qwen3_moe")] == done[FAMILIES.index("qwen3_moe, as routed")]
    model, columns = Model(str(folder / "qwen3")), (batch.prompt_ids, batch.response_ids)
    once, shape = engine.flops(model, *columns, training=True, spared=[5, 3]), Transformer.of(engine._config(model))
    assert once == done[2] - model_flops(shape, [5, 3], training=True, logits=[0, 0])


def test_a_model_is_trained_once(cases: Any, engine: Any, folder: Path) -> None:
    model = Model(str(folder / "qwen3"))
    engine.learner(model, cases.OPTIMIZATION)
    with pytest.raises(StageError, match="two stages train"):
        engine.learner(model.frozen(), cases.OPTIMIZATION)


@pytest.mark.parametrize(
    ("family", "layout", "expert", "told"),
    [
        ("qwen3", RankLayout(tensor=3), 1, "tensor_parallel=3 does not divide the model's attention heads"),
        ("qwen3", RankLayout(pipeline=4), 1, "pipeline_parallel=4, and the model has 2 layers"),
        ("qwen3", RankLayout(data=2), 2, "expert_parallel=2, and the model has no experts"),
        ("qwen3", RankLayout(data=3), 1, "expert_tensor_parallel=3, and the model has no experts"),
    ],
)
def test_ranks_that_cannot_divide_a_model_are_refused(
    cases: Any, groups: Any, folder: Path, family: str, layout: RankLayout, expert: int, told: str
) -> None:
    other = replace(groups, ranks=Ranks(layout), expert=expert, expert_tensor=max(layout.tensor, layout.data // expert))
    with pytest.raises(StageError, match=told):
        cases.MegatronEngine(other).network(Model(str(folder / family)))


@pytest.mark.parametrize(
    ("layer", "layout", "expert_tensor", "told"),
    [
        (
            Layer(mixer=Grouped(heads=12, groups=4, head_dim=8), mlp=None),
            RankLayout(tensor=6),
            6,
            "tensor_parallel=6, and the model has 4 key-value heads; each rank computes with whole key-value heads, or "
            "equally many ranks share one. Fix: use a divisor or a multiple of 4",
        ),
        (
            Layer(mixer=Grouped(heads=8, groups=1, head_dim=6), mlp=None),
            RankLayout(tensor=8),
            8,
            "tensor_parallel=8 does not divide the 60 rows of the model's queries, keys and values; ranks that share a "
            "key-value head hold equal parts of its rows and of those of its query heads. "
            "Fix: use a divisor of 60",
        ),
        (
            Layer(mixer=None, mlp=Dense(inner=48)),
            RankLayout(pipeline=4),
            1,
            "pipeline_parallel=4, and the model has 2 layers; each pipeline stage needs a layer. "
            "Fix: pipeline_parallel=2 or less",
        ),
        (
            Layer(mixer=None, mlp=Dense(inner=48)),
            RankLayout(tensor=2),
            1,
            "expert_tensor_parallel=1, and the model has no experts; it divides experts over ranks. "
            "Fix: expert_tensor_parallel=2, or a mixture-of-experts model",
        ),
        (
            Layer(mixer=None, mlp=Sparse(experts=4, chosen=2, inner=50, shared=48)),
            RankLayout(tensor=4),
            4,
            "expert_tensor_parallel=4 does not divide the model's intermediate_size of experts (50); all ranks hold "
            "equal parts. Fix: use a divisor of 50",
        ),
        (
            Layer(mixer=Latent(heads=4, query=8, key_value=8, plain=104, rotary=32, value=8), mlp=None),
            RankLayout(context=2),
            1,
            "context_parallel=2, and the model has heads of size 136; Transformer Engine trains packed rows over "
            "several ranks with heads whose size is a multiple of 8, at most 128. "
            "Fix: context_parallel=1, or tensor_parallel, which divides heads",
        ),
    ],
)
def test_what_ranks_cannot_divide_is_said_in_full(
    groups: Any, layer: Layer, layout: RankLayout, expert_tensor: int, told: str
) -> None:
    from stages.backends.megatron.config import transformer_config
    from stages.backends.megatron.fused import Fused

    decoder = Decoder(layers=(layer,) * 2, hidden=32, vocab=131, tied=True)
    with pytest.raises(StageError) as refused:
        other = replace(groups, ranks=Ranks(layout), expert_tensor=expert_tensor)
        transformer_config(decoder, other, torch.float32, "graph.py:7", Fused())
    assert str(refused.value) == f"graph.py:7: {told}"


@pytest.mark.parametrize(
    ("layout", "experts", "expert_tensors"),
    [
        (RankLayout(tensor=4, data=3, pipeline=2), 3, 4),
        (RankLayout(tensor=4, data=3, pipeline=2), 6, 2),
        (RankLayout(tensor=4, data=2, pipeline=3), 4, 1),
        (RankLayout(tensor=2, data=4), 2, 1),
    ],
)
def test_parts_are_those_of_megatron_core(cases: Any, layout: RankLayout, experts: int, expert_tensors: int) -> None:
    from megatron.core.parallel_state import RankGenerator

    from stages.backends.megatron.parts import Part

    order, copies = "tp-cp-ep-dp-pp", layout.tensor * layout.data // (experts * expert_tensors)
    dense = RankGenerator(layout.tensor, 1, layout.data, layout.pipeline, 1, order)
    experts_of = RankGenerator(expert_tensors, experts, copies, layout.pipeline, 1, order)
    for generator, kind, name in (
        (dense, "tp", "tensor"),
        (dense, "pp", "stage"),
        (experts_of, "ep", "expert"),
        (experts_of, "tp", "expert_tensor"),
    ):
        for ranks in generator.get_ranks(kind):
            parts = [Part.of(rank, layout, experts, expert_tensors) for rank in ranks]
            assert [getattr(part, name) for part in parts] == list(range(len(ranks))), kind
    for ranks in experts_of.get_ranks("dp"):  # the gradients of these are summed
        parts = [Part.of(rank, layout, experts, expert_tensors) for rank in ranks]
        assert len({(part.stage, part.expert, part.expert_tensor) for part in parts}) == 1


def test_recomputing_keeps_only_the_inputs_of_layers(
    cases: Any, engine: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer.mlp import MLP

    from stages.backends.megatron.attention import CausalAttention

    passes = []

    def count(kind: type) -> None:
        plain: Any = kind.forward

        def counted(self: Any, *given: Any, **named: Any) -> torch.Tensor:
            passes.append(kind)
            return plain(self, *given, **named)

        monkeypatch.setattr(kind, "forward", counted)

    count(CausalAttention)
    count(MLP)
    batch = cases.frozen_batch()
    (shard,) = cases.shards_of(batch, Plain(), 1)
    for family, recompute, attention, mlp in (("qwen3", False, 1, 1), ("llama", True, 2, 2), ("qwen2", "mlp", 1, 2)):
        optimization = replace(cases.OPTIMIZATION, checkpoint_activations=recompute)
        learner = engine.learner(Model(str(folder / family)), optimization)
        passes.clear()
        learner.update(batch, cases.LOSS, temperature=1.0, update=shard.updates[0])
        assert [passes.count(kind) for kind in (CausalAttention, MLP)] == [2 * attention, 2 * mlp]  # two layers
