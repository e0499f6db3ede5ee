"""Eighty seeded schedules in virtual time, with random delays and lost attempts, checked by the journal checker.

The faults and schedules covered are printed (`pytest -s`) and asserted. A seed that breaks an invariant is shrunk:
fewer steps, smaller batches, fewer faults, as long as the invariant still breaks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline import Schedule
from pipeline.declare.task import Task
from pipeline.plan.plan import Plan
from pipeline.plan.planner import plan
from pipeline.simulation.distributions import parse, uniform
from pipeline.simulation.durations import Costs, Drawn, Durations
from pipeline.simulation.virtual_run import Fault
from tests.journal.checker import Violation, audit
from tests.unit import toy
from tests.unit.simulated_runs import write_run

SECONDS = {"rollout": "lognormal(1.0, 1.0)", "reward": "0.01/group @ 1", "logprobs": "0.1 @ 1", "train": "0.2 @ 2"}
KINDS = ("before_put", "after_put", "mid_stream", "late", "twice", "straggles")
SEEDS = range(80)
MORE = range(80, 400)
NEVER: frozenset[int] = frozenset()


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One schedule. `spared` holds the numbers of tasks that get no fault."""

    seed: int
    staleness: int
    depth: int | None
    on_stale: str
    refit: str
    checkpoint_every: int
    batch: int
    samplers: int
    learners: int
    run_groups: int | None
    cores: float | None
    driver_s: float
    beside_cpu_s: float
    spread: float = 0.0
    steps: int = 5
    faulty: bool = True
    spared: frozenset[int] = NEVER

    @staticmethod
    def of(seed: int) -> Case:
        """Return the case of a seed; one in four has no faults."""
        rng = random.Random(seed)
        staleness = rng.choice([0, 1, 1, 2, 3])
        return Case(
            seed=seed,
            staleness=staleness,
            depth=rng.choice([None, min(1, staleness), staleness]),
            on_stale=rng.choice(["wait", "drop"]),
            refit=rng.choice(["drain", "in_flight"]),
            checkpoint_every=rng.choice([0, 2]),
            batch=rng.choice([6, 12]),
            samplers=rng.choice([1, 2, 3]),
            learners=rng.choice([1, 2]),
            run_groups=rng.choice([None, 2]),
            cores=rng.choice([None, 1.0, 2.0]),
            driver_s=rng.choice([0.0, 0.001]),
            beside_cpu_s=rng.choice([0.0, 0.01]),
            spread=rng.choice([0.0, 4.0, 40.0]),
            faulty=seed % 4 > 0,
        )

    def plan(self) -> Plan:
        """Return the plan of the toy graph under this schedule."""
        schedule: Any = Schedule(
            steps=self.steps,
            max_staleness=self.staleness,
            pipeline_depth=self.depth,
            on_stale=self.on_stale,  # type: ignore[arg-type]
            refit=self.refit,  # type: ignore[arg-type]
            checkpoint_every=self.checkpoint_every,
        )
        changes = toy.streaming(sampler=self.samplers, learner=self.learners, run_groups=self.run_groups)
        return plan(toy.graph(batch=self.batch, schedule=schedule, **changes))[0]

    def fault(self, task: Task) -> Fault | None:
        """Return the fault of an attempt, a function of the seed and the task."""
        at = uniform(self.seed, task.number, 7) / 0.15
        if not self.faulty or at >= 1 or task.attempt > 2 or task.number in self.spared:
            return None
        delay_s = (0.01, 0.3, 1.0)[task.number % 3]
        return Fault(kind=KINDS[int(at * len(KINDS))], delay_s=delay_s, factor=5.0, groups=task.number % 3)

    def smaller(self, befallen: set[int]) -> Iterator[Case]:
        """Yield schedules that are simpler in one respect and can still be planned."""
        half = self.batch // 2
        if self.steps > 1:
            yield msgspec.structs.replace(self, steps=self.steps - 1)
        if half and half % self.samplers == half % self.learners == 0:
            yield msgspec.structs.replace(self, batch=half)
        for name, plain in (
            ("samplers", 1),
            ("learners", 1),
            ("cores", None),
            ("driver_s", 0.0),
            ("beside_cpu_s", 0.0),
            ("spread", 0.0),
        ):
            if getattr(self, name) != plain:
                yield msgspec.structs.replace(self, **{name: plain})
        for number in sorted(befallen - self.spared):
            yield msgspec.structs.replace(self, spared=self.spared | {number})


def simulate(case: Case, folder: Path, stop_s: float | None = None) -> tuple[list[Violation], Counter[str], set[int]]:
    """Return the checker's violations, counts of what the run covered, and the tasks that had a fault."""
    met: Counter[str] = Counter()
    befallen: set[int] = set()

    def faults(task: Task) -> Fault | None:
        fault = case.fault(task)
        if fault is not None:
            befallen.add(task.number)
            met[fault.kind] += fault.kind != "mid_stream" or task.stage == "rollout"
        return fault

    described = case.plan()
    costs = Costs(
        dispatch_s={"rollout": 0.002},
        report_s={"rollout": 0.01, "train": 0.003},
        driver_s=case.driver_s,
        beside_cpu_s=case.beside_cpu_s,
        checkpoint_s=0.1,
        spread=case.spread,
    )
    times = Durations({s.name: Drawn(parse(SECONDS.get(s.name, "0.05"))) for s in described.stages}, costs)
    folder.mkdir(parents=True)
    run_dir = write_run(folder, described, times, seed=case.seed, cores=case.cores, faults=faults, stop_s=stop_s)
    for line in (run_dir / "events.jsonl").read_text().splitlines():
        event = msgspec.json.decode(line)
        met[event["type"]] += 1
        if event["type"] == "dropped":
            met[event["reason"]] += 1
    report = audit(run_dir)
    assert report.clean or report.violations or stop_s is not None
    return report.violations, met, befallen


def shrunk(case: Case, folder: Path, broken: Any = simulate) -> tuple[Case, list[Violation]]:
    """Return the simplest schedule found that still breaks an invariant, with its violations."""
    found, _, befallen = broken(case, folder / "0")
    tried = 0
    while True:
        for simpler in case.smaller(befallen):
            tried += 1
            violations, _, hit = broken(simpler, folder / str(tried))
            if violations:
                case, found, befallen = simpler, violations, hit
                break
        else:
            return case, found


@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(MORE, marks=pytest.mark.search)], ids=str)
def test_seeds_keep_every_invariant(tmp_path, seeds):
    met: Counter[str] = Counter()
    for seed in seeds:
        case = Case.of(seed)
        violations, seen, _ = simulate(case, tmp_path / str(seed))
        if violations:
            simplest, found = shrunk(case, tmp_path / "shrunk")
            pytest.fail(f"seed {seed}, shrunk to {simplest}:\n" + "\n".join(map(str, found[:5])))
        met.update(seen)
        met[f"{case.on_stale}, {case.refit}" if case.staleness else "sync"] += 1
    print("\n" + ", ".join(f"{name}: {count}" for name, count in sorted(met.items())))
    expected = {*KINDS, "served", "stale", "cancelled", "retried", "fenced", "checkpointed", "sync"}
    expected |= {f"{on_stale}, {refit}" for on_stale in ("wait", "drop") for refit in ("drain", "in_flight")}
    assert not {name for name in expected if not met[name]}, met


def events(folder: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in (folder / "events.jsonl").read_bytes().splitlines()]


def test_runs_that_are_asked_to_stop_keep_every_invariant(tmp_path):
    met: Counter[str] = Counter()
    for seed in range(24):
        case = Case.of(seed)
        simulate(case, tmp_path / f"whole {seed}")
        stop_s = random.Random(seed).random() * events(tmp_path / f"whole {seed}")[-1]["at_s"]
        violations, seen, _ = simulate(case, tmp_path / f"stopped {seed}", stop_s)
        assert not violations, (seed, stop_s, violations[:5])
        met.update(seen)
        trained = [event["step"] for event in events(tmp_path / f"stopped {seed}") if event["type"] == "trained"]
        saved = [int(path.name[5:]) for path in (tmp_path / f"stopped {seed}" / "checkpoints").glob("*")]
        assert max(saved, default=0) == max(trained, default=-1) + 1
    assert met["stopping"] == 24 and met["failed"] > 16


@pytest.mark.journal_expected
@pytest.mark.parametrize("kind", ["admitted", "submitted"])
def test_what_begins_in_a_run_that_stops_is_noticed(tmp_path, kind):
    simulate(Case.of(4), tmp_path / "run")
    lines = events(tmp_path / "run")
    at = next(
        i for i, event in enumerate(lines)
        if event["type"] == kind and event["step"] == 3 and event.get("stage", "train") == "train"
    )  # fmt: skip
    lines.insert(at, {"type": "stopping", "at_s": lines[at]["at_s"]})
    (tmp_path / "run" / "events.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    found = [violation.text for violation in audit(tmp_path / "run").violations if violation.invariant == "I5"]
    assert any("after the run was asked to stop" in text for text in found)


def test_whatever_a_seed_is_shrunk_to_can_be_planned():
    seen: set[tuple[int, ...]] = set()
    cases = [Case.of(seed) for seed in SEEDS]
    while cases:
        case = cases.pop()
        key = (case.batch, case.samplers, case.learners, case.run_groups or 0)
        if key not in seen:
            seen.add(key)
            assert case.plan().batch == case.batch
            cases += [smaller for smaller in case.smaller(set()) if smaller.steps == case.steps]
    assert min(batch for batch, *_ in seen) == 1


@pytest.mark.journal_expected
def test_a_seed_that_fails_is_shrunk_to_what_makes_it_fail(tmp_path):
    """A stand-in check fails if a trainer attempt is lost: shrinking leaves little more than that attempt."""

    def broken(case: Case, folder: Path) -> tuple[list[Any], Counter[str], set[int]]:
        _, met, befallen = simulate(case, folder)
        return (["broken"] if met["after_put"] else []), met, befallen

    seed = next(seed for seed in SEEDS if broken(Case.of(seed), tmp_path / f"look {seed}")[0])
    _, before, hit = simulate(Case.of(seed), tmp_path / "first")
    case, found = shrunk(Case.of(seed), tmp_path / "shrunk", broken)
    assert found == ["broken"] and (case.samplers, case.learners, case.cores) == (1, 1, None)
    _, met, befallen = simulate(case, tmp_path / "last")
    assert 1 <= met["after_put"] <= before["after_put"] and len(befallen - case.spared) < len(hit)
