"""How many decisions per second the scheduler takes, with 100 to 100,000 groups in flight.

python -m benchmarks.scheduler [--quick] [--out FILE]

Fields land one group at a time, in a shuffled order, as streaming rollouts deliver them. A decision is a group that is
sent to a stage, claimed, dropped or cleared. Cases: one step with all groups; a run that drops stale groups
(`max_staleness=2`), with batches of a third of the groups in flight and one group in ten slow; and 1,024 sampling
replicas. Aim: 50,000 per second.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections import Counter, deque

from benchmarks.report import report
from pipeline import Schedule
from pipeline.declare.task import Task
from pipeline.plan.plan import Plan, PlannedStage
from pipeline.plan.planner import plan
from pipeline.schedule.events import Claim, Clear, Decision, Drop, Event, Finished, Landed, Run, Save, Saved
from pipeline.schedule.scheduler import Scheduler
from tests.unit import toy

AIM = 50_000
REPLICAS = 1_024
SLOW = 0.1  # fraction of the groups, if some are to become stale
SLOW_ROUNDS = 20  # rounds by which the report of a slow group is late


def planned(groups: int, *, replicas: int = 1, steps: int = 1, staleness: int = 0) -> Plan:
    """A plan of GRPO steps of `groups` groups, with a streaming rollout on `replicas` workers."""
    changes = toy.streaming(sampler=replicas, reward={"per": "group"}, evaluate=None)
    schedule = Schedule(
        steps=steps, max_staleness=staleness, on_stale="drop" if staleness else "wait", refit="in_flight"
    )
    return plan(toy.graph(batch=groups, schedule=schedule, **changes))[0]


def reports(task: Task, stage: PlannedStage, weights_fields: tuple[str, ...], rng: random.Random) -> list[list[Event]]:
    """The reports of a task, in parts: group by group for a stream, otherwise all at the end."""
    weights = tuple(field for field in stage.writes if field in weights_fields)
    fields = tuple(field for field in stage.writes if field not in weights)
    order = list(task.groups)
    rng.shuffle(order)
    parts: list[list[Event]] = [[Landed(task.step, (), weights, task=task.number)]] if weights else []
    for groups in [task.groups] if stage.per == "batch" else [(group,) for group in order]:
        oldest = (task.version,) * len(groups) if stage.stamps else ()
        landed: list[Event] = [Landed(task.step, groups, fields, oldest, task.number)] if fields and groups else []
        parts.append([*landed, Finished(task, groups)] if stage.shape == "stream" else landed)
    if stage.shape == "stream":
        return parts
    return [[*(event for part in parts for event in part), Finished(task, task.groups)]]


def run(described: Plan, slow: float) -> Counter[str]:
    """Count decisions, reports and the scheduler's microseconds; a fraction `slow` of the groups is late."""
    scheduler = Scheduler(described)
    rng = random.Random(described.batch)
    stages = {stage.name: stage for stage in described.stages}
    counts: Counter[str] = Counter()
    spent_s = 0.0
    late: deque[tuple[int, list[Event]]] = deque()
    pending: list[Decision] = scheduler.begin()
    for round_ in itertools.count():
        events: list[Event] = []
        for decision in pending:
            match decision:
                case Run(task=task):
                    counts["decisions"] += len(task.groups) or 1
                    for part in reports(task, stages[task.stage], described.weights_fields, rng):
                        if stages[task.stage].shape == "stream" and rng.random() < slow:
                            late.append((round_ + SLOW_ROUNDS, part))
                        else:
                            events += part
                case Clear() | Claim() | Drop():
                    counts["decisions"] += len(decision.groups)
                    counts["dropped"] += len(decision.groups) if isinstance(decision, Drop) else 0
                case Save():
                    events.append(Saved(decision.step))
        while late and (late[0][0] <= round_ or not events):
            events += late.popleft()[1]
        if not events:
            break
        began_s = time.perf_counter()
        pending = [decision for event in events for decision in scheduler.handle(event)]
        spent_s += time.perf_counter() - began_s
        counts["reports"] += len(events)
    assert scheduler.done, scheduler.waiting()[:3]
    counts["spent_us"] = round(spent_s * 1e6)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="up to 10,000 groups, one repetition")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    sizes = (100, 1_000, 10_000) if options.quick else (100, 1_000, 10_000, 100_000)
    cases = [("one step", groups, planned(groups), 0.0) for groups in sizes]
    drop = {"steps": 6, "staleness": 2}
    cases += [("drop, k=2", 3 * batch, planned(batch, **drop), SLOW) for batch in (32, 1_000)]
    name = f"{REPLICAS:,} replicas"
    cases += [(name, 10 * REPLICAS, planned(10 * REPLICAS, replicas=REPLICAS), 0.0)]
    cases += [(f"{name}, drop, k=2", 3 * REPLICAS, planned(REPLICAS, replicas=REPLICAS, **drop), SLOW)]
    rows = []
    for name, groups, described, slow in cases:
        counts = [run(described, slow) for _ in range(1 if options.quick else 5)]
        rates = [1e6 * each["decisions"] / each["spent_us"] for each in counts]
        rate, last = statistics.median(rates), counts[-1]
        row = {"case": name, "groups in flight": groups, "decisions": last["decisions"], "dropped": last["dropped"]}
        row |= {"reports/s": round(rate * last["reports"] / last["decisions"]), "decisions/s": round(rate)}
        row |= {"min": round(min(rates)), "max": round(max(rates)), "aim": "reached" if rate >= AIM else "missed"}
        rows.append(row)
    notes = f"Medians of {1 if options.quick else 5} runs; aim {AIM:,} decisions/s. One process, one core."
    report("scheduler", rows, list(rows[0]), notes, options.out)


if __name__ == "__main__":
    main()
