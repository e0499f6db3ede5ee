"""How long the episodes of a task take with other numbers of environment processes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.declare.task import Task
from pipeline.declare.times import ENVIRONMENT, GENERATE, PROCESS, WORKER, SampleTimes
from pipeline.errors import GraphError
from pipeline.record import trace
from pipeline.record.spent import spent
from pipeline.simulation.durations import Costs
from pipeline.simulation.episodes import ends
from pipeline.simulation.hints import hints
from pipeline.simulation.recorded import fitted
from pipeline.simulation.recording import Recording
from pipeline.simulation.recording import simulated as virtual
from pipeline.simulation.virtual_run import Simulation
from pipeline.simulation.whatif import Changes
from tests.examples import few
from tests.unit.records import simulated

SECONDS = st.integers(1, 4)
TURNS = st.lists(st.tuples(st.tuples(st.just(GENERATE), SECONDS), st.tuples(st.just(ENVIRONMENT), SECONDS)), max_size=3)


@st.composite
def episode(draw):
    """An episode: it is opened, has turns, and may be closed; its worker may take time in between."""
    steps = [(ENVIRONMENT, draw(SECONDS)), *(step for turn in draw(TURNS) for step in turn)]
    if draw(st.booleans()):
        steps.insert(draw(st.integers(0, len(steps))), (WORKER, draw(SECONDS)))
    return [*steps, (ENVIRONMENT, draw(SECONDS))] if draw(st.booleans()) else steps


EPISODES = st.lists(episode(), min_size=1, max_size=5)


def second_by_second(episodes, processes, waves):
    """The same, in a loop over whole seconds."""
    count = len(episodes)
    at, left, place, found = [0] * count, [0] * count, {}, [None] * count
    queues = [[] for _ in range(processes)]
    turns = [[n for n, (name, _) in enumerate(each) if name == GENERATE] for each in episodes]
    answered = [
        next((n for n in range(all_[-1], len(each)) if each[n][0] == ENVIRONMENT), all_[-1]) if all_ else -1
        for each, all_ in zip(episodes, turns)
    ]
    state = ["next"] * count
    for now in range(1000):
        for i in range(count):  # what has ended by now
            if state[i] == "takes" and left[i] == 0:
                if episodes[i][at[i] - 1][0] == ENVIRONMENT:
                    queues[place[i]].pop(0)
                state[i] = "next"
        moved = True
        while moved:
            moved = False
            for i in range(count):
                if state[i] != "next":
                    continue
                moved = True
                if at[i] == len(episodes[i]):
                    state[i], found[i] = "over", now
                    continue
                name, length = episodes[i][at[i]]
                at[i] += 1
                left[i] = length
                state[i] = "takes"
                if name == ENVIRONMENT:
                    if i not in place:
                        living = [place[j] for j in place if state[j] != "over"]
                        opened = [living.count(process) for process in range(processes)]
                        place[i] = opened.index(min(opened))
                    queues[place[i]].append(i)
                    state[i] = "waits"
                elif name == GENERATE and waves:
                    state[i] = "asks"
            for queue in queues:
                if queue and state[queue[0]] == "waits":
                    state[queue[0]] = "takes"
            asking = [i for i in range(count) if state[i] == "asks"]
            over = [at[i] > answered[i] + 1 or (at[i] == answered[i] + 1 and state[i] == "over") for i in range(count)]
            if asking and asking == [i for i in range(count) if answered[i] >= 0 and not over[i]]:
                for i in asking:
                    state[i] = "takes"
        if all(one == "over" for one in state):
            return found
        for i in range(count):
            left[i] -= state[i] == "takes"
    raise AssertionError("it does not end")


@settings(deadline=None, max_examples=few(300))
@given(EPISODES, st.integers(1, 3), st.booleans())
def test_a_loop_over_seconds_finds_the_same(episodes, processes, waves):
    assert ends(episodes, processes, waves=waves) == second_by_second(episodes, processes, waves)


@settings(deadline=None, max_examples=few(200))
@given(EPISODES, st.integers(1, 5), st.booleans())
def test_a_process_for_each_episode_is_never_slower_and_without_waves_each_takes_its_own_time(
    episodes, processes, waves
):
    alone, fewer = (ends(episodes, count, waves=waves) for count in (len(episodes), processes))
    assert all(one <= other for one, other in zip(alone, fewer))
    if not waves:
        assert alone == [sum(length for _, length in each) for each in episodes]


@settings(deadline=None, max_examples=few(100))
@given(st.lists(st.lists(st.tuples(st.just(ENVIRONMENT), SECONDS), min_size=1, max_size=3), min_size=1, max_size=5))
def test_one_process_takes_the_sum_of_all_calls_if_nothing_else_limits(episodes):
    assert max(ends(episodes, 1, waves=False)) == sum(length for each in episodes for _, length in each)


def test_a_wave_waits_for_the_slowest_environment():
    slow, fast = [(ENVIRONMENT, 5.0), (GENERATE, 1.0)], [(ENVIRONMENT, 1.0), (GENERATE, 2.0)]
    assert ends([slow, fast], 2, waves=True) == [6.0, 7.0]
    assert ends([slow, fast], 2, waves=False) == [6.0, 3.0]
    assert ends([slow, fast], 1, waves=False) == [6.0, 8.0]
    assert ends([slow, fast], 2, waves=False, starts=[1.0, 0.5]) == [7.0, pytest.approx(3.5)]


def test_an_episode_opens_in_the_process_with_the_fewest_that_are_not_over():
    calls = [[(ENVIRONMENT, length)] for length in (1.0, 9.0, 1.0, 1.0)]
    assert ends(calls, 2, waves=False, starts=[0.0, 0.0, 0.0, 5.0]) == [1.0, 9.0, 2.0, 6.0]


# A record with them.


def waiting(processes: int = 1) -> Recording:
    """A recorded run whose rollouts take 4 s: the two episodes of a task wait for each other in one process."""
    plan, events = simulated(steps=6, batch=1, seconds={"rollout": "4"}, costs=Costs())
    timed = []
    for event in events:
        timed.append(event)
        if isinstance(event, trace.Ran) and event.stage == "rollout":
            first, second = SampleTimes(event.start_s), SampleTimes(event.start_s)
            first.until(ENVIRONMENT, event.start_s + 2)
            second.until(PROCESS, event.start_s + 2)
            second.until(ENVIRONMENT, event.start_s + 4)
            task = Task(stage="rollout", step=event.step, groups=event.groups, number=event.task)
            at_once = {ENVIRONMENT: processes} if processes else {}
            timed.append(spent(task, event.groups[0], [first, second], at_once, ("sampler", 0)))
    return Recording(plan=plan, durations=fitted(plan, timed)[0], events=timed)


@pytest.mark.parametrize(("rounds", "unknown"), [(1, 0), (3, 0), (3, 1)])
def test_tasks_whose_episodes_wait_for_environments_compute_meanwhile(rounds, unknown):
    """Of the 4 s of a rollout, environments work for 3 alone. Two at a time take up to 5 s each, not 8. A task whose
    times are not in the record changes nothing."""
    plan, events = simulated(steps=6, batch=1, seconds={"rollout": "4 @ 1"}, costs=Costs())
    timed = []
    for event in events:
        timed.append(event)
        if isinstance(event, trace.Ran) and event.stage == "rollout":
            times = SampleTimes(event.start_s)
            for number in range(1, rounds + 1):
                times.until(ENVIRONMENT, event.start_s + (4 * number - 1) / rounds)
                times.until(GENERATE, event.start_s + 4 * number / rounds)
            task = Task(stage="rollout", step=event.step, groups=event.groups, number=event.task)
            if event.step != 3 or not unknown:
                timed.append(spent(task, event.groups[0], [times], {ENVIRONMENT: 2}, ("sampler", 0)))
    durations = fitted(plan, timed)[0]
    found = durations.stages["rollout"]
    assert (found.away_s, found.rounds, found.processes) == (pytest.approx(3.0, abs=0.01), rounds, 2)
    planned, durations = Changes(max_staleness=1).applied(plan, durations)
    ran = [e for e in Simulation(planned, durations, seed=0).run() if isinstance(e, trace.Ran) and e.stage == "rollout"]
    took_s = [event.end_s - event.start_s for event in ran]
    assert min(took_s) == pytest.approx(4.0, abs=0.02) and 4.1 < max(took_s) < 5.05
    assert any(one.end_s > other.start_s for one, other in pairwise(ran)), "they overlap"


def test_a_what_if_of_processes_moves_the_end_of_a_task():
    recording = waiting()
    same, more = (virtual(recording, change)[1] for change in (Changes(), Changes(environments={"rollout": 2})))
    assert same.critical_path.by_stage["rollout"] == pytest.approx(4.0, abs=0.01)
    assert more.critical_path.by_stage["rollout"] == pytest.approx(2.0, abs=0.01)
    assert same.steps.mean - more.steps.mean == pytest.approx(2.0, abs=0.02)
    assert virtual(recording, Changes(environments={"rollout": 1}))[1].steps.mean == pytest.approx(same.steps.mean)


def test_more_processes_are_a_hint_where_calls_wait():
    found = {hint.text: hint for hint in hints(waiting(), Path("runs/r")).hints}
    hint = found["2 environment processes in rollout instead of 1"]
    assert hint.flags == ("--environments", "rollout=2") and hint.times > 1.3
    assert not [text for text in {hint.text for hint in hints(waiting(2), Path("r")).hints} if "environment" in text]


def test_a_number_of_processes_that_says_nothing_is_refused():
    for recording, change, text in (
        (waiting(0), {"rollout": 2}, "no calls of 'rollout' that wait for a process are recorded"),
        (waiting(), {"rollout": 0}, "it is too small"),
        (waiting(), {"rolout": 2}, "there is no stage 'rolout'"),
    ):
        with pytest.raises(GraphError, match=text):
            virtual(recording, Changes(environments=change))
