"""Refit waves: each rank gets a version once, from a holder, in as few waves as possible, even if ranks die."""

import json
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.refit.layout import Layout, Tensor, dense, whole
from ops.refit.waves import TRAINER, NoSourceError, RankReport, State, gives, kinds, parts, settled, waves
from tests.examples import few
from tests.unit.refit_layouts import POISON, buffers, filled, sides

SENDERS = 2
KINDS = st.lists(st.integers(0, 2), min_size=1, max_size=14).map(
    lambda drawn: {SENDERS + number: kind for number, kind in enumerate(drawn)}
)


@st.composite
def states(draw: st.DrawFn) -> tuple[dict[int, int], State, list[int]]:
    """Draw receivers with their kinds, a state, and the kinds that the trainer can send."""
    kind = draw(KINDS)
    some = st.sets(st.sampled_from(sorted(kind)), max_size=len(kind) // 2)
    holders, gone = draw(some), draw(some)
    pairs = st.tuples(st.sampled_from(sorted(kind)), st.sampled_from([TRAINER, *sorted(kind)]))
    failed = draw(st.sets(pairs, max_size=12))
    trainer = draw(st.sampled_from([[0, 1, 2], [0], []]))
    return kind, State(tuple(sorted(holders - gone)), tuple(sorted(gone)), tuple(sorted(failed))), trainer


def check(kind: dict[int, int], state: State, trainer: list[int], made: list[list[list[int]]]) -> None:
    """Check that each rank gets it once, from a holder of its kind, which sends to one rank of a kind per wave."""
    holders = set(state.holders)
    for wave in made:
        givers = Counter((source, kind[rank]) for rank, source in wave)
        assert wave and max(givers.values()) == 1
        for rank, source in wave:
            assert rank not in holders and (rank, source) not in state.failed
            assert kind[rank] in trainer if source == TRAINER else source in holders and kind[source] == kind[rank]
            assert not {rank, source} & set(state.gone)
        taking = [rank for rank, _ in wave]
        assert len(set(taking)) == len(taking)
        holders |= set(taking)
    assert holders == set(kind) - set(state.gone)


@given(states())
@settings(max_examples=few(150), deadline=None)
def test_everyone_gets_it_once_or_the_plan_is_refused(drawn: tuple[dict[int, int], State, list[int]]) -> None:
    kind, state, trainer = drawn
    left = set(kind) - set(state.gone)
    reached = set(state.holders)
    while more := {
        rank
        for rank in left - reached
        if any(
            (rank, source) not in state.failed
            for source in [
                *([TRAINER] if kind[rank] in trainer else []),
                *(r for r in reached if kind[r] == kind[rank]),
            ]
        )
    }:
        reached |= more
    if reached == left:
        check(kind, state, trainer, waves(kind, state, trainer))
    else:
        with pytest.raises(NoSourceError, match="no rank is left to send them the version"):
            waves(kind, state, trainer)


@given(KINDS, st.data())
@settings(deadline=None)
def test_there_are_as_few_waves_as_there_can_be(kind: dict[int, int], data: st.DataObject) -> None:
    holders = data.draw(st.sets(st.sampled_from(sorted(kind))))
    needed = 0
    for each in set(kind.values()):
        of_kind = {rank for rank in kind if kind[rank] == each}
        sources = 1 + len(of_kind & holders)  # plus the trainer
        while sources << needed < 1 + len(of_kind):
            needed += 1
    assert len(waves(kind, State(tuple(sorted(holders))))) == needed


@pytest.mark.parametrize(
    ("receivers", "count"), [(1, 1), (2, 2), (3, 2), (4, 3), (7, 3), (8, 4), (1023, 10), (1024, 11)]
)
def test_waves_grow_by_the_logarithm_of_receivers(receivers: int, count: int) -> None:
    assert len(waves(dict.fromkeys(range(receivers), 0), State())) == count


def test_receivers_turn_to_different_sources() -> None:
    kind = dict.fromkeys(range(2, 34), 0)
    have = State(tuple(range(2, 26)))
    (wave,) = waves(kind, have)
    assert len({source for _, source in wave}) == len(wave) == 8
    assert wave != [[rank, source] for (rank, _), source in zip(wave, [TRAINER, *range(2, 26)])]


@given(states())
@settings(deadline=None)
def test_plans_and_states_are_plain(drawn: tuple[dict[int, int], State, list[int]]) -> None:
    kind, state, _ = drawn
    assert msgspec.json.decode(msgspec.json.encode(state), type=State) == state
    made = waves(kind, State())
    assert json.loads(json.dumps(made)) == made == waves(dict(reversed(kind.items())), State())


@given(KINDS, st.data())
@settings(max_examples=few(120), deadline=None)
def test_whoever_dies_in_whatever_wave_the_others_have_it_or_nobody_could_give_it(
    kind: dict[int, int], data: st.DataObject
) -> None:
    """Ranks die, and transfers between live ranks fail, in any wave; the rest is planned again from the new state."""
    state, dead, count = State(), set[int](), 0
    while True:
        alone = set(range(SENDERS)) & dead
        trainer = [0, 1, 2] if len(alone) < SENDERS else []  # each sender holds every kind
        try:
            made = waves(kind, state, trainer)
        except NoSourceError:
            lacking = set(kind) - set(state.gone) - set(state.holders)
            sources = {TRAINER} if trainer else set()
            assert any(
                all(
                    (rank, source) in state.failed
                    for source in sources | {r for r in state.holders if kind[r] == kind[rank]}
                )
                for rank in lacking
            )
            return
        check(kind, state, trainer, made)
        if not made:
            break
        wave, count = made[0], count + 1
        expected = {rank for pair in wave for rank in pair} - {TRAINER} | set(range(SENDERS)) - set(state.gone)
        dying = data.draw(st.sets(st.sampled_from(sorted(expected)), max_size=2)) if count < 6 else set()
        broken = data.draw(st.sets(st.sampled_from([rank for rank, _ in wave]), max_size=1)) if count < 6 else set()
        dead |= dying
        reports = {rank: RankReport(rank) for rank in expected - dying}
        for rank, source in wave:
            giver = max(set(range(SENDERS)) - set(state.gone)) if source == TRAINER else source
            if rank not in dying:
                lost = (giver,) if giver in dying or rank in broken else ()
                reports[rank] = RankReport(rank, holds=not lost, lost=lost)
            elif giver not in dying:
                reports[rank] = RankReport(by=giver)
        state = settled(state, expected, reports, SENDERS)
        assert set(state.gone) == dead and not set(state.holders) & dead
    assert set(state.holders) == set(kind) - dead


def test_what_ranks_report_is_the_state_behind_a_wave() -> None:
    before = State(holders=(2,), gone=(5,), failed=((3, 2),))
    reports = {
        0: RankReport(0),
        2: RankReport(2),
        3: RankReport(3, holds=True),
        4: RankReport(4, lost=(0, 6)),
        6: RankReport(by=4),
    }
    assert settled(before, [0, 1, 2, 3, 4, 6], reports, 2) == State((2, 3), (1, 5, 6), ((3, 2), (4, TRAINER)))
    assert settled(State(), [3, 4], {3: RankReport(3, lost=(4,)), 4: RankReport(4)}, 2).failed == ((3, 4),)


def test_ranks_that_plan_from_different_layouts_are_told() -> None:
    reports = {0: RankReport(0, plan="a"), 1: RankReport(1, plan="b"), 2: RankReport(2, plan="a")}
    assert settled(State(), [0, 1, 2], reports, 1).refused == (
        "refit, ranks [0, 2] and [1]: they plan from different layouts or versions; all ranks must use the "
        "same. Fix: the same model, layouts and version on all ranks"
    )


def test_a_refusal_says_who_lacks_it_and_why() -> None:
    with pytest.raises(NoSourceError) as refused:
        waves({2: 0, 3: 0, 4: 0, 5: 1}, State((5,), (2,), ((3, TRAINER), (3, 4), (4, TRAINER))))
    assert str(refused.value) == (
        "refit, ranks [3, 4]: no rank is left to send them the version (gone: [2]; failed transfers: 3 from the "
        "trainer, 3 from 4, 4 from the trainer); only a rank that holds exactly this version can forward it. Fix: "
        "restart the ranks that are gone and refit from the trainer; live ranks with failed transfers need a network "
        "between them"
    )


@given(sides(), st.integers(1, 3), st.sampled_from([1, 16, 1 << 20]))
@settings(max_examples=few(100), deadline=None)
def test_both_ends_have_the_same_copies_and_they_are_the_whole_of_it(
    pair: tuple[Layout, Layout], replicas: int, segment: int
) -> None:
    source, one = pair
    to = Layout(one.tensors, [places for _ in range(replicas) for places in one.ranks])
    senders = len(source.ranks)
    kind = {senders + rank: senders + first for rank, first in enumerate(kinds(to))}
    memory = [*filled(source), *buffers(to)]
    for wave in waves(kind, State(), gives(source, to, kind)):
        by_rank = [parts(wave, source, to, rank, segment) for rank in range(senders + len(to.ranks))]
        pairs = {ends for own in by_rank for ends in own}
        for sender, receiver in pairs:
            assert by_rank[sender][sender, receiver] == by_rank[receiver][sender, receiver]
        assert all(rank in ends for rank, own in enumerate(by_rank) for ends in own)
        for sender, receiver in sorted(pairs):
            for copy in by_rank[sender][sender, receiver]:
                here, there = memory[sender][copy.source_buffer], memory[receiver][copy.destination_buffer]
                for row in range(copy.rows):
                    a = copy.source_offset + row * copy.source_stride
                    b = copy.destination_offset + row * copy.destination_stride
                    assert (there[b : b + copy.run] == POISON).all()  # no byte is written twice
                    there[b : b + copy.run] = here[a : a + copy.run]
    for rank, wanted in enumerate(filled(to)):
        for name, bytes_ in wanted.items():
            assert (memory[senders + rank][name] == bytes_).all()


def test_the_trainer_gives_what_its_ranks_have_left() -> None:
    tensors = {"w": Tensor((4, 4), "bfloat16")}
    upper, lower = ([dense("w", ((a, a + 2), (0, 4)), 2, "w")] for a in (0, 2))
    both = [dense("w", whole((4, 4)), 2, "w")]
    to = Layout(tensors, [both, upper, lower, upper])
    kind = {2 + rank: 2 + first for rank, first in enumerate(kinds(to))}
    assert kind == {2: 2, 3: 3, 4: 4, 5: 3}
    assert gives(Layout(tensors, [both, []]), to, kind) == [2, 3, 4]
    assert gives(Layout(tensors, [upper, []]), to, kind) == [3]
    assert gives(Layout(tensors, [[], []]), to, kind) == []
