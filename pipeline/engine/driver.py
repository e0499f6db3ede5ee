"""Drives one run: the scheduler decides, the executor acts, the journal records.

run = Driver(graph, plan, LocalExecutor(), run_dir=RunDir.new(Path("runs"), "quickstart"))
run.execute()

`pipeline.engine.loop.Loop` is shared by real runs and simulations; `Driver` gives it the components of a real run.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import msgspec

from pipeline.data_plane.outside import publish
from pipeline.declare.abilities import stamps_of
from pipeline.declare.graph import Graph
from pipeline.declare.version_folders import VersionFolders
from pipeline.engine.checkpoints import Folders
from pipeline.engine.drops import Drops
from pipeline.engine.journal import Journal, WallClock
from pipeline.engine.loop import Loop
from pipeline.engine.outside import Outside
from pipeline.engine.oversight import Oversight
from pipeline.engine.run_rows import RunRows
from pipeline.engine.steps import Numbers, StepListener
from pipeline.engine.termination import Termination
from pipeline.engine.watch import Says, Watch
from pipeline.engine.watchdog import Watchdog
from pipeline.executors import Executor
from pipeline.executors.worker import WorkerSettings, register
from pipeline.plan.plan import Plan
from pipeline.plan.planner import sample_fields, with_samples
from pipeline.plan.resting import resting_bytes
from pipeline.record import checkpoint, trace
from pipeline.rundir import RunDir
from pipeline.schedule.scheduler import Scheduler
from pipeline.writing import replace


class Driver:
    """One run of a graph. `execute` runs it to the end or raises the error that ended it; both release everything.

    `on_step(step, metrics)` is called after each step (step -1: before the first), `on_notice(problem)` for each lost
    worker, and for each sign of divergence, unless the graph's schedule stops the run then. `deadline_s` bounds the
    time in which no task finishes, in the driver's own process too; if code there cannot be interrupted, the process
    ends after `last_words`. `termination` may ask the run to stop: the steps in training are then finished and saved,
    `execute` returns, and `stopped` is true.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        executor: Executor,
        *,
        run_dir: RunDir | None = None,
        start: int = 0,
        on_step: StepListener | None = None,
        on_notice: Says | None = None,
        deadline_s: float = 3600.0,
        last_words: Callable[[], None] = lambda: None,
        termination: Termination | None = None,
    ) -> None:
        self.graph, self.plan, self.executor, self.run_dir = graph, plan, executor, run_dir
        journal = Journal(plan, WallClock(), trace.TraceWriter(run_dir.events if run_dir else None), on_notice)
        stamps = stamps_of(graph.all_stages())
        self.rows = RunRows(plan, executor, journal, stamps.ragged if stamps else None)
        watch = Watch(journal, run_dir, stop=graph.schedule.on_divergence == "stop", says=on_notice)
        listeners = [*([on_step] if on_step else []), watch.take]
        self._turns = turns = VersionFolders(run_dir.turns) if run_dir else None
        if run_dir and turns:
            listeners.append(lambda step, metrics: turns.keep_for(step + 1, run_dir.checkpoint_steps))
        steps = Numbers(plan, run_dir, start, listeners, self.rows.stored)
        outside = Outside(plan, sample_fields(graph.all_stages()), self.rows.handles, self.rows.stored, executor)
        of = f"run of {plan.name}"
        self.loop = Loop(
            Scheduler(plan, start=start),
            executor,
            journal=journal,
            rows=self.rows,
            steps=steps,
            drops=Drops(journal, steps, self.rows.lengths, at_once=False),
            checkpoints=Folders(graph, run_dir, executor, journal),
            outside=outside,
            oversight=Oversight(
                of,
                journal.clock,
                termination=termination,
                deadline_s=deadline_s,
                watchdog=Watchdog(deadline_s, last_words),
                awaits=outside.awaited,
            ),
        )

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of the run."""
        return self.loop.scheduler

    @property
    def stopped(self) -> bool:
        """Whether the run stopped on request, before its last step."""
        return self.loop.stopped

    def execute(self) -> None:
        """Run the remaining steps. Raises SluiceError; KeyboardInterrupt and SystemExit pass through."""
        start, restore, mark = self.scheduler.start, None, ""
        if self.run_dir and start:
            restore, manifest, _ = checkpoint.read(self.run_dir, start)
            self.loop.scheduler = Scheduler(
                self.plan, start=start, next_group=manifest.next_group, pending=manifest.pending
            )
        if self._turns:
            self._turns.forget(lambda version: version != start)
        if self.run_dir:
            replace(self.run_dir.plan, msgspec.json.format(msgspec.json.encode(self.plan)))
            mark = secrets.token_hex(8)
            replace(self.run_dir.mark, mark.encode())
        settings = WorkerSettings(
            partition=self.plan.partition,
            parts={partition.name: partition.fields for partition in self.plan.partitions},
            group_size=self.plan.group_size,
            steps=self.plan.steps,
            seed=self.graph.schedule.seed,
            run_dir=self.run_dir.path if self.run_dir else None,
            mark=mark,
            beside={
                group.name: resting_bytes(self.graph, partners)
                for group in self.plan.groups
                if (partners := self.plan.partners(group.name))
            },
            max_staleness=self.graph.schedule.max_staleness,
        )

        def bring_up() -> Iterable[trace.Placed]:
            termination = self.loop.oversight.termination
            with termination.starting() if termination else nullcontext():
                placed = list(self.executor.start(self.graph, self.plan, settings, restore))
            yield from placed
            stages = with_samples(self.graph)
            register(self.executor.plane, self.plan.partition, stages, settings.parts)
            if self.run_dir:
                publish(
                    self.run_dir,
                    self.executor.plane,
                    stages,
                    partition=settings.partition,
                    group_size=settings.group_size,
                    parts=settings.parts,
                )

        self.loop.run(bring_up)
        if self._turns and not self.stopped:
            self._turns.forget(lambda version: True)
