"""Follows a record: reads it once for all pages, and again from any byte for pages that connect late.

    record = Record(Path("runs/quickstart-..."))
    record.advance()                       # new data as a PageBlock; None if there is none
    record.block(0)                        # the rows from byte 0

Of what is long ago it decodes only what it needs. It keeps the state in flight (`live.py`), the times of the run's
starts, what was counted up to each block, and where the rows of long ago are.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import msgspec

from pipeline.analysis.perfetto import Starts
from pipeline.record import trace
from pipeline.record.lock import is_alive
from pipeline.record.runs import consistent, of_a_run, open_plan
from pipeline.rundir import RunDir
from pipeline.web.live import Live, Picture, in_flight_since, stopped
from pipeline.web.page_rows import PageRows, Seconds, page_rows

EVENTS = 2000  # per block
RECENT_BYTES = 4 << 20  # the end of a record that is decoded whole
PASSED = frozenset({trace.Ran, trace.Got, trace.Put})  # of long ago, that leave no trace in the current state,
ENDED = PASSED | {trace.Submitted, trace.Acknowledged, trace.OpenSamples}  # or none once their group ended
LASTING = frozenset(  # of before all groups in flight, what the current state shows
    {trace.Started, trace.Placed, trace.Acknowledged, trace.Published, trace.StepEnded, trace.Spent, trace.Diverged}
)
SPANS = 100_000  # about as many of the last spans are sent to a page,
EPISODES = 4_000  # and of the last episodes
ALL: frozenset[type] = frozenset(get_args(trace.TraceEvent))
ROWS: frozenset[type] = frozenset(
    {
        *(trace.Ran, trace.Spent, trace.Turned, trace.StepEnded, trace.Published, trace.Trained, trace.Dropped),
        *(trace.Started, trace.Retried, trace.Checkpointed, trace.Diverged, trace.Stopping, trace.Failed, trace.Ended),
    }
)  # that have rows


class PageBlock(msgspec.Struct, frozen=True, kw_only=True):
    """Rows up to byte `offset`, the id to continue from."""

    offset: int
    rows: PageRows


class Record:
    """The events of a run directory, read up to byte `offset`."""

    def __init__(self, path: Path) -> None:
        self._run_dir = RunDir(path)
        self.plan = open_plan(path)
        self.offset = 0
        self._starts = Starts()
        self._shifts: list[tuple[int, float]] = []  # (byte, seconds to add to monotonic times from there on)
        self._marks: list[tuple[int, int, int]] = [(0, 0, 0)]  # (byte, spans and episodes before it), one per block
        self._index = array("Q")  # the bytes at which lines with rows begin, but for spans,
        self._indexed = 0  # up to this one
        self._live = Live(self.plan)
        self._pids: set[int] = set()
        self._remote = False

    @staticmethod
    def read(path: Path) -> Record:
        """Return a record that is read to its end."""
        record = Record(path)
        with of_a_run(RunDir(path).events):
            recent = RunDir(path).events.stat().st_size - RECENT_BYTES
        long_ago = [*record._skimmed(recent, ALL - ENDED, ends=True)]
        record._index.extend(at for block in long_ago for at, event in block.events if type(event) in ROWS)
        record._indexed = long_ago[-1].offset if long_ago else 0
        since = in_flight_since(record.plan, (event for block in long_ago for event in block.events))
        for block in long_ago:
            if block.offset <= since:
                record._take([one for one in block.events if type(one[1]) in LASTING], block.offset, block.ran)
        outside = any(stage.shape == "external" for stage in record.plan.stages)  # its puts count as its tasks
        for block in record._skimmed(recent, ALL - PASSED | ({trace.Put} if outside else frozenset())):
            record._take(block.events, block.offset, block.ran)
        while record._next():
            pass
        return record

    def advance(self) -> PageBlock | None:
        """Read the next block; None if nothing new was written. Raises GraphError for a line that is not an
        event, or whose stage or group is not in the plan."""
        before = self.offset
        events = self._next()
        return PageBlock(offset=self.offset, rows=self._rows(before, events)) if events else None

    def _next(self) -> list[tuple[int, trace.TraceEvent]]:
        """Read the events of the next block, each with the byte where it begins."""
        behind = self.offset
        events: list[tuple[int, trace.TraceEvent]] = []
        for offset, event in self._read(behind):
            events.append((behind, event))
            behind = offset
        self._take(events, behind, sum(isinstance(event, trace.Ran) for _, event in events))
        return events

    def _skimmed(self, until: int, kinds: frozenset[type], *, ends: bool = False) -> Iterator[trace.Skimmed]:
        """Yield what is up to byte `until`, block by block. See `trace.skim`."""
        offset = self.offset
        while True:
            with of_a_run(self._run_dir.events):
                found = trace.skim(self._run_dir.events, offset, until, kinds, ends=ends)
            if found.offset == offset:
                return
            yield found
            offset = found.offset

    def _take(self, events: list[tuple[int, trace.TraceEvent]], behind: int, spans: int) -> None:
        """Apply the events up to a byte, among or between which are that many spans."""
        with consistent(self._run_dir.path):
            for begin, event in events:
                if isinstance(event, trace.Started):
                    self._begin(event, begin)
                elif isinstance(event, trace.Placed):
                    self._place(event)
                self._live.apply(event)
        if behind > self.offset:
            episodes = sum(len(event.samples) for _, event in events if isinstance(event, trace.Spent))
            self._marks.append((behind, self._marks[-1][1] + spans, self._marks[-1][2] + episodes))
            self.offset = behind

    def block(self, offset: int) -> PageBlock | None:
        """Return the rows after a known byte, without spans and episodes that are too old; None at the end."""
        begins = {trace.Ran: self._begins(1, SPANS), trace.Spent: self._begins(2, EPISODES)}
        old = frozenset(kind for kind, begin in begins.items() if offset < begin)
        kept = {"spans": trace.Ran not in old, "episodes": trace.Spent not in old}
        until = min((begins[kind] for kind in old), default=self.offset)
        if offset < (long_ago := min(until, self._indexed)) and trace.Ran in old:
            begin, end = bisect_left(self._index, offset), bisect_left(self._index, long_ago)
            lines = self._index[begin : min(end, begin + EVENTS)]
            behind = self._index[begin + EVENTS] if begin + EVENTS < end else long_ago
            with of_a_run(self._run_dir.events):
                events = trace.lines_at(self._run_dir.events, lines, ROWS - old)
            return PageBlock(offset=behind, rows=self._rows(offset, events, **kept))
        with of_a_run(self._run_dir.events):
            found = trace.skim(self._run_dir.events, offset, until, ROWS - old)
        if found.offset == offset:
            return None
        return PageBlock(offset=found.offset, rows=self._rows(offset, found.events, **kept))

    def _read(self, offset: int) -> list[tuple[int, trace.TraceEvent]]:
        with of_a_run(self._run_dir.events):
            return [*islice(trace.read(self._run_dir.events, offset), EVENTS)]

    def _begins(self, counted: int, most: int) -> int:
        """Return the last mark after which at least as many spans (1) or episodes (2) follow as a page gets; 0 if there
        are not that many."""
        total = self._marks[-1][counted]
        return self._marks[max(0, bisect_right(self._marks, total - most, key=lambda mark: mark[counted]) - 1)][0]

    def picture(self) -> Picture:
        """Return the current state of the run."""
        with consistent(self._run_dir.path):
            return self._live.picture(self._starts.seconds)

    def now(self) -> dict[str, Any]:
        """Return the current state as plain values; as `gone` whether the run was killed: it has not ended, but its
        processes no longer exist; and, once it has stopped, as `checkpoint` the steps of the last one: 0 without any,
        None if that is not known."""
        picture = self.picture()
        gone = not picture.ended and not picture.failed and self.gone()
        if gone:
            picture = stopped(picture)
        checkpoint = self._checkpoint() if gone or picture.failed else None
        return msgspec.structs.asdict(picture) | {"gone": gone, "checkpoint": checkpoint}

    def _checkpoint(self) -> int | None:
        with suppress(OSError):
            linked = self._run_dir.checkpoints.is_symlink()  # no link is followed
            return None if linked else max(self._run_dir.checkpoint_steps(), default=0)
        return None

    def gone(self) -> bool:
        """Return whether the run's processes on this machine no longer exist. False if any worker was placed on another
        machine."""
        return bool(self._pids) and not self._remote and not any(map(is_alive, self._pids))

    def _begin(self, event: trace.Started, offset: int) -> None:
        self._starts.start(event)
        self._shifts.append((offset, self._starts.seconds(0.0)))
        self._pids.clear()
        self._remote = False

    def _place(self, event: trace.Placed) -> None:
        if event.node == "this process" or event.node.startswith("127."):
            self._pids.add(event.pid)
        else:
            self._remote = True

    def _seconds(self, offset: int) -> Seconds:
        place = bisect_right(self._shifts, (offset, float("inf"))) - 1
        shift = self._shifts[place][1] if place >= 0 else 0.0
        return lambda at_s: at_s + shift

    def _rows(self, offset: int, events: list[tuple[int, trace.TraceEvent]], **kept: bool) -> PageRows:
        timed: list[tuple[trace.TraceEvent, Seconds]] = []
        seconds = self._seconds(offset)
        for behind, event in events:
            if isinstance(event, trace.Started):
                seconds = self._seconds(behind)
            timed.append((event, seconds))
        return page_rows(timed, **kept)
