"""Plays recorded episodes again with another number of environment processes: one task, event by event. Pure.

    ends([[("environment", 1.0), ("generate", 2.0), ("environment", 0.5)], ...], 4, waves=False)

An episode takes its steps one after the other. Each of its calls goes to the process that it was opened in, which had
the fewest open episodes then, and waits for those that came before. With waves, turns are sampled together, once every
open episode has asked for one. Other steps take their time. As many processes as episodes are never slower than fewer;
in between, one process more may be, if it changes who waits for whom.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence

from pipeline.declare.times import ENVIRONMENT, GENERATE, PROCESS, QUEUE
from pipeline.record import trace
from pipeline.record.history import Tasks
from pipeline.record.spent import TimedPart, parts_of

Steps = Sequence[tuple[str, float]]  # names and seconds
WORTH = 0.02  # more processes than these are no hint if they save less, as a fraction of the time of all tasks
FACTORS = (2, 4, 8, 16)


def ends(episodes: Sequence[Steps], processes: int, *, waves: bool, starts: Sequence[float] = ()) -> list[float]:
    """Return when each episode ends, in seconds; they begin at `starts`, or at 0."""
    waiting = [(starts[i] if starts else 0.0, i) for i in range(len(episodes))]  # times of the next steps
    heapq.heapify(waiting)
    free_s = [0.0] * processes
    there: Counter[int] = Counter()  # open episodes by process
    place: dict[int, int] = {}
    at = [0] * len(episodes)
    last = [_last_turn(steps) for steps in episodes]
    playing = {i for i, step in enumerate(last) if step}  # those that will ask for turns, or wait for an answer
    asked: dict[int, float] = {}  # the lengths of the turns that the next wave will sample
    found = [0.0] * len(episodes)
    while waiting:
        now_s, i = heapq.heappop(waiting)
        if at[i] >= last[i]:
            playing.discard(i)
        if at[i] == len(episodes[i]):
            found[i] = now_s
            there[place.get(i, -1)] -= 1
        else:
            name, length = episodes[i][at[i]]
            at[i] += 1
            if name == GENERATE and waves:
                asked[i] = length
            elif name == ENVIRONMENT:
                if i not in place:
                    place[i] = min(range(processes), key=lambda process: there[process])
                    there[place[i]] += 1
                free_s[place[i]] = max(now_s, free_s[place[i]]) + length
                heapq.heappush(waiting, (free_s[place[i]], i))
            else:
                heapq.heappush(waiting, (now_s + length, i))
        if asked and len(asked) == len(playing):
            for j, length in asked.items():
                heapq.heappush(waiting, (now_s + length, j))
            asked = {}
    return found


def _last_turn(steps: Steps) -> int:
    """Return the number of steps up to the answer to the last turn; 0 without turns."""
    turns = [n for n, (name, _) in enumerate(steps) if name == GENERATE]
    answers = [n for n in range(turns[-1], len(steps)) if steps[n][0] == ENVIRONMENT] if turns else []
    return answers[0] + 1 if answers else turns[-1] + 1 if turns else 0


def recorded_processes(tasks: Tasks, stage: str) -> int:
    """Return how many environment processes a worker had for a stage; 0 if that bounded nothing, or is not known."""
    return max((event.at_once.get(ENVIRONMENT, 0) for event in _all(tasks, stage)), default=0)


def saved_seconds(tasks: Tasks, stage: str, processes: int) -> Mapping[int, float]:
    """Return by how much the groups of a stage would have ended later (or earlier, below 0) with that many processes
    per worker, in seconds. Empty for groups of tasks that are not recorded as a whole."""
    now = recorded_processes(tasks, stage)
    found: dict[int, float] = {}
    for task in tasks.of(stage) if now else ():
        events = tasks.spent.get(task.task, ())
        if len(events) == len(task.groups) and events:
            found |= _shifts(events, now, processes)
    return found


def enough_processes(tasks: Tasks, stage: str) -> int:
    """Return the fewest processes, of some multiples of the recorded ones, with which tasks end about as early as with
    any of them; 0 if none would end earlier."""
    now = recorded_processes(tasks, stage)
    took_s = sum(span.end_s - span.start_s for task in tasks.of(stage) for span in tasks.ran[task.task][:1])
    saved = {now * factor: _saved(tasks, stage, now * factor) for factor in FACTORS} if now else {}
    most = max(saved.values(), default=0.0)
    if not most > WORTH * took_s:
        return 0
    return next(count for count, seconds in saved.items() if seconds >= most - WORTH * took_s)


def _saved(tasks: Tasks, stage: str, processes: int) -> float:
    """Return the seconds by which all tasks of a stage would end earlier."""
    shifts, saved_s = saved_seconds(tasks, stage, processes), 0.0
    for task in tasks.of(stage):
        ended_s = {event.groups[0]: event.end_s for event in tasks.spent.get(task.task, ())}
        if ended_s and ended_s.keys() <= shifts.keys():
            saved_s += max(ended_s.values()) - max(end_s + shifts[group] for group, end_s in ended_s.items())
    return saved_s


def _shifts(events: Sequence[trace.Spent], now: int, processes: int) -> dict[int, float]:
    played = [(event.groups[0], parts) for event in events for parts in parts_of(event)]
    first_s = min(event.start_s for event in events)
    starts = [parts[0].start_s - first_s if parts else 0.0 for _, parts in played]
    waves = any(part.name == QUEUE for _, parts in played for part in parts)
    steps = [_steps(parts) for _, parts in played]
    before, after = (ends(steps, count, waves=waves, starts=starts) for count in (now, processes))
    latest: dict[int, tuple[float, float]] = {}
    for (group, _), *both in zip(played, before, after):
        latest[group] = tuple(map(max, latest.get(group, (0.0, 0.0)), both))  # type: ignore[assignment]
    return {group: later - sooner for group, (sooner, later) in latest.items()}


def _steps(parts: Sequence[TimedPart]) -> list[tuple[str, float]]:
    """Return what an episode did, without what it waited for."""
    return [(part.name, part.end_s - part.start_s) for part in parts if part.name not in (QUEUE, PROCESS)]


def _all(tasks: Tasks, stage: str) -> Sequence[trace.Spent]:
    return [event for events in tasks.spent.values() for event in events if event.stage == stage]
