"""How the time of episodes was spent: along the one that ended last, while nothing was sampled, and on average. Pure.

list(divided(tasks.spent[number], start_s, end_s))       # [("queue", 1.0, 1.2), ("generate", 1.2, 3.0), ...]
waits(tasks.spent[number])                               # [(3.0, 3.4)]: no turn was sampled
episode_times(tasks, start_s, end_s)                     # seconds of an episode, by stage and part
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from string import ascii_letters

import msgspec

from pipeline.declare.times import ENVIRONMENT, PROCESS, QUEUE
from pipeline.record import trace
from pipeline.record.history import Tasks
from pipeline.record.spent import UNIT_S, TimedPart, lengths_of, parts_of

WAITS = (ENVIRONMENT, PROCESS)  # parts in which an episode waits for environments
BUSY = 1 << 40  # more than there are episodes
Span = tuple[float, float]


class EpisodeTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The mean seconds of `episodes` of a stage, and by part, largest first. `waiting` is the fraction of its tasks'
    time in which no turn was sampled and every open episode waited for an environment, its own or, in the queue, that
    of another one; None if no task says so for all of its groups."""

    stage: str
    episodes: int
    seconds: float
    parts: dict[str, float]
    waiting: float | None


def divided(spent: Sequence[trace.Spent], start_s: float, end_s: float) -> Iterator[TimedPart]:
    """Yield the parts of an interval of a task: those of the episode that ended last in it, and "" outside it."""
    there = [event for event in spent if event.end_s <= end_s + UNIT_S]
    event = max(there, key=lambda one: one.end_s) if there else min(spent, key=lambda one: one.end_s)
    last = max(parts_of(event), key=lambda parts: parts[-1].end_s if parts else 0.0, default=[])
    at_s = start_s
    for part in last:
        for name, until_s in (("", part.start_s), (part.name, part.end_s)):
            until_s = min(until_s, end_s)
            if until_s > at_s:
                yield TimedPart(name, at_s, until_s)
                at_s = until_s
    if at_s < end_s:
        yield TimedPart("", at_s, end_s)


def waits(spent: Iterable[trace.Spent]) -> list[Span]:
    """Return when none of a task's episodes was sampled or in the hands of its worker, and one waited for its
    environment; those in the queue then wait for that one too."""
    changes: dict[int, int] = defaultdict(int)  # by time in units: of the episodes that wait, and BUSY for each other
    for event in spent:
        first = round(event.start_s / UNIT_S)
        weights = {
            letter: 0 if name == QUEUE else 1 if name in WAITS else BUSY
            for letter, name in zip(ascii_letters, event.names)
        }
        for start, pairs in lengths_of(event):
            at = first + start
            for letter, length in pairs:
                if weight := weights[letter]:
                    changes[at] += weight
                    changes[at + int(length)] -= weight
                at += int(length)
    found: list[Span] = []
    running, since = 0, 0
    for at in sorted(changes):
        before, running = running, running + changes[at]
        if not 0 < before < BUSY and 0 < running < BUSY:
            since = at
        elif 0 < before < BUSY and not 0 < running < BUSY:
            found.append((since * UNIT_S, at * UNIT_S))
    return found


def waits_by_task(tasks: Tasks) -> dict[int, list[Span]]:
    """Return the `waits` of every task of the record that has ended, and has the times of all its groups."""
    groups = {number: len(task.groups) or 1 for number, task in tasks.submitted.items() if number in tasks.ran}
    return {number: waits(spent) for number, spent in tasks.spent.items() if len(spent) == groups.get(number)}


def alone(spans: Iterable[Span], others: Iterable[Span]) -> Iterator[Span]:
    """Yield the intervals in which at least one of the `spans` runs and none of the `others`, in time order."""
    changes: dict[float, list[int]] = defaultdict(lambda: [0, 0])
    for kind, given in enumerate((spans, others)):
        for start_s, end_s in given:
            if start_s < end_s:
                changes[start_s][kind] += 1
                changes[end_s][kind] -= 1
    running = blocking = 0
    since_s: float | None = None
    for at_s in sorted(changes):
        running, blocking = running + changes[at_s][0], blocking + changes[at_s][1]
        if since_s is None and running and not blocking:
            since_s = at_s
        elif since_s is not None and (not running or blocking):
            yield since_s, at_s
            since_s = None


def episode_times(
    tasks: Tasks, waiting: Mapping[int, Sequence[Span]], start_s: float, end_s: float
) -> list[EpisodeTimes]:
    """Return how the episodes that ended between two times spent theirs, by stage. `waiting` are those of
    `waits_by_task`."""
    counts, sums = Counter[str](), defaultdict[str, Counter[str]](Counter)
    waited_s, took_s = defaultdict[str, float](float), defaultdict[str, float](float)
    for number, spent in tasks.spent.items():
        stage = spent[0].stage
        for event in spent:
            if start_s < event.end_s <= end_s:
                counts[stage] += len(event.samples)
                names = dict(zip(ascii_letters, event.names))
                for _, pairs in lengths_of(event):
                    for letter, length in pairs:
                        sums[stage][names[letter]] += int(length)
        if number in waiting and start_s < max(event.end_s for event in spent) <= end_s:
            waited_s[stage] += sum(b - a for a, b in waiting[number])
            took_s[stage] += tasks.ran[number][0].end_s - tasks.ran[number][0].start_s
    return [
        EpisodeTimes(
            stage=stage,
            episodes=count,
            seconds=sums[stage].total() * UNIT_S / count,
            parts={name: units * UNIT_S / count for name, units in sums[stage].most_common()},
            waiting=waited_s[stage] / took_s[stage] if took_s[stage] else None,
        )
        for stage, count in counts.items()
    ]
