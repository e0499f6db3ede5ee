"""Drives one run: the scheduler decides, the executor acts, the trace remembers.

run = Engine(graph, plan, LocalExecutor(), run_dir=RunDir.new(Path("runs"), "quickstart"))
run.execute()
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from pipeline import checkpoint, trace
from pipeline.errors import CheckpointError, Problem, SluiceError, StageError
from pipeline.executors import Executor
from pipeline.graph import Graph
from pipeline.handles import HandleTable
from pipeline.outside import EVERY_S, Outside
from pipeline.plan import Plan, with_samples
from pipeline.rundir import RunDir
from pipeline.scheduler import (
    Admit,
    Clear,
    Decision,
    Dropped,
    Event,
    Finished,
    GiveUp,
    Landed,
    Run,
    Save,
    Saved,
    Scheduler,
    StepDone,
)
from pipeline.stage import Task
from pipeline.worker import TaskResult, WorkerSettings, register

CLEARS_AT_ONCE = 2
StepListener = Callable[[int, dict[str, float]], None]


class Engine:
    """One run of a graph. `execute` runs it to the end or raises what ended it; either way everything is put away.

    `on_step(step, metrics)` is called as each step is done (step -1: before the first). `deadline_s` bounds how long
    the run may go without any task finishing.
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
    ) -> None:
        self.graph, self.plan, self.executor, self.run_dir = graph, plan, executor, run_dir
        self.start, self.on_step, self.deadline_s = start, on_step, deadline_s
        self.scheduler = Scheduler(plan, start=start)
        self.handles = HandleTable(plan.group_size)
        self.weights: dict[int, str] = {}  # the last published version and its hash
        self._trace = trace.TraceWriter(run_dir.events if run_dir else None)
        self._metrics: dict[int, dict[str, float]] = {}
        self._clearing = ThreadPoolExecutor(1, thread_name_prefix="clear")
        self._clears: deque[Future[trace.Cleared]] = deque()
        self._seen: dict[int, dict[str, float]] = {}  # of metrics whose stages see more or less than a batch
        self._groups: dict[int, tuple[int, int]] = {}  # admitted and dropped, by step
        self._admitted_s: dict[int, float] = {}
        self._last_admitted_s: dict[int, float] = {}
        self._published_s = 0.0  # a step lasts from one published version to the next
        self._failed: Task | None = None
        self._outstanding: dict[tuple[str, int], int] = {}
        self._last_progress_s = time.monotonic()
        self._outside = Outside(plan, self.handles)

    def execute(self) -> None:
        """Run every step that is left. Raises SluiceError; KeyboardInterrupt passes through."""
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
            self.scheduler = Scheduler(self.plan, start=self.start, next_group=manifest.next_group)
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
        except KeyboardInterrupt:
            self._trace.write(
                trace.Failed(stage=None, step=None, error="interrupted", problems=(), at_s=time.monotonic())
            )
            raise
        finally:
            self._clearing.shutdown()
            self.executor.close()
            self._trace.close()

    def _loop(self) -> None:
        self._last_progress_s = time.monotonic()
        decisions = self.scheduler.begin()
        while True:
            while decisions:
                events = [event for decision in decisions for event in self._act(decision)]
                decisions = [decision for event in events for decision in self.scheduler.handle(event)]
            self._take_clears()
            self._trace.flush()
            if self.scheduler.done:
                return self._take_clears(wait=True)
            results = self.executor.wait(EVERY_S)
            events = [event for result in results for event in self._take(result)]
            if self._outside.due():
                found = self._outside.ask(self.executor.plane, self.scheduler, self._last_admitted_s)
                for landed, put in found:
                    self._trace.write(put)
                    events.append(landed)
            if results or events:
                self._last_progress_s = time.monotonic()
            else:
                self._check_progress()
            decisions = [decision for event in events for decision in self.scheduler.handle(event)]

    def _act(self, decision: Decision) -> list[Event]:
        match decision:
            case Admit():
                now_s = self._last_admitted_s[decision.step] = time.monotonic()
                self._admitted_s.setdefault(decision.step, now_s)
                self._count(decision.step, admitted=len(decision.groups))
                self._trace.write(
                    trace.Admitted(
                        step=decision.step, groups=decision.groups, version=self.scheduler.version, at_s=now_s
                    )
                )
            case Run():
                self._submit(decision.task)
            case Clear():
                self._clear(decision)
            case Save():
                return [self._save(decision.step, decision.next_group)]
            case StepDone():
                self._step_done(decision.step)
            case GiveUp():
                self._failed = Task(stage=decision.stage, step=decision.step)
                raise StageError(decision.problem)
        return []

    def _submit(self, task: Task) -> None:
        planned = self.plan.stage(task.stage)
        fields = [field for field in planned.reads if field not in self.plan.weights_fields]
        groups = task.groups[: planned.first_groups]
        meta = self.handles.handle(task.step, groups, fields) if fields and groups else None
        self._outstanding[task.stage, task.step] = self._outstanding.get((task.stage, task.step), 0) + len(
            task.groups or "1"
        )
        self._trace.write(
            trace.Submitted(
                stage=task.stage,
                step=task.step,
                attempt=task.attempt,
                group=planned.groups[0],
                worker=0,
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
        if result.error:
            self._failed = task
            raise result.error
        planned = self.plan.stage(task.stage)
        events: list[Event] = [self.handles.add(task.step, handle) for handle in result.handles]
        weights = tuple(field for field in planned.writes if field in self.plan.weights_fields)
        if weights and result.weights:
            version, sha256 = result.weights
            if planned.shape == "transfer":
                self.weights = {version: sha256}
                self._trace.write(
                    trace.Published(
                        stage=task.stage, step=task.step, version=version, sha256=sha256, at_s=time.monotonic()
                    )
                )
                now_s = time.monotonic()
                if task.step >= self.start:
                    self._metric(task.step, {"time/step_s": now_s - self._published_s}, 1.0)
                self._published_s = now_s
            events.append(Landed(task.step, (), weights))
        if result.dropped:
            self._drop(task, result.dropped)
            events.append(Dropped(task.step, result.dropped))
        share = len(task.groups) / self.plan.batch if task.groups else 1.0
        self._metric(task.step, result.metrics, share)
        if self.plan.gate and task.groups:
            seen = self._seen.setdefault(task.step, {})
            seen.update({name: seen.get(name, 0.0) + share for name in result.metrics})
        taken_s: dict[tuple[str, int], float] = {}  # by worker; those that share a task work at the same time
        for event in result.events:
            if isinstance(event, trace.Ran):
                worker = (event.group, event.worker)
                taken_s[worker] = taken_s.get(worker, 0.0) + event.end_s - event.start_s
        longest_s = sum(taken_s.values()) if planned.shape == "transfer" else max(taken_s.values(), default=0.0)
        self._metric(task.step, {f"time/{task.stage}_s": longest_s}, 1.0)
        left = self._outstanding[task.stage, task.step] - len(task.groups or "1")
        if left:
            self._outstanding[task.stage, task.step] = left
        else:
            del self._outstanding[task.stage, task.step]
        return [*events, Finished(task)]

    def _metric(self, step: int, values: dict[str, float], share: float) -> None:
        metrics = self._metrics.setdefault(step, {})
        for name, value in values.items():
            metrics[name] = metrics.get(name, 0.0) + share * value

    def _drop(self, task: Task, reasons: dict[int, str]) -> None:
        """Record what a gate dropped."""
        self._count(task.step, dropped=len(reasons))
        for reason in dict.fromkeys(reasons.values()):
            groups = tuple(group for group, why in reasons.items() if why == reason)
            self._trace.write(
                trace.Dropped(stage=task.stage, step=task.step, groups=groups, reason=reason, at_s=time.monotonic())
            )

    def _count(self, step: int, *, admitted: int = 0, dropped: int = 0) -> None:
        before = self._groups.get(step, (0, 0))
        self._groups[step] = (before[0] + admitted, before[1] + dropped)

    def _gate_metrics(self, step: int) -> dict[str, float]:
        """How many groups of a step were sampled, dropped and kept."""
        admitted, dropped = self._groups.pop(step, (0, 0))
        if self.plan.gate is None or not admitted:
            return {}
        name = self.plan.gate.stage
        return {
            f"{name}/admitted": float(admitted),
            f"{name}/dropped": float(dropped),
            f"{name}/acceptance": 1 - dropped / admitted,
        }

    def _clear(self, decision: Clear) -> None:
        """Hand the clearing to a thread of its own: nobody waits for rows that nobody reads."""
        handle = self.handles.rows(decision.step, decision.groups)
        if handle is None:
            return

        def clear() -> trace.Cleared:
            start_s = time.monotonic()
            self.executor.plane.clear(handle)
            return trace.Cleared(step=decision.step, groups=decision.groups, start_s=start_s, end_s=time.monotonic())

        while len(self._clears) >= CLEARS_AT_ONCE:  # the data plane holds no more than the plan says and these
            self._trace.write(self._clears.popleft().result())
        self._clears.append(self._clearing.submit(clear))
        self.executor.cleared(list({row: None for placement in handle.placements for row in placement.rows}))

    def _take_clears(self, *, wait: bool = False) -> None:
        """Record the clears that are done; raises what one of them raised."""
        while self._clears and (wait or self._clears[0].done()):
            self._trace.write(self._clears.popleft().result())

    def _save(self, step: int, next_group: int) -> Saved:
        if self.run_dir:
            start_s = time.monotonic()
            try:
                folder, manifest = checkpoint.write(
                    self.run_dir,
                    graph=self.plan.name,
                    steps=step + 1,
                    next_group=next_group,
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
                    step=step,
                    folder=folder.name,
                    size_bytes=manifest.size_bytes,
                    start_s=start_s,
                    end_s=time.monotonic(),
                )
            )
        return Saved(step)

    def _step_done(self, step: int) -> None:
        self.handles.forget(step)
        self._last_admitted_s.pop(step, None)
        admitted_s = self._admitted_s.pop(step, None)
        metrics = self._metrics.pop(step, {})
        metrics |= {name: metrics[name] / seen for name, seen in self._seen.pop(step, {}).items()}
        metrics |= self._gate_metrics(step)
        if admitted_s is not None:
            metrics.setdefault("time/step_s", time.monotonic() - admitted_s)
        line = {"step": step + 1, "version": self.scheduler.version, **dict(sorted(metrics.items()))}
        if self.run_dir:
            with self.run_dir.metrics.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
        self._trace.write(trace.StepEnded(step=step, metrics=metrics, at_s=time.monotonic()))
        if self.on_step:
            self.on_step(step, metrics)

    def _check_progress(self) -> None:
        idle_s = time.monotonic() - self._last_progress_s
        waits = "; ".join(
            f"step {step + 1} {stage} waits for {', '.join(what) or 'a worker'}"
            for step, stage, what in self.scheduler.waiting()
        )
        if not self._outstanding and not self._outside.stages:
            raise StageError(
                Problem(
                    where=f"run of {self.plan.name}",
                    what=f"nothing can start: {waits}",
                    why="no task is running",
                    fix="report this graph: the checks should have refused it",
                )
            )
        if idle_s > self.deadline_s:
            running = ", ".join(f"{stage} at step {step + 1}" for stage, step in self._outstanding)
            raise StageError(
                Problem(
                    where=f"run of {self.plan.name}",
                    what=f"no task finished in {self.deadline_s:g} s; running: {running or 'none'}",
                    why=f"every wait has a deadline; {waits}",
                    fix="raise --deadline-s, or mend the stage that hangs",
                )
            )

    def _end(self) -> None:
        rows = self.executor.plane.row_count(self.plan.partition)
        self._trace.write(trace.Ended(steps=self.plan.steps, rows_left=rows, at_s=time.monotonic()))
