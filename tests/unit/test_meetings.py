"""Meeting points of a transfer: their names identify processes, and the store reports lost workers."""

from pipeline.declare.ranks import reach_store
from pipeline.executors.meetings import Meetings


def test_a_worker_in_the_place_of_another_one_meets_anew_and_nobody_waits_for_the_old() -> None:
    meetings = Meetings(lambda: "127.0.0.1", deadline_s=30.0)
    meetings.lose("sampler.0", "before there was any")
    both, one = (
        meetings.of("refit", ["learner.0"], "sampler", [0, 1]),
        meetings.of("refit", ["learner.0"], "sampler", [1]),
    )
    assert both.name == "refit learner.0#0 > sampler.0#1 sampler.1#0" and both.targets == (0, 1)
    assert meetings.of("refit", ["learner.0"], "sampler", [0, 1]) == both
    store = reach_store(both.host, both.port, 1, deadline_s=both.deadline_s)
    meetings.lose("sampler.0", "worker sampler.0 died")
    assert store.get(both.name) == b"worker sampler.0 died" and not store.check([one.name])
    again = meetings.of("refit", ["learner.0"], "sampler", [0, 1])
    assert again.name == "refit learner.0#0 > sampler.0#2 sampler.1#0" and not store.check([again.name])
    meetings.close()
    meetings.close()
