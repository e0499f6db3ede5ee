"""Units: which groups a task gets together, whatever the order in which groups become ready, are dropped or return."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Schedule
from pipeline.plan.planner import plan
from pipeline.schedule.readiness import Loose, Lots, Once, Reader, Runs, units_of
from tests.unit import toy

STAGE = plan(toy.graph(schedule=Schedule(steps=1)))[0].stage("rollout")


def drained(units):
    """Take and return all available units."""
    taken = []
    while units:
        taken.append(units.take())
    assert units.take() is None
    return taken


def parts(draw, groups):
    """Draw the groups in any order, split into any parts."""
    order = draw(st.permutations(groups))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(order) - 1)))))
    return [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)]) if order[a:b]]


@given(st.data(), st.integers(1, 5), st.lists(st.integers(0, 50), unique=True, min_size=1, max_size=12).map(sorted))
def test_runs_are_equal_and_in_canonical_order(data, size, groups):
    """Groups are admitted and become ready in any parts and in any relative order."""
    units = Runs(size, len(groups))
    expected = [tuple(groups[at : at + size]) for at in range(0, len(groups), size)]
    placed, ready, taken = 0, set(), []
    events = [("ready", part) for part in parts(data.draw, groups)]
    while events or placed < len(groups):
        if events and (placed == len(groups) or data.draw(st.booleans())):
            _, part = events.pop()
            units.ready(part)
            ready |= set(part)
        else:
            count = data.draw(st.integers(1, len(groups) - placed))
            units.admit(groups[placed : placed + count])
            placed += count
        taken += drained(units)
        whole = [unit for unit in expected if set(unit) <= ready & set(groups[:placed])]
        assert sorted(taken) == whole, "each as soon as it is whole, and not before"
    assert sorted(taken) == expected
    with pytest.raises(ValueError, match="belongs to a batch"):
        units.remove(groups[0])


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_lot_is_what_was_admitted_together_less_what_was_dropped(data, sizes):
    units, lots, first = Lots(), [], 0
    for size in sizes:
        lots.append(list(range(first, first + size)))
        units.admit(lots[-1])
        first += size
    waiting, ready, gone, taken = set(range(first)), set(), set(), []
    for group in data.draw(st.permutations(range(first))):
        if data.draw(st.integers(0, 3)):
            units.ready([group])
            ready.add(group)
        else:
            assert not units.remove(group), "it was not ready"
            gone.add(group)
        waiting.discard(group)
        if ready and data.draw(st.integers(0, 4)) == 0:
            left = sorted(ready - {g for unit in taken for g in unit})
            if left:
                dropped = data.draw(st.sampled_from(left))
                assert units.remove(dropped), "it was ready and not taken"
                ready.discard(dropped)
                gone.add(dropped)
        if data.draw(st.booleans()):
            taken += drained(units)
        decided = [lot for lot in lots if not waiting.intersection(lot)]
        have = {g for unit in taken for g in unit}
        assert have <= {g for lot in decided for g in lot}, "not before the whole lot is decided"
    taken += drained(units)
    assert not units.remove(taken[0][0] if taken else 0), "it is gone"
    whole = [tuple(g for g in lot if g not in gone) for lot in lots]
    assert sorted(taken) == [unit for unit in whole if unit]


@given(st.data(), st.lists(st.integers(0, 50), unique=True, max_size=12))
def test_loose_groups_come_as_they_are_there_and_lost_ones_apart(data, groups):
    units, ready = Loose(), set()
    units.admit(groups)
    assert not units and units.take() is None
    for group in groups:
        units.ready([group])
        ready.add(group)
        match data.draw(st.sampled_from(["wait", "take", "remove", "lose"])):
            case "take":
                assert units.take() == tuple(sorted(ready))
                ready.clear()
            case "remove":
                assert units.remove(group) and not units.remove(group)
                ready.discard(group)
            case "lose":
                unit = units.take()
                units.give_back(unit)
                units.ready([100 + group])
                assert units.take() == unit, "what was lost is not mixed with the rest"
                ready = {100 + group}
    assert bool(units) == bool(ready)


@pytest.mark.parametrize("units", [Loose(), Lots(), Runs(3, 3)])
def test_what_is_given_back_comes_again_first(units):
    units.admit([1, 2, 3])
    units.ready([3, 1, 2])
    unit = units.take()
    assert unit == (1, 2, 3) and not units
    units.give_back((2, 3))
    assert units and units.take() == (2, 3) and not units


@pytest.mark.parametrize("units", [Loose(), Lots()])
def test_what_is_given_back_can_be_dropped(units):
    units.admit([1, 2, 3])
    units.ready([1, 2, 3])
    units.give_back(units.take())
    assert units.remove(2) and not units.remove(2)
    assert units.take() == (1, 3)
    units.give_back((1,))
    assert units.remove(1) and not units


def test_a_stage_without_samples_has_one_unit():
    units = Once()
    units.admit([1])
    units.ready([1])
    assert units and not units.remove(1)
    assert units.take() == () and not units and units.take() is None
    units.give_back(())
    assert units.take() == ()


def test_every_kind_of_stage_gets_its_units():
    def made(**changes):
        return units_of(msgspec.structs.replace(STAGE, **changes), holds=True, batch=5)

    assert isinstance(units_of(STAGE, holds=False, batch=5), Once)
    assert isinstance(made(per="group"), Loose)
    assert isinstance(made(shape="stream"), Lots)
    for run_groups, runs in ((None, [(0, 1, 2, 3, 4)]), (2, [(0, 1), (2, 3), (4,)]), (9, [(0, 1, 2, 3, 4)])):
        units = made(per="batch", run_groups=run_groups)
        units.admit(range(5))
        units.ready(range(5))
        assert drained(units) == runs


def test_attempts_are_counted_by_group_and_not_forgotten():
    reader = Reader(STAGE, 0, set(), Loose(), 4)
    reader.units.ready([0, 1, 2])
    assert reader.take() == ((0, 1, 2), 0)
    reader.give_back((0, 2), 0)
    reader.units.ready([3])
    assert reader.units.remove(0)
    assert reader.take() == ((2,), 1), "the attempt of what is left, though its unit has changed"
    assert reader.take() == ((3,), 0)
    reader.give_back((2,), 1)
    assert reader.take() == ((2,), 2)
    with pytest.raises(ValueError, match="stage 'rollout' has nothing to start on"):
        reader.take()


def test_attempts_of_a_stage_without_samples_are_counted():
    reader = Reader(STAGE, 0, set(), Once(), 1)
    assert reader.take() == ((), 0)
    reader.give_back((), 0)
    assert reader.take() == ((), 1)


def test_what_weights_depend_on_comes_first_then_the_step_then_the_way_to_them():
    def order(path, step, layer=0):
        return Reader(msgspec.structs.replace(STAGE, path=path, layer=layer), step, set(), Once(), 1).order

    wanted = [order(3, 1), order(2, 1), order(2, 1, 5), order(9, 2), order(1, 3), order(0, 0), order(0, 1)]
    assert sorted(wanted) == wanted
