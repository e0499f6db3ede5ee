"""Writes checkpoints that a run can resume from. Chooses the folder; the workers write its contents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from pipeline.declare.graph import Graph
from pipeline.engine.journal import Journal
from pipeline.errors import CheckpointError, Problem
from pipeline.record import checkpoint
from pipeline.rundir import RunDir
from pipeline.schedule.events import Event, Save, Saved

if TYPE_CHECKING:
    from pipeline.executors import Executor


class Checkpoints(Protocol):
    """How the driver writes checkpoints."""

    def save(self, decision: Save) -> Sequence[Event]:
        """Save the workers' state after a step. Returns `Saved`, or nothing if it is reported later."""


class Folders:
    """Checkpoints of a graph's run in its run directory; none are written without one."""

    def __init__(self, graph: Graph, run_dir: RunDir | None, executor: Executor, journal: Journal) -> None:
        self._graph, self._schedule = graph.name, graph.schedule
        self._run_dir, self._executor, self._journal = run_dir, executor, journal

    def save(self, decision: Save) -> Sequence[Event]:
        """Write a checkpoint, then remove those that need not stay. Raises CheckpointError if the disk is full or not
        writable."""
        if self._run_dir:
            self._journal.flush()  # a checkpoint is never ahead of the record
            start_s = self._journal.clock.now_s
            checkpoint.check_room(self._run_dir, checkpoint.last_bytes(self._run_dir) or self._executor.saved_bytes())
            try:
                folder, manifest = checkpoint.write(
                    self._run_dir,
                    graph=self._graph,
                    steps=decision.step + 1,
                    next_group=decision.next_group,
                    pending=decision.pending,
                    seed=self._schedule.seed,
                    save=self._executor.save,
                )
            except OSError as error:
                raise checkpoint.unwritten(error, self._run_dir.checkpoints) from error
            self._journal.checkpointed(decision.step, folder.name, manifest.size_bytes, start_s)
            self._remove_old(self._run_dir, decision.step + 1)
        return [Saved(decision.step)]

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
