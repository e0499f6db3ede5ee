"""Router replay on the torch backend: the experts that the sampler chose, from the field to the gradients."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ops.kl import kl_k3
from pipeline import Model, StageContext, StageError, WorkerGroup
from pipeline.declare.columns import Ragged
from pipeline.declare.sharding import Dynamic, Packed, Plain, Sharding
from pipeline.engine.driver import Driver
from pipeline.executors.local import LocalExecutor
from pipeline.plan.planner import plan
from pipeline.rundir import RunDir
from stages import ClippedLoss, PrevLogprobs, Reward, Rollout, Train
from stages.backends import Batch, Draws, Optimization, Sampling, engine, one_shard, part
from stages.backends.model.routes import numbered, table, unknown
from stages.routes import mixture_problems, routed_experts
from tests.shares import weight_hash
from tests.unit import tiny_graph
from tests.unit.test_folder import DEEPSEEK, GLM, MIXTURE
from tests.unit.test_torch_families import FAMILIES as OTHERS

torch.set_num_threads(1)
FAMILIES = {"qwen3_moe": MIXTURE, "glm4_moe": GLM, "deepseek_v3": DEEPSEEK}
KNOWN = FAMILIES | {"nemotron_h": OTHERS["nemotron_h, experts"]}
TEXTS = ["1", "0123456", "abc", "77", "abcab", "77"]
WHOLE = Plain()
WAYS = [WHOLE, Plain(2), Dynamic(24), Packed(24)]
LEARNER = WorkerGroup("learner", backend="torch", threads=1)
SETTINGS = Optimization(lr=1e-2)


def policy(family: str = "qwen3_moe", **changed: Any) -> Model:
    return Model(family, config=KNOWN[family] | changed, alphabet="0123456789abc", router_replay=True)


def opened() -> Any:
    return engine(StageContext(group=LEARNER, rank=0, seed=0, group_size=1, run_dir=None, shared={}))


def biased(backend: Any, model: Model, *roles: Any) -> None:
    """Give experts a bias, if the family has one, as trained models have."""
    for role in roles:
        for name, constant in backend.network(model, role).named_buffers():
            if name.endswith("e_score_correction_bias"):
                constant.copy_(torch.linspace(-0.2, 0.2, len(constant)))


def sampled(backend: Any, model: Model) -> tuple[Batch, Ragged]:
    """Samples with their experts, and the sampler's logprobs."""
    prompts = backend.encode(model, TEXTS)
    draws = Draws(0, tuple(range(len(TEXTS))), (0,) * len(TEXTS))
    made = backend.generate(model, prompts, Sampling(9, routes=True), draws)
    old = Ragged(torch.full((len(made.logprobs.values),), -2.3), made.logprobs.lengths)
    return Batch(
        prompts, made.response_ids, torch.linspace(-1, 1, len(TEXTS)), old, old, routes=made.routes
    ), made.logprobs


def scored(backend: Any, model: Model, batch: Batch, way: Any = WHOLE, routes: Ragged | None = None) -> torch.Tensor:
    given = (
        model,
        batch.prompt_ids,
        batch.response_ids,
        one_shard(batch.prompt_ids, batch.response_ids, Sharding.of(way)),
    )
    if routes is None:
        return backend.score(*given, temperature=1.0).values
    return backend.score_replayed(*given, temperature=1.0, routes=routes).values


def updated(model: Model, batch: Batch, way: Any = WHOLE, **settings: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics and weights after an update."""
    backend = opened()
    biased(backend, model, "trained")
    learner = backend.learner(model, replace(SETTINGS, **settings))
    shard = one_shard(batch.prompt_ids, batch.response_ids, Sharding.of(way))
    made = learner.update(batch, ClippedLoss(), temperature=1.0, update=shard.updates[0], packed=shard.packed)
    return made, backend.trained_weights(model)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: Any) -> tuple[Any, Model, Batch, Ragged]:
    backend, model = opened(), policy(request.param)
    biased(backend, model, "served", "trained")
    return backend, model, *sampled(backend, model)


def test_the_sampler_returns_the_experts_of_each_token_but_the_last(case: Any) -> None:
    """Those of a pass over each sample alone, by the scores that the network itself returns."""
    backend, model, batch, _ = case
    network = backend.network(model, "trained")
    logits: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda module, given, made: logits.append(made[0]))
        for module in network.modules()
        if type(module).__name__.lower().endswith("router")
    ]
    for prompt, response, routes in zip(batch.prompt_ids.rows(), batch.response_ids.rows(), batch.routes.rows()):
        logits.clear()
        with torch.no_grad():
            network(torch.cat([prompt, response[:-1]])[None])
        found = routes.view(len(prompt) + len(response) - 1, len(logits), -1).long()
        for layer, scores in enumerate(logits):
            wanted = scores
            if model.source != "qwen3_moe":  # two groups of two experts, of which one is chosen whole
                groups = (scores.sigmoid() + torch.linspace(-0.2, 0.2, 4)).unflatten(-1, (2, 2)).sum(-1)
                wanted = groups.repeat_interleave(2, -1)
            assert torch.equal(wanted.topk(2).indices.sort(-1).values, found[:, layer].sort(-1).values)
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_replaying_the_own_choice_changes_no_bit(case: Any, way: Any) -> None:
    backend, model, batch, logprobs = case
    assert torch.equal(scored(backend, model, batch, way, batch.routes), scored(backend, model, batch, way))
    torch.testing.assert_close(scored(backend, model, batch, way, batch.routes), logprobs.values, atol=1e-5, rtol=0)
    with_routes, weights = updated(model, batch, way)
    without, others = updated(model, replace(batch, routes=None), way)
    assert with_routes.pop("router_disagreement") == 0.0
    assert with_routes == without and weight_hash(weights) == weight_hash(others)


def test_experts_stay_with_their_tokens_where_packed_rows_are_rectangles() -> None:
    """The torch backend packs no rows of a NemotronH (stages/backends/torch/rows.py)."""
    model, backend = policy("nemotron_h"), opened()
    batch, _ = sampled(backend, model)
    tokens, random = len(batch.routes.values) // 2, torch.Generator().manual_seed(0)  # 1 layer, 2 of 4 experts
    chosen = torch.rand(tokens, 4, generator=random).argsort(-1)[:, :2].flatten().to(torch.uint8)
    given = Ragged(chosen, batch.routes.lengths)
    wanted = scored(backend, model, batch, WHOLE, given)
    assert not torch.allclose(wanted, scored(backend, model, batch), atol=1e-3)
    torch.testing.assert_close(scored(backend, model, batch, Packed(24), given), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_given_experts_are_computed_with_the_own_scores(family: str) -> None:
    """A large bias makes a router of sigmoids choose two experts, and changes neither its scores nor its gradient."""
    model, backend = policy(family), opened()
    batch, _ = sampled(backend, model)
    layers = backend.routers(model, "served").layers
    forced = Ragged(torch.tensor([2, 3], dtype=torch.uint8).repeat(len(batch.routes.values) // 2), batch.routes.lengths)
    assert not torch.equal(forced.values, batch.routes.values.to(torch.uint8)) and layers
    wants = opened()
    for name, constant in wants.network(model, "trained").named_buffers():
        if name.endswith("e_score_correction_bias"):
            constant.copy_(torch.tensor([0.0, 0.0, 100.0, 100.0]))
    torch.testing.assert_close(
        scored(backend, model, batch, routes=forced), scored(wants, model, batch), atol=1e-6, rtol=0
    )
    shard = one_shard(batch.prompt_ids, batch.response_ids)
    for each, given in ((backend, replace(batch, routes=forced)), (wants, replace(batch, routes=None))):
        learner = each.learner(model, SETTINGS)
        learner.update(given, ClippedLoss(), temperature=1.0, update=shard.updates[0], packed=False)
    found, wanted = backend.trained_weights(model), wants.trained_weights(model)
    routers = [name for name in found if name.endswith("gate.weight")]
    assert len(routers) == layers
    for name in found:
        if not name.endswith("e_score_correction_bias"):
            torch.testing.assert_close(found[name], wanted[name], atol=2e-5, rtol=0, msg=name)


def test_given_experts_of_a_softmax_are_those_of_a_model_that_has_no_others() -> None:
    model, backend = policy(norm_topk_prob=True), opened()
    batch, _ = sampled(backend, model)
    forced = Ragged(torch.tensor([3, 1], dtype=torch.uint8).repeat(len(batch.routes.values) // 2), batch.routes.lengths)
    small = policy(norm_topk_prob=True, num_experts=2)
    wants = opened()
    network = wants.network(small, "trained")
    kept = dict(network.named_parameters())
    with torch.no_grad():
        for name, weight in backend.network(model, "trained").named_parameters():
            kept[name].copy_(weight[[1, 3]] if weight.shape != kept[name].shape else weight)
    torch.testing.assert_close(
        scored(backend, model, batch, routes=forced), scored(wants, small, batch), atol=1e-5, rtol=0
    )


def test_tokens_whose_experts_are_not_known_choose_their_own(case: Any) -> None:
    backend, model, batch, _ = case
    other = Ragged((batch.routes.values + 1).clamp(max=3).to(torch.uint8), batch.routes.lengths)
    other.values[:] = unknown(torch.uint8)
    assert torch.equal(scored(backend, model, batch, routes=other), scored(backend, model, batch))
    known = part(batch.routes, [0, 1])
    other.values[: len(known.values)] = known.values.to(torch.uint8)
    made, _ = updated(model, replace(batch, routes=other))
    assert made["router_disagreement"] == 0.0


@pytest.mark.parametrize("way", WAYS[1:], ids=str)
def test_recomputed_layers_have_the_same_experts(case: Any, way: Any) -> None:
    _, model, batch, _ = case
    other = Ragged(batch.routes.values.flip(0), batch.routes.lengths)  # of other tokens
    made, weights = updated(model, replace(batch, routes=other), way)
    again, same = updated(model, replace(batch, routes=other), way, checkpoint_activations=True)
    whole, wanted = updated(model, replace(batch, routes=other))
    assert made["router_disagreement"] == again["router_disagreement"] == whole["router_disagreement"] > 0.1
    assert weight_hash(weights) == weight_hash(same)
    for name in wanted:
        torch.testing.assert_close(weights[name], wanted[name], atol=1e-4, rtol=0)


def test_replay_brings_the_trainer_closer_to_a_sampler_in_bfloat16() -> None:
    model = policy(num_experts=16, num_hidden_layers=6)
    backend = opened()
    backend.network(model, "served").bfloat16()
    batch, logprobs = sampled(backend, model)
    free, replayed = (
        float(kl_k3(logprobs.values, scored(backend, model, batch, routes=routes)).mean())
        for routes in (None, batch.routes)
    )
    assert replayed < free / 5


def test_numbers_place_tokens_in_any_layout() -> None:
    prompts, responses = numbered([2, 2, 1], [2, 1, 3], shared=(2, 1))
    assert [row.tolist() for row in prompts.rows()] == [[1, 2], [1, 2], [6]]
    assert [row.tolist() for row in responses.rows()] == [[3, 0], [0], [7, 8, 0]]
    prompts, _ = numbered([2, 2, 1], [2, 1, 3])
    assert [row.tolist() for row in prompts.rows()] == [[1, 2], [4, 5], [6]]


def test_a_field_of_another_model_is_refused() -> None:
    with pytest.raises(
        StageError, match="sample 1 of a microbatch: routed_experts has 12 entries; 2 tokens in 2 layers"
    ):
        table(Ragged(torch.zeros(20, dtype=torch.uint8), (8, 12)), [1, 1], [2, 2], layers=2, chosen=2)


def test_the_field_has_the_smallest_dtype_that_also_holds_a_number_for_unknown_experts() -> None:
    for experts, dtype in ((128, "uint8"), (255, "uint8"), (256, "int16")):
        assert routed_experts(policy(num_experts=experts)).dtype == dtype
    assert routed_experts(Model("Qwen/Qwen3-30B-A3B", router_replay=True)).dtype == "int16"


@pytest.mark.parametrize(
    ("config", "has"),
    [
        (GLM, True),
        (GLM | {"first_k_dense_replace": 9}, False),
        (DEEPSEEK | {"num_hidden_layers": 1}, False),
        (MIXTURE | {"mlp_only_layers": [0]}, True),
        (MIXTURE | {"mlp_only_layers": [0, 1]}, False),
        (MIXTURE | {"decoder_sparse_step": 3}, False),
        ({"model_type": "glm4_moe"}, True),  # as far as that is known
    ],
)
def test_a_mixture_without_a_layer_that_has_experts_is_refused(config: dict[str, Any], has: bool) -> None:
    found = list(mixture_problems(Model("mixture", config=config, alphabet="01", router_replay=True)))
    assert [problem.why for problem in found] == ([] if has else ["none of its layers has experts"])


def many_ones(response: str) -> float:
    return float(response.count("1"))


def described(steps: int = 4) -> Any:
    """The smallest graph, with a mixture that replays routes."""
    graph = tiny_graph.graph(steps=steps, checkpoint_every=2)
    (first,) = {stage.model for stage in graph.stages if isinstance(stage, Train)}
    model = replace(first, config=MIXTURE, router_replay=True)
    stages = [replace(stage, model=model) if hasattr(stage, "model") else stage for stage in graph.stages]
    stages = [Reward(many_ones) if isinstance(stage, Reward) else stage for stage in stages]
    stages = [replace(stage, minibatches=2, lr=0.3) if isinstance(stage, Train) else stage for stage in stages]
    return replace(graph, stages=tuple(stages))


@pytest.mark.journal_expected("I8")  # the resumed run has the checkpoint of another one
def test_a_run_replays_routes_and_a_resumed_one_goes_on_to_the_bit(tmp_path: Path) -> None:
    graph = described()
    made, problems = plan(graph)
    assert not problems
    fields = {stage.name: {field.name for field in stage.reads} for stage in graph.stages}
    assert [name for name, read in fields.items() if "routed_experts" in read] == ["prev_logprobs", "train"]
    whole, resumed = RunDir(tmp_path / "whole").create(), RunDir(tmp_path / "resumed")
    Driver(graph, made, LocalExecutor(), run_dir=whole).execute()
    lines = [msgspec.json.decode(line) for line in whole.metrics.read_bytes().splitlines()][1:]
    assert all(line["train/mismatch_kl"] < 1e-6 for line in lines)
    assert max(line["train/router_disagreement"] for line in lines) > 0.0, (
        "the second update of a step is another router"
    )
    shutil.copytree(whole.checkpoint(2), resumed.create().checkpoint(2))
    Driver(graph, made, LocalExecutor(), run_dir=resumed, start=2).execute()
    files = [run.checkpoint(4) / "train/weights.safetensors" for run in (whole, resumed)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_frozen_copy_routes_by_itself(case: Any) -> None:
    _, model, *_ = case
    assert routed_experts(model) not in PrevLogprobs(model.frozen(), on=LEARNER).reads
    assert routed_experts(model) in Rollout(model, on=LEARNER).writes
    assert routed_experts(model) not in Rollout(replace(model, router_replay=False), on=LEARNER).writes
