"""The record of dropped groups."""

from typing import Any

from pipeline.engine.drops import Drops
from pipeline.schedule.events import CANCELLED, Drop


class Journal:
    def __init__(self) -> None:
        self.lines: list[Any] = []

    def dropped(self, *line: Any) -> None:
        self.lines.append(line)


class Steps:
    def dropped(self, *_: Any) -> None:
        pass


def test_a_cancelled_group_is_recorded_when_acknowledged_with_the_tokens_that_it_had() -> None:
    journal: Any = Journal()
    steps: Any = Steps()
    drops = Drops(journal, steps, lambda groups: (9,) * len(groups), at_once=False)
    drops.take(Drop(step=2, groups=(4, 5, 6), reason=CANCELLED))
    assert journal.lines == []
    drops.acknowledged((3, 4, 5), given_up={4: 7})
    assert journal.lines == [("", 2, (4,), CANCELLED, (7,)), ("", 2, (5,), CANCELLED, (9,))]
    drops.unheard((5, 6))
    assert journal.lines[2:] == [("", 2, (6,), CANCELLED, ())]
