"""The current state of a run: running tasks, what each stage waits for, queue depths. Pure.

    now = Live(plan)
    for event in events: now.apply(event)
    now.picture(seconds)

It holds only the groups and tasks in flight, so its size does not grow with the run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping

import msgspec

from pipeline.declare.times import ENVIRONMENT, GENERATE, PROCESS, QUEUE, WORKER
from pipeline.plan.plan import Plan, PlannedStage
from pipeline.record import trace

RUNNING, WAITING, READY, IDLE, DONE, FAILED = "running", "waiting", "ready", "idle", "done", "failed"
STOPPED = "stopped"
DOES = {  # what open episodes do, by the part of their time
    ENVIRONMENT: "wait for their environment",
    PROCESS: "wait for a process of their environment",
    QUEUE: "wait to be sampled",
    GENERATE: "are sampled",
    WORKER: "wait for their worker",
}


class StageNow(msgspec.Struct, frozen=True, kw_only=True):
    """A stage. `state` is one of the words above; `why` explains it; `step` is the last step in which it finished a
    group, or -2; `seconds` is the duration of its tasks in the last step; `open` counts its unfinished samples, by the
    part of their time that they are in, if it reports that."""

    state: str
    why: str
    running: int
    step: int
    seconds: float
    open: dict[str, int]


class TaskNow(msgspec.Struct, frozen=True, kw_only=True):
    """A running task, submitted at `start` (seconds of the run)."""

    task: int
    stage: str
    group: str
    replica: int | None
    step: int
    start: float


class ActorNow(msgspec.Struct, frozen=True, kw_only=True):
    """A worker: one actor in one process on a node of the cluster."""

    group: str
    worker: int
    node: str
    pid: int


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """The whole state. `diverged` has the signs of divergence so far, one per kind; `depth` counts the groups on each
    edge, "writer>reader", that wait for the reader."""

    step: int
    steps: int
    version: int
    last: float
    ended: bool
    failed: str
    problems: tuple[str, ...]
    diverged: tuple[str, ...]
    in_flight: int
    stages: dict[str, StageNow]
    depth: dict[str, int]
    tasks: tuple[TaskNow, ...]
    actors: tuple[ActorNow, ...]


def stopped(picture: Picture) -> Picture:
    """Return the state of a run whose processes are gone: none of its stages runs or waits."""
    stages = {
        name: msgspec.structs.replace(stage, state=STOPPED, why=f"stopped: {stage.why}", running=0)
        if stage.state in (RUNNING, WAITING, READY)
        else stage
        for name, stage in picture.stages.items()
    }
    return msgspec.structs.replace(picture, stages=stages, tasks=())


def in_flight_since(plan: Plan, events: Iterable[tuple[int, trace.TraceEvent]]) -> int:
    """Return the byte of an event before which nothing began that is in flight after these events; each is given with
    its byte. Only admissions, starts, and the ends of groups count."""
    began: dict[int, int] = {}  # group in flight -> byte of its admission
    batches = [0]
    for byte, event in events:
        match event:
            case trace.Started():
                began.clear()
            case trace.Admitted():
                began |= dict.fromkeys(event.groups, byte)
                batches.append(byte)
            case trace.Cleared(last=True) | trace.Dropped():
                for group in event.groups:
                    began.pop(group, None)
    ahead = plan.max_staleness + 3  # batches that are admitted while a task without groups, such as a refit, runs
    return min([batches[max(0, len(batches) - ahead)], *began.values()])


class _LiveTask:
    """A task, its unreported groups, and where it runs."""

    def __init__(self, event: trace.Submitted) -> None:
        self.event = event
        self.left = set(event.groups)


class Live:
    """Tracks the groups and tasks in flight, event by event."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._writer = {field: stage.name for stage in plan.stages for field in stage.writes}
        self._weights = set(plan.weights_fields)
        self.begin()

    def begin(self) -> None:
        """Reset the state when a run starts or resumes."""
        self._done: dict[int, set[str]] = {}  # group in flight -> stages that have finished it
        self._given: dict[int, set[str]] = {}  # group in flight -> stages it was submitted to
        self._running: dict[int, _LiveTask] = {}
        self._step: dict[str, int] = defaultdict(lambda: -2)
        self._seconds: dict[str, float] = {}
        self._open: dict[str, dict[str, int]] = {}  # unfinished samples by stage and part, while it runs
        self._ended_step, self._version, self._last_s = -1, -1, 0.0
        self._ended = False
        self._failed: trace.Failed | None = None
        self._diverged: list[str] = []
        self._actors: dict[tuple[str, int], ActorNow] = {}

    def apply(self, event: trace.TraceEvent) -> None:
        """Apply one event, in record order."""
        match event:
            case trace.Ran() | trace.Got():  # the most frequent ones first
                self._last_s = max(self._last_s, event.end_s)
                return
            case trace.Submitted():
                self._running[event.task] = _LiveTask(event)
                for group in event.groups:
                    self._given.get(group, set()).add(event.stage)
            case trace.Acknowledged():
                self._acknowledge(event)
            case trace.Put():
                if self._plan.stage(event.stage).shape == "external":
                    self._behind(event.stage, event.groups)
            case trace.OpenSamples():
                self._open[event.stage] = event.parts
            case trace.Started():
                self.begin()
                self._ended_step, self._last_s = event.start - 1, event.monotonic_s
            case trace.Placed():
                actor = ActorNow(group=event.group, worker=event.worker, node=event.node, pid=event.pid)
                self._actors[actor.group, actor.worker] = actor
            case trace.Admitted():
                for group in event.groups:
                    self._done[group], self._given[group] = set(), set()
            case trace.Retried():
                self._forget(event.task)
                for group in event.groups:
                    self._given.get(group, set()).discard(event.stage)
            case trace.Cleared(last=True) | trace.Dropped():
                for group in event.groups:
                    self._done.pop(group, None)
                    self._given.pop(group, None)
            case trace.Published():
                self._version = event.version
            case trace.StepEnded():
                self._ended_step = max(self._ended_step, event.step)
                times = {name: value for name, value in event.metrics.items() if name.startswith("time/")}
                self._seconds |= {name[5:-2]: value for name, value in times.items()}
            case trace.Diverged():
                self._diverged.append(event.problem)
            case trace.Failed():
                self._failed = event
            case trace.Ended():
                self._ended = True
        self._last_s = max(self._last_s, getattr(event, "at_s", 0.0), getattr(event, "end_s", 0.0))

    def _acknowledge(self, event: trace.Acknowledged) -> None:
        self._step[event.stage] = max(self._step[event.stage], event.step)
        self._behind(event.stage, event.groups)
        running = self._running.get(event.task)
        if running:
            running.left -= set(event.groups)
            if not running.left:
                self._forget(event.task)

    def _forget(self, number: int) -> None:
        task = self._running.pop(number, None)
        if task and all(task.event.stage != other.event.stage for other in self._running.values()):
            self._open.pop(task.event.stage, None)

    def _behind(self, stage: str, groups: Iterable[int]) -> None:
        for group in groups:
            self._done.get(group, set()).add(stage)

    def picture(self, seconds: Callable[[float], float]) -> Picture:
        """Return the current state; `seconds` converts monotonic times to run time."""
        over = self._ended or self._failed is not None
        running = Counter(task.event.stage for task in self._running.values())
        return Picture(
            step=self._ended_step,
            steps=self._plan.steps,
            version=self._version,
            last=seconds(self._last_s),
            ended=self._ended,
            failed=self._failed.error if self._failed else "",
            problems=self._failed.problems if self._failed else (),
            diverged=tuple(self._diverged),
            in_flight=len(self._done),
            stages={stage.name: self._stage(stage, running[stage.name], over) for stage in self._plan.stages},
            depth={} if over else self._depth(),
            tasks=() if over else tuple(self._tasks(seconds)),
            actors=tuple(self._actors.values()),
        )

    def _tasks(self, seconds: Callable[[float], float]) -> Iterable[TaskNow]:
        for task in self._running.values():
            of = task.event
            yield TaskNow(
                task=of.task,
                stage=of.stage,
                group=of.group,
                replica=of.replica,
                step=of.step,
                start=seconds(of.at_s),
            )

    def _stage(self, stage: PlannedStage, running: int, over: bool) -> StageNow:
        state, why = self._state(stage, running, over)
        return StageNow(
            state=state,
            why=why,
            running=running,
            step=self._step[stage.name],
            seconds=self._seconds.get(stage.name, 0.0),
            open=self._open.get(stage.name, {}) if state == RUNNING else {},
        )

    def _state(self, stage: PlannedStage, running: int, over: bool) -> tuple[str, str]:
        if self._failed is not None and self._failed.stage == stage.name:
            return FAILED, f"failed in step {(self._failed.step or 0) + 1}"
        if over:
            return (DONE, "done") if self._ended else (IDLE, "stopped with the run")
        if running:
            of = f"{running} tasks" if running > 1 else f"step {self._now_in(stage.name) + 1}"
            return RUNNING, _in_words(self._open.get(stage.name, {})) or of
        missing, ready = self._missing(stage)
        if missing:
            return WAITING, "waits for " + " and ".join(name for name, _ in missing.most_common(2))
        if ready:
            return READY, f"{ready} groups ready, waits for its turn"
        return IDLE, "nothing to do yet"

    def _now_in(self, name: str) -> int:
        return max((task.event.step for task in self._running.values() if task.event.stage == name), default=-1)

    def _missing(self, stage: PlannedStage) -> tuple[Counter[str], int]:
        """Return the fields that groups in flight lack for a stage, with counts, and how many groups lack none."""
        missing: Counter[str] = Counter()
        ready = 0
        needs = [field for field in (*stage.reads, *stage.awaits)]
        of_step = [field for field in needs if field in self._weights]
        if of_step:
            return Counter(of_step), 0
        for group, done in self._done.items():
            if stage.name in done or stage.name in self._given[group]:
                continue
            lacks = [field for field in needs if self._writer[field] not in done]
            missing.update(lacks)
            ready += not lacks
        return missing, ready

    def _depth(self) -> dict[str, int]:
        """Return the number of groups that a writer finished and its reader has not started, by edge."""
        counts: Counter[str] = Counter()
        for pair in {(edge.writer, edge.reader) for edge in self._plan.edges if edge.field not in self._weights}:
            writer, reader = pair
            count = sum(writer in done and reader not in self._given[group] for group, done in self._done.items())
            if count:
                counts[f"{writer}>{reader}"] = count
        return dict(counts)


def _in_words(counts: Mapping[str, int]) -> str:
    """Say what most open episodes do; empty if none are open. Those in a process of their environment and those that
    wait for one both wait for environments."""
    counts = {part: count for part, count in counts.items() if count}
    if not counts:
        return ""
    waiting = counts.get(ENVIRONMENT, 0) + counts.get(PROCESS, 0)
    others = {part: count for part, count in counts.items() if part not in (ENVIRONMENT, PROCESS)}
    most = max(others, key=lambda part: others[part], default=ENVIRONMENT)
    if waiting >= others.get(most, 0):
        most, others[ENVIRONMENT] = ENVIRONMENT, waiting
    return f"{others[most]} of {sum(counts.values())} episodes {DOES.get(most, most)}"
