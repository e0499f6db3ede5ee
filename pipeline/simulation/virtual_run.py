"""Runs a plan in virtual time: the driver of real runs, with simulated workers and no data plane.

Durations come from `Durations`. The record has the format of a real run's, so the same tools read both.

    simulation = Simulation(plan, Durations({"rollout": Drawn(parse("lognormal(1.0, 0.8)")), ...}))
    events = simulation.run()

Tasks that compute at the same time share the cores of their machine (`pipeline.simulation.sharing`). The driver handles
one report at a time. `faults` makes attempts fail; see `Fault`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from pipeline.declare.task import Task
from pipeline.engine.drops import Drops
from pipeline.engine.journal import Journal
from pipeline.engine.loop import Loop
from pipeline.engine.oversight import Oversight
from pipeline.engine.termination import Termination
from pipeline.plan.plan import Plan
from pipeline.record import trace
from pipeline.schedule.events import Clear, Decision, Event
from pipeline.schedule.scheduler import Scheduler
from pipeline.simulation.durations import Durations
from pipeline.simulation.virtual_executor import VirtualExecutor, VirtualReport
from pipeline.simulation.workers import Fault

__all__ = ["Fault", "Simulation"]
DEADLINE_S = 3600.0
Watch = Callable[[float, tuple[Event, ...], list[Decision]], object]


class Simulation:
    """One run of a plan in virtual time.

    `cores` is the number of cores per machine; None means no contention. `nodes` maps (group, rank) to the worker's
    machine; workers that it omits share one machine. With `one_process`, all workers take turns in one process, as with
    the local executor. `write` receives the events; otherwise `run` returns them as a list. `watch(now_s, events,
    decisions)` is called with everything that the scheduler receives and decides. At `stop_s`, a stop is requested.
    """

    def __init__(
        self,
        plan: Plan,
        durations: Durations,
        *,
        seed: int = 0,
        cores: float | None = None,
        nodes: Mapping[tuple[str, int], str] | None = None,
        one_process: bool = False,
        faults: Callable[[Task], Fault | None] | None = None,
        write: Callable[[trace.TraceEvent], object] | None = None,
        watch: Watch | None = None,
        stop_s: float | None = None,
    ) -> None:
        self.events: list[trace.TraceEvent] = []
        executor = self._executor = VirtualExecutor(
            plan, durations, seed=seed, cores=cores, nodes=nodes or {}, one_process=one_process, faults=faults
        )
        scheduler = WatchedScheduler(plan, executor, watch) if watch else Scheduler(plan)
        journal = Journal(plan, executor.clock, FunctionPen(write or self.events.append))
        rows, steps = NoRows(scheduler, executor, journal), Seconds()
        termination = Termination()
        if stop_s is not None:
            executor.clock.at(stop_s, _ask, termination)
        self._loop = Loop(
            scheduler,
            executor,
            journal=journal,
            rows=rows,
            steps=steps,
            drops=Drops(journal, steps, rows.lengths, at_once=True),
            checkpoints=NoFolders(executor, journal),
            outside=executor,
            oversight=Oversight(
                f"simulation of {plan.name}",
                executor.clock,
                termination=termination,
                deadline_s=DEADLINE_S,
                lingers=lambda: not executor.idle,
            ),
        )

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self._executor.clock.now_s

    def run(self) -> list[trace.TraceEvent]:
        """Run every step. Raises StageError if the run cannot continue, as a real run would."""
        self._loop.run(self._executor.start)
        return self.events


def _ask(termination: Termination) -> bool:
    termination.asked = True
    return True


class WatchedScheduler(Scheduler):
    """A scheduler that passes its events and decisions to `watch`."""

    def __init__(self, plan: Plan, executor: VirtualExecutor, watch: Watch) -> None:
        super().__init__(plan)
        self._clock, self._watch = executor.clock, watch

    def begin(self) -> list[Decision]:
        return self._shown((), super().begin())

    def handle(self, *events: Event) -> list[Decision]:
        return self._shown(events, super().handle(*events))

    def stop(self) -> list[Decision]:
        return self._shown((), super().stop())

    def _shown(self, events: tuple[Event, ...], decisions: list[Decision]) -> list[Decision]:
        self._watch(self._clock.now_s, events, decisions)
        return decisions


class FunctionPen:
    """Passes events to a function."""

    def __init__(self, write: Callable[[trace.TraceEvent], object]) -> None:
        self.write = write

    def flush(self) -> None:
        return None

    def close(self) -> None:
        return None


class NoFolders:
    """The checkpoints of a run without a disk: once the state is copied, its files are there."""

    def __init__(self, executor: VirtualExecutor, journal: Journal) -> None:
        self.save, self._held, self._journal = executor.save, executor.held, journal

    def settle(self, complete: int, *, wait: bool = False) -> None:
        while self._held and self._held[0][0] < complete:
            step, start_s = self._held.popleft()
            self._journal.checkpointed(step, f"step_{step + 1:06d}", 0, start_s)

    def end(self, *, wait: bool) -> None:
        return None


class NoRows:
    """The rows of a run without a data plane: knows the lengths of responses, and clears rows at once."""

    def __init__(self, scheduler: Scheduler, executor: VirtualExecutor, journal: Journal) -> None:
        self._scheduler, self._journal, self._tokens = scheduler, journal, executor.tokens

    def handle(self, task: Task) -> None:
        return None

    def landed(self, report: VirtualReport) -> list[Event]:
        return report.landed

    def lengths(self, groups: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._tokens.get(group, 0) for group in groups)

    def lost(self, groups: Sequence[int], attempt: int) -> None:
        return None

    def clear(self, decision: Clear) -> None:
        now_s = self._journal.clock.now_s
        self._journal.write(trace.Cleared(**msgspec.structs.asdict(decision), start_s=now_s, end_s=now_s))

    def sweep(self, report: VirtualReport) -> None:
        return None

    def settle(self, *, wait: bool = False) -> None:
        return None

    def left(self) -> int:
        return self._scheduler.in_flight

    def close(self) -> None:
        return None


class Seconds:
    """The metrics of a simulated step: its duration, from one published version to the next."""

    def __init__(self) -> None:
        self._published_s = 0.0
        self._took_s: dict[int, float] = {}

    def admitted(self, step: int, groups: int, at_s: float) -> None:
        return None

    def claimed(self, step: int, groups: Sequence[int]) -> None:
        return None

    def dropped(self, step: int, groups: Sequence[int], reason: str) -> None:
        return None

    def report(self, report: VirtualReport) -> None:
        return None

    def published(self, step: int, at_s: float) -> None:
        if step >= 0:
            self._took_s[step] = at_s - self._published_s
        self._published_s = at_s

    def close(self, step: int, version: int, now_s: float) -> tuple[dict[str, float], tuple[float, float]]:
        return {"time/step_s": self._took_s.pop(step)} if step in self._took_s else {}, (0.0, 0.0)

    def done(self, step: int, metrics: dict[str, float]) -> None:
        return None
