"""How many decisions a second the scheduler takes, with 100 to 100,000 groups in flight.

python -m benchmarks.scheduler [--quick] [--out FILE]

One step holds all groups; every group's fields land one group at a time, in a shuffled order, as streaming rollouts
deliver them. A decision is a task that is handed out or a group that is cleared. Aim: 50,000 a second.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from benchmarks.report import report
from pipeline import Schedule
from pipeline.plan import Plan, plan
from pipeline.scheduler import Clear, Decision, Event, Finished, Landed, Run, Save, Saved, Scheduler
from tests.unit import toy

AIM = 50_000


def planned(groups: int) -> Plan:
    """A GRPO step of `groups` groups whose rollout, reward and advantage run a group at a time."""
    changes = {"reward": {"per": "group"}, "evaluate": None}
    return plan(toy.graph(batch=groups, schedule=Schedule(steps=1), **changes))[0]


def run(described: Plan, groups: int) -> tuple[int, float]:
    """Decisions, and the seconds that the scheduler itself took for them."""
    scheduler = Scheduler(described)
    rng = random.Random(groups)
    decisions, spent_s = 0, 0.0
    pending: list[Decision] = scheduler.begin()
    while pending:
        tasks = [decision.task for decision in pending if isinstance(decision, Run)]
        decisions += len(tasks) + sum(len(decision.groups) for decision in pending if isinstance(decision, Clear))
        events: list[Event] = [Saved(decision.step) for decision in pending if isinstance(decision, Save)]
        for task in tasks:
            stage = described.stage(task.stage)
            weights = tuple(field for field in stage.writes if field in described.weights_fields)
            fields = tuple(field for field in stage.writes if field not in described.weights_fields)
            if weights:
                events.append(Landed(task.step, (), weights))
            if fields and stage.per != "batch":
                order = list(task.groups)
                rng.shuffle(order)
                events += [Landed(task.step, (group,), fields) for group in order]
            elif fields:
                events.append(Landed(task.step, task.groups, fields))
            events.append(Finished(task))
        began_s = time.perf_counter()
        pending = [decision for event in events for decision in scheduler.handle(event)]
        spent_s += time.perf_counter() - began_s
    assert scheduler.done, scheduler.waiting()[:3]
    return decisions, spent_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="up to 10,000 groups, one repetition")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    rows = []
    for groups in (100, 1_000, 10_000) if options.quick else (100, 1_000, 10_000, 100_000):
        described = planned(groups)
        rates = []
        for _ in range(1 if options.quick else 5):
            decisions, spent_s = run(described, groups)
            rates.append(decisions / spent_s)
        rate = statistics.median(rates)
        spread = {"min": round(min(rates)), "max": round(max(rates)), "aim": "reached" if rate >= AIM else "missed"}
        rows.append({"groups in flight": groups, "decisions": decisions, "decisions/s": round(rate)} | spread)
    notes = f"Medians of {1 if options.quick else 5} runs; aim {AIM:,} decisions/s. One process, one core."
    report("scheduler", rows, list(rows[0]), notes, options.out)


if __name__ == "__main__":
    main()
