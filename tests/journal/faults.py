"""Faults to plant in valid made-up runs; each breaks one invariant and no other.

fault = FAULTS["doubled"]
run = fault.run(seed=0)                       # made up, with the fault
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

from tests.journal.setups import TEXTS, Setup
from tests.journal.world import Event, MadeUp

SYNC = Setup()
AHEAD = Setup(max_staleness=2, steps=6)
DROP = Setup(max_staleness=2, steps=6, drop=True, in_flight=True)
GATE = Setup(gate=True)
RANKS = Setup(ranks=2, group_size=3, max_staleness=1)
DIES = Setup(dies=0.1, max_staleness=1)
PARTLY = Setup(partly=True, max_staleness=1)


@dataclass(frozen=True)
class Fault:
    """`plant` breaks a run of `setup`; with `resumed`, one that was killed after its first checkpoint and continues."""

    invariant: str
    setup: Setup
    plant: Callable[[MadeUp], None]
    resumed: bool = False

    def run(self, seed: int) -> MadeUp:
        """Return a run with the fault."""
        run = MadeUp(self.setup, seed)
        if self.resumed:
            run.segment(stop=lambda run: bool(run.manifests))
            self.plant(run)
            return run
        run.segment()
        self.plant(run)
        return run


FAULTS: dict[str, Fault] = {}
Plant = Callable[[MadeUp], None]


def _fault(invariant: str, setup: Setup, *, resumed: bool = False) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        FAULTS[plant.__name__] = Fault(invariant, setup, plant, resumed)
        return plant

    return register


def at(run: MadeUp, kind: str, position: int = 0, **like: object) -> int:
    """Return the index of an event with this type and these values: the first, or the last with position -1."""
    places = [
        i
        for i, event in enumerate(run.events)
        if event["type"] == kind and all(event[name] == value for name, value in like.items())
    ]
    return places[position]


def event(run: MadeUp, kind: str, position: int = 0, **like: object) -> Event:
    """Return the event that `at` finds."""
    return run.events[at(run, kind, position, **like)]


def move(run: MadeUp, start: int, to: int) -> None:
    """Move an event before the one at `to`."""
    moved = run.events.pop(start)
    run.events.insert(to if to < start else to - 1, moved)


def again(run: MadeUp, place: int) -> None:
    """Repeat an event."""
    run.events.insert(place, copy.deepcopy(run.events[place]))


@_fault("I1", AHEAD)
def stale_token(run: MadeUp) -> None:
    trained = event(run, "trained", step=4)
    trained["oldest"][1] = 1


@_fault("I1", AHEAD)
def future_token(run: MadeUp) -> None:
    trained = event(run, "trained", step=3)
    trained["newest"][0] = 4


@_fault("I1", DROP)
def laxer_than_its_plan(run: MadeUp) -> None:
    """The run is scheduled with 2, and the plan says 1."""
    run.plan["max_staleness"] = 1


@_fault("I1", AHEAD)
def sampled_too_early(run: MadeUp) -> None:
    """Sampling of a batch starts with weights three versions before its own."""
    places = [i for i, one in enumerate(run.events) if one["type"] == "submitted" and one["stage"] == "rollout"]
    early = next(run.events[i] for i in places if run.events[i]["step"] == 5)
    early["version"] = 2


@_fault("I2", RANKS)
def lost_on_a_rank(run: MadeUp) -> None:
    trained = event(run, "trained", step=2, worker=1)
    for name in ("groups", "samples", "oldest", "newest"):
        del trained[name][0]


@_fault("I2", SYNC)
def lost_group(run: MadeUp) -> None:
    trained = event(run, "trained", step=1)
    for name in ("groups", "samples", "oldest", "newest"):
        del trained[name][2]


@_fault("I2", SYNC)
def doubled(run: MadeUp) -> None:
    again(run, at(run, "trained", step=2))


@_fault("I2", RANKS)
def half_a_group(run: MadeUp) -> None:
    event(run, "trained", step=0, worker=0)["samples"][0] -= 1


@_fault("I2", SYNC)
def out_of_order(run: MadeUp) -> None:
    event(run, "claimed", step=2)["groups"].reverse()


@_fault("I2", GATE)
def dropped_and_trained(run: MadeUp) -> None:
    place = at(run, "claimed", step=1)
    group = run.events[place]["groups"][1]
    told = {"stage": "filter", "step": 1, "groups": [group], "reason": "all right", "tokens": [3], "at_s": 0.0}
    run.events.insert(place + 1, {"type": "dropped", **told})


@_fault("I2", DROP)
def left_in_flight(run: MadeUp) -> None:
    last = event(run, "admitted", -1)
    told = {"step": 6, "groups": [last["groups"][-1] + 1], "version": 6, "at_s": 0.0}
    run.events.insert(at(run, "ended"), {"type": "admitted", **told})


@_fault("I2", SYNC)
def rows_left(run: MadeUp) -> None:
    event(run, "ended")["rows_left"] = 3


@_fault("I2", SYNC)
def never_cleared(run: MadeUp) -> None:
    del run.events[at(run, "cleared", -1)]


@_fault("I3", AHEAD)
def capacity_exceeded(run: MadeUp) -> None:
    """A batch is admitted while four others are held."""
    place = at(run, "claimed", step=3) + 1
    version = event(run, "admitted", step=3)["version"]
    event(run, "admitted", step=4)["version"] = version
    move(run, at(run, "admitted", step=4), place)
    move(run, at(run, "claimed", step=4), place + 1)


@_fault("I3", DROP)
def asked_too_early(run: MadeUp) -> None:
    """The last groups of the run are admitted at a version that allows only those of the step before."""
    event(run, "admitted", -1)["version"] = run.setup.steps - run.setup.ahead - 2


@_fault("I4", SYNC)
def no_hash(run: MadeUp) -> None:
    event(run, "published", step=1)["sha256"] = ""


@_fault("I4", SYNC)
def version_jumps(run: MadeUp) -> None:
    event(run, "published", step=1)["version"] = 4


@_fault("I4", SYNC)
def never_published(run: MadeUp) -> None:
    del run.events[at(run, "published", step=2)]


@_fault("I4", PARTLY)
def sampled_where_the_version_is_not(run: MadeUp) -> None:
    """A task samples on the replica that does not have the version yet."""
    start = at(run, "served", step=0)
    task = next(one for one in run.events[start:] if one["type"] == "submitted" and one["stage"] == "rollout")
    task["replica"] = 1 - task["replica"]
    event(run, "ran", task=task["task"])["worker"] = task["replica"]


@_fault("I4", PARTLY)
def served_in_no_transfer(run: MadeUp) -> None:
    move(run, at(run, "served", step=1), at(run, "submitted", stage="refit", step=1))


@_fault("I4", DROP)
def worker_goes_back(run: MadeUp) -> None:
    """Tokens of a version that is fresh enough to train, but older than the version its worker was given."""
    tasks = {one["task"]: one for one in run.events if one["type"] == "submitted" and one["stage"] == "rollout"}
    given = {group: one["version"] for one in tasks.values() for group in one["groups"]}
    for trained in (one for one in run.events if one["type"] == "trained"):
        for i, group in enumerate(trained["groups"]):
            older = given[group] - 1
            if older >= max(0, trained["step"] - run.setup.max_staleness):
                put = next(
                    one for one in run.events if one["type"] == "put" and one["versions"] and group in one["groups"]
                )
                put["versions"][put["groups"].index(group)][0] = trained["oldest"][i] = older
                return
    raise ValueError("every group of this run is as old as it may be")


@_fault("I5", SYNC)
def step_never_ended(run: MadeUp) -> None:
    del run.events[at(run, "step_ended", step=2)]
    run.metrics = [line for line in run.metrics if line["step"] != 3]


@_fault("I5", SYNC)
def never_acknowledged(run: MadeUp) -> None:
    del run.events[at(run, "acknowledged", stage="evaluate", step=3)]


@_fault("I6", SYNC)
def torn_when_handed_out(run: MadeUp) -> None:
    event(run, "submitted", stage="advantage", step=1)["samples"] -= 1


@_fault("I6", RANKS)
def torn_when_fetched(run: MadeUp) -> None:
    event(run, "got", stage="train", step=1)["samples"] -= 1


@_fault("I6", SYNC)
def torn_when_put(run: MadeUp) -> None:
    event(run, "put", stage="reward")["samples"] -= 1


@_fault("I6", SYNC)
def half_a_batch(run: MadeUp) -> None:
    """A stage per batch computes the logprobs in two tasks."""
    first = at(run, "submitted", stage="prev", step=1)
    number = 1 + max(one.get("task", 0) for one in run.events)
    for place in range(len(run.events) - 1, first - 1, -1):
        one = run.events[place]
        if one.get("stage") == "prev" and one.get("step") == 1:
            other = copy.deepcopy(one)
            for half, part in ((one, slice(0, 2)), (other, slice(2, 4))):
                half["groups"] = half["groups"][part] if "groups" in half else None
                if half["groups"] is None:
                    del half["groups"]
                if "samples" in half:
                    half["samples"] //= 2
            if "task" in other:
                other["task"] = number
            run.events.insert(place + 1, other)


@_fault("I7", SYNC)
def put_twice(run: MadeUp) -> None:
    again(run, at(run, "put", stage="reward", step=1))


@_fault("I7", RANKS)
def share_put_twice(run: MadeUp) -> None:
    again(run, at(run, "put", stage="prev", step=1))


@_fault("I7", SYNC)
def read_after_clear(run: MadeUp) -> None:
    """The rows of a step are cleared before the last stage that reads them starts."""
    group = event(run, "claimed", step=2)["groups"][0]
    clears = (i for i, one in enumerate(run.events) if one["type"] == "cleared" and one["last"])
    cleared = next(i for i in clears if group in run.events[i]["groups"])
    move(run, cleared, at(run, "submitted", stage="samples", step=2))


@_fault("I7", SYNC)
def texts_cleared_before_their_last_reader(run: MadeUp) -> None:
    """The texts of a group are cleared before `prev` has acknowledged them."""
    place = next(i for i, one in enumerate(run.events) if one["type"] == "cleared" and TEXTS in one["partitions"])
    group = run.events[place]["groups"][0]
    read = next(
        i for i, one in enumerate(run.events)
        if one["type"] == "acknowledged" and one["stage"] == "prev" and group in one["groups"]
    )  # fmt: skip
    run.events[place]["partitions"].remove(TEXTS)
    early = {**run.events[place], "groups": [group], "partitions": [TEXTS], "last": False}
    run.events.insert(read, early)


@_fault("I7", SYNC)
def a_partition_cleared_twice(run: MadeUp) -> None:
    place = next(i for i, one in enumerate(run.events) if one["type"] == "cleared" and not one["last"])
    run.events.insert(place + 1, dict(run.events[place]))


@_fault("I7", SYNC)
def started_too_early(run: MadeUp) -> None:
    """The advantages of a group are computed before its rewards have landed."""
    task = event(run, "submitted", stage="advantage", step=1)
    put = next(
        i
        for i, one in enumerate(run.events)
        if one["type"] == "put" and one["stage"] == "reward" and set(one["groups"]) & set(task["groups"])
    )
    move(run, run.events.index(task), put)


@_fault("I7", AHEAD)
def fence_crossed(run: MadeUp) -> None:
    """A step is trained before the weights of the previous one have arrived."""
    move(run, at(run, "submitted", stage="train", step=1), at(run, "acknowledged", stage="refit", step=0))


@_fault("I7", SYNC)
def acknowledged_twice(run: MadeUp) -> None:
    again(run, at(run, "acknowledged", stage="reward", step=1))


@_fault("I7", SYNC)
def handed_out_twice(run: MadeUp) -> None:
    """Two tasks have the same groups of a stage."""
    place = at(run, "submitted", stage="reward", step=1)
    task = run.events[place]
    number = 1 + max(one.get("task", 0) for one in run.events)
    told = {name: task[name] for name in ("stage", "step", "attempt", "group", "groups", "at_s")} | {"task": number}
    span = {"start_s": 0.0, "end_s": 0.0}
    run.events[place + 1 : place + 1] = [
        {"type": "submitted", **task, "task": number},
        {
            "type": "got",
            **told,
            **span,
            "fields": ["response"],
            "samples": task["samples"],
            "size_bytes": 8,
            "field_bytes": [8],
        },
        {"type": "ran", **told, **span, "worker": 0, "cpu_s": 0.0, "metrics": {}},
        {"type": "acknowledged", **told},
    ]


@_fault("I8", AHEAD)
def trained_before_the_checkpoint(run: MadeUp) -> None:
    """The state after the second step is copied after training of the third has started."""
    move(run, at(run, "held", step=1), at(run, "submitted", stage="train", step=2) + 1)


@_fault("I8", AHEAD)
def checkpoint_of_nothing(run: MadeUp) -> None:
    """A checkpoint is written before its state is copied."""
    move(run, at(run, "held", step=1), at(run, "checkpointed", step=1) + 1)


@_fault("I5", AHEAD)
def checkpoint_ahead_of_the_record(run: MadeUp) -> None:
    """A checkpoint is written before its step ends."""
    move(run, at(run, "checkpointed", step=1), at(run, "step_ended", step=1))


@_fault("I8", AHEAD)
def checkpoint_forgets(run: MadeUp) -> None:
    run.manifests[2]["next_group"] += 1


@_fault("I8", DROP)
def pending_lost(run: MadeUp) -> None:
    """A checkpoint lacks a group that was admitted and not trained."""
    told = next(manifest for manifest in run.manifests.values() if manifest["pending"])
    del told["pending"][0]


@_fault("I8", AHEAD, resumed=True)
def trained_again(run: MadeUp) -> None:
    """A resume starts one batch too early."""
    run.manifests[2]["next_group"] -= run.setup.batch
    run.segment(2)
    run.manifests[2]["next_group"] += run.setup.batch


@_fault("I8", AHEAD, resumed=True)
def resumed_too_late(run: MadeUp) -> None:
    """A resume starts after a step that was never trained."""
    run.manifests[3] = {**run.manifests.pop(2), "steps": 3, "version": 3, "next_group": 12}
    run.segment(3)
    run.manifests[2] = {**run.manifests[3], "steps": 2, "version": 2, "next_group": 8}


@_fault("I9", SYNC)
def fewer_logprobs_than_tokens(run: MadeUp) -> None:
    event(run, "trained", step=1)["entries"]["prev_logprobs"] -= 1


@_fault("I10", DIES)
def zombie_acknowledged(run: MadeUp) -> None:
    """A lost worker reports after all, and its report is accepted."""
    place = at(run, "retried")
    lost = run.events[place]
    told = {name: lost[name] for name in ("task", "stage", "step", "attempt", "groups", "at_s")}
    run.events.insert(place + 1, {"type": "acknowledged", **told})


@_fault("I10", DIES)
def same_attempt_again(run: MadeUp) -> None:
    """A retried task has the attempt number of the lost one."""
    lost = event(run, "retried")
    next_one = next(
        one
        for one in run.events[at(run, "retried") :]
        if one["type"] == "submitted" and one["stage"] == lost["stage"] and set(one["groups"]) & set(lost["groups"])
    )
    for one in run.events:
        if one.get("task") == next_one["task"]:
            one["attempt"] -= 1


@_fault("I10", SYNC)
def of_no_task(run: MadeUp) -> None:
    told = copy.deepcopy(event(run, "acknowledged", stage="reward"))
    told["task"] = 100_000
    run.events.insert(at(run, "acknowledged", stage="reward") + 1, told)
