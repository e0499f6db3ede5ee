"""Simulated run records for tests that analyze records: complete, cut off or resumed."""

from __future__ import annotations

from hypothesis import strategies as st

from pipeline import Schedule
from pipeline.plan.plan import Plan
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.simulation.distributions import parse
from pipeline.simulation.durations import Costs, Drawn, Durations
from pipeline.simulation.virtual_run import Fault, Simulation
from tests.unit import toy

SECONDS = {"rollout": "lognormal(1, 1)", "train": "0.4 @ 1", "logprobs": "0.1 @ 1", "refit": "0.1", "evaluate": "0.3"}
COSTS = Costs(dispatch_s={"train": 0.02}, report_s={"rollout": 0.03}, driver_s=0.001, checkpoint_s=0.05)
Record = tuple[Plan, list[trace.TraceEvent]]


def times(plan_: Plan, costs: Costs = COSTS, **seconds: str) -> Durations:
    """Return the duration of every stage of a plan; `seconds` overrides single stages."""
    known = SECONDS | seconds
    return Durations({stage.name: Drawn(parse(known.get(stage.name, "0.01"))) for stage in plan_.stages}, costs)


def simulated(
    *, steps: int = 8, batch: int = 4, sampler: int = 1, learner: int = 1, seed: int = 0, costs: Costs = COSTS,
    seconds: dict[str, str] | None = None, faults=None, one_process: bool = False, **schedule,
) -> Record:  # fmt: skip
    """Return the plan and the events of a simulated run of the toy graph."""
    graph = toy.graph(
        batch=batch, schedule=Schedule(steps=steps, **schedule), **toy.streaming(sampler=sampler, learner=learner)
    )
    made = plan(graph)[0]
    run = Simulation(made, times(made, costs, **(seconds or {})), seed=seed, faults=faults, one_process=one_process)
    return made, run.run()


def resumed(events: list[trace.TraceEvent], at: int, again: list[trace.TraceEvent]) -> list[trace.TraceEvent]:
    """Return the record of a run that stops after `at` events and is then resumed with the events `again`."""
    return [*events[:at], *again]


@st.composite
def records(draw) -> Record:
    """Draw runs of any schedule, with lost attempts, several workers or one process; complete or cut off."""
    staleness = draw(st.integers(0, 2))
    faulty = draw(st.sampled_from([0, 7, 9]))

    def faults(task):
        return Fault(kind="after_put") if faulty and task.number % faulty == 0 and task.attempt == 0 else None

    made, events = simulated(
        steps=draw(st.integers(1, 6)),
        sampler=draw(st.integers(1, 2)),
        learner=draw(st.sampled_from([1, 2])),
        seed=draw(st.integers(0, 99)),
        max_staleness=staleness,
        on_stale="drop" if staleness and draw(st.booleans()) else "wait",
        refit=draw(st.sampled_from(["drain", "in_flight"])),
        checkpoint_every=draw(st.integers(0, 2)),
        one_process=draw(st.booleans()),
        faults=lambda task: (
            Fault(kind="after_put") if faulty and task.number % faulty == 0 and not task.attempt else None
        ),
    )
    if draw(st.booleans()):
        events = events[: draw(st.integers(1, len(events)))]
    if draw(st.booleans()):
        events = resumed(events, draw(st.integers(0, len(events))), events)
    return made, events
