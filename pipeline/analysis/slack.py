"""Computes how much longer each task could have taken without delaying a version. Pure; from trace events alone.

    found = slack(plan, Tasks(events))
    found.steps[3]["reward"]           # 0.8: seconds that the reward of the fourth step had to spare

A task inherits the slack of the tasks that wait for it, plus the time before they read its result. A task that
publishes a version has none. The slack of a task is thus the least idle time on any path from it to a version.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import msgspec

from pipeline.analysis.waits import Waits, latest_of
from pipeline.plan.plan import Plan
from pipeline.record import trace
from pipeline.record.history import Tasks


class Slack(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds to spare; None if no version depends on it.

    tasks    by task number
    steps    by step, counted from 0, and stage: the minimum over its tasks, or None if no version depends on any
    """

    tasks: dict[int, float | None]
    steps: dict[int, dict[str, float | None]]

    def stages(self) -> dict[str, float | None]:
        """Return the minimum of each stage over all steps, most urgent first."""
        least: dict[str, float | None] = {}
        for found in self.steps.values():
            for stage, seconds in found.items():
                least[stage] = lesser(least.get(stage), seconds)
        return dict(sorted(least.items(), key=lambda item: (item[1] is None, item[1] or 0.0)))


def slack(plan: Plan, tasks: Tasks, *, waits: Waits | None = None) -> Slack:
    """Compute the slack of every finished task."""
    waits = waits or Waits(plan, tasks)
    place = {number: min((span.start_s, number) for span in ran) for number, ran in tasks.ran.items()}
    ran = sorted((number for number in tasks.ran if number in tasks.submitted), key=place.__getitem__, reverse=True)
    spare: dict[int, float] = {
        number: 0.0 for step in {task.step for task in tasks.submitted.values()} if (number := waits.ended(step))
    }
    for number in ran:  # tasks that wait for this one started later, so their slack is known
        if number in spare:
            for before, idle_s in _idle_before(tasks.submitted[number], place[number][0], waits):
                if before in place and place[before] < place[number]:
                    spare[before] = min(spare.get(before, inf), spare[number] + idle_s)
    steps: dict[int, dict[str, float | None]] = {}
    for number in ran:
        task = tasks.submitted[number]
        stages = steps.setdefault(task.step, {})
        stages[task.stage] = lesser(stages.get(task.stage), spare.get(number))
    return Slack(tasks={number: spare.get(number) for number in sorted(ran)}, steps=dict(sorted(steps.items())))


def _idle_before(task: trace.Submitted, begun_s: float, waits: Waits) -> Iterator[tuple[int, float]]:
    """Yield the tasks that this one waited for, and how long before its submission (or its start, in the same process)
    each was done."""
    needs = waits.needs(task)
    held = waits.held(task, latest_of(needs), task.at_s + 1e-9)
    for reason in (*needs, *waits.parts(task), *([held] if held else ())):
        if reason.task is not None and reason.at_s <= task.at_s + 1e-9:
            yield reason.task, max(0.0, task.at_s - reason.at_s)
    before = waits.before_in_process(task, begun_s)
    if before and before.task is not None:
        yield before.task, begun_s - before.at_s


def lesser(one: float | None, other: float | None) -> float | None:
    """Return the smaller of two slacks; None is infinite."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
