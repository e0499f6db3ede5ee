"""Writes checkpoints that a run can resume from. Chooses the folder; the workers write its contents.

Training waits until the workers have copied their state. They write the copies, and a thread of the driver the
manifest, while the run goes on. The driver gives the folder its name once all files are written and every step that the
checkpoint covers is recorded: a resume repeats no step, so what is not recorded by then would be lost. The disk writes
one checkpoint at a time: if it is too slow for `checkpoint_every`, it slows the run.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pipeline.declare.graph import Graph
from pipeline.engine.journal import Journal
from pipeline.errors import CheckpointError, Problem, SluiceError
from pipeline.record import checkpoint
from pipeline.rundir import RunDir
from pipeline.schedule.events import Event, Save, Saved

if TYPE_CHECKING:
    from pipeline.executors import Executor


class Checkpoints(Protocol):
    """How the driver writes checkpoints."""

    def save(self, decision: Save) -> Sequence[Event]:
        """Save the workers' state after a step. Returns `Saved` once it may change, or nothing if that is reported
        later."""

    def settle(self, complete: int, *, wait: bool = False) -> None:
        """Record the checkpoints of steps before `complete` that are written by now, or with `wait` all of them. Raises
        the error of one that failed."""

    def end(self, *, wait: bool) -> None:
        """Settle up to the same step as before, ignore how that ends, and give up the others. Idempotent."""


class _Written(NamedTuple):
    """A checkpoint on its way to the disk."""

    decision: Save
    draft: checkpoint.Draft
    start_s: float
    done: Future[checkpoint.Manifest]


class Folders:
    """Checkpoints of a graph's run in its run directory; none are written without one."""

    def __init__(self, graph: Graph, run_dir: RunDir | None, executor: Executor, journal: Journal) -> None:
        self._graph, self._schedule = graph.name, graph.schedule
        self._run_dir, self._executor, self._journal = run_dir, executor, journal
        if run_dir:
            self._place = run_dir.path.stat()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: deque[_Written] = deque()
        self._complete = 0

    def save(self, decision: Save) -> Sequence[Event]:
        """Begin a checkpoint. Raises CheckpointError if the disk is full or not writable, for earlier ones too."""
        if run_dir := self._run_dir:
            for written in self._written:
                self._manifest(written)
            if not self._written:
                checkpoint.clean(run_dir)
            self._journal.flush()  # a checkpoint is never ahead of the record
            start_s = self._journal.clock.now_s
            with checkpoint.writing(run_dir.checkpoints):
                self._check_place(run_dir)
                checkpoint.check_room(run_dir, checkpoint.last_bytes(run_dir) or self._executor.saved_bytes())
                draft = checkpoint.Draft(run_dir, decision.step + 1)
                with draft.kept():
                    self._executor.hold(draft.folder)
            self._journal.held(decision.step, start_s)
            self._written.append(_Written(decision, draft, start_s, self._thread.submit(self._finish, decision, draft)))
        return [Saved(decision.step)]

    def settle(self, complete: int, *, wait: bool = False) -> None:
        """Name and record the checkpoints, then remove those that need not stay."""
        self._complete = complete
        while self._written and self._written[0].decision.step < complete and (wait or self._written[0].done.done()):
            self._put(self._written.popleft())

    def end(self, *, wait: bool) -> None:
        with suppress(SluiceError):
            self.settle(self._complete, wait=wait)
        for written in self._written:  # of a step that is not recorded
            if wait or written.done.done():
                written.done.exception()  # waits
                written.draft.discard()
        self._thread.shutdown(wait=False)

    def _put(self, written: _Written) -> None:
        run_dir, manifest = self._run_dir, self._manifest(written)
        assert run_dir
        self._journal.flush()
        with checkpoint.writing(run_dir.checkpoints), written.draft.kept():
            written.draft.put()
        step, folder = written.decision.step, written.draft.final
        self._journal.checkpointed(step, folder.name, manifest.size_bytes, written.start_s)
        self._journal.flush()
        self._remove_old(run_dir, step + 1)

    def _check_place(self, run_dir: RunDir) -> None:
        """Raise an error if the run directory has been moved: its record goes on where it is now."""
        if not os.path.samestat(run_dir.path.stat(), self._place):
            raise CheckpointError(
                Problem(
                    where=str(run_dir.path),
                    what="another folder has taken the place of the run directory",
                    why="the record and the checkpoints of a run lie in one folder",
                    fix="move the run directory back, then --resume",
                )
            )

    def _manifest(self, written: _Written) -> checkpoint.Manifest:
        """Return the manifest of a checkpoint once its files are written. Raises CheckpointError."""
        with checkpoint.writing(written.draft.folder.parent), written.draft.kept():
            return written.done.result()

    def _finish(self, decision: Save, draft: checkpoint.Draft) -> checkpoint.Manifest:
        draft.see(self._executor.saved(draft.folder))
        return draft.finish(
            graph=self._graph,
            next_group=decision.next_group,
            pending=decision.pending,
            seed=self._schedule.seed,
        )

    def _remove_old(self, run_dir: RunDir, newest: int) -> None:
        keep, every = self._schedule.keep_checkpoints, self._schedule.keep_every
        if keep is None:
            return
        try:
            for step in checkpoint.old(run_dir, newest, keep=keep, every=every):
                folder = run_dir.checkpoint(step)
                self._journal.removed(step - 1, folder.name)
                self._journal.flush()
                checkpoint.remove(folder)
        except OSError as error:
            raise CheckpointError(
                Problem(
                    where=str(run_dir.checkpoints),
                    what=f"an old checkpoint could not be removed: {error.strerror}",
                    why=f"keep_checkpoints={keep} removes it; the new checkpoint is complete",
                    fix="make the folder writable, or leave out keep_checkpoints, then --resume",
                )
            ) from error
