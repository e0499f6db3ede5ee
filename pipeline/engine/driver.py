"""Drives one run: the scheduler decides, the executor acts, the trace remembers.

run = Engine(graph, plan, LocalExecutor(), run_dir=RunDir.new(Path("runs"), "quickstart"))
run.execute()
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from pipeline.declare.abilities import stamps_of
from pipeline.declare.graph import Graph
from pipeline.declare.handle import KVBatchMeta
from pipeline.declare.task import Task
from pipeline.engine.handles import HandleTable
from pipeline.engine.outside import EVERY_S, Outside
from pipeline.engine.tally import Tally
from pipeline.engine.termination import Termination
from pipeline.engine.usage import Usage
from pipeline.errors import CheckpointError, Problem, SluiceError, StageError
from pipeline.executors import Executor
from pipeline.executors.worker import TaskResult, WorkerSettings, register
from pipeline.plan.plan import Plan
from pipeline.plan.planner import with_samples
from pipeline.record import checkpoint, trace
from pipeline.record.history import covered_s
from pipeline.rundir import RunDir
from pipeline.schedule.events import (
    CANCELLED,
    Admit,
    Cancel,
    Claim,
    Clear,
    Decision,
    Drop,
    Dropped,
    Event,
    Failed,
    Finished,
    GiveUp,
    Landed,
    Run,
    Save,
    Saved,
    Served,
    StepDone,
)
from pipeline.schedule.scheduler import Scheduler

CLEARS_AT_ONCE = 2
StepListener = Callable[[int, dict[str, float]], None]


class Engine:
    """One run of a graph. `execute` runs it to the end or raises what ended it; either way everything is put away.

    `on_step(step, metrics)` is called as each step is done (step -1: before the first). `deadline_s` bounds how long
    the run may go without any task finishing. `termination` may ask the run to stop: then what is being trained is
    finished and saved, `execute` returns, and `stopped` is true.
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
        deadline_s: float = 3600.0,
        termination: Termination | None = None,
    ) -> None:
        self.termination, self.stopped = termination, False
        self._stopping = False
        self.graph, self.plan, self.executor, self.run_dir = graph, plan, executor, run_dir
        self.start, self.on_step, self.deadline_s = start, on_step, deadline_s
        self.scheduler = Scheduler(plan, start=start)
        self.handles = HandleTable(plan.group_size)
        self.weights: dict[int, str] = {}  # the last published version and its hash
        self._trace = trace.TraceWriter(run_dir.events if run_dir else None)
        self._tally = Tally(plan)
        self._clearing = ThreadPoolExecutor(1, thread_name_prefix="clear")
        self._clears: deque[Future[trace.Cleared]] = deque()
        self._cancelled: dict[int, int] = {}  # groups that are to be given up, and the step for which they were too old
        self._published_s = 0.0  # a step lasts from one published version to the next
        self._failed: Task | None = None
        self._last_progress_s = time.monotonic()
        self._outside = Outside(plan, self.handles)
        self._usage = Usage()
        stamps = stamps_of(graph.all_stages())
        self._tokens = stamps.ragged if stamps else None  # the dimension of tokens

    def execute(self) -> None:
        """Run every step that is left. Raises SluiceError; KeyboardInterrupt and SystemExit pass through."""
        settings = WorkerSettings(
            partition=self.plan.partition,
            group_size=self.plan.group_size,
            steps=self.plan.steps,
            seed=self.graph.schedule.seed,
            run_dir=self.run_dir.path if self.run_dir else None,
        )
        restore = None
        if self.run_dir and self.start:
            restore, manifest, _ = checkpoint.read(self.run_dir, self.start)
            self.scheduler = Scheduler(
                self.plan, start=self.start, next_group=manifest.next_group, pending=manifest.pending
            )
        if self.run_dir:
            self.run_dir.plan.write_bytes(msgspec.json.format(msgspec.json.encode(self.plan)))
        self._trace.write(
            trace.Started(
                graph=self.plan.name,
                start=self.start,
                steps=self.plan.steps,
                executor=self.executor.name,
                monotonic_s=time.monotonic(),
                wall_s=time.time(),
            )
        )
        try:
            for placed in self.executor.start(self.graph, self.plan, settings, restore):
                self._trace.write(placed)
            register(self.executor.plane, self.plan.partition, with_samples(self.graph))
            if self.termination:
                self.termination.install()  # again: Ray has a handler of its own
            self._loop()
            self._end()
        except SluiceError as error:
            self._trace.write(
                trace.Failed(
                    stage=self._failed.stage if self._failed else None,
                    step=self._failed.step if self._failed else None,
                    error=type(error).__name__,
                    problems=tuple(map(str, error.problems)),
                    at_s=time.monotonic(),
                )
            )
            raise
        except (KeyboardInterrupt, SystemExit):
            self._interrupted()
            raise
        finally:
            self._clearing.shutdown()
            self.executor.close()
            self._trace.close()

    def _loop(self) -> None:
        self._last_progress_s = time.monotonic()
        self._carry_out(self.scheduler.begin())
        while True:
            if self.termination and self.termination.asked and not self._stopping:
                self._stopping = True
                self._trace.write(trace.Stopping(at_s=time.monotonic()))
                self._carry_out(self.scheduler.stop())
            self._take_clears()
            self._trace.flush()
            if self.scheduler.done or self.scheduler.stopped:
                return self._take_clears(wait=True)
            results = self.executor.wait(EVERY_S)
            found = []
            for result in results:  # what follows from one report comes before the next
                self._handle(self._take(result))
            if self._outside.due():
                found = self._outside.ask(self.executor.plane, self.scheduler, self._tally.last_admitted_s())
                for landed, put in found:
                    self._trace.write(put)
                    self._handle([landed])
            if results or found:
                self._last_progress_s = time.monotonic()
            else:
                self._check_progress()

    def _handle(self, events: Sequence[Event]) -> None:
        if events:
            self._carry_out(self.scheduler.handle(*events))

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            self._handle(self._act(decision))

    def _act(self, decision: Decision) -> list[Event]:
        now_s = time.monotonic()
        match decision:
            case Admit(step=step, groups=groups):
                self._tally.admitted(step, len(groups), now_s)
                self._trace.write(trace.Admitted(step=step, groups=groups, version=self.scheduler.version, at_s=now_s))
            case Claim(step=step, groups=groups):
                self._tally.claimed(step, groups)
                self._trace.write(trace.Claimed(step=step, groups=groups, at_s=now_s))
            case Run():
                self._submit(decision.task)
            case Drop(step=step, groups=groups, reason=reason):
                if reason == CANCELLED:  # how long they were is known when the worker has given them up
                    self._cancelled.update(dict.fromkeys(groups, step))
                else:
                    self._drop(step, groups, reason)
            case Cancel():
                self.executor.cancel(decision.task, decision.groups)
            case Clear():
                self._clear(decision)
            case Save():
                return [self._save(decision)]
            case StepDone():
                self._step_done(decision.step)
            case GiveUp():
                self._failed = Task(stage=decision.stage, step=decision.step)
                raise StageError(decision.problem)
        return []

    def _submit(self, task: Task) -> None:
        planned = self.plan.stage(task.stage)
        fields = [field for field in planned.reads if field not in self.plan.weights_fields]
        groups = task.groups if planned.chooses else task.groups[: planned.first_groups]
        meta = self.handles.handle(groups, fields) if fields and groups else None
        self._trace.write(
            trace.Submitted(
                **trace.of(task),
                group=planned.groups[0],
                replica=task.replica,
                groups=task.groups,
                samples=len(task.groups) * self.plan.group_size,
                version=task.version,
                at_s=time.monotonic(),
            )
        )
        self.executor.submit(task, meta)

    def _take(self, result: TaskResult) -> list[Event]:
        """What a worker reported, as events."""
        task = result.task
        for event in result.events:
            self._trace.write(event)
        self._measure(result)
        if result.error:
            self._failed = task
            raise result.error
        if result.lost:
            return self._lost(task, result.lost)
        if not self.scheduler.is_current(task):
            return self._fence(result)
        if result.served is not None:
            return [self._served(task, result.served)]
        events: list[Event] = []
        for handle in result.handles:
            whole = self.handles.add(handle)
            oldest = tuple(result.oldest[group] for group in whole) if result.oldest else ()
            events.append(Landed(task.step, whole, handle.fields, oldest, task.number))
        if result.weights:
            events.append(self._weights(task, result.weights))
        if result.dropped:
            stage = self.plan.gate.stage if self.plan.gate else task.stage
            for reason in dict.fromkeys(result.dropped.values()):
                self._drop(task.step, [g for g, why in result.dropped.items() if why == reason], reason, stage=stage)
            events.append(Dropped(task.step, result.dropped, task.number))
        if self._cancelled:
            self._given_up(result)
        if result.finished or not task.groups:
            self._trace.write(
                trace.Acknowledged(
                    **trace.of(task),
                    groups=result.finished,
                    at_s=time.monotonic(),
                )
            )
            events.append(Finished(task, result.finished))
        return events

    def _served(self, task: Task, replica: int) -> Served:
        """A replica has the version that a transfer brings."""
        now_s = time.monotonic()
        self._trace.write(trace.Served(**trace.of(task), replica=replica, version=task.step + 1, at_s=now_s))
        return Served(task, replica)

    def _fence(self, result: TaskResult) -> list[Event]:
        """A report of an attempt that was replaced: what it has put is swept. The end of a stream is none."""
        task = result.task
        if result.finished or result.handles:
            self._trace.write(
                trace.Fenced(
                    **trace.of(task),
                    groups=result.finished,
                    at_s=time.monotonic(),
                )
            )
        for handle in result.handles:
            self._clear_rows(handle, task.step, ())
        return []

    def _lost(self, task: Task, reason: str) -> list[Event]:
        """The worker of a task is another one now: what it had not acknowledged goes out again, as the next attempt."""
        if not self.scheduler.is_current(task):
            return []
        owed = self.scheduler.owed(task)
        self._give_up(group for group in owed if group in self._cancelled)
        self._trace.write(trace.Retried(**trace.of(task), groups=owed, reason=reason, at_s=time.monotonic()))
        self.handles.lose(owed, task.attempt)
        return [Failed(task)]

    def _weights(self, task: Task, weights: tuple[int, str]) -> Landed:
        """A stage has made weights, or published them."""
        planned = self.plan.stage(task.stage)
        fields = tuple(field for field in planned.writes if field in self.plan.weights_fields)
        if planned.shape == "transfer":
            version, sha256 = weights
            self.weights = {version: sha256}
            now_s = time.monotonic()
            self._trace.write(
                trace.Published(stage=task.stage, step=task.step, version=version, sha256=sha256, at_s=now_s)
            )
            if task.step >= self.start:
                self._tally.took(task.step, "step", now_s - self._published_s)
            self._published_s = now_s
        return Landed(task.step, (), fields, task=task.number)

    def _measure(self, result: TaskResult) -> None:
        """Count the metrics of a task, and the seconds of its slowest worker."""
        task = result.task
        groups = [group for group in result.finished if group not in result.cancelled]
        self._tally.report(task, result.metrics, result.samples if task.groups else 0, groups)
        spans = [event for event in result.events if isinstance(event, trace.Ran)]
        if not spans:
            return
        if self.plan.stage(task.stage).shape == "transfer":  # one side after the other, or both together
            took_s = covered_s((span.start_s, span.end_s) for span in spans)
        else:
            taken_s: dict[tuple[str, int], float] = {}  # by worker; those that share a task work at the same time
            for span in spans:
                worker = (span.group, span.worker)
                taken_s[worker] = taken_s.get(worker, 0.0) + span.end_s - span.start_s
            took_s = max(taken_s.values())
        self._tally.took(task.step, task.stage, took_s)

    def _drop(
        self, step: int, groups: Sequence[int], reason: str, *, stage: str = "", tokens: Sequence[int] | None = None
    ) -> None:
        """Record groups that leave without being trained."""
        if tokens is None:
            tokens = self.handles.longest(groups, self._tokens) if self._tokens else ()
        self._tally.dropped(step, groups, stage or reason)
        self._trace.write(
            trace.Dropped(
                stage=stage,
                step=step,
                groups=tuple(groups),
                reason=reason,
                tokens=tuple(tokens),
                at_s=time.monotonic(),
            )
        )

    def _give_up(self, groups: Iterable[int]) -> None:
        """Record groups that were cancelled though their worker has not acknowledged it; nobody knows their length."""
        for group in list(groups):
            self._drop(self._cancelled.pop(group), (group,), CANCELLED, tokens=())

    def _given_up(self, result: TaskResult) -> None:
        """Record groups that were cancelled, now that their worker acknowledges them: given up, or just finished."""
        for group in result.finished:
            if group in self._cancelled:
                step = self._cancelled.pop(group)
                tokens = (result.cancelled[group],) if group in result.cancelled else None
                self._drop(step, (group,), CANCELLED, tokens=tokens)

    def _clear(self, decision: Clear) -> None:
        handle = self.handles.rows(decision.groups)
        self.handles.forget(decision.groups)
        if handle is not None:
            self._clear_rows(handle, decision.step, decision.groups)

    def _clear_rows(self, handle: KVBatchMeta, step: int, groups: tuple[int, ...]) -> None:
        """Hand the clearing to a thread of its own: nobody waits for rows that nobody reads."""

        def clear() -> trace.Cleared:
            start_s = time.monotonic()
            self.executor.plane.clear(handle)
            return trace.Cleared(step=step, groups=groups, start_s=start_s, end_s=time.monotonic())

        while len(self._clears) >= CLEARS_AT_ONCE:  # the data plane holds no more than the plan says and these
            self._trace.write(self._clears.popleft().result())
        self._clears.append(self._clearing.submit(clear))
        self.executor.cleared(list({row: None for placement in handle.placements for row in placement.rows}))

    def _take_clears(self, *, wait: bool = False) -> None:
        """Record the clears that are done; raises what one of them raised."""
        while self._clears and (wait or self._clears[0].done()):
            self._trace.write(self._clears.popleft().result())

    def _save(self, decision: Save) -> Saved:
        self._give_up(self._cancelled)  # the checkpoint has them behind it, and its record may end before they are done
        if self.run_dir:
            self._trace.flush()  # a checkpoint is never ahead of the record
            start_s = time.monotonic()
            try:
                folder, manifest = checkpoint.write(
                    self.run_dir,
                    graph=self.plan.name,
                    steps=decision.step + 1,
                    next_group=decision.next_group,
                    pending=decision.pending,
                    seed=self.graph.schedule.seed,
                    save=self.executor.save,
                )
            except OSError as error:
                raise CheckpointError(
                    Problem(
                        where=str(self.run_dir.checkpoints),
                        what=f"a checkpoint could not be written: {error}",
                        why="the run must be able to resume; earlier checkpoints are whole",
                        fix="make room, then --resume",
                    )
                ) from error
            self._trace.write(
                trace.Checkpointed(
                    step=decision.step,
                    folder=folder.name,
                    size_bytes=manifest.size_bytes,
                    start_s=start_s,
                    end_s=time.monotonic(),
                )
            )
        return Saved(decision.step)

    def _step_done(self, step: int) -> None:
        metrics = self._tally.close(step, time.monotonic())
        line = {"step": step + 1, "version": self.scheduler.version, **metrics}
        if self.run_dir:
            with self.run_dir.metrics.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
        driver_cpu_s, processes_cpu_s = self._usage.read()
        self._trace.write(
            trace.StepEnded(
                step=step,
                metrics=metrics,
                at_s=time.monotonic(),
                driver_cpu_s=driver_cpu_s,
                processes_cpu_s=processes_cpu_s,
            )
        )
        if self.on_step:
            self.on_step(step, metrics)

    def _check_progress(self) -> None:
        idle_s = time.monotonic() - self._last_progress_s
        waits = "; ".join(
            f"step {step + 1} {stage} waits for {', '.join(what) or 'a worker'}"
            for step, stage, what in self.scheduler.waiting()
        )
        running = self.scheduler.running
        if not running and not self._outside.stages:
            raise StageError(
                Problem(
                    where=f"run of {self.plan.name}",
                    what=f"nothing can start: {waits}",
                    why="no task is running",
                    fix="report this graph: the checks should have refused it",
                )
            )
        if idle_s > self.deadline_s:
            doing = ", ".join(dict.fromkeys(f"{task.stage} at step {task.step + 1}" for task in running))
            raise StageError(
                Problem(
                    where=f"run of {self.plan.name}",
                    what=f"no task finished in {self.deadline_s:g} s; running: {doing or 'none'}",
                    why=f"every wait has a deadline; {waits}",
                    fix="raise --deadline-s, or mend the stage that hangs",
                )
            )

    def _interrupted(self) -> None:
        self._trace.write(trace.Failed(stage=None, step=None, error="interrupted", problems=(), at_s=time.monotonic()))

    def _end(self) -> None:
        if not self.scheduler.done:
            self.stopped = True
            return self._interrupted()
        late = self.handles.late(self.plan.partition)  # a worker that was taken for lost may have gone on
        if late is not None:
            self.executor.plane.clear(late)
        rows = self.executor.plane.row_count(self.plan.partition)
        self._trace.write(trace.Ended(steps=self.plan.steps, rows_left=rows, at_s=time.monotonic()))
