"""Rules for groups: admission (I2, I3, I8), claim (I1, I2, I7), drop (I2), training (I2) and clearing (I7)."""

from __future__ import annotations

from tests.journal.ledger import Ledger
from tests.journal.record import RECORD, Line
from tests.journal.rules import Found, named, rule

TOO_OLD = ("stale", "cancelled")


@rule("admitted")
def in_turn(ledger: Ledger, line: Line) -> Found:
    """Admission numbers count up without a gap; after a resume, from the checkpoint on."""
    invariant = "I8" if ledger.start else "I2"
    pending, expected = list(ledger.pending), ledger.next_group
    for number in line["groups"]:
        if number in ledger.groups:
            yield "I2", f"group {number} was admitted already"
        if number in ledger.history.trained:
            step = ledger.history.trained[number] + 1
            yield "I8", f"group {number} was trained at step {step}, which the resume at {ledger.start} has behind it"
        if pending:
            wanted: int | None = pending.pop(0)
        else:
            wanted = expected
            expected = number + 1
        if wanted is not None and number != wanted:
            yield invariant, f"group {number} was admitted where group {wanted} was next"


@rule("admitted")
def room(ledger: Ledger, line: Line) -> Found:
    """No more groups than the data plane's capacity, and no further ahead than the schedule allows."""
    planned, fresh = ledger.planned, len(line["groups"])
    held = len(ledger.held) + fresh
    if held > planned.capacity:
        yield "I3", f"{held} groups are held, {fresh} of them new, and the capacity is {planned.capacity}"
    if planned.pooled and line["step"] != ledger.next_claim:
        yield "I2", f"groups were admitted for step {line['step'] + 1}, the next batch is {ledger.next_claim + 1}"
    if planned.pooled:
        bound = (planned.ahead + line["version"] + 1) * planned.batch
        waiting = sum(_qualifies(ledger, number) for number in ledger.groups)
        asked = ledger.next_claim * planned.batch + waiting + fresh
        if asked > bound:
            yield "I3", f"{asked} groups were asked for at version {line['version']}, which allows {bound}"
    if planned.transfers and line["version"] > ledger.reached:
        yield "I4", f"version {line['version']} is named, {ledger.reached} is published"


def _qualifies(ledger: Ledger, number: int) -> bool:
    """Return whether a group could still be claimed. A stale one is about to be dropped, perhaps not yet recorded."""
    group = ledger.groups[number]
    if group.claimed is not None or group.dropped is not None:
        return False
    return group.oldest is None or group.oldest >= ledger.next_claim - ledger.planned.max_staleness


@rule("claimed")
def batch(ledger: Ledger, line: Line) -> Found:
    """Batches are claimed in order, each with as many groups as the plan says and no group twice."""
    planned, groups, step = ledger.planned, line["groups"], line["step"]
    if step != ledger.next_claim:
        yield "I2", f"step {step + 1} was claimed where step {ledger.next_claim + 1} was next"
    if len(groups) != planned.batch or groups != sorted(set(groups)):
        yield "I2", f"the batch of step {step + 1} is {groups}; it has {planned.batch} groups in ascending order"
    for number in groups:
        group = ledger.groups.get(number)
        if group is None:
            yield "I2", f"group {number} was claimed and never admitted"
        elif group.dropped is not None:
            yield "I2", f"group {number} was claimed and had been dropped ({group.dropped})"
        elif group.claimed is not None:
            yield "I2", f"group {number} was claimed twice, for steps {group.claimed + 1} and {step + 1}"
    if planned.pooled and not planned.drops and groups:
        passed = [
            n for n, one in ledger.groups.items() if n < groups[-1] and one.claimed is None and one.dropped is None
        ]
        if left := sorted(set(passed) - set(groups)):
            yield "I2", f"the batch of step {step + 1} is {groups}, and {named(left)} were admitted before its last one"
    if not planned.pooled:
        kept = [n for n in ledger.admitted[step] if n in ledger.groups and ledger.groups[n].dropped is None]
        if kept != groups and set(groups) <= ledger.groups.keys():
            yield "I2", f"the batch of step {step + 1} is {groups}, and {kept} were admitted for it and kept"


@rule("claimed")
def ready_and_fresh(ledger: Ledger, line: Line) -> Found:
    """Claimed groups were acknowledged by every pool stage and are not too old for the step."""
    planned = ledger.planned
    for number in line["groups"]:
        group = ledger.groups.get(number)
        if group is None:
            continue
        if planned.pooled and not group.acknowledged >= planned.pool:
            missing = ", ".join(sorted(planned.pool - group.acknowledged))
            yield "I7", f"group {number} was claimed and {missing} had not acknowledged it"
        bound = line["step"] - planned.max_staleness
        if group.versions and group.versions[0] < bound:
            yield "I1", f"group {number} has tokens of version {group.versions[0]}, the batch takes none below {bound}"


@rule("dropped")
def with_cause(ledger: Ledger, line: Line) -> Found:
    """Groups are dropped once, by the gate or because they are too old for the next batch."""
    planned, stage, reason = ledger.planned, line["stage"], line["reason"]
    gate = planned.gate["stage"] if planned.gate else None
    by_age = not stage and planned.drops and reason in TOO_OLD
    if not (stage and stage == gate) and not by_age:
        yield "I2", f"{named(line['groups'])} were dropped by {stage or 'nobody'} ({reason}), who drops none"
    if len(line["tokens"]) not in (0, len(line["groups"])):
        yield RECORD, f"{len(line['tokens'])} lengths for {len(line['groups'])} groups"
    for number in line["groups"]:
        group = ledger.groups.get(number)
        if group is None:
            yield "I2", f"group {number} was dropped and never admitted"
            continue
        if group.dropped is not None:
            yield "I2", f"group {number} was dropped twice ({group.dropped}, {reason})"
        elif group.claimed is not None:
            yield "I2", f"group {number} was dropped ({reason}) and had been claimed for step {group.claimed + 1}"
        ages = [age for age in (group.began, group.versions and group.versions[0]) if age is not None]
        bound = line["step"] - planned.max_staleness
        if by_age and not any(age < bound for age in ages):
            yield "I2", f"group {number} was dropped as {reason}; its versions are {ages}, the bound is {bound}"


@rule("trained")
def exactly_once(ledger: Ledger, line: Line) -> Found:
    """Only groups claimed for the step are trained, by one task, each sample on one rank."""
    planned, stage, step = ledger.planned, line["stage"], line["step"]
    for number, samples in zip(line["groups"], line["samples"]):
        group = ledger.groups.get(number)
        if group is None:
            yield "I2", f"group {number} was trained and never admitted"
            continue
        if group.dropped is not None:
            yield "I2", f"group {number} was trained and had been dropped ({group.dropped})"
        if group.claimed != step:
            claimed = "never claimed" if group.claimed is None else f"claimed for step {group.claimed + 1}"
            yield "I2", f"group {number} was trained at step {step + 1} and was {claimed}"
        seen = group.trained.get(stage, {})
        if line["worker"] in seen or stage in group.acknowledged:
            yield "I2", f"group {number} was trained twice by {stage}"
        elif samples + sum(other for other, *_ in seen.values()) > planned.group_size * planned.siblings(stage):
            yield "I2", f"group {number} was trained with more than its {planned.group_size} samples"


@rule("acknowledged")
def trained_whole(ledger: Ledger, line: Line) -> Found:
    """When the trainer is done with a group, its ranks have trained all of its samples."""
    planned, stage = ledger.planned, line["stage"]
    if stage not in planned.trainers or not planned.stamps & planned.sample_reads(stage):
        return
    task = ledger.task_of(line)
    for number in line["groups"]:
        group = ledger.groups.get(number)
        if group is None or task is None or number not in task.left:
            continue
        samples = sum(count for count, *_ in group.trained.get(stage, {}).values())
        if samples not in (planned.group_size, planned.group_size * planned.siblings(stage)):
            yield "I2", f"group {number} has {planned.group_size} samples and {stage} trained {samples}"


@rule("cleared")
def nobody_needs_them(ledger: Ledger, line: Line) -> Found:
    """Rows are cleared once, after every stage that reads or writes them has acknowledged."""
    for number in line["groups"]:
        group = ledger.groups.get(number)
        if group is None:
            yield "I7", f"group {number} was cleared and never admitted"
        elif group.cleared:
            yield "I7", f"group {number} was cleared twice"
        elif line["last"] and not ledger.released(number):
            step = group.claimed if ledger.planned.pooled else group.step
            left = ledger.planned.holders(step) - group.acknowledged if step is not None else set()
            waiting = ", ".join(sorted(left | group.working.keys())) or "its claim"
            yield "I7", f"group {number} was cleared before {waiting}"


@rule("cleared")
def nobody_needs_the_partitions(ledger: Ledger, line: Line) -> Found:
    """A partition of a group is cleared once, after every stage that reads or writes it has acknowledged."""
    for name in line["partitions"]:
        if name not in ledger.planned.partitions:
            yield RECORD, f"partition {name} was cleared, and the plan does not have it"
            continue
        for number in line["groups"]:
            group = ledger.groups.get(number)
            if group is None:
                continue
            if name in group.freed:
                yield "I7", f"partition {name} of group {number} was cleared twice"
            elif not ledger.lets_go(number, ledger.planned.partition_holders(name)):
                yield "I7", f"partition {name} of group {number} was cleared before its holders had acknowledged"
