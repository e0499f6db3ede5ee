"""All findings from the record of one run, for the command line and the web view. Pure.

    found = find(open_run(Path("runs/quickstart-...")))
    found.report.critical_path.sentence
    found.paths[3].spans                      # the critical path of the fourth step, span by span
    found.groups[0].parts                     # why workers of the first group had no task

Seconds refer to `window`: all steps after warm-up, or one step.
"""

from __future__ import annotations

import msgspec

from pipeline.analysis.critical_path import StepPath, step_paths
from pipeline.analysis.episodes import EpisodeTimes, episode_times, waits_by_task
from pipeline.analysis.gaps import Gap, gaps, workers
from pipeline.analysis.idle import Idle, idle_by_group, idle_by_worker
from pipeline.analysis.report import Report, report
from pipeline.analysis.slack import Slack, slack
from pipeline.analysis.waits import Waits
from pipeline.errors import GraphError, Problem
from pipeline.record.history import Tasks, step_ends
from pipeline.record.runs import OpenedRun


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of a record.

    report    seconds per step, utilization, staleness, drops and critical path sums of all steps after warm-up
    window    start and end (monotonic seconds) of the idle time accounting, and its number of steps
    paths     the critical path of every published step, or of the one step
    slack     seconds to spare, by task, and by step and stage
    gaps      when and why workers had no task, inside the window
    workers   sums per worker; `groups` has the means per worker group
    episodes  how the episodes that ended inside the window spent their time
    """

    report: Report
    window: tuple[float, float, int]
    paths: tuple[StepPath, ...]
    slack: Slack
    gaps: tuple[Gap, ...]
    workers: tuple[Idle, ...]
    groups: tuple[Idle, ...]
    episodes: tuple[EpisodeTimes, ...] = ()


def find(run: OpenedRun, *, step: int | None = None, tasks: Tasks | None = None) -> Findings:
    """Return the findings of a run, or of one step, counted from 0. Raises GraphError if that step has not ended."""
    tasks = tasks or Tasks(run.events)
    waits = Waits(run.plan, tasks)
    ends = step_ends(tasks)
    made = report(run.plan, tasks, waits=waits)
    start_s, end_s, steps = _window(run, ends, made, step)
    paths = step_paths(run.plan, tasks, ends, waits=waits)
    spare = slack(run.plan, tasks, waits=waits)
    waiting = waits_by_task(tasks)
    found = tuple(gaps(run.plan, tasks, start_s, end_s, waits=waits, environments=waiting))
    by_worker = idle_by_worker(workers(run.plan, tasks), found, end_s - start_s)
    return Findings(
        report=made,
        window=(start_s, end_s, steps),
        paths=tuple(path for path in paths if step in (None, path.step)),
        slack=spare if step is None else _of_step(spare, tasks, step),
        gaps=found,
        workers=tuple(by_worker),
        groups=tuple(idle_by_group(by_worker)),
        episodes=tuple(episode_times(tasks, waiting, start_s, end_s)),
    )


def _window(run: OpenedRun, ends: list[tuple[float, int]], made: Report, step: int | None) -> tuple[float, float, int]:
    count = len(made.steps.seconds)
    if step is None:
        return (ends[-1 - count][0], ends[-1][0], count) if count else (0.0, 0.0, 0)
    found = next((place for place, (_, number) in enumerate(ends) if number == step and place), None)
    if found is None:
        message = f"{ends[1][1] + 1} to {ends[-1][1] + 1}" if len(ends) > 1 else "none"
        raise GraphError(
            Problem(
                where=f"--step {step + 1}",
                what=f"that step is not in the record of {run.name}",
                why=f"the steps that have ended since the run was last started: {message}",
                fix=f"--step {ends[-1][1] + 1}" if len(ends) > 1 else "wait for the first step to end",
            )
        )
    return ends[found - 1][0], ends[found][0], 1


def _of_step(found: Slack, tasks: Tasks, step: int) -> Slack:
    of = {number: spare for number, spare in found.tasks.items() if tasks.submitted[number].step == step}
    return Slack(tasks=of, steps={step: found.steps[step]} if step in found.steps else {})
