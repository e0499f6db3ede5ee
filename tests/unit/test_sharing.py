"""Processor sharing, against small time steps and against hand-computed schedules."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.simulation.sharing import Lane, Machine
from tests.examples import few

STEP_S = 1e-3
MEET_S = 6 * STEP_S


def ends_by_small_steps(jobs, cores):
    """Return when each (lane, start, seconds of work, cores, first) ends, integrated in small time steps."""
    left = [work for _, _, work, _, _ in jobs]
    ends = [None] * len(jobs)
    now_s = 0.0
    while None in ends:
        lanes: dict[int, list[int]] = {}
        for i, (lane, start_s, *_) in enumerate(jobs):
            if ends[i] is None and start_s <= now_s + 1e-9:
                lanes.setdefault(lane, []).append(i)
        shares, asked = {}, 0.0
        for members in lanes.values():
            members = [i for i in members if jobs[i][4]] or members
            shares.update(dict.fromkeys(members, 1 / len(members)))
            asked += sum(jobs[i][3] for i in members) / len(members)
        rate = min(1.0, cores / asked) if asked else 1.0
        now_s += STEP_S
        for i, share in shares.items():
            left[i] -= share * rate * STEP_S
            if left[i] <= 1e-9:
                ends[i] = now_s
    return ends


def ends_by_clocks(jobs, cores):
    machine = Machine(cores)
    lanes = [Lane(machine) for _ in range(3)]
    ends = [None] * len(jobs)
    todo = sorted(range(len(jobs)), key=lambda i: jobs[i][1])
    while None in ends:
        next_s = machine.next_s()
        if todo and jobs[todo[0]][1] <= next_s:
            i = todo.pop(0)
            lane, start_s, work_s, parallelism, first = jobs[i]
            lanes[lane].start(start_s, [(work_s, i)], parallelism=parallelism, first=first)
        else:
            ends[machine.pop(next_s)] = next_s
    return ends


JOBS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(0, 50).map(lambda n: n / 100),
        st.integers(1, 40).map(lambda n: n / 100),
        st.sampled_from([0.5, 1.0, 2.0]),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


def meet(stream, end_s, task):
    """Return whether a task starts just as a stream of its lane ends. Any earlier, the stream would wait for it."""
    return task[4] and not stream[4] and task[0] == stream[0] and abs(end_s - task[1]) < MEET_S


@settings(max_examples=few(40), deadline=None)
@given(JOBS, st.sampled_from([1.0, 2.0, 3.0]))
def test_clocks_agree_with_small_steps(jobs, cores):
    expected = ends_by_small_steps(jobs, cores)
    found = ends_by_clocks(jobs, cores)
    for ends in (expected, found):
        assume(not any(meet(stream, end_s, task) for stream, end_s in zip(jobs, ends) for task in jobs))
    assert all(abs(a - b) < 0.02 for a, b in zip(expected, found)), (expected, found)


def test_two_lanes_that_want_all_cores_take_twice_as_long():
    assert ends_by_clocks([(0, 0.0, 1.0, 2.0, True), (1, 0.0, 1.0, 2.0, True)], 2.0) == [2.0, 2.0]


def test_enough_cores_slow_nobody():
    assert ends_by_clocks([(0, 0.0, 1.0, 1.0, True), (1, 0.0, 0.5, 1.0, True)], 2.0) == [1.0, 0.5]


def test_tasks_of_a_lane_go_before_its_streams():
    assert ends_by_clocks([(0, 0.0, 1.0, 1.0, False), (0, 0.5, 1.0, 1.0, True)], 8.0) == [2.0, 1.5]


def test_streams_of_a_lane_share_it():
    assert ends_by_clocks([(0, 0.0, 1.0, 1.0, False), (0, 0.0, 1.0, 1.0, False)], 8.0) == [2.0, 2.0]


def test_marks_come_in_order_and_what_was_given_up_does_not_come():
    machine = Machine(None)
    lane = Lane(machine)
    lane.start(0.0, [(1.0, "half"), (2.0, "all")], parallelism=1.0, first=False)
    other = lane.start(0.0, [(1.5, "never")], parallelism=1.0, first=False)
    assert machine.next_s() == 2.0  # two streams share the lane
    assert machine.pop(2.0) == "half"
    lane.stop(2.5, other)
    lane.stop(2.5, other)
    assert machine.next_s() == pytest.approx(3.25)  # 1.25 of 2.0 s are done
    assert machine.pop(3.25) == "all"
    assert machine.next_s() == math.inf
    assert machine.demand == 0.0


def test_a_stream_waits_for_room_behind_those_before_it():
    """Room for 8 samples: two streams of 4 share the lane, the third begins when the first one ends."""
    machine = Machine()
    lane = Lane(machine, room=8)
    for number, samples in enumerate((4, 4, 4, 1)):
        lane.start(0.0, [(1.0, number)], parallelism=1.0, first=False, samples=samples)
    ends = {}
    while machine.next_s() < math.inf:
        now_s = machine.next_s()
        ends[machine.pop(now_s)] = now_s
    assert ends == pytest.approx({0: 2.0, 1: 2.0, 2: 4.0, 3: 4.0})


def test_a_stream_that_is_given_up_leaves_its_room_and_one_that_waits_leaves_its_place():
    machine = Machine()
    lane = Lane(machine, room=4)
    first, second, third = (
        lane.start(0.0, [(1.0, number)], parallelism=1.0, first=False, samples=4) for number in range(3)
    )
    assert lane.done_s(0.5, first) == 0.5 and lane.done_s(0.5, second) == lane.done_s(0.5, third) == 0.0
    lane.stop(0.5, second)
    lane.stop(0.5, first)
    assert (machine.next_s(), machine.pop(1.5)) == (1.5, 2)
    large = lane.start(2.0, [(1.0, "large")], parallelism=1.0, first=False, samples=9)
    assert machine.pop(machine.next_s()) == "large" and not large.left, "a stream alone has room"
