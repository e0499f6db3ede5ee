"""The model stages without an engine: columns in, columns out."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs

from graphs.quickstart import graph as quickstart
from ops.flops import Transformer, model_flops
from ops.refit.share import digest_of
from ops.refit.transports import TRANSPORTS
from ops.rewards import digit_match, exact_match
from pipeline import Graph, Model, Output, Schedule, Stage, StageContext, StageError, Task, WorkerGroup
from pipeline.declare.columns import Columns, Ragged
from pipeline.declare.sharding import Packed, Sharding
from stages import (
    ClippedLoss,
    Episode,
    Evaluate,
    Generated,
    PrevLogprobs,
    Prompts,
    Refit,
    RefLogprobs,
    Rollout,
    Supervised,
    Train,
)
from stages.backends import engine
from stages.logprobs import speed
from tests.shares import weight_hash
from tests.unit.environments import OneTurn
from tests.unit.streams import collected, whole
from tests.unit.tiny import QWEN3

torch.set_num_threads(1)
CONFIG = QWEN3 | {"num_hidden_layers": 1}
TASK = Generated("reverse", digits=2, held_out=20)
POLICY = Model("tiny", config=CONFIG, alphabet=TASK.alphabet)
SAMPLER = WorkerGroup("sampler", backend="torch", threads=1)
LEARNER = WorkerGroup("learner", backend="torch", threads=1)
G = 4


def context(group: WorkerGroup = SAMPLER, seed: int = 0, steps: int = 0) -> StageContext:
    return StageContext(group=group, rank=0, seed=seed, group_size=G, run_dir=None, shared={}, steps=steps)


def described(*stages: Stage, batch: int = 8) -> Graph:
    return Graph(name="g", source=Prompts(TASK, batch=batch), stages=stages, schedule=Schedule(steps=1))


def prompts_of(groups: tuple[int, ...]) -> Columns:
    return {"prompt": [TASK.train(group)[0] for group in groups for _ in range(G)]}


def rolled_out(stage: Rollout, groups: tuple[int, ...], *, seed: int = 0, version: int = 0) -> list[Output]:
    run = stage.setup(context(seed=seed))
    return collected(run(prompts_of(groups), Task(stage="rollout", step=0, groups=groups, version=version)))


ROLLOUT = Rollout(POLICY, on=SAMPLER, samples_per_prompt=G, max_tokens=6)
EPISODE = Episode(POLICY, OneTurn(), on=SAMPLER, samples_per_prompt=G, turn_tokens=6, environments=1)
SHORT = replace(ROLLOUT, stop=tuple("01234567"))  # makes groups end at different tokens


def test_rollout_writes_what_it_declares() -> None:
    outputs = rolled_out(SHORT, (0, 1, 5), version=3)
    assert len(outputs) > 1
    assert all(list(output.columns) == [field.name for field in ROLLOUT.writes] for output in outputs)
    columns = whole(outputs)
    lengths = columns["response_ids"].lengths
    assert len(lengths) == 12 and max(lengths) <= 6 and min(lengths) >= 1
    assert lengths == columns["rollout_logprobs"].lengths == columns["token_versions"].lengths
    assert set(columns["token_versions"].values.tolist()) == {3}
    assert columns["token_versions"].values.dtype == torch.int32
    assert columns["truncated"].dtype == torch.bool and columns["truncated"].shape == (12,)
    for ids, text in zip(columns["response_ids"].rows(), columns["response"]):
        assert text == "".join(TASK.alphabet[i - 2] for i in ids.tolist() if i > 1)
    for ids, text in zip(columns["prompt_ids"].rows(), prompts_of((0, 1, 5))["prompt"]):
        assert "".join(TASK.alphabet[i - 2] for i in ids.tolist()) == text
    assert ROLLOUT.group_size == G and ROLLOUT.stamps in ROLLOUT.writes


def test_the_metrics_of_a_rollout_are_means_over_samples() -> None:
    outputs = rolled_out(SHORT, (0, 1, 5, 6, 7, 8))
    assert len({len(output.index) for output in outputs}) > 1
    columns = whole(outputs)
    mean = {name: sum(o.metrics[name] * len(o.index) for o in outputs) / 24 for name in outputs[0].metrics}
    assert mean == pytest.approx(
        {
            "length_mean": sum(columns["response_ids"].lengths) / 24,
            "truncated": columns["truncated"].float().mean().item(),
        }
    )


def test_a_group_is_the_same_in_any_company() -> None:
    together, alone, other_seed, other_group = (
        whole(rolled_out(ROLLOUT, groups, seed=seed))["response"]
        for groups, seed in (((0, 1, 5), 0), ((5,), 0), ((5,), 1), ((6,), 0))
    )
    assert together[8:] == alone
    assert len(set(alone)) > 1
    assert other_seed != alone != other_group


def test_decode_batches_are_whole_groups_and_change_no_sample() -> None:
    parts = rolled_out(replace(SHORT, decode_batch=2), (0, 1, 5))
    seen = [sample for part in parts for sample in part.index]
    assert set(seen[:8]) == set(range(8)) and seen[8:] == list(range(8, 12))
    assert whole(parts)["response"] == whole(rolled_out(SHORT, (0, 1, 5)))["response"]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("stage", [ROLLOUT, EPISODE], ids=lambda stage: stage.name)
def test_weights_that_are_no_numbers_are_said(stage: Any, temperature: float) -> None:
    here = context()
    engine(here).network(POLICY, "served").get_input_embeddings().weight.data.fill_(float("nan"))
    run = replace(stage, temperature=temperature).setup(here)
    with pytest.raises(
        StageError, match=rf"^stage '{stage.name}': tokens of version 2 have logprobs that are not finite"
    ):
        collected(run(prompts_of((0,)), Task(stage=stage.name, step=0, groups=(0,), version=2)))
    for held in here.shared.values():
        getattr(held, "close", lambda: None)()


def batch_columns(groups: tuple[int, ...] = (0, 1, 2, 3), *, kl: bool = False, shared: Any = None) -> Columns:
    columns = whole(rolled_out(ROLLOUT, groups))
    run = PrevLogprobs(POLICY, on=LEARNER).setup(context(LEARNER))
    columns |= run(columns, Task(stage="prev_logprobs", step=0, groups=groups)).columns
    if kl:
        columns["ref_logprobs"] = columns["prev_logprobs"]
    columns["advantage"] = torch.linspace(-1, 1, len(groups) * G)
    return columns


@pytest.mark.parametrize("stage", [PrevLogprobs(POLICY, on=LEARNER), RefLogprobs(POLICY.frozen(), on=LEARNER)])
def test_logprobs_are_computed_in_the_microbatches_that_the_task_has(stage: Stage, monkeypatch: Any) -> None:
    """The handle holds them. If each rank packed on its own, ranks could run different numbers of microbatches."""
    columns, here = batch_columns(), context(LEARNER)
    lengths = {"P": columns["prompt_ids"].lengths, "T": columns["response_ids"].lengths}
    (planned,) = Sharding.of(Packed(31)).shards(lengths, 1)
    (own,) = stage.sharding.shards(lengths, 1)
    backend, taken = engine(here), []
    score = backend.score
    monkeypatch.setattr(
        backend, "score", lambda *given, **named: taken.append(given[3]) or score(*given, **named), raising=False
    )
    run = stage.setup(here)
    groups = (0, 1, 2, 3)
    for shard in (planned, None):
        run(columns, Task(stage=stage.name, step=0, groups=groups, shard=shard))
    assert taken == [planned, own] and planned != own


def test_updates_are_made_in_the_microbatches_that_the_task_has() -> None:
    columns, stage, groups = batch_columns(), Train(POLICY, on=LEARNER, lr=0.0, minibatches=2), (0, 1, 2, 3)
    lengths = {"P": columns["prompt_ids"].lengths, "T": columns["response_ids"].lengths}
    (planned,) = Sharding.of(Packed(31), minibatches=2).shards(lengths, 1)
    (own,) = stage.sharding.shards(lengths, 1)
    runner, taken = stage.setup(context(LEARNER)), []
    update = runner.learner.update
    runner.learner.update = lambda *given, **named: (
        taken.append((named["update"], named["packed"])) or update(*given, **named)
    )
    for shard in (planned, None):
        runner(columns, Task(stage="train", step=0, groups=groups, shard=shard))
    assert taken == [(each, shard.packed) for shard in (planned, own) for each in shard.updates]
    assert planned.packed and not own.packed and planned.updates != own.updates


@pytest.mark.parametrize(
    ("group", "equal"),
    [
        ({}, False),
        ({"workers": 2, "fully_sharded": True}, True),
        ({"workers": 2, "expert_parallel": 2}, True),
    ],
)
def test_ranks_that_hold_the_weights_together_score_equally_many_microbatches(group: Any, equal: bool) -> None:
    for stage in (PrevLogprobs(POLICY, on=WorkerGroup("learner", backend="torch", **group)), RefLogprobs(POLICY)):
        assert stage.sharding.equal == (equal and stage.on is not None)
    assert Train(POLICY, on=WorkerGroup("learner", backend="torch", **group), lr=1e-3).sharding.equal


def test_prev_and_ref_logprobs_are_the_rollouts_of_the_same_weights() -> None:
    columns = batch_columns()
    torch.testing.assert_close(columns["prev_logprobs"].values, columns["rollout_logprobs"].values, atol=1e-5, rtol=0)
    stage = RefLogprobs(POLICY.frozen(), on=LEARNER, microbatch=3)
    reference = stage.setup(context(LEARNER))(columns, Task(stage="ref_logprobs", step=0)).columns
    assert list(reference) == ["ref_logprobs"]
    torch.testing.assert_close(reference["ref_logprobs"].values, columns["prev_logprobs"].values, atol=1e-5, rtol=0)


def test_the_reference_does_not_follow_the_trained_model() -> None:
    shared = context(LEARNER)
    columns, task = batch_columns(), Task(stage="any", step=0, groups=(0, 1, 2, 3))
    previous = PrevLogprobs(POLICY, on=LEARNER).setup(shared)
    reference = RefLogprobs(POLICY.frozen(), on=LEARNER).setup(shared)
    train = Train(POLICY, on=LEARNER, lr=1e-2).setup(shared)
    before = [run(columns, task).columns for run in (previous, reference)]
    train(columns, task)
    after = [run(columns, task).columns for run in (previous, reference)]
    assert not torch.equal(before[0]["prev_logprobs"].values, after[0]["prev_logprobs"].values)
    assert torch.equal(before[1]["ref_logprobs"].values, after[1]["ref_logprobs"].values)


def test_train_reads_reference_logprobs_only_for_a_kl_term() -> None:
    plain, with_kl = Train(POLICY, on=LEARNER, lr=1e-3), Train(POLICY, on=LEARNER, lr=1e-3, loss=ClippedLoss(kl=0.1))
    assert "ref_logprobs" not in {field.name for field in plain.reads}
    assert "ref_logprobs" in {field.name for field in with_kl.reads}


def test_train_makes_minibatches_times_epochs_updates() -> None:
    stage = Train(POLICY, on=LEARNER, lr=1e-2, minibatches=2, epochs=3, loss=ClippedLoss(kl=0.1))
    task = Task(stage="train", step=7, groups=(0, 1, 2, 3), version=7)
    output = stage.setup(context(LEARNER))(batch_columns(kl=True), task)
    assert output.weights == (8, "")
    assert output.columns == {}
    assert output.metrics["updates"] == 6.0 and output.metrics["skipped"] == 0.0
    assert output.metrics["ratio_max"] > 1.0 and output.metrics["clip_fraction"] > 0
    assert output.metrics["kl"] > 0
    assert abs(output.metrics["mismatch_kl"]) < 1e-8


def test_padding_and_imbalance_are_those_of_the_shard() -> None:
    columns, groups = batch_columns(), (0, 1, 2, 3)
    lengths = {"P": columns["prompt_ids"].lengths, "T": columns["response_ids"].lengths}
    planned = replace(Train(POLICY, on=LEARNER, lr=0.0), microbatch=0).sharding.shards(lengths, 1)[0]
    assert 0 < planned.padding < 1 and planned.imbalance == 1
    uneven = structs.replace(planned, imbalance=1.25)
    for stage in (Train(POLICY, on=LEARNER, lr=0.0), PrevLogprobs(POLICY, on=LEARNER)):
        run = stage.setup(context(LEARNER))
        metrics = run(columns, Task(stage=stage.name, step=0, groups=groups, shard=uneven)).metrics
        assert (metrics["padding"], metrics["imbalance"]) == (planned.padding, 1.25)
        assert metrics["microbatches"] == sum(len(update.microbatches) for update in planned.updates) > 0


def test_minibatches_are_runs_of_whole_groups_in_order() -> None:
    seen = []
    stage = Train(POLICY, on=LEARNER, lr=0.0, minibatches=2)
    runner = stage.setup(context(LEARNER))
    update = runner.learner.update
    runner.learner.update = lambda *given, **named: (seen.append(named["update"]), update(*given, **named))[1]
    runner(batch_columns(), Task(stage="train", step=0, groups=(0, 1, 2, 3)))
    samples = [[i for part in each.microbatches for i in part.samples] for each in seen]
    assert samples == [list(range(8)), list(range(8, 16))]


def test_mismatch_is_seen() -> None:
    columns = batch_columns()
    rollout = columns["rollout_logprobs"]
    columns["rollout_logprobs"] = Ragged(rollout.values - 0.5, rollout.lengths)
    output = Train(POLICY, on=LEARNER, lr=1e-3).setup(context(LEARNER))(columns, Task(stage="train", step=0))
    assert output.metrics["mismatch_kl"] == pytest.approx(torch.tensor(0.5).exp().item() - 1.5, rel=1e-3)
    assert output.metrics["token_mult_prob_error"] == pytest.approx(math.exp(0.5), rel=1e-3)
    assert output.metrics["mismatch_ratio_max"] == pytest.approx(math.exp(0.5), rel=1e-3)


def test_tokens_that_the_policy_did_not_draw_are_not_compared() -> None:
    columns = batch_columns()
    rollout, versions = columns["rollout_logprobs"], columns["token_versions"]
    inserted = torch.arange(len(rollout.values)) % 3 == 1
    columns["rollout_logprobs"] = Ragged(rollout.values.masked_fill(inserted, 0.0), rollout.lengths)
    columns["token_versions"] = Ragged(versions.values.masked_fill(inserted, -1), versions.lengths)
    run = Train(POLICY, on=LEARNER, lr=1e-3, minibatches=2).setup(context(LEARNER))
    metrics = run(columns, Task(stage="train", step=5)).metrics
    assert metrics["staleness_max"] == metrics["staleness_mean"] == 5.0
    same = {"mismatch_kl": 0.0, "token_mult_prob_error": 1.0, "mismatch_ratio_max": 1.0, "mismatch_ess": 1.0}
    assert {name: metrics[name] for name in same} == pytest.approx(same, abs=1e-4)
    columns["token_versions"] = Ragged(torch.full_like(versions.values, -1), versions.lengths)
    with pytest.raises(StageError, match="minibatch 1 of 'train' has no token that the policy drew"):
        run(columns, Task(stage="train", step=6))


def test_the_error_of_a_token_counts_the_same_in_both_directions() -> None:
    columns = batch_columns()
    rollout = columns["rollout_logprobs"]
    shifts = torch.where(torch.arange(len(rollout.values)) % 2 == 0, math.log(2.0), -math.log(4.0))
    columns["rollout_logprobs"] = Ragged(rollout.values + shifts, rollout.lengths)
    output = Train(POLICY, on=LEARNER, lr=1e-3).setup(context(LEARNER))(columns, Task(stage="train", step=0))
    expected = float(torch.where(shifts > 0, 2.0, 4.0).mean())
    assert output.metrics["token_mult_prob_error"] == pytest.approx(expected, rel=1e-3)


def test_a_step_without_a_finite_update_reports_only_counts() -> None:
    columns = batch_columns()
    columns["advantage"][0] = float("nan")
    output = Train(POLICY, on=LEARNER, lr=1e-3).setup(context(LEARNER))(columns, Task(stage="train", step=0))
    assert output.metrics["skipped"] == 1.0 and output.metrics["updates"] == 0.0
    assert "loss" not in output.metrics


def test_a_restored_runner_continues_bit_for_bit(tmp_path: Path) -> None:
    stage = Train(POLICY, on=LEARNER, lr=1e-2, minibatches=2, schedule="linear")
    columns, task = batch_columns(), Task(stage="train", step=0, groups=(0, 1, 2, 3))
    contexts = [context(LEARNER, steps=2) for _ in range(2)]
    first, second = (stage.setup(each) for each in contexts)
    first(columns, task)
    first.save(tmp_path)
    second.restore(tmp_path)
    metrics = [each(columns, task).metrics for each in (first, second)]
    assert all(found.pop("tflops_per_s") > 0 for found in metrics)  # the only timing among the metrics
    assert metrics[0] == metrics[1]
    hashes = [weight_hash(engine(each).trained_weights(POLICY)) for each in contexts]
    assert hashes[0] == hashes[1]


class Meeting:
    """Fake of both sides of a transfer, used one after the other; `spoil` changes the payload."""

    def __init__(self, spoil: Any = None) -> None:
        self.side, self.is_near, self.spoil = "source", True, spoil
        self.payloads: list[Any] = []

    def offer(self, payload: Any) -> None:
        self.payloads, self.side = [payload], "target"
        if self.spoil:
            self.spoil(payload)

    def take(self) -> list[Any]:
        return self.payloads


def test_refit_serves_the_trained_weights() -> None:
    sampler, learner = context(SAMPLER), context(LEARNER)
    stage = Refit(POLICY, source=LEARNER, target=SAMPLER)
    sides = [stage.setup(learner), stage.setup(sampler)]
    train = Train(POLICY, on=LEARNER, lr=1e-2).setup(learner)
    train(batch_columns(), Task(stage="train", step=0, groups=(0, 1, 2, 3)))
    sent = weight_hash(engine(learner).trained_weights(POLICY))
    offered = digest_of([engine(learner).share(POLICY, TRANSPORTS["pull"])])
    assert weight_hash(engine(sampler).served_weights(POLICY)) != sent
    meeting, task = Meeting(), Task(stage="refit", step=4, version=4)
    assert sides[0](meeting, task).weights is None
    output = sides[1](meeting, task)
    assert output.weights == (5, offered)
    assert engine(sampler).served_version(POLICY) == 5 and engine(learner).served_version(POLICY, 3) == 3
    assert weight_hash(engine(sampler).served_weights(POLICY)) == sent
    assert output.metrics["size_bytes"] == 4 * sum(
        p.numel() for p in engine(sampler).network(POLICY, "served").parameters()
    )
    assert stage.groups() == (LEARNER, SAMPLER)


def test_the_first_refit_publishes_the_version_that_there_is() -> None:
    stage, meeting = Refit(POLICY, source=LEARNER, target=SAMPLER), Meeting()
    sides = [stage.setup(context(LEARNER)), stage.setup(context(SAMPLER))]
    task = Task(stage="refit", step=-1, version=0)
    sides[0](meeting, task)
    assert sides[1](meeting, task).weights[0] == 0


def test_training_after_a_refit_does_not_change_what_is_served_on_the_same_group() -> None:
    both = context(LEARNER)
    stage, meeting = Refit(POLICY, source=LEARNER, target=LEARNER), Meeting()
    task = Task(stage="refit", step=0)
    run, train = stage.setup(both), Train(POLICY, on=LEARNER, lr=1e-2).setup(both)
    run(meeting, task)
    _, served = run(meeting, task).weights
    before = weight_hash(engine(both).served_weights(POLICY))
    train(batch_columns(), Task(stage="train", step=1, groups=(0, 1, 2, 3)))
    assert weight_hash(engine(both).served_weights(POLICY)) == before
    assert digest_of([engine(both).share(POLICY, TRANSPORTS["pull"])]) != served


def test_a_transfer_that_changes_anything_is_an_error() -> None:
    def spoil(share: Any) -> None:
        share.memory.bytes[1000] += 1

    stage, meeting = Refit(POLICY, source=LEARNER, target=SAMPLER), Meeting(spoil)
    sides = [stage.setup(context(LEARNER)), stage.setup(context(SAMPLER))]
    task = Task(stage="refit", step=2, version=2)
    sides[0](meeting, task)
    with pytest.raises(StageError, match=r"refit: offered weights have sha256 \w+, served weights \w+"):
        sides[1](meeting, task)


def test_evaluation_is_greedy_exact_match_on_held_out_prompts() -> None:
    warm = replace(POLICY, warm_start=Supervised(TASK, steps=60, lr=5e-3))
    stage = Evaluate(warm, TASK, on=SAMPLER, reward=(exact_match, digit_match), prompts=15, max_tokens=3)
    shared = context()
    output = stage.setup(shared)({}, Task(stage="evaluate", step=0))
    assert output.columns == {}
    network = engine(shared).network(warm, "served")
    right = 0
    for prompt, answer in TASK.held_out_pairs(15):
        ids = [TASK.alphabet.index(c) + 2 for c in prompt]
        for _ in range(3):
            with torch.no_grad():
                ids.append(network(input_ids=torch.tensor([ids])).logits[0, -1].argmax().item())
            if ids[-1] == 1:
                break
        right += "".join(TASK.alphabet[i - 2] for i in ids[len(prompt) :] if i > 1) == answer
    assert output.metrics["eval/exact_match"] == pytest.approx(right / 15)
    assert output.metrics["eval/digit_match"] > output.metrics["eval/exact_match"] > 0
    assert output.metrics["eval/count"] == 15
    parts = replace(stage, decode_batch=4).setup(shared)({}, Task(stage="evaluate", step=0))
    assert parts.metrics == pytest.approx(output.metrics)


def test_evaluation_reads_a_file(tmp_path: Path) -> None:
    path = tmp_path / "held_out.jsonl"
    path.write_text("".join(json.dumps({"q": p, "a": a}) + "\n" for p, a in TASK.held_out_pairs(5)))
    stage = Evaluate(POLICY, path, on=SAMPLER, max_tokens=3, prompts=4, prompt="q", answer="a")
    assert list(stage.check(described(stage))) == []
    assert stage.setup(context())({}, Task(stage="evaluate", step=0)).metrics["eval/count"] == 4


def test_evaluation_passes_columns_of_the_data_to_rewards(tmp_path: Path) -> None:
    seen = []

    def levelled(response: str, level: int, text: str, truncated: bool) -> float:
        seen.append((level, text, truncated))
        return float(level)

    path = tmp_path / "held_out.jsonl"
    path.write_text("".join(f'{{"prompt": "1{n}", "answer": "2", "level": {n}, "text": "t{n}"}}\n' for n in range(3)))
    stage = Evaluate(POLICY, path, on=SAMPLER, max_tokens=1, reward=levelled, extra=("level", "text"))
    assert list(stage.check(described(stage))) == []
    assert stage.setup(context())({}, Task(stage="evaluate", step=0)).metrics["eval/levelled"] == 1
    assert [row[:2] for row in seen] == [(0, "t0"), (1, "t1"), (2, "t2")] and {type(row[2]) for row in seen} == {bool}


def texts(stage: Stage, *others: Stage, batch: int = 8) -> list[str]:
    problems = stage.check(described(stage, *others, batch=batch))
    return [str(problem).removeprefix(f"{stage.location}: ") for problem in problems]


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        (
            replace(ROLLOUT, temperature=0.0),
            "stage 'rollout' has temperature=0.0; temperature must be a number above 0. Fix: temperature=1.0",
        ),
        (
            replace(ROLLOUT, top_p=1.5),
            "stage 'rollout' has top_p=1.5; top_p must be a number above 0 and at most 1. Fix: top_p=1.0",
        ),
        (
            replace(ROLLOUT, max_tokens=0),
            "stage 'rollout' has max_tokens=0; max_tokens must be a whole number from 1 to 2**31. Fix: max_tokens=512",
        ),
        (
            replace(ROLLOUT, top_k=-1),
            "stage 'rollout' has top_k=-1; top_k must be a whole number, 0 (off) or more. Fix: top_k=0",
        ),
        (
            Train(POLICY, on=LEARNER, lr=-1.0),
            "stage 'train' has lr=-1.0; the learning rate must be a number, 0 or more. Fix: lr=1e-6",
        ),
        (
            Train(POLICY, on=LEARNER, lr=1e-3, minibatches=3),
            "stage 'train' has minibatches=3 for 8 groups per batch; minibatches must be equal runs of whole groups. "
            "Fix: minibatches=2 or 4",
        ),
        (
            Train(POLICY, on=LEARNER, lr=1e-3, loss=ClippedLoss(clip=(-0.1, 0.2))),
            "ClippedLoss(clip=(-0.1, 0.2)); clip[0] is below 1, and neither bound is negative. Fix: clip=(0.2, 0.2)",
        ),
        (
            Train(POLICY, on=LEARNER, lr=1e-3, schedule="step"),  # type: ignore[arg-type]
            "stage 'train' has schedule='step'; valid values are constant, linear, cosine. Fix: schedule='constant'",
        ),
        (
            RefLogprobs(POLICY, on=LEARNER),
            "stage 'ref_logprobs' scores with the trained copy of 'tiny'; the reference does not change during "
            "training. Fix: RefLogprobs(model.frozen(), ...)",
        ),
        (
            PrevLogprobs(POLICY, on=LEARNER, microbatch=-1),
            "stage 'prev_logprobs' has microbatch=-1; microbatch is samples per pass (0 for all), or Dynamic or "
            "Packed with a number of tokens. Fix: microbatch=0, or microbatch=Packed(tokens=8192)",
        ),
        (
            Evaluate(POLICY, TASK, on=SAMPLER, prompts=0, max_tokens=8),
            "stage 'evaluate' has prompts=0; prompts must be a whole number, 1 or more. Fix: prompts=1000",
        ),
        (
            Evaluate(POLICY, Generated("sort", held_out=0), on=SAMPLER, max_tokens=8),
            "the task 'sort' has no held-out prompts; evaluation on training prompts measures memory, not skill. "
            "Fix: Generated(..., held_out=1000)",
        ),
        (
            Refit(POLICY, source=WorkerGroup("a", backend="torch", gpus=1), target=SAMPLER),
            "stage 'refit' goes from 1 GPU to 0; the torch backend has bfloat16 weights on GPUs and float32 weights "
            "on CPUs. Fix: gpus on both worker groups, or on neither",
        ),
    ],
)
def test_problems(stage: Stage, text: str) -> None:
    assert texts(stage) == [text]


@pytest.mark.parametrize(
    "stage",
    [PrevLogprobs(POLICY, on=LEARNER), Train(POLICY, on=LEARNER, lr=1e-3), RefLogprobs(POLICY.frozen(), on=LEARNER)],
)
def test_another_temperature_than_the_rollouts_is_a_problem(stage: Stage) -> None:
    assert texts(stage, replace(ROLLOUT, temperature=0.7)) == [
        f"{stage.name!r} has temperature=1.0 and 'rollout' has 0.7; logprobs at another temperature belong to "
        "another policy, so every ratio would be wrong. Fix: temperature=0.7"
    ]
    assert texts(replace(stage, temperature=0.7), replace(ROLLOUT, temperature=0.7)) == []


def test_every_worker_of_a_trainer_needs_its_part_of_every_minibatch() -> None:
    many = WorkerGroup("learner", backend="torch", workers=8)
    rollout = replace(ROLLOUT, samples_per_prompt=3)
    stages = (rollout, Train(POLICY, on=many, lr=1e-3, minibatches=2))
    (problem,) = stages[1].check(described(*stages))
    assert problem.what == "stage 'train' has minibatches of 12 samples for 8 workers"
    packed = Train(POLICY, on=many, lr=1e-3, minibatches=2, microbatch=Packed(tokens=64))
    assert not list(packed.check(described(rollout, packed)))


def test_the_recipes_have_no_problem_and_load_no_tensor_library() -> None:
    described = quickstart()
    assert [problem for stage in described.all_stages() for problem in stage.check(described)] == []
    code = """
import sys, graphs.quickstart, graphs.grpo
g = graphs.quickstart.graph()
assert not [p for s in g.all_stages() for p in s.check(g)]
print([m for m in ("torch", "ray", "transformers", "transfer_queue", "tokenizers") if m in sys.modules])
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_train_counts_its_work() -> None:
    columns = batch_columns()
    once, twice = (
        Train(POLICY, on=LEARNER, lr=1e-3, epochs=epochs).setup(context(LEARNER))(columns, Task(stage="train", step=0))
        for epochs in (1, 2)
    )
    tokens = sum(columns["prompt_ids"].lengths) + sum(columns["response_ids"].lengths) - 16
    weights = CONFIG["num_hidden_layers"] * (32 * 8 * (2 * 4 + 2 * 2) + 3 * 32 * 48)
    logits = sum(columns["response_ids"].lengths) * 32 * (len(TASK.alphabet) + 2)
    pairs = [(p + t - 1) * (p + t) / 2 for p, t in zip(columns["prompt_ids"].lengths, columns["response_ids"].lengths)]
    expected = 3 * (2 * (tokens * weights + logits) + 4 * sum(pairs) * CONFIG["num_hidden_layers"] * 4 * 8)
    assert once.metrics["flops"] == pytest.approx(expected)
    assert twice.metrics["flops"] == pytest.approx(2 * expected)
    assert once.metrics["ranks"] == 1.0 and once.metrics["tflops_per_s"] > 0
    assert "utilization" not in once.metrics


def test_scoring_counts_its_work_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    columns, seconds = batch_columns(), iter((10.0, 12.0))
    trained = Train(POLICY, on=LEARNER, lr=1e-3).setup(context(LEARNER))(columns, Task(stage="train", step=0))
    run = PrevLogprobs(POLICY, on=LEARNER).setup(context(LEARNER))
    monkeypatch.setattr("stages.logprobs.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    made = run({name: columns[name] for name in ("prompt_ids", "response_ids")}, Task(stage="prev_logprobs", step=0))
    forward = trained.metrics["flops"] / 3  # a backward pass is two forward passes
    assert made.metrics["tflops_per_s"] == pytest.approx(forward / 2.0 / 1e12)
    assert speed(3e12, 2.0, 3, FakeGpu()) == {"tflops_per_s": 0.5, "utilization": 0.05}  # type: ignore[arg-type]


def test_a_prompt_that_is_not_computed_again_does_not_count_as_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend says what it computed by the shard: here it computes all of it, and only the count is looked at."""
    columns, groups = batch_columns(), (0, 1, 2, 3)
    lengths = {"P": columns["prompt_ids"].lengths, "T": columns["response_ids"].lengths}
    plain, shared = (Sharding.of(Packed(500), shares=shares).shards(lengths, 1, [G] * 4)[0] for shares in (False, True))
    spared = shared.spared(lengths["P"])
    assert len(spared) == 4 * (G - 1) and shared.shared == sum(spared) / sum(map(sum, lengths.values()))
    done = []
    for stage, passes in ((Train(POLICY, on=LEARNER, lr=0.0), 3), (PrevLogprobs(POLICY, on=LEARNER), 1)):
        run = stage.setup(context(LEARNER))
        monkeypatch.setattr(
            f"{type(stage).__module__}.time", SimpleNamespace(monotonic=iter((0.0, 2.0, 0.0, 2.0)).__next__)
        )
        of = [
            run(columns, Task(stage=stage.name, step=0, groups=groups, shard=each)).metrics for each in (plain, shared)
        ]
        assert [metrics["shared"] for metrics in of] == [0.0, shared.shared]
        done.append((of[0]["tflops_per_s"] - of[1]["tflops_per_s"]) * 2e12 / passes)
    shape = Transformer.of(CONFIG | {"vocab_size": 1})
    assert done == [pytest.approx(model_flops(shape, spared, training=False, logits=[0] * len(spared)))] * 2


def test_scoring_within_an_update_counts_a_shared_prompt_once() -> None:
    """Of two minibatches, the second one is scored before the first update, in rows that share prompts too."""
    columns, stage = batch_columns(), Train(POLICY, on=LEARNER, lr=0.0, minibatches=2, prev="own")
    lengths = {"P": columns["prompt_ids"].lengths, "T": columns["response_ids"].lengths}
    run, done = stage.setup(context(LEARNER)), []
    for shares in (False, True):
        cut = Sharding.of(Packed(500), minibatches=2, shares=shares)
        (shard,) = cut.shards(lengths, 1, [G] * 4)
        done.append(run(columns, Task(stage="train", step=0, groups=(0, 1, 2, 3), shard=shard)).metrics["flops"])
    spared = shard.spared(lengths["P"])
    halves = [spared[: len(spared) // 2], spared[len(spared) // 2 :]]
    shape = Transformer.of(CONFIG | {"vocab_size": 1})
    one, two = (model_flops(shape, half, training=False, logits=[0] * len(half)) for half in halves)
    assert done[0] - done[1] == pytest.approx(3 * (one + two) + two)


class FakeGpu:
    def peak_tflops(self) -> float:
        return 10.0


def test_an_architecture_that_is_not_known_reports_no_work() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    policy = Model("other", config=gpt2, alphabet=TASK.alphabet)
    backend = engine(context(LEARNER))
    columns = batch_columns()
    assert backend.flops(policy, columns["prompt_ids"], columns["response_ids"], training=True) is None


def messages(text: str) -> str:
    return json.dumps([{"role": "system", "content": "7"}, {"role": "user", "content": text}])


TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}0{% endif %}"


def test_messages_become_a_prompt_by_the_models_chat_template() -> None:
    here = context()
    backend: Any = engine(here)
    backend.tokenizer(POLICY).chat_template = TEMPLATE
    stage = replace(ROLLOUT, chat=True)
    assert [field.name for field in stage.reads] == ["messages"]
    run, task = stage.setup(here), Task(stage="rollout", step=0, groups=(0,))
    prompt_ids = whole(collected(run({"messages": [messages("12")] * G}, task)))["prompt_ids"]
    assert backend.decode(POLICY, prompt_ids) == ["7120"] * G


def test_a_model_without_a_chat_template_says_so() -> None:
    with pytest.raises(StageError, match="the tokenizer of 'tiny' has no chat template"):
        engine(context()).encode(POLICY, [messages("12")], chat=True)


def test_evaluation_asks_in_the_chat_template(tmp_path: Path) -> None:
    rows = [{"prompt": json.loads(messages(text)), "answer": text[::-1]} for text in ("12", "34")]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    here = context()
    backend: Any = engine(here)
    backend.tokenizer(POLICY).chat_template = TEMPLATE
    asked: list[str] = []
    encode = backend.encode
    backend.encode = lambda model, texts, chat: (asked.extend(texts), encode(model, texts, chat=chat))[1]
    stage = Evaluate(POLICY, tmp_path / "test.jsonl", on=SAMPLER, max_tokens=3, chat=True)
    checked = replace(stage, model=replace(POLICY, chat_template=TEMPLATE))
    assert not list(checked.check(described(checked)))
    output = stage.setup(here)({}, Task(stage="evaluate", step=0))
    assert [json.loads(text) for text in asked] == [row["prompt"] for row in rows]
    assert output.metrics["eval/count"] == 2.0
