"""Turns events into rows that pages draw, independent of earlier events. Pure.

A page that has the rows up to a byte offset requests the rest, and gets the same rows as a page that was open all the
time. Times are seconds since the run first started; steps count from 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from pipeline.record import trace

Seconds = Callable[[float], float]


class PageRows(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Lists of rows in record order.

    spans      stage, worker group, worker, step, attempt, start, end, groups: how many, and which, as in "4-7 9"
    spent      stage, worker group, worker, step, start, names, and a text per episode, as in the record
    turns      worker group, worker, awake, bytes in use at that time, start, end
    steps      step, time of its end, its metrics
    published  step, version, sha256, time
    trained    step, version, {age in versions: samples}
    dropped    stage (empty: too old), step, reason, groups, tokens of each group's longest response if known
    notes      kind, time, text
    """

    spans: list[tuple[str, str, int, int, int, float, float, int, str]] = []
    spent: list[tuple[str, str, int, int, float, tuple[str, ...], tuple[str, ...]]] = []
    turns: list[tuple[str, int, bool, int, float, float]] = []
    steps: list[tuple[int, float, dict[str, float]]] = []
    published: list[tuple[int, int, str, float]] = []
    trained: list[tuple[int, int, dict[int, int]]] = []
    dropped: list[tuple[str, int, str, int, tuple[int, ...]]] = []
    notes: list[tuple[str, float, str]] = []


def page_rows(
    events: Iterable[tuple[trace.TraceEvent, Seconds]], *, spans: bool = True, episodes: bool = True
) -> PageRows:
    """Return the rows of events, each given with its converter from monotonic to run time; `spans` includes spans, and
    `episodes` how their time was spent."""
    made = PageRows()
    for event, seconds in events:
        match event:
            case trace.Ran() if spans:
                start_s, end_s = round(seconds(event.start_s), 6), round(seconds(event.end_s), 6)
                span = (event.stage, event.group, event.worker, event.step, event.attempt, start_s, end_s)
                made.spans.append((*span, len(event.groups), ranges(event.groups)))
            case trace.Spent() if episodes:
                of = (event.stage, event.group, event.worker, event.step, round(seconds(event.start_s), 6))
                made.spent.append((*of, event.names, event.samples))
            case trace.Turned():
                start_s, end_s = seconds(event.start_s), seconds(event.end_s)
                made.turns.append((event.group, event.worker, event.awake, event.memory_bytes, start_s, end_s))
            case trace.StepEnded():
                made.steps.append((event.step, seconds(event.at_s), event.metrics))
            case trace.Published():
                made.published.append((event.step, event.version, event.sha256, seconds(event.at_s)))
            case trace.Trained():
                ages: Counter[int] = Counter()
                for oldest, count in zip(event.oldest, event.samples):
                    ages[event.version - oldest] += count
                made.trained.append((event.step, event.version, dict(ages)))
            case trace.Dropped():
                made.dropped.append((event.stage, event.step, event.reason, len(event.groups), event.tokens))
            case _:
                if found := _note(event):
                    made.notes.append((found[0], seconds(found[1]), found[2]))
    return made


def ranges(groups: Iterable[int]) -> str:
    """Return the groups as a text of ranges: "4-7 9" for 4, 5, 6, 7 and 9."""
    ends: list[tuple[int, int]] = []
    for group in sorted(groups):
        if ends and group == ends[-1][1] + 1:
            ends[-1] = (ends[-1][0], group)
        else:
            ends.append((group, group))
    return " ".join(f"{low}-{high}" if high > low else str(low) for low, high in ends)


def _note(event: trace.TraceEvent) -> tuple[str, float, str] | None:
    """Return (kind, monotonic time, text) of an event that the run's log shows, else None."""
    match event:
        case trace.Started():
            text = f"resumed after step {event.start}" if event.start else "started"
            return "started", event.monotonic_s, text
        case trace.Retried():
            text = f"{event.stage} of step {event.step + 1} is retried: {event.reason}"
            return "retried", event.at_s, text
        case trace.Checkpointed():
            return "checkpointed", event.end_s, f"checkpoint of step {event.step + 1}"
        case trace.Diverged():
            return "diverged", event.at_s, event.problem
        case trace.Stopping():
            return "stopping", event.at_s, "asked to stop: the step in training is finished and saved"
        case trace.Failed():
            return "failed", event.at_s, event.error
        case trace.Ended():
            return "ended", event.at_s, f"ended after step {event.steps}"
    return None
