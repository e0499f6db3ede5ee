"""CPU seconds per task: an exclusive task gets the whole process, streams share the rest, nothing is counted twice."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.executors.meter import Meter


def test_a_task_that_does_not_await_takes_what_the_process_takes():
    now = [0.0]
    meter = Meter(lambda: now[0])
    meter.begin(1, alone=False)
    now[0] = 2.0
    meter.begin(2, alone=True)
    now[0] = 5.0
    assert meter.end(2) == 3.0
    now[0] = 6.0
    meter.begin(3, alone=False)
    now[0] = 10.0
    assert meter.end(1) == 2.0 + 1.0 + 2.0
    assert meter.end(3) == 2.0


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 9)), max_size=40))
def test_what_tasks_take_adds_up_to_what_was_spent_while_any_ran(moves):
    now, open_tasks, counted, spent = [0.0], set(), 0.0, 0.0
    meter = Meter(lambda: now[0])
    for task, alone, seconds in moves:
        if task in open_tasks:
            open_tasks.discard(task)
            counted += meter.end(task)
        else:
            meter.begin(task, alone=alone)
            open_tasks.add(task)
        now[0] += seconds
        spent += seconds if open_tasks else 0
    counted += sum(meter.end(task) for task in open_tasks)
    assert abs(counted - spent) < 1e-9
