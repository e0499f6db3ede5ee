"""What each backend requires of a worker group, checked before any engine is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

import stages.backends as registry
from graphs import quickstart
from pipeline import Model, WorkerGroup
from pipeline.declare.ranks import RankLayout
from pipeline.plan.plan import PlacedGroup
from pipeline.plan.planner import plan
from stages import Refit, Rollout, Train
from stages.backends import backend_problems

POLICY = Model("/models/policy")


def texts(group: WorkerGroup, work: registry.Work | None = None, stage: object = None) -> list[str]:
    return [str(problem).partition(": ")[2] for problem in backend_problems(group, stage, work)]  # type: ignore[arg-type]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "is_installed", lambda package: True)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("group", "work", "said"),
    [
        (WorkerGroup("g", backend="vllm"), "sample", []),
        (WorkerGroup("g", backend="vllm", gpus=4, tensor_parallel=2), "sample", []),
        (WorkerGroup("g", backend="megatron", gpus=8, tensor_parallel=2, pipeline_parallel=2), "train", []),
        (WorkerGroup("g", backend="megatron", workers=4, expert_parallel=2), "score", []),
        (WorkerGroup("g", backend="vllm"), "train", ["'vllm' can only sample. Fix: another worker group, with "]),
        (WorkerGroup("g", backend="vllm"), "score", ["backend='torch' or 'megatron'"]),
        (WorkerGroup("g", backend="megatron"), "sample", ["'megatron' can only score and train"]),
        (WorkerGroup("g", backend="megatron"), "reward", ["runs reward models there", ]),
        (WorkerGroup("g", backend="vllm", gpus=2, pipeline_parallel=2), "sample", ["pipeline_parallel=2"]),
        (WorkerGroup("g", backend="vllm", gpus=2, tensor_parallel=2, expert_tensor_parallel=2), "sample", []),
        (WorkerGroup("g", backend="vllm", gpus=2, tensor_parallel=2, expert_tensor_parallel=1), "sample",
         ["expert_tensor_parallel=1 and tensor_parallel=2"]),
        (WorkerGroup("g", backend="vllm", fully_sharded=True), "sample", ["sampling has none"]),
        (WorkerGroup("g", backend="vllm", workers=4, gpus=2), "sample", ["2 GPUs for 4 workers"]),
        (WorkerGroup("g", backend="megatron", workers=2, fully_sharded=True), "train", ["is fully_sharded"]),
        (WorkerGroup("g", backend="megatron", workers=2, context_parallel=2), "train", ["context_parallel=2"]),
        (WorkerGroup("g", backend="torch", workers=2, tensor_parallel=2), "train", ["over 2 workers"]),
    ],
)  # fmt: skip
def test_what_a_group_is_told(group: WorkerGroup, work: registry.Work, said: list[str]) -> None:
    found = texts(group, work)
    assert len(found) == len(said), found
    for text, expected in zip(found, said):
        assert expected in text


@pytest.mark.parametrize(
    ("backend", "package", "extra"), [("vllm", "vllm", "vllm"), ("megatron", "megatron.core", "megatron")]
)
def test_a_missing_package_is_named_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, backend: str, package: str, extra: str
) -> None:
    monkeypatch.setattr(registry, "is_installed", lambda name: False)
    (text,) = texts(WorkerGroup("g", backend=backend))
    assert f"needs the package '{package}'; it is not installed. Fix: pip install 'sluice-rl[{extra}]'" in text


@pytest.mark.usefixtures("installed")
def test_stages_say_what_they_do_there() -> None:
    sampler, learner = WorkerGroup("s", backend="megatron"), WorkerGroup("l", backend="vllm")
    graph = quickstart.graph()
    stages = (
        Rollout(POLICY, on=sampler, samples_per_prompt=2),
        Train(POLICY, on=learner, loss=next(s.loss for s in graph.stages if isinstance(s, Train)), lr=1.0),
        Refit(POLICY, source=learner, target=sampler),
    )
    said = ["\n".join(map(str, stage.check(graph))) for stage in stages]
    assert "stage 'rollout' samples there" in said[0]
    assert "stage 'train' trains there" in said[1]
    assert "stage 'refit' trains there" in said[2] and "stage 'refit' samples there" in said[2]


def test_workers_are_one_a_gpu_unless_said() -> None:
    assert WorkerGroup("g", backend="megatron", gpus=4).workers == 4
    assert WorkerGroup("g", backend="torch").workers == 1
    assert WorkerGroup("g", gpus=2).workers == 1  # the functions divide the GPUs themselves
    assert WorkerGroup("g", backend="vllm", workers=2, gpus=2).workers == 2


def test_a_group_that_leads_its_ranks_has_a_process_a_replica() -> None:
    group = WorkerGroup("g", backend="vllm", gpus=8, tensor_parallel=4)
    assert (group.workers, group.processes, RankLayout.of(group)) == (8, 2, RankLayout(data=2))
    trainer = WorkerGroup("g", backend="megatron", gpus=8, tensor_parallel=4)
    assert (trainer.workers, trainer.processes, RankLayout.of(trainer).siblings(1)) == (8, 8, (4, 5, 6, 7))


@pytest.mark.usefixtures("installed")
def test_the_plan_counts_processes() -> None:
    import dataclasses

    sampler = WorkerGroup("fast", backend="vllm", workers=8, tensor_parallel=4, cpus=2)
    graph = quickstart.graph()
    stages = tuple(
        dataclasses.replace(stage, on=sampler) if isinstance(stage, Rollout)
        else dataclasses.replace(stage, target=sampler) if isinstance(stage, Refit)
        else stage
        for stage in graph.stages if stage.name != "evaluate"
    )  # fmt: skip
    placed: PlacedGroup = next(
        group for group in plan(dataclasses.replace(graph, stages=stages))[0].groups if group.name == "fast"
    )
    assert (placed.workers, placed.model_parallel, placed.replicas, placed.cpus) == (2, 1, 2, 8)


def test_the_checks_load_no_engine() -> None:
    code = (
        "import sys\nfrom pipeline import WorkerGroup\nfrom stages.backends import backend_problems\n"
        "for name in ('torch', 'vllm', 'megatron'): list(backend_problems(WorkerGroup('g', backend=name)))\n"
        "print([name for name in ('torch', 'vllm', 'megatron.core', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
