"""Experts in one grouped layer train like experts one by one, and have the same folders, checkpoints and refits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ops.flops import Transformer, model_flops
from pipeline.declare.columns import Ragged
from pipeline.declare.sharding import Packed
from tests.gpu.processes import each
from tests.gpu.test_transformer_engine import MIXTURE, NEAR
from tests.optional import need

KINDS = ("one by one", "grouped")


def compared(rank: int, folder: str, out: str) -> dict[str, Any]:
    """Train both kinds in this process; return what `measure` returns of each, and what the record says of one."""
    from safetensors.torch import load_file

    from stages.backends.megatron import fused
    from tests.engines import megatron_cases as cases

    groups = cases.join(cases.Ranks(), 1, torch.device("cuda", 0), 0)
    case = cases.Case("qwen3_moe", cases.RankLayout(), microbatching=Packed(64))
    model, found = cases.Model(folder), {}
    learners, held = {}, {}
    every = fused.fused_on(groups)
    for kind in KINDS:
        fused.fused_on = lambda groups, kind=kind: replace(every, experts=kind == "grouped")  # type: ignore[misc]
        tensors, metrics = cases.measure(cases.MegatronEngine(groups), Path(folder), case)
        found[kind] = {name: tensor.float().cpu() for name, tensor in tensors.items()}
        found[f"{kind}, metrics"] = metrics
        held[kind] = cases.MegatronEngine(groups)
        learners[kind] = held[kind].learner(model, cases.OPTIMIZATION)
        names = [name for name, _ in learners[kind].network.named_parameters()]
        assert any(name.endswith("experts.linear_fc1.weight3") for name in names) == (kind == "grouped"), names
    # The same bytes in an export and in a checkpoint, before training
    states: dict[str, dict[str, torch.Tensor]] = {}
    for kind in KINDS:
        saved = Path(out) / kind
        saved.mkdir()
        learners[kind].save(saved)
        held[kind].export(model, saved / "exported")
        states[kind] = {
            name: each_ for file in sorted(saved.glob("shard-*")) for name, each_ in load_file(file).items()
        }
    exports = [sorted((Path(out) / kind / "exported").glob("*.safetensors")) for kind in KINDS]
    assert [file.read_bytes() for file in exports[0]] == [file.read_bytes() for file in exports[1]]
    assert states["grouped"].keys() == states["one by one"].keys()
    assert all(torch.equal(states["grouped"][name], tensor) for name, tensor in states["one by one"].items())
    # Each kind resumes what the other saved after an update
    batch = cases.frozen_batch()
    (shard,) = cases.shards_of(batch, Packed(64), 1)

    def update(kind: str) -> None:
        learners[kind].update(batch, cases.LOSS, temperature=1.0, update=shard.updates[0], packed=True)

    for saver, reader in (KINDS, KINDS[::-1]):
        saved = Path(out) / f"{saver} for {reader}"
        saved.mkdir()
        update(saver)
        learners[saver].save(saved)
        learners[reader].restore(saved)
        hashes = {cases.weight_hash(held[kind].trained_weights(model)) for kind in KINDS}
        assert len(hashes) == 1
        assert learners[reader].updates == learners[saver].updates
    served(held["grouped"], model, folder)
    found["record"] = recorded(held["grouped"], model, batch)
    return found


def served(engine: Any, model: Any, folder: str) -> None:
    """Assert that a refit from grouped experts writes the trained weights into a model of transformers."""
    from transformers import AutoModelForCausalLM

    from stages.backends import PULL
    from stages.backends.model.places import placed
    from stages.backends.refit.target import Target, acknowledged

    sampler = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
    tensors, places, held = placed(sampler)
    target, share = Target(tensors, [places], 0, held), engine.share(model, PULL.transport)
    acknowledged([share], [target.receive([share], 1, PULL).summed])
    engine.export(model, Path(folder) / "after")
    wanted = AutoModelForCausalLM.from_pretrained(Path(folder) / "after", dtype=torch.bfloat16).state_dict()
    for name, tensor in sampler.state_dict().items():
        assert torch.equal(tensor.cpu(), wanted[name]), name


def recorded(engine: Any, model: Any, batch: Any) -> dict[str, float]:
    """Return the metrics of a train task."""
    from pipeline import StageContext, Task, WorkerGroup
    from stages.train import Train

    group = WorkerGroup("learner", backend="megatron", gpus=1)
    stage = Train(model, on=group, lr=1e-4, microbatch=Packed(64), advantage="token")
    engine._learners.clear()
    context = StageContext(group=group, rank=0, seed=0, group_size=1, run_dir=None, shared={"engine": engine}, steps=1)
    versions = Ragged(torch.zeros(sum(batch.response_ids.lengths), dtype=torch.int32), batch.response_ids.lengths)
    columns = {
        "prompt_ids": batch.prompt_ids,
        "response_ids": batch.response_ids,
        "token_advantages": batch.advantage,
        "prev_logprobs": batch.old_logprobs,
        "rollout_logprobs": batch.rollout_logprobs,
        "token_versions": versions,
    }
    return stage.setup(context)(columns, Task(stage="train", step=0)).metrics


def test_grouped_experts_are_those_one_by_one(gpus: list[str], tmp_path: Path) -> None:
    need("transformer_engine", "transformer_engine")
    from tests.engines import megatron_cases as cases

    folder = cases.make_folder("qwen3_moe", tmp_path / "model", **MIXTURE)
    (tmp_path / "saved").mkdir()
    (found,) = each(compared, gpus[:1], str(folder), str(tmp_path / "saved"))
    if isinstance(found, Exception):
        raise found
    wanted, made = (found[kind] for kind in KINDS)
    assert made.keys() == wanted.keys()
    for kind, near in NEAR.items():
        names = [name for name in wanted if name.startswith(kind) or name.endswith(kind)]
        off = sum(float((made[name] - wanted[name]).square().sum()) for name in names)
        far = (off / sum(float(wanted[name].square().sum()) for name in names)) ** 0.5
        print(f"{kind} {far:.5f}")
        assert far < near, kind

    record, batch = found["record"], cases.frozen_batch()
    from transformers import AutoConfig

    shape = Transformer.of(AutoConfig.from_pretrained(folder).to_dict())
    lengths = [p + t - 1 for p, t in zip(batch.prompt_ids.lengths, batch.response_ids.lengths)]
    assert (shape.experts, shape.chosen) == (4, 2)
    assert record["flops"] == model_flops(shape, lengths, training=True, logits=batch.response_ids.lengths)
    assert 0 < record["utilization"] < 1
    print({name: record[name] for name in ("flops", "tflops_per_s", "utilization")})
