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
from string import ascii_letters

from pipeline.declare.times import ENVIRONMENT, GENERATE, PROCESS, QUEUE, WORKER
from pipeline.record import trace
from pipeline.record.history import Tasks
from pipeline.record.spent import UNIT_S, lengths_of

Steps = Sequence[tuple[str, float]]  # names and seconds
WORTH = 0.02  # more processes than these are no hint if they save less, as a fraction of the time of all tasks
FACTORS = (2, 4, 8, 16)
MOST, FEW = 20_000, 4_000  # episodes that are played again for a what-if, and to find how many processes are enough


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
    events = [spent[0] for spent in tasks.spent.values() if spent[0].stage == stage]
    return max((event.at_once.get(ENVIRONMENT, 0) for event in events), default=0)


def saved_seconds(tasks: Tasks, stage: str, processes: int) -> Mapping[int, float]:
    """Return by how many seconds the groups of a stage would have ended later (or earlier, below 0) with that many
    processes per worker: the groups of the latest tasks that are recorded as a whole, of about `MOST` episodes."""
    now = recorded_processes(tasks, stage)
    found: dict[int, float] = {}
    for events in _latest(tasks, stage, MOST) if now else ():
        found |= _shifts(events, now, processes)
    return found


def enough_processes(tasks: Tasks, stage: str) -> int:
    """Return the fewest processes, of some multiples of the recorded ones, with which tasks end about as early as with
    any of them; 0 if none would end earlier."""
    now = recorded_processes(tasks, stage)
    latest = _latest(tasks, stage, FEW)
    took_s = sum(_end(events, {}) - min(event.start_s for event in events) for events in latest)
    saved = {
        count: sum(_end(events, {}) - _end(events, _shifts(events, now, count)) for events in latest)
        for count in ([now * factor for factor in FACTORS] if now else ())
    }
    most = max(saved.values(), default=0.0)
    if not most > WORTH * took_s:
        return 0
    return next(count for count, seconds in saved.items() if seconds >= most - WORTH * took_s)


def _end(events: Sequence[trace.Spent], later_s: Mapping[int, float]) -> float:
    return max(event.end_s + later_s.get(event.groups[0], 0.0) for event in events)


def _latest(tasks: Tasks, stage: str, most: int) -> list[Sequence[trace.Spent]]:
    """Return the times of the latest tasks that are recorded as a whole, at least one, of about `most` episodes."""
    found: list[Sequence[trace.Spent]] = []
    count = 0
    for task in reversed(tasks.of(stage)):
        events = tasks.spent.get(task.task, ())
        if events and len(events) == len(task.groups) and count < most:
            found.append(events)
            count += sum(len(event.samples) for event in events)
    return found


def _shifts(events: Sequence[trace.Spent], now: int, processes: int) -> dict[int, float]:
    waves = any(QUEUE in event.names for event in events)
    first_s = min(event.start_s for event in events)
    groups: list[int] = []
    starts: list[float] = []
    steps: list[list[tuple[str, float]]] = []
    for event in events:
        for start, pairs in lengths_of(event):
            groups.append(event.groups[0])
            starts.append(event.start_s - first_s + start * UNIT_S)
            steps.append(_steps(event, pairs, waves=waves))
    before, after = (ends(steps, count, waves=waves, starts=starts) for count in (now, processes))
    latest: dict[int, tuple[float, float]] = {}
    for group, sooner, later in zip(groups, before, after):
        had = latest.get(group, (0.0, 0.0))
        latest[group] = max(had[0], sooner), max(had[1], later)
    return {group: later - sooner for group, (sooner, later) in latest.items()}


def _steps(event: trace.Spent, pairs: Sequence[tuple[str, str]], *, waves: bool) -> list[tuple[str, float]]:
    """Return what an episode did, without what it waited for; what waits for nobody is one step."""
    names = dict(zip(ascii_letters, event.names))
    found: list[tuple[str, float]] = []
    for letter, length in pairs:
        name = names[letter]
        if name in (QUEUE, PROCESS):
            continue
        alone = name != ENVIRONMENT and not (waves and name == GENERATE)
        if alone and found and found[-1][0] == WORKER:
            found[-1] = WORKER, found[-1][1] + int(length) * UNIT_S
        else:
            found.append((WORKER if alone else name, int(length) * UNIT_S))
    return found
