"""Worker groups of several ranks on Ray and TransferQueue: the same run as in one process, up to rounding."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from graphs.quickstart import TINY_QWEN3
from ops.rewards import digit_match
from pipeline import Field, Graph, Model, Schedule, Stage, StageError, WorkerGroup
from pipeline.declare.columns import Ragged
from pipeline.declare.sharding import Packed, Sharding
from pipeline.engine.driver import Driver
from pipeline.errors import WorkerLost
from pipeline.executors.local import LocalExecutor
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.rundir import RunDir
from stages import (
    Advantage,
    ClippedLoss,
    Generated,
    PrevLogprobs,
    Prompts,
    Refit,
    RefLogprobs,
    Reward,
    Rollout,
    Train,
)
from stages.vocabulary import ADVANTAGE, PROMPT, PROMPT_IDS, REF_LOGPROBS, RESPONSE_IDS
from tests.waiting import until

torch.set_num_threads(1)
TASK = Generated("reverse", digits=2, held_out=20)
POLICY = Model("tiny", config=TINY_QWEN3, alphabet=TASK.alphabet)
LENGTH = Field("length", dtype="int64", unit="token")
PIXELS = Field("pixel_values", dtype="float32", dims="N Q 2")


def pixels_of(prompt: str) -> list[list[float]]:
    """Return an image of its own content and size for each prompt."""
    return [[float(prompt), float(i)] for i in range(1 + int(prompt) % 3)]


@dataclass(frozen=True)
class Lengths(Stage):
    """Writes response lengths and checks the other columns, on a worker group whose ranks work together."""

    on: WorkerGroup
    name: str = "lengths"
    reads = (PROMPT, PIXELS, PROMPT_IDS, RESPONSE_IDS, REF_LOGPROBS)
    writes = (LENGTH,)
    per = "batch"
    sharding = Sharding()

    def setup(self, context):
        def run(columns, task):
            own = columns["response_ids"].lengths
            assert task.shard is not None and len(task.shard.index) == len(own)
            seen = context.ranks.gather(task.shard.index)  # every data-parallel rank has its share
            assert sorted(i for index in seen for i in index) == list(range(16))
            for prompt, pixels in zip(columns["prompt"], columns["pixel_values"].rows()):
                assert pixels.tolist() == pixels_of(prompt)
            return {"length": torch.tensor(own)}

        return run


@dataclass(frozen=True)
class Compare(Stage):
    """Checks that every length belongs to its sample, on ranks that are connected from setup on and beside streams."""

    on: WorkerGroup
    name: str = "compare"
    reads = (LENGTH, PROMPT_IDS, RESPONSE_IDS, ADVANTAGE)
    per = "batch"
    sharding = Sharding()

    def setup(self, context):
        assert context.ranks.connected == (context.group.workers > 1)
        return Comparing(context.ranks)


class Comparing:
    """Its last rank writes its state last, under another name until it is whole."""

    def __init__(self, ranks):
        self.ranks = ranks

    def __call__(self, columns, task):
        assert sorted(i for index in self.ranks.gather(task.shard.index) for i in index) == list(range(16))
        assert columns["length"].tolist() == list(columns["response_ids"].lengths)
        return {}

    def save(self, folder: Path) -> None:
        self.copied()(folder)

    def restore(self, folder: Path) -> None:
        assert sorted(path.name for path in folder.iterdir()) == ["0", "1"]

    def saved_bytes(self) -> int:
        return 1

    def copied(self):
        def write(folder: Path) -> None:
            if not self.ranks.rank:
                until((folder / "draft").exists)
                (folder / "0").write_text("0")
                return
            (folder / "draft").write_text("1")
            until((folder / "0").exists)
            time.sleep(0.3)  # a rank that lists files as soon as it is ready does so now
            (folder / "draft").rename(folder / "1")

        return write if self.ranks.connected else lambda folder: None


@dataclass(frozen=True)
class Speak(Stage):
    """Writes prompts and responses without a model."""

    name: str = "speak"
    reads = (PROMPT,)
    writes = (PROMPT_IDS, RESPONSE_IDS)
    per = "group"
    group_size = 1

    def setup(self, context):
        def run(columns, task):
            ids = Ragged.of([torch.tensor([int(text)]) for text in columns["prompt"]])
            return {"prompt_ids": ids, "response_ids": ids}

        return run


@dataclass(frozen=True)
class Meet(Stage):
    """Its ranks wait for each other; rank 1 fails or dies before it gets there."""

    on: WorkerGroup
    dies: bool = False
    name: str = "meet"
    reads = (PROMPT_IDS, RESPONSE_IDS)
    per = "batch"
    sharding = Sharding()

    def setup(self, context):
        def run(columns, task):
            if context.rank == 1 and self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            if context.rank == 1:
                raise ValueError(f"rank 1 has {len(columns['prompt_ids'])} samples and had enough")
            context.ranks.gather(task.step)
            return {}

        return run


def graph(data: Path, workers: int, *, fully_sharded: bool = False, cpus: float = 0.25) -> Graph:
    sampler = WorkerGroup("sampler", backend="torch", workers=workers, threads=1, cpus=cpus)
    learner = WorkerGroup(
        "learner", backend="torch", workers=workers, threads=1, cpus=cpus, fully_sharded=fully_sharded
    )
    counters = WorkerGroup("counters", workers=2 * workers, tensor_parallel=2, cpus=cpus)
    return Graph(
        name="ranks",
        host=WorkerGroup("host", cpus=cpus),
        source=Prompts(data, batch=4, extra=(PIXELS,)),
        stages=(
            Rollout(POLICY, on=sampler, samples_per_prompt=4, max_tokens=5),
            Reward(digit_match),
            PrevLogprobs(POLICY, on=learner, microbatch=Packed(24)),
            RefLogprobs(POLICY.frozen(), on=learner, microbatch=2),
            Advantage("group_relative"),
            Train(POLICY, on=learner, loss=ClippedLoss(kl=0.01), lr=1e-3, minibatches=2, microbatch=Packed(24)),
            Refit(POLICY, source=learner, target=sampler),
            Lengths(counters),
            Compare(sampler),
        ),
        schedule=Schedule(steps=2, seed=3),
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"prompt": p, "answer": p[::-1], "pixel_values": pixels_of(p)} for p in map(str, range(10, 40))]
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(described: Graph, executor: Any, folder: Path) -> tuple[dict[str, torch.Tensor], Driver]:
    driver = Driver(described, plan(described)[0], executor, run_dir=RunDir(folder).create(), deadline_s=120.0)
    driver.execute()
    (weights,) = folder.rglob("weights.safetensors")
    return load_file(weights), driver


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, data: Path) -> dict[str, torch.Tensor]:
    return run(graph(data, 1), LocalExecutor(), tmp_path_factory.mktemp("local"))[0]


@pytest.mark.parametrize("fully_sharded", [False, True])
def test_two_ranks_a_group_give_the_run_of_one_process(tmp_path, ray_session, data, expected, fully_sharded):
    from pipeline.executors.ray import RayExecutor
    from pipeline.executors.sent import user_modules

    executor = RayExecutor(modules=user_modules(sys.modules[__name__]))
    found, driver = run(graph(data, 2, fully_sharded=fully_sharded), executor, tmp_path)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=2e-5, rtol=1e-4)
    events = [event for _, event in trace.read(driver.run_dir.events)]
    gets = [e for e in events if isinstance(e, trace.Got) and e.stage == "lengths"]
    puts = [e for e in events if isinstance(e, trace.Put) and e.stage == "lengths"]
    spans = [e for e in events if isinstance(e, trace.Ran) and e.stage == "lengths"]
    assert (len(gets), len(puts), len(spans)) == (4, 4, 8)  # 2 steps x 2 replicas; two ranks in each
    trained = {e.worker for e in events if isinstance(e, trace.Ran) and e.stage == "train"}
    assert trained == {0, 1}
    assert [e.rows_left for e in events if isinstance(e, trace.Ended)] == [0]


def deaths_last(waiting: list[Any], **options: Any) -> tuple[list[Any], list[Any]]:
    """Wait like Ray, but report a dead worker's calls after everyone else's, as a busy cluster may."""
    import ray

    ray.wait(waiting, **options)
    ready, others = ray.wait(waiting, num_returns=len(waiting), timeout=0)
    alive = [ref for ref in ready if not died(ref)]
    return (alive, [*others, *(ref for ref in ready if ref not in alive)]) if alive or others else (ready, others)


def died(ref: Any) -> bool:
    import ray
    from ray.exceptions import RayActorError

    try:
        ray.get(ref)
    except RayActorError:
        return True
    return False


@pytest.mark.parametrize("dies", [False, True], ids=["fails", "dies"])
def test_the_rank_that_fails_is_named_while_the_others_wait_for_it(tmp_path, ray_session, monkeypatch, data, dies):
    import ray

    from pipeline.executors import ray as executors
    from pipeline.executors.ray import EXCHANGE_DEADLINE_S, RayExecutor
    from pipeline.executors.sent import user_modules

    monkeypatch.setattr(executors, "ray", SimpleNamespace(**vars(ray) | {"wait": deaths_last}))
    described = Graph(
        name="meeting",
        host=WorkerGroup("host", cpus=0.25),
        source=Prompts(data, batch=4),
        stages=(Speak(), Meet(WorkerGroup("pair", workers=2, cpus=0.25), dies=dies)),
        schedule=Schedule(steps=2),
    )
    executor = RayExecutor(modules=user_modules(sys.modules[__name__]))
    driver = Driver(described, plan(described)[0], executor, run_dir=RunDir(tmp_path).create(), deadline_s=600.0)
    begun_s = time.monotonic()
    named = "a worker died and did not finish 'meet' at step 1" if dies else "rank 1 has 2 samples and had enough"
    with pytest.raises(WorkerLost if dies else StageError, match=named):
        driver.execute()
    assert time.monotonic() - begun_s < EXCHANGE_DEADLINE_S / 4
    if not dies:  # a rank that dies has no failure of its own
        (folder,) = (tmp_path / "failures").iterdir()
        assert folder.name == "step_000001_meet.rank1"
