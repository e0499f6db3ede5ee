"""Collects every task of a run from its events, for analysis, critical path and simulator. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from pipeline.record import trace


class Tasks:
    """The tasks of a record by number: submission, spans, puts, acknowledgments, and how its samples spent their
    time."""

    def __init__(self, events: Iterable[trace.TraceEvent]) -> None:
        self.submitted: dict[int, trace.Submitted] = {}
        self.ran: dict[int, list[trace.Ran]] = defaultdict(list)
        self.acknowledged: dict[int, list[trace.Acknowledged]] = defaultdict(list)
        self.puts: dict[int, list[trace.Put]] = defaultdict(list)
        self.spent: dict[int, list[trace.Spent]] = defaultdict(list)
        self.tokens: dict[int, int] = {}
        self.process: dict[tuple[str, int], int] = {}  # the process of a worker, by group and rank
        self.others: list[trace.TraceEvent] = []
        number: dict[tuple[str, int, int], int] = {}  # by task number of the put
        for event in last_run(events):
            match event:
                case trace.Submitted():
                    self.submitted[event.task] = event
                    number.update({(event.stage, group, event.attempt): event.task for group in event.groups})
                case trace.Placed():
                    self.process[event.group, event.worker] = event.pid or -len(self.process) - 1
                    self.others.append(event)
                case trace.Ran():
                    self.ran[event.task].append(event)
                case trace.Spent():
                    self.spent[event.task].append(event)
                case trace.Acknowledged():
                    self.acknowledged[event.task].append(event)
                case trace.Put():
                    self.tokens.update(zip(event.groups, event.tokens))
                    key = (event.stage, event.groups[0], event.attempt) if event.groups else None
                    if key in number:
                        self.puts[number[key]].append(event)
                    else:
                        self.others.append(event)
                case _:
                    self.others.append(event)

    def of(self, stage: str) -> list[trace.Submitted]:
        """Return finished tasks of a stage, without those of the first step if there are later ones."""
        tasks = [task for number, task in self.submitted.items() if task.stage == stage and number in self.ran]
        first = min((task.step for task in tasks if task.step >= 0), default=0)
        return [task for task in tasks if task.step > first] or tasks


def step_ends(tasks: Tasks) -> list[tuple[float, int]]:
    """Return end times of steps (the publication of their version) and step numbers, in time order. The first entry
    marks the start of the second step.

    Without publications: the start of the run (step -1), and the end of each step.
    """
    published = [(event.at_s, event.step) for event in tasks.others if isinstance(event, trace.Published)]
    if published:
        return published
    began = [(event.monotonic_s, -1) for event in tasks.others if isinstance(event, trace.Started)]
    ended = [event for event in tasks.others if isinstance(event, trace.StepEnded) and event.step >= 0]
    return began + [(event.at_s, event.step) for event in ended]


def last_run(events: Iterable[trace.TraceEvent]) -> list[trace.TraceEvent]:
    """Return the events since the run was last started or resumed."""
    kept: list[trace.TraceEvent] = []
    for event in events:
        if isinstance(event, trace.Started):
            kept.clear()
        kept.append(event)
    return kept


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds covered by at least one of these (start_s, end_s) spans."""
    open_s, reached_s = 0.0, float("-inf")
    for start_s, end_s in sorted(spans):
        open_s += max(0.0, end_s - max(start_s, reached_s))
        reached_s = max(reached_s, end_s)
    return open_s
