"""Time and memory foretold before a run: against kept results, by hand, and what the commands refuse."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks import foretold
from benchmarks.gpu import tables
from benchmarks.gpu.shapes import MIXTURES, SHAPES, TRUNCATED
from pipeline import Graph, GraphError, Model, Schedule, WorkerGroup, run, simulate
from pipeline.declare.interpreter import elsewhere
from pipeline.declare.sharding import Packed
from pipeline.declare.task import Task
from pipeline.declare.work import Decoding, GpuPart, GpuWork
from pipeline.foretell.forecast import Forecast, forecast
from pipeline.foretell.gpu import asked, known, table
from pipeline.foretell.loads import Assumed
from pipeline.foretell.memory import USABLE, GroupMemory
from pipeline.foretell.seconds import finished, seconds
from pipeline.plan.planner import plan
from pipeline.plan.resting import resting_bytes
from pipeline.simulation.recording import simulated
from pipeline.simulation.whatif import Changes
from stages import (
    Advantage,
    ClippedLoss,
    Evaluate,
    Generated,
    LoRA,
    PrevLogprobs,
    Prompts,
    Refit,
    Reward,
    Rollout,
    Train,
    TruncatedIS,
)
from stages.backends.vllm.limits import share_of
from stages.forecast import vllm
from stages.forecast.shape import divided
from tests.examples import few

RATES = {"products": 10.0, "attention": 5.0, "moved_bytes": 2.0, "layers": 4.0, "passes": 1.0, "updated_bytes": 8.0}
DECODES = {"products": 100.0, "weights_bytes": 50.0, "cache_bytes": 1000.0, "tokens": 200.0}
REPOSITORY = Path(__file__).resolve().parents[2]


def even(response: str) -> float:
    return float(len(response) % 2)


def described(
    *, model: str = "0.6B", gpus: int = 1, colocated: bool = False, staleness: int = 0, row: int = 16384,
    tokens: int = 1024, batch: int = 16, memory: float = 0.85, reward: Reward | None = None, **learner: int,
) -> Graph:  # fmt: skip
    policy = Model(model, config=(SHAPES | MIXTURES | TRUNCATED)[model], alphabet="bytes")
    sampler = WorkerGroup("sampler", backend="vllm", gpus=1, memory=memory)
    owner = sampler if colocated else None
    trainer = WorkerGroup("learner", backend="megatron", gpus=gpus, colocated=owner, **learner)  # type: ignore[arg-type]
    cut = Packed(row)
    loss = ClippedLoss(correction=TruncatedIS(cap=2.0))
    return Graph(
        name="grpo",
        source=Prompts(Generated("reverse"), batch=batch),
        stages=(
            Rollout(policy, on=sampler, samples_per_prompt=8, max_tokens=tokens),
            reward or Reward(even),
            PrevLogprobs(policy, on=trainer, microbatch=cut),
            Advantage("group_relative"),
            Train(policy, on=trainer, loss=loss, lr=1e-6, minibatches=2, microbatch=cut),
            Refit(policy, source=trainer, target=sampler),
        ),
        schedule=Schedule(steps=6, max_staleness=staleness),
    )


def made(graph: Graph, gpu: str = "h200", **assumed: int | str) -> Forecast:
    with elsewhere():
        return forecast(graph, plan(graph)[0], table(gpu), Assumed(**assumed))  # type: ignore[arg-type]


def step_s(graph: Graph, gpu: str = "h200", **assumed: int | str) -> float:
    return simulated(made(graph, gpu, **assumed).recording, Changes())[1].steps.mean


# Against kept results.


@pytest.mark.parametrize("name", known())
def test_a_table_is_what_the_kept_results_say(name):
    assert table(name) == tables.table(name)


@pytest.mark.parametrize(("flag", "code"), [("--help", 0), ("--nope", 2)])
def test_a_flag_writes_no_table(flag, code, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", ["tables", flag])
    with pytest.raises(SystemExit) as ended:
        tables.main()
    assert ended.value.code == code and not list(tmp_path.iterdir())
    assert ("Fits the tables of GPUs" in capsys.readouterr().out) == (flag == "--help")


def test_every_rate_has_a_source():
    for name in known():
        assert table(name).sources.keys() == table(name).rates.keys()


def test_steps_of_kept_runs_are_foretold_within_a_quarter():
    """0.6B and 4B, colocated and apart, on H200 and H100, with fused kernels and without."""
    rows = [row for row in foretold.seconds() if not row["fitted"]]
    assert len([row for row in rows if row["figure"] == "step s"]) == 18
    assert [row for row in rows if abs(row["error %"]) > 25] == []


def test_memory_of_kept_runs_is_foretold_within_a_tenth():
    rows = list(foretold.memory())
    assert len([row for row in rows if not row["fitted"]]) >= 7
    off = [row for row in rows if abs(row["error %"]) > 10]
    known = ("gpu.step.deepseek-v3-2-layers", "gpu.step.nemotron-3-super-3-layers")  # docs/foretell.md names them
    assert [row for row in off if not row["result"].startswith(known)] == []


def test_rows_of_the_same_size_leave_no_other_logits_in_the_cache():
    """256 samples of 1,030 tokens are 8 rows of 32 in rows of 36,864, and unequal rows in those of 16,384."""
    spare = "logits of other rows, cached"
    found = [made(described(batch=64, row=row), prompt=6).memory["learner"].passing["train"] for row in (36864, 16384)]
    alike, differ = ({part.name: part.size_bytes for part in parts} for parts in found)
    assert "activations and logits of 32,960 tokens" in alike and spare not in alike and differ[spare] > 2**33


# By hand.


def test_the_host_launches_while_the_gpu_computes():
    work = GpuWork(kind="", products=30.0, attention=10.0, moved_bytes=2.0, layers=8.0, passes=1.0, updated_bytes=4.0)
    assert seconds(work, RATES) == (30 / 10 + 10 / 5 + 2 / 2) + 1 / 1 + 4 / 8
    slow_host = GpuWork(kind="", products=30.0, layers=80.0, passes=1.0, seconds=0.25)
    assert seconds(slow_host, RATES) == 80 / 4 + 1 / 1 + 0.25


def test_a_step_of_decoding_reads_the_weights_and_every_sequence():
    decoding = Decoding(kind="", weights_bytes=10.0, products=1.0, cache_bytes=2.0, most_tokens=1000)
    ends = finished(decoding, DECODES, prompt=5, groups=[[1, 2]])
    prompt_s, fixed_s = 5 * 1 / 100, max(10 / 50, 2 * 1 / 100) + 2 / 200
    first_s = fixed_s + (6 + 6) * 2 / 1000  # both sequences have a prompt of 5 and their first token
    second_s = max(10 / 50, 1 / 100) + 1 / 200 + 7 * 2 / 1000
    assert ends == [pytest.approx(prompt_s + first_s + second_s)]


def test_what_the_cache_cannot_hold_waits():
    decoding = Decoding(kind="", weights_bytes=10.0, products=1.0, cache_bytes=0.0, most_tokens=30)
    ends = finished(decoding, DECODES, prompt=5, groups=[[10], [10], [10]])  # two of 15 tokens at a time
    assert ends[0] == ends[1] and ends[2] > 1.9 * ends[0]


@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=6), st.integers(45, 400))
@settings(deadline=None, max_examples=few(50))
def test_more_cache_never_takes_longer_and_longer_groups_end_later(groups, cache):
    decoding = Decoding(kind="", weights_bytes=10.0, products=1.0, cache_bytes=0.5, most_tokens=cache)
    ends = finished(decoding, DECODES, 5, groups)
    roomy = finished(replace(decoding, most_tokens=10**6), DECODES, 5, groups)
    assert max(roomy) <= max(ends) + 1e-9
    together = sorted(zip(map(max, groups), roomy))
    assert [end for _, end in together] == sorted(roomy)


# What changes what.


def test_twice_the_trainers_train_in_half_the_time_and_hold_half_the_optimizer():
    one, two = (made(described(gpus=gpus, batch=64)) for gpus in (1, 2))  # several rows per update and rank
    part = "master weights and moments"
    sizes = [{each.name: each.size_bytes for each in found.memory["learner"].held} for found in (one, two)]
    assert sizes[1][part] == sizes[0][part] / 2 and sizes[1]["gradients"] == sizes[0]["gradients"]
    assert "send each other is not counted" in " ".join(two.recording.notes)
    steps = [simulated(found.recording, Changes())[1].critical_path.by_stage["train"] for found in (one, two)]
    assert steps[1] == pytest.approx(steps[0] / 2, rel=0.1)


def learner(graph: Graph) -> dict[str, float]:
    """Bytes of the learner's parts, by name."""
    found = made(graph).memory["learner"]
    return {part.name: part.size_bytes for part in [*found.held, *found.passing["train"]]}


def test_moments_are_divided_over_the_ranks_that_hold_the_same_weights():
    """Of a mixture, experts over as many fewer as expert parallelism says. Two CPU ranks with expert_parallel=2 had
    moments of all their experts."""
    part = "master weights and moments"
    whole, context = (learner(described(gpus=n, context_parallel=n))[part] for n in (1, 2))
    assert context == whole / 2
    mixture = {"model": "30B-A3B-2-layers", "gpus": 2}
    alike, apart = (described(**mixture, expert_parallel=experts) for experts in (1, 2))
    policy, groups = alike.stages[0].model, [one.stages[-1].source for one in (alike, apart)]
    held, experts = ([getattr(divided(policy, on), of) for on in groups] for of in ("weights", "expert_matrices"))
    assert learner(alike)[part] == 12 * held[0] / 2 and experts[1] == experts[0] / 2
    assert learner(apart)[part] == 12 * ((held[1] - experts[1]) / 2 + experts[1])


def test_the_first_stage_of_a_pipeline_keeps_a_pass_for_each_stage():
    whole, half = (learner(described(gpus=n, pipeline_parallel=n)) for n in (1, 2))
    name = "activations and logits of 16,384 tokens"
    assert whole[name] == half[name]


def test_a_token_in_the_cache_is_latents_or_at_least_a_head_of_each_kind():
    latent = described(model="deepseek-v3-2-layers").stages[0]
    heads = described().stages[0]
    load = tables.load(latent.on, 256, 1024)
    assert vllm.cache_bytes(divided(latent.model, latent.on), load) == 2 * 2 * (512 + 64)
    shared = WorkerGroup("sampler", backend="vllm", workers=16, gpus=16, tensor_parallel=16)
    assert vllm.cache_bytes(divided(heads.model, shared), load) == 2 * 2 * 28 * 128, "8 heads over 16 ranks"


def test_the_most_in_use_is_that_of_the_stage_that_takes_most():
    parts = {
        "train": [
            GpuPart(name="rows", size_bytes=10, when="task"),
            GpuPart(name="cached", size_bytes=30, when="spare"),
        ],
        "prev_logprobs": [GpuPart(name="rows", size_bytes=20, when="task")],
    }
    one = GroupMemory(group=WorkerGroup("learner"), held=(), passing=parts, gpu_bytes=100, beside_bytes=5)
    assert (one.needed_bytes, one.peak_bytes) == (25, 45)


def test_tensor_parallel_ranks_hold_a_part_of_everything_but_the_libraries():
    whole, half = (made(described(gpus=n, tensor_parallel=n)).memory["learner"].peak_bytes for n in (1, 2))
    assert half < 0.6 * whole


def trained(**learner: int) -> GpuWork:
    """The work of a training task of 8 rows per update of one replica, on the busiest rank."""
    graph = described(batch=32, row=16 * 1030, gpus=max([1, *learner.values()]), **learner)
    stage = next(stage for stage in graph.stages if isinstance(stage, Train))
    (found,) = stage.work(tables.load(stage.on, 256, 1024))
    return found


def test_ranks_of_a_pipeline_wait_for_the_first_row():
    whole, half = trained(), trained(pipeline_parallel=2)
    assert whole.passes == 16 and half.passes == 16 * (1 + 1 / 8)  # one more row per update of 8
    assert half.products == pytest.approx(whole.products / 2 * (1 + 1 / 8))
    assert half.layers == pytest.approx(whole.layers / 2 * (1 + 1 / 8))


def test_tensor_and_context_parallel_ranks_divide_products_and_logits_but_launch_every_layer():
    whole = trained()
    for kind in ("tensor_parallel", "context_parallel"):
        half = trained(**{kind: 2})
        assert (half.products, half.vocabulary_bytes) == (whole.products / 2, whole.vocabulary_bytes / 2)
        assert (half.layers, half.passes) == (whole.layers, whole.passes)


def test_a_trainer_without_scored_samples_scores_all_but_the_first_minibatch():
    graph = described(row=16 * 1030)
    field = next(stage for stage in graph.stages if isinstance(stage, Train))
    load = tables.load(field.on, 256, 1024)
    prev = next(stage for stage in graph.stages if isinstance(stage, PrevLogprobs))
    scored, updates = dataclasses.replace(field, prev="own").work(load)
    assert [updates] == field.work(load) and scored.kind == "megatron.scoring"
    assert scored.products == prev.work(load).products / 2 and scored.passes == prev.work(load).passes / 2
    twice, more = dataclasses.replace(field, prev="own", epochs=2).work(load)
    assert twice == scored and more.vocabulary_bytes == 2 * updates.vocabulary_bytes
    alone = dataclasses.replace(field, prev="own", minibatches=1)
    assert alone.work(load) == dataclasses.replace(field, minibatches=1).work(load)


def test_a_cache_of_8_bits_holds_twice_as_many_tokens_and_is_read_no_faster():
    full = next(stage for stage in described().stages if isinstance(stage, Rollout))
    half = dataclasses.replace(full, on=dataclasses.replace(full.on, cache="fp8"))
    wide, narrow = (one.work(tables.load(one.on, 256, 1024)) for one in (full, half))
    assert narrow.cache_bytes == wide.cache_bytes
    assert narrow.most_tokens == pytest.approx(2 * wide.most_tokens, rel=1e-6)


def test_8_bit_weights_leave_room_for_the_cache_and_halve_what_a_refit_moves():
    graph = described()
    full = next(stage for stage in graph.stages if isinstance(stage, Rollout))
    refit = next(stage for stage in graph.stages if isinstance(stage, Refit))
    eight = dataclasses.replace(full.on, weights="fp8")
    part = divided(refit.model, eight)
    saved = part.matrices * (1 - 4 / 128**2)
    assert part.size_bytes("auto") - part.size_bytes("fp8") == pytest.approx(saved)
    wide, narrow = (one.work(tables.load(one.on, 256, 1024)) for one in (full, dataclasses.replace(full, on=eight)))
    assert wide.weights_bytes - narrow.weights_bytes == pytest.approx(saved)
    assert narrow.most_tokens > wide.most_tokens
    moved, fewer = (
        one.work(tables.load(refit.source, 256, 1024)).moved_bytes
        for one in (refit, dataclasses.replace(refit, target=eight))
    )
    assert (moved, fewer) == (part.size_bytes("auto"), part.size_bytes("fp8"))
    source, target = (tables.load(group, 256, 1024) for group in (refit.source, eight))
    size = divided(refit.model, refit.source).size_bytes
    kept = {
        name: [sum(each.size_bytes for each in one.memory(load)) for load in (source, target)]
        for name, one in (("auto", refit), ("fp8", dataclasses.replace(refit, target=eight)))
    }
    assert refit.path(is_near=True).name == "pull", "whose source keeps one copy"
    assert kept == {"auto": [size("auto"), 0], "fp8": [2 * size("fp8"), 0]}, "and one of what it quantizes"


def test_a_draft_takes_room_from_the_cache_and_speculation_is_taken_to_save_no_time():
    graph = described()
    plain = next(stage for stage in graph.stages if isinstance(stage, Rollout))
    group = dataclasses.replace(plain.on, speculate=4, draft=plain.model)
    drafts = dataclasses.replace(plain, on=group)
    load = tables.load(plain.on, 256, 1024)
    one, two = plain.work(load), drafts.work(replace(load, group=group))
    assert (two.cache_bytes, two.weights_bytes) == (one.cache_bytes, one.weights_bytes)
    assert two.most_tokens < one.most_tokens / 2
    held = [sum(part.size_bytes for part in each.memory(replace(load, group=each.on))) for each in (plain, drafts)]
    assert held[0] == pytest.approx(held[1]), "an engine takes its share of the GPU, whatever is in it"
    stages = []
    for stage in graph.stages:
        own = [name for name in ("on", "target") if getattr(stage, name, None) == plain.on]
        stages.append(dataclasses.replace(stage, **dict.fromkeys(own, group)))
    said = [made(each).recording.notes for each in (graph, dataclasses.replace(graph, stages=tuple(stages)))]
    assert [any("as fast as without drafts" in note for note in notes) for notes in said] == [False, True]


def test_a_shared_prompt_is_computed_once():
    stage = next(stage for stage in described(row=16 * 1030).stages if isinstance(stage, Train))
    short, load = tables.load(stage.on, 256, 1024), replace(tables.load(stage.on, 256, 1024), prompt=1000)
    apart = dataclasses.replace(stage, microbatch=Packed(16 * 1030, shared=False))
    ((shared,), (alone,), (small,)) = (one.work(each) for one, each in ((stage, load), (apart, load), (stage, short)))
    assert shared.products < 0.75 * alone.products and shared.attention < alone.attention
    assert shared.vocabulary_bytes == alone.vocabulary_bytes
    assert small == apart.work(short)[0]  # sharing so little does not pay
    held = [sum(part.size_bytes for part in one.memory(load)) for one in (stage, apart)]
    assert held[0] >= held[1]  # rows hold no whole samples, so they may be full


def test_an_evaluation_samples_its_own_prompts_every_so_many_steps():
    graph = described()
    rollout = graph.stages[0]
    evaluate = Evaluate(rollout.model, Generated("reverse"), on=rollout.on, every=2, prompts=512, max_tokens=1024)
    found = made(dataclasses.replace(graph, stages=(*graph.stages, evaluate)))
    times = found.recording.durations.stages
    alone_s = times["evaluate"].work(Task(stage="evaluate", step=1), samples=0, tokens=0, seed=0).work_s
    same = times["rollout"].stream(Task(stage="rollout", step=1, groups=tuple(range(16))), group_size=8, seed=0)
    assert 2 < alone_s / max(part.work_s for part in same.parts) < 4  # four times as many responses
    steps = simulated(found.recording, Changes(steps=9))[1].steps.mean
    assert steps > 1.1 * step_s(graph)


def test_an_adapter_takes_two_products_per_weight_and_room_for_itself():
    graph = described(row=16 * 1030)
    whole = next(stage for stage in graph.stages if isinstance(stage, Train))
    adapter = dataclasses.replace(whole, model=dataclasses.replace(whole.model, lora=LoRA(rank=16)))
    load = tables.load(whole.on, 256, 1024)
    work = [one.work(load)[0] for one in (whole, adapter)]
    assert work[1].products == pytest.approx(2 / 3 * work[0].products) and work[1].attention == work[0].attention
    scored = [PrevLogprobs(one.model.frozen(), on=one.on, microbatch=Packed(16 * 1030)) for one in (whole, adapter)]
    weights = divided(whole.model, whole.on).weights
    both = replace(load, trained=(whole.model, adapter.model))
    assert [one.work(both).copied_bytes for one in scored] == [4 * 2 * weights, 0], "an adapter is left out, in place"
    assert scored[0].work(load).copied_bytes == 0, "a model that nothing trains here has one copy"
    sizes = [{part.name: part.size_bytes for part in one.memory(load)} for one in (whole, adapter)]
    # By hand, of Qwen3-0.6B: A and B of q, k, v, o, gate, up and down in 28 layers.
    inputs_and_outputs = 3 * (1024 + 3072) + 2 * (1024 + 2048) + 2 * (1024 + 1024)
    trained = 28 * 16 * inputs_and_outputs
    assert (sizes[1]["gradients"], sizes[1]["master weights and moments"]) == (4 * trained, 12 * trained)
    assert sizes[1]["weights of 0.6B"] == sizes[0]["weights of 0.6B"] and sizes[1]["adapter"] == 2 * trained
    refit = dataclasses.replace(graph.stages[-1], model=adapter.model)
    assert [part.size_bytes for part in refit.memory(load)] == [2 * trained] and refit.work(
        load
    ).moved_bytes == 2 * trained


def test_a_trainer_of_an_adapter_leaves_the_sampler_all_but_the_adapter():
    whole = described(model="8B", colocated=True)
    policy = dataclasses.replace(whole.stages[0].model, lora=LoRA(rank=16))
    stages = [dataclasses.replace(one, model=policy) if hasattr(one, "model") else one for one in whole.stages]
    found = made(dataclasses.replace(whole, stages=tuple(stages)))
    assert found.problems == () and found.memory["sampler"].beside_bytes < 3 * 2**30
    assert found.recording.durations.costs.turn_s["learner"] > 0.2  # 16 GB come back from the host


def test_recomputed_activations_take_time_and_leave_memory():
    graph = described(row=16 * 1030)
    stage = next(stage for stage in graph.stages if isinstance(stage, Train))
    mlp, again = (dataclasses.replace(stage, checkpoint_activations=kept) for kept in ("mlp", True))
    load = tables.load(stage.on, 256, 1024)
    plain, some, all_of_it = (one.work(load)[0].products for one in (stage, mlp, again))
    assert all_of_it == pytest.approx(4 / 3 * plain)
    # By hand, of Qwen3-0.6B: two of the three matrices of a feed-forward part once more.
    assert some - plain == pytest.approx(2 * 256 * 1030 * 28 * 2 * 1024 * 3072, rel=0.01)
    sizes = [sum(part.size_bytes for part in one.memory(load) if part.when == "task") for one in (stage, mlp, again)]
    assert sizes[2] < 0.5 * sizes[0] and sizes[2] < sizes[1] < 0.75 * sizes[0]
    assert stage.fitting(load, 3.2e9).startswith("checkpoint_activations='mlp', microbatch=Packed(")
    assert stage.fitting(load, 2.8e9).startswith("checkpoint_activations=True, microbatch=Packed(")


def test_running_ahead_hides_the_shorter_engine():
    ahead, together = step_s(described(staleness=1)), step_s(described())
    in_turns = step_s(described(colocated=True))
    assert ahead < 0.7 * together < together < in_turns


def test_turns_take_time_and_leave_room():
    found = made(described(colocated=True))
    turns = found.recording.durations.costs.turn_s
    assert set(turns) == {"sampler", "learner"} and turns["sampler"] > turns["learner"] > 0
    bare = found.recording
    bare = replace(bare, durations=replace(bare.durations, costs=type(bare.durations.costs)()))
    without = simulated(bare, Changes())[1].steps.mean
    assert simulated(found.recording, Changes())[1].steps.mean == pytest.approx(without + sum(turns.values()))


def test_a_turn_frees_the_memory_of_the_others_and_takes_its_own():
    found, rates = made(described(colocated=True)), table("h200").rates["turns"]
    sampler, trainer = found.memory["sampler"], found.memory["learner"]
    leaves = sum(part.size_bytes for part in sampler.held if part.when != "always")
    weights = sampler.movable_bytes
    gradients = sum(part.size_bytes for part in trainer.held if part.when == "dropped")
    assert sampler.spared_bytes == trainer.movable_bytes, "there is room for the moments"
    assert sampler.cached_bytes == trainer.dropped_bytes, "and for the gradients, which its allocator keeps"
    took_s = leaves / rates["slept_bytes"] + weights / rates["copied_bytes"] + gradients / rates["woken_bytes"]
    assert found.recording.durations.costs.turn_s["learner"] == pytest.approx(took_s)


@pytest.mark.parametrize("model", ["0.6B", "4B", "8B"])
def test_an_engine_in_turns_takes_what_is_foretold(model):
    """It leaves what the trainer keeps, also what that makes after the engine's start. Moments move if they must."""
    graph = described(model=model, colocated=True)
    found, total = made(graph).memory["sampler"], table("h200").memory_bytes
    beside = resting_bytes(graph, ["learner"])
    assert beside == found.beside_bytes > 2 * 2 * divided(graph.stages[0].model, graph.stages[0].on).weights
    share = share_of(0.85, free_bytes=0.99 * total, total_bytes=total, beside_bytes=beside)
    assert share * total == pytest.approx(sum(part.size_bytes for part in found.held), rel=1e-6)
    assert (share < 0.85) == (model != "0.6B") and found.before_bytes <= USABLE * total
    assert share_of(0.85, free_bytes=total / 2, total_bytes=total, beside_bytes=beside) == pytest.approx(0.46)
    assert share_of(0.1, free_bytes=total, total_bytes=total, beside_bytes=beside) == 0.1
    small = made(described(model=model, colocated=True, memory=0.35)).memory["sampler"]
    assert small.spared_bytes > found.spared_bytes or model == "0.6B"


def test_of_a_trainer_whose_backend_says_nothing_only_the_copy_for_refits_is_known():
    graph = described(colocated=True)
    assert resting_bytes(graph, []) == 0
    refit = graph.stages[-1]
    plain = dataclasses.replace(refit.source, backend="torch")
    stages = [dataclasses.replace(one, on=plain) if hasattr(one, "microbatch") else one for one in graph.stages[:-1]]
    other = dataclasses.replace(graph, stages=(*stages, dataclasses.replace(refit, source=plain)))
    assert resting_bytes(other, ["learner"]) == 2 * divided(refit.model, plain).weights


def test_shorter_responses_take_less_and_are_spread_around_the_mean():
    graph = described()
    assert step_s(graph, mean=256) < step_s(graph)
    lengths = made(graph, mean=256).tokens / (16 * 8)
    assert lengths == pytest.approx(256, rel=0.02)


def test_plain_kernels_take_longer_and_more_memory():
    graph = described()
    assert step_s(graph, kernels="plain") > step_s(graph)
    fused, plain = made(graph), made(graph, kernels="plain")
    assert plain.memory["learner"].peak_bytes > fused.memory["learner"].peak_bytes


def test_the_time_of_a_mixture_is_not_known_and_its_memory_is():
    found = made(described(model="30B-A3B-2-layers"))
    assert "train" not in found.recording.durations.stages and "rollout" not in found.recording.durations.stages
    assert found.memory["learner"].peak_bytes > 31 * 2**30


def test_a_stage_of_the_user_says_what_it_needs():
    class Judged(Reward):
        def work(self, load):
            return GpuWork(kind="megatron.scoring", products=1e15, passes=2, seconds=1.0)

        def memory(self, load):
            return [GpuPart(name="judge", size_bytes=20 * 2**30)]

        def fitting(self, load, room_bytes):
            return ""

    judges = WorkerGroup("judges", gpus=1)
    graph = described(reward=Judged(even, on=judges))
    found = made(graph)
    rates = table("h200").rates["megatron.scoring"]
    wanted = 1.0 + 1e15 / rates["products"] + 2 / rates["passes"]
    report = simulated(found.recording, Changes())[1]
    assert found.memory["judges"].peak_bytes == 20 * 2**30
    assert report.critical_path.by_stage["reward"] == pytest.approx(wanted, rel=0.01)


class Mistaken(Reward):
    """Says what it needs in a wrong way, which `answers` has by method."""

    answers: dict[str, object] = {}

    def work(self, load):
        return self._answer("work", GpuWork())

    def memory(self, load):
        return self._answer("memory", [])

    def fitting(self, load, room_bytes):
        return ""

    def _answer(self, name, otherwise):
        answer = self.answers.get(name, otherwise)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("method", "answer", "says"),
    [
        ("work", 3.0, "work() of stage 'reward' returned 3.0; it returns a GpuWork, a list of them, or a Decoding"),
        ("work", GpuWork(products=-1.0), "it returns amounts of 0 or more"),
        ("work", KeyError("shape"), "work() of stage 'reward' raised KeyError: 'shape'"),
        ("memory", ["weights"], "memory() of stage 'reward' returned ['weights']; it returns a list of GpuPart"),
        ("memory", [GpuPart(name="weights", size_bytes=float("nan"))], "it returns bytes of 0 or more"),
    ],
)
def test_a_wrong_answer_of_a_stage_is_one_clear_error(monkeypatch, method, answer, says):
    monkeypatch.setattr(Mistaken, "answers", {method: answer})
    graph = described(reward=Mistaken(even, on=WorkerGroup("judges", gpus=1)))
    with pytest.raises(GraphError) as raised:
        made(graph)
    assert len(raised.value.problems) == 1 and says in str(raised.value.problems[0])


# What does not fit.


@pytest.mark.parametrize(("gpu", "model"), [("h100", "0.6B"), ("h200", "0.6B"), ("h200", "4B")])
def test_the_refusal_names_a_row_that_fits(gpu, model):
    too_long = made(described(model=model, colocated=True, row=400_000, batch=128), gpu)
    assert all("'learner' needs" in problem.what for problem in too_long.problems)
    tokens = int(re.search(r"microbatch=Packed\(tokens=(\d+)\) in 'train'", too_long.problems[0].fix)[1])
    assert all(problem.fix.endswith("in 'prev_logprobs'") for problem in too_long.problems[1:])
    fits = made(described(model=model, colocated=True, row=tokens, batch=128), gpu)
    assert fits.problems == ()
    longer = made(described(model=model, colocated=True, row=tokens + 2 * 1280, batch=128), gpu)
    assert len(longer.problems) == 1
    assert fits.memory["learner"].peak_bytes <= USABLE * table(gpu).memory_bytes


def test_rows_of_unlike_samples_need_not_hold_whole_ones():
    found = made(described(model="4B", row=400_000, batch=128), mean=300)
    tokens = int(re.search(r"tokens=(\d+)", found.problems[0].fix)[1])
    assert tokens % 64 == 0 and tokens % 1280
    assert made(described(model="4B", row=tokens, batch=128), mean=300).problems == ()
    assert len(made(described(model="4B", row=tokens + 64, batch=128), mean=300).problems) == 1


def test_a_model_that_no_row_fits_beside_needs_more_gpus():
    (problem,) = made(described(model="4B", row=4096), "h100").problems
    assert "'learner' needs" in problem.what and "tensor_parallel" in problem.fix
    assert made(described(model="4B", row=4096, gpus=4, tensor_parallel=4), "h100").problems == ()


def test_a_cache_without_room_for_a_sample_is_refused():
    (problem,) = made(described(colocated=True, memory=0.044)).problems
    assert "the cache of worker group 'sampler' holds" in problem.what
    assert problem.fix == "a larger memory= or tensor_parallel=, or GPUs of its own"
    assert problem.why.startswith("with its weights and buffers, the engine may have at most 0.044 of a GPU's 139.8")


def test_an_engine_that_leaves_nothing_for_its_cache_says_so():
    (apart,) = made(described(memory=0.04)).problems
    assert " holds 0 tokens, " in apart.what
    assert apart.why == (
        "the engine's weights and buffers alone take 6.1 GiB, which leaves nothing of what it may have: at most 0.04 "
        "of a GPU's 139.8 GiB"
    )


def test_no_less_than_nothing_is_left_for_a_cache_beside_groups_that_fill_the_gpu(monkeypatch):
    monkeypatch.setitem(SHAPES, "8B", SHAPES["8B"] | {"num_hidden_layers": 101})
    found = made(described(model="8B", colocated=True), "h100")
    assert found.memory["sampler"].beside_bytes > table("h100").memory_bytes * 0.98
    (told,) = (problem for problem in found.problems if "the cache of" in problem.what)
    assert told.why.startswith("the engine's weights and buffers alone take 43.6 GiB") and "-" not in told.why
    assert told.why.endswith(" at most 0.85 of a GPU's 79.1 GiB, beside 78.1 GiB of other worker groups")
    assert told.fix == "a larger tensor_parallel=, or GPUs of its own", "a larger memory= would not help"


# The commands.


@pytest.fixture
def flags(tmp_path, monkeypatch):
    """Flags of grpo.py with a folder that has nothing but a config, as on a machine without GPUs and engines."""
    monkeypatch.chdir(tmp_path)
    for name in ("0.6B", "4B"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(SHAPES[name]))
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    found = importlib.util.find_spec
    absent = ("vllm", "megatron", "nccl")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name.split(".")[0] in absent else found(name, *rest)
    )
    graph = str(REPOSITORY / "graphs/grpo.py")
    given = "--generator vllm --trainer megatron --sampler-gpus 1 --learner-gpus 1 --microbatch 8192"
    return [graph, *given.split()]


def test_simulate_needs_neither_a_run_nor_gpus_nor_engines(flags, capsys):
    assert simulate.main([*flags, "--on", "h200:1", "--model", "0.6B", "--colocated", "--steps", "4"]) == 0
    said = capsys.readouterr().out
    assert "response tokens/s" in said and "master weights and moments" in said and "prompts of 256 tokens" in said
    assert "cores busy" not in said
    assert simulate.main([*flags, "--model", "0.6B", "--colocated"]) == 2  # without --on, the engines are missing


def test_the_json_has_seconds_tokens_and_bytes(flags, capsys):
    assert simulate.main([*flags, "--on", "h200:2", "--model", "4B", "--json", "--steps", "4"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["tokens_per_step"] == 256 * 512 and 15 < said["step_s"] < 30
    assert said["memory_bytes"]["learner"]["peak"] > 80 * 2**30


def test_a_plan_shows_memory_and_refuses_what_does_not_fit(flags, capsys):
    assert run.main([*flags, "--plan", "--on", "h200:1", "--model", "0.6B", "--colocated"]) == 0
    said = capsys.readouterr().out
    assert "kept by the groups beside it" in said and "up to microbatch=Packed(tokens=" in said
    too_long = ["--model", "4B", "--colocated", "--microbatch", "100000", "--prompts-per-step", "128"]
    assert run.main([*flags, "--plan", "--on", "h200:1", *too_long]) == 2
    assert re.search(r"Fix: microbatch=Packed\(tokens=\d+\) in 'train'", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--on", "a100:1"], "of h100 and h200. Fix: --on h200:1"),
        (["--on", "h100:0"], "--on h100:0: '0' is no number of GPUs"),
        (["--on", "h200:1", "--no-colocated"], "the worker groups ask for 2 GPUs (sampler 1, learner 1), 1 available"),
        (
            ["--on", "h100:1000000"],
            "'1000000' is no number of GPUs; it is a whole number, 1 to 100,000. Fix: --on h100:1",
        ),
        (["--on", "h100:1.5"], "'1.5' is no number of GPUs; it is a whole number, 1 to 100,000. Fix: --on h100:1\n"),
        (["--on", "h100:1", "--on", "h200:1"], "--on h200:1: --on h100:1 is given too"),
        (
            ["--on", "h200:1", "--assume", "mean=9", "--assume", "mean=8"],
            "--assume mean=8: --assume mean=9 is given too",
        ),
        (["--on", "h200:1", "--prompts-per-step", "20000"], "a step has 160,000 samples: 20,000 groups of 8"),
        (["--on", "h200:2", "--groups", "8x"], "--groups: it does not go with --on"),
        (["--on", "h200:2", "--workers", "learner=2"], "--workers: it does not go with --on"),
        (["--on", "h200:2", "--assume", "mean=600"], "--assume mean=600: responses have at most 512 tokens"),
        (["--on", "h200:2", "--assume", "prompt=0"], "--assume prompt=0: '0' is no value of prompt"),
        (["--on", "h200:2", "--assume", "kernel=plain"], "--assume kernel=plain: there is no assumption 'kernel'"),
        (["--assume", "prompt=100"], "--assume prompt=100: there is no --on"),
        (
            ["--on", "h200:2", "--assume", "prompt=90000"],
            "a sample of 90,512 tokens does not fit into",
        ),
        (["--on", "h200:2", "--generator", "torch"], "the time of stage 'rollout' on h200 is not known"),
    ],
)
def test_wrong_flags_get_one_clear_error(flags, capsys, given, says):
    assert simulate.main([*flags, "--model", "0.6B", *given]) == 2
    assert says in capsys.readouterr().err


def test_a_stage_whose_time_is_given_need_not_be_known(flags, capsys):
    asked_for = [*flags, "--on", "h200:2", "--model", "0.6B", "--generator", "torch", "--stage", "rollout=30"]
    assert simulate.main([*asked_for, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] > 30


def test_a_model_of_the_hub_needs_its_config(flags, capsys, monkeypatch):
    fetched = []

    def fetch(name, file):
        fetched.append((name, file))
        if name == "acme/none":
            raise OSError("offline")
        return f"0.6B/{file}"

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    assert simulate.main([*flags, "--on", "h200:2", "--model", "acme/0.6B", "--steps", "3"]) == 0
    assert set(fetched) == {("acme/0.6B", "config.json")}
    assert simulate.main([*flags, "--on", "h200:2", "--model", "acme/none"]) == 2
    assert "the config of 'acme/none' is not on this machine" in capsys.readouterr().err


def test_a_run_directory_is_not_foretold(tmp_path, capsys):
    assert simulate.main([str(tmp_path), "--on", "h200:1"]) == 2
    assert "RUN is a run directory" in capsys.readouterr().err


def test_gpus_are_counted_and_one_is_the_default():
    assert (asked("H200:4").count, asked("h100").count) == (4, 1)
    with pytest.raises(GraphError, match="the number of GPUs is missing"):
        asked("h200:")
