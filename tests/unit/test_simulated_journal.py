"""The scheduler over 200 seeds in virtual time, with and without faults, judged by the journal checker."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from pipeline import Schedule
from pipeline.executors.simulated import Fault
from pipeline.plan import Plan, plan
from pipeline.simulation.distributions import parse, uniform
from pipeline.simulation.durations import Costs, Drawn, Durations
from tests.journal.checker import audit
from tests.unit import toy
from tests.unit.simulated_runs import write_run

SECONDS = {"rollout": "lognormal(1.0, 1.0)", "reward": "0.01/group @ 1", "logprobs": "0.1 @ 1", "train": "0.2 @ 2"}
KINDS = ("before_put", "after_put", "mid_stream", "late", "twice", "straggles")
BATCH = 20  # seeds a test


def planned(rng: random.Random) -> Plan:
    k = rng.choice([0, 1, 1, 2, 3])
    schedule = Schedule(
        steps=5,
        max_staleness=k,
        pipeline_depth=rng.choice([None, min(1, k), k]),
        on_stale=rng.choice(["wait", "drop"]) if k else "wait",
        refit=rng.choice(["drain", "in_flight"]),
        checkpoint_every=rng.choice([0, 2]),
    )
    graph = toy.graph(
        batch=rng.choice([6, 12]),
        schedule=schedule,
        **toy.streaming(sampler=rng.choice([1, 2, 3]), learner=rng.choice([1, 2]), run_groups=rng.choice([None, 2])),
    )
    return plan(graph)[0]


def simulate(seed: int, folder: Path, *, faulty: bool) -> Path:
    rng = random.Random(seed)
    described = planned(rng)
    delays = [rng.choice([0.01, 0.3, 1.0]) for _ in KINDS]

    def faults(task):
        at = uniform(seed, task.number, 7) / 0.15
        if not faulty or at >= 1 or task.attempt > 2:
            return None
        kind = int(at * len(KINDS))
        return Fault(kind=KINDS[kind], delay_s=delays[kind], factor=5.0, groups=task.number % 3)

    run_dir = folder / str(seed)
    run_dir.mkdir()

    costs = Costs(
        dispatch_s={"rollout": 0.002},
        report_s={"rollout": 0.01, "train": 0.003},
        driver_s=rng.choice([0.0, 0.001]),
        beside_cpu_s=rng.choice([0.0, 0.01]),
        checkpoint_s=0.1,
    )
    times = Durations({s.name: Drawn(parse(SECONDS.get(s.name, "0.05"))) for s in described.stages}, costs)
    cores = rng.choice([None, 1.0, 2.0])
    return write_run(run_dir, described, times, seed=seed, cores=cores, faults=faults)


@pytest.mark.parametrize("faulty", [False, True])
@pytest.mark.parametrize("first", range(0, 100, BATCH))
def test_no_seed_breaks_an_invariant(first, faulty, tmp_path):
    seen = set()
    for seed in range(first, first + BATCH):
        run_dir = simulate(seed, tmp_path, faulty=faulty)
        report = audit(run_dir)
        assert not report.violations, (seed, report.violations[:3])
        assert report.clean
        seen |= {msgspec.json.decode(line)["type"] for line in (run_dir / "events.jsonl").read_text().splitlines()}
    assert "dropped" in seen  # what is too old is dropped somewhere in each batch of seeds
    assert ("retried" in seen) == ("fenced" in seen) == faulty
