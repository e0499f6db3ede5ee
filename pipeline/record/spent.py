"""How the time of samples was spent, in the record: a text per sample, of names and lengths, such as "0a12b20531".

One event has all samples of a finished group. A part takes about four bytes, so thousands of turns per step cost
little.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from string import ascii_letters
from typing import NamedTuple

from pipeline.declare.task import Task
from pipeline.declare.times import SampleTimes
from pipeline.record import trace

UNIT_S = 1e-4  # of recorded lengths
MOST_NAMES = len(ascii_letters)  # of the parts of a group's samples
_TEXT = re.compile(r"(-?\d+)((?:[a-zA-Z]\d+)*)")
_PART = re.compile(r"([a-zA-Z])(\d+)")


class TimedPart(NamedTuple):
    """A part of a sample's time, in monotonic seconds."""

    name: str
    start_s: float
    end_s: float


def spent(
    task: Task, group: int | None, times: Sequence[SampleTimes], at_once: Mapping[str, int], where: tuple[str, int]
) -> trace.Spent:
    """Return the event of a finished group, or of a task without groups: the `times` of its samples, in their order.
    `where` is the worker."""
    start_s = min(each.start_s for each in times)
    names = tuple(dict.fromkeys(name for each in times for name, _ in each.parts))
    letters = dict(zip(names, ascii_letters))
    return trace.Spent(
        **trace.of(task),
        groups=() if group is None else (group,),
        group=where[0],
        worker=where[1],
        names=names,
        samples=tuple(_text(each, start_s, letters) for each in times),
        at_once=dict(at_once),
        start_s=start_s,
        end_s=max(each.end_s for each in times),
    )


def _text(times: SampleTimes, start_s: float, letters: Mapping[str, str]) -> str:
    """Return a sample's start behind the event's, and then the letter and the length of each part, in units."""
    before = round((times.start_s - start_s) / UNIT_S)
    found = [str(before)]
    for name, end_s in times.parts:
        end = round((end_s - start_s) / UNIT_S)  # each end is rounded by itself, so errors do not add up
        if end > before:
            found += (letters[name], str(end - before))
        before = end
    return "".join(found)


def lengths_of(event: trace.Spent) -> Iterator[tuple[int, list[tuple[str, str]]]]:
    """Yield the start of each sample of an event, and the letters and lengths of its parts, in units. Raises ValueError
    if the event is damaged. Quicker than `parts_of`."""
    for text in event.samples:
        whole = _TEXT.fullmatch(text)
        if whole is None:
            raise ValueError(f"{text!r:.60} is no sample's time")
        yield int(whole[1]), _PART.findall(whole[2])


def parts_of(event: trace.Spent) -> Iterator[list[TimedPart]]:
    """Yield the parts of each sample of an event, in time order. Raises ValueError or KeyError if it is damaged."""
    names = dict(zip(ascii_letters, event.names))
    for at, pairs in lengths_of(event):
        found = []
        for letter, length in pairs:
            start_s, at = event.start_s + at * UNIT_S, at + int(length)
            found.append(TimedPart(names[letter], start_s, event.start_s + at * UNIT_S))
        yield found
