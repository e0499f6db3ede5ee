"""Negative controls: what must not learn does not learn, and what is logged is what happened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from graphs import quickstart
from ops.random import uniform
from pipeline import Field, Graph, Stage, StageContext, Task
from pipeline.declare.columns import Ragged
from pipeline.engine.driver import Driver
from pipeline.executors.local import LocalExecutor
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.rundir import RunDir
from pipeline.web import texts
from stages import Advantage, Generated, Reward, Supervised
from stages.vocabulary import (
    ADVANTAGE,
    PROMPT_IDS,
    RESPONSE_IDS,
    REWARD,
    ROLLOUT_LOGPROBS,
    TOKEN_VERSIONS,
)

SAMPLES = 128  # of each version whose logprobs are computed again
STEPS, SEED = 25, 2  # its warm start is short, and what it learns in these steps is plain


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def warmed_up_once() -> Iterator[None]:
    """The runs of this module begin with the same weights: a warm start is computed for the first of them only."""
    run, kept = Supervised.run, {}

    def once(described: Supervised, model: Any, tokenizer: Any, seed: int) -> None:
        before = repr((described, seed, {name: float(held.double().sum()) for name, held in model.named_parameters()}))
        if before not in kept:
            run(described, model, tokenizer, seed)
            kept[before] = {name: held.clone() for name, held in model.state_dict().items()}
        model.load_state_dict(kept[before])

    with patch.object(Supervised, "run", once):
        yield


def reverse(**changes: Any) -> Graph:
    """Return the quickstart's graph on `reverse`, evaluated before and after training."""
    return quickstart.graph(**({"steps": STEPS, "seed": SEED, "evaluate_every": 1000} | changes))


def with_stage(graph: Graph, name: str, other: Stage | None) -> Graph:
    """Return the graph with the stage `name` replaced or removed."""
    kept = tuple(stage for stage in graph.stages if stage.name != name)
    return replace(graph, stages=(*kept, other) if other else kept)


def run(graph: Graph, folder: Path) -> tuple[RunDir, list[dict[str, float]]]:
    run_dir = RunDir(folder).create()
    Driver(graph, plan(graph)[0], LocalExecutor(), run_dir=run_dir).execute()
    return run_dir, [msgspec.json.decode(line) for line in run_dir.metrics.read_bytes().splitlines()]


def gain(metrics: list[dict[str, float]]) -> float:
    """Return exact match on held-out prompts after training minus before."""
    scores = [line["eval/exact_match"] for line in metrics if "eval/exact_match" in line]
    assert len(scores) == 2
    return scores[1] - scores[0]


def coin(response: str, prompt: str) -> float:
    """A reward that is independent of the answer."""
    return float(uniform(0, 99, [abs(hash_of(prompt + response)) % 2**32], [0], 1)[0, 0])


def hash_of(text: str) -> int:
    return int.from_bytes(text.encode().ljust(16, b"-")[-16:], "big")


@dataclass(frozen=True)
class Shuffled(Stage):
    """Group-relative advantages, shuffled over the samples of the batch."""

    name: str = "advantage"
    per: str = "batch"
    reads: Sequence[Field] = (REWARD,)
    writes: Sequence[Field] = (ADVANTAGE,)

    def setup(self, context: StageContext) -> Any:
        inner = Advantage("group_relative").setup(context)

        def shuffled(columns: dict, task: Task) -> dict:
            advantage = inner(columns, task).columns["advantage"]
            order = torch.randperm(len(advantage), generator=torch.Generator().manual_seed(task.step))
            return {"advantage": advantage[order]}

        return shuffled


@dataclass(frozen=True)
class Keep(Stage):
    """Writes tokens, logprobs and versions of each step to a folder."""

    folder: str
    name: str = "keep"
    per: str = "batch"
    reads: Sequence[Field] = (PROMPT_IDS, RESPONSE_IDS, ROLLOUT_LOGPROBS, TOKEN_VERSIONS)

    def setup(self, context: StageContext) -> Any:
        def keep(columns: dict[str, Ragged], task: Task) -> dict:
            tensors = {name: column.values.clone() for name, column in columns.items()}
            lengths = {
                f"{name}.lengths": torch.tensor(columns[name].lengths) for name in ("prompt_ids", "response_ids")
            }
            save_file(tensors | lengths, Path(self.folder) / f"{task.step}.safetensors")
            return {}

        return keep


def test_a_true_reward_teaches(tmp_path):
    _, metrics = run(reverse(), tmp_path)
    assert gain(metrics) > 0.15


def test_a_random_reward_teaches_nothing(tmp_path):
    _, metrics = run(with_stage(reverse(), "reward", Reward(coin)), tmp_path)
    assert gain(metrics) < 0.05


def test_shuffled_advantages_teach_nothing(tmp_path):
    _, metrics = run(with_stage(reverse(), "advantage", Shuffled()), tmp_path)
    assert gain(metrics) < 0.05


def test_a_learning_rate_of_zero_keeps_the_weights(tmp_path):
    graph = reverse(steps=3)
    train = next(stage for stage in graph.stages if stage.name == "train")
    run_dir, metrics = run(with_stage(graph, "train", replace(train, lr=0.0)), tmp_path)
    hashes = [event.sha256 for _, event in trace.read(run_dir.events) if isinstance(event, trace.Published)]
    assert len(hashes) == 4
    assert len(set(hashes)) == 1
    assert gain(metrics) == 0.0
    assert any(line.get("train/grad_norm", 0.0) > 0 for line in metrics), "there was a gradient that was not followed"


def test_rollout_logprobs_are_those_of_the_version_that_they_name(tmp_path):
    """Proves that refit happened: plain transformers with the weights of version k recompute version k's logprobs."""
    graph = reverse(steps=4)
    graph = replace(graph, schedule=replace(graph.schedule, checkpoint_every=1))
    kept = tmp_path / "kept"
    kept.mkdir()
    run_dir, _ = run(with_stage(graph, "keep", Keep(str(kept))), tmp_path / "run")
    for version in (1, 2, 3):
        now = kept / f"{version}.safetensors"
        found = load_file(now)
        assert set(found["token_versions"].tolist()) == {version}
        right = recomputed(load_file(run_dir.checkpoint(version) / "train" / "weights.safetensors"), found, SAMPLES)
        torch.testing.assert_close(found["rollout_logprobs"][: len(right)], right, atol=1e-5, rtol=0)
        another = load_file(run_dir.checkpoint(version - 1 or 4) / "train" / "weights.safetensors")
        stale = recomputed(another, found, SAMPLES // 4)
        assert (found["rollout_logprobs"][: len(stale)] - stale).abs().max() > 1e-3, "other weights give others"


def recomputed(weights: dict[str, torch.Tensor], found: dict[str, torch.Tensor], samples: int) -> torch.Tensor:
    """Return the logprobs of the response tokens, one sample at a time, without code of this project; of the first
    samples."""
    settings = {key: value for key, value in quickstart.TINY_QWEN3.items() if key != "embedding_std"}
    alphabet = Generated("reverse", digits=4).alphabet
    config = AutoConfig.for_model(settings.pop("model_type"), **settings, vocab_size=len(alphabet) + 2)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(weights)
    prompts = found["prompt_ids"].split(found["prompt_ids.lengths"].tolist())[:samples]
    responses = found["response_ids"].split(found["response_ids.lengths"].tolist())
    rows = []
    with torch.no_grad():
        for prompt, response in zip(prompts, responses):
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
            rows.append(logits.log_softmax(-1).gather(-1, response[:, None])[:, 0])
    return torch.cat(rows)


def test_rewards_are_those_of_the_stored_text(tmp_path):
    run_dir, metrics = run(reverse(steps=2), tmp_path)
    for step, line in ((0, metrics[1]), (1, metrics[2])):
        rows = [msgspec.json.decode(row) for row in run_dir.samples(step).read_bytes().splitlines()]
        assert len(rows) >= 4 * 16
        for row in rows:
            right = row["prompt"][1:5][::-1]
            assert row["answer"] == right
            hits = sum(a == b for a, b in zip(row["response"], right)) / max(len(row["response"]), 4)
            assert row["reward"] == pytest.approx(hits)
        for row in texts.samples(run_dir.path, step):
            assert "".join(text for text, _ in row["tokens"]) == row["response"]
            assert all(nats <= 0 for _, nats in row["tokens"])
        assert 0 < line["reward/mean"] < 1
