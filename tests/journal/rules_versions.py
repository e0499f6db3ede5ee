"""Rules for versions: of published weights (I4) and of tokens (I1, I4); every token has all its values (I9)."""

from __future__ import annotations

import re

from tests.journal.ledger import Ledger
from tests.journal.record import RECORD, Line
from tests.journal.rules import Found, rule

SHA256 = re.compile(r"[0-9a-f]{64}")


@rule("published")
def rise_by_one(ledger: Ledger, line: Line) -> Found:
    """Each transfer publishes the version after its previous one, with the hash of the served weights."""
    stage, step, version = line["stage"], line["step"], line["version"]
    if stage not in ledger.planned.transfers:
        yield RECORD, f"{stage} publishes nothing in this plan"
        return
    before = [other for (name, _), other in ledger.published.items() if name == stage]
    expected = max(before) + 1 if before else ledger.start
    if version != expected or version != step + 1:
        yield "I4", f"{stage} of step {step + 1} published version {version} where {expected} was next"
    if not SHA256.fullmatch(line["sha256"]):
        yield "I4", f"version {version} was published with the hash {line['sha256']!r}"
    if ledger.single.get((stage, step)) != "out":
        yield "I4", f"{stage} published version {version} and has no task at step {step + 1}"


@rule("served")
def reached(ledger: Ledger, line: Line) -> Found:
    """A replica gets the version of a running transfer, once."""
    planned, stage, step, version = ledger.planned, line["stage"], line["step"], line["version"]
    if stage not in planned.transfers:
        yield RECORD, f"{stage} publishes nothing in this plan"
        return
    target, replica = planned.stages[stage]["groups"][-1], line["replica"]
    group = planned.worker_groups[target]
    if not 0 <= replica < group["workers"] // group["model_parallel"]:
        yield RECORD, f"{stage} served replica {replica} of {target}"
    if version != step + 1 or ledger.single.get((stage, step)) != "out":
        yield "I4", f"replica {replica} of {target} served version {version} in no transfer of it"
    elif (stage, step) in ledger.published:
        yield "I4", f"replica {replica} of {target} served version {version} when it was published already"


@rule("submitted")
def started_with(ledger: Ledger, line: Line) -> Found:
    """A task names a published version; sampling does not start with weights that are too old for its batch."""
    planned, stage, version = ledger.planned, line["stage"], line["version"]
    if not planned.transfers:
        return
    if version > max(ledger.reached, 0):
        yield "I4", f"task {line['task']} started with version {version}, {ledger.reached} is published"
    where = line["group"], line["replica"]
    if planned.stages[stage]["reads_back"]:
        if version > max(ledger.version, 0) and ledger.served[where] < version:
            yield "I4", f"task {line['task']} started with version {version}, which its replica does not have"
        if ledger.reached < ledger.start:
            yield "I4", f"{stage} started before any weights were published"
        least = ledger.start if planned.pooled else max(ledger.start, line["step"] - planned.ahead)
        if version < least:
            yield "I1", f"{stage} of step {line['step'] + 1} started with version {version}; it waits for {least}"


@rule("put")
def stamps(ledger: Ledger, line: Line) -> Found:
    """No token has a version that was not served, and no worker goes back to an older version."""
    planned, stage = ledger.planned, line["stage"]
    versions, groups = line["versions"], line["groups"]
    if stage not in planned.stamping:
        if versions:
            yield RECORD, f"{stage} put versions and makes no tokens"
        return
    if len(versions) != len(groups):
        yield RECORD, f"{stage} put {len(groups)} groups and the versions of {len(versions)}"
    newest = ledger.reached if planned.drains else ledger.sending  # an in-flight swap is served before it is published
    for number, (low, high) in zip(groups, versions):
        group = ledger.groups.get(number)
        task = ledger.tasks.get(group.working.get(stage, -1)) if group else None
        if group is None or task is None or line["attempt"] != group.attempts[stage]:
            continue
        if low > high:
            yield RECORD, f"the versions of group {number} are {low} to {high}"
        elif high > newest:
            yield "I4", f"group {number} has tokens of version {high}, {newest} is the newest"
        elif low < task.floor:
            yield "I4", f"group {number} has tokens of version {low}, and its worker served {task.floor}"
        elif planned.drains and low != high:
            yield "I4", f"the weights changed from version {low} to {high} under group {number}"


@rule("trained")
def fresh_enough(ledger: Ledger, line: Line) -> Found:
    """0 <= version of the weights - version of a token <= max_staleness, according to the columns that were put."""
    planned, version = ledger.planned, line["version"]
    if version != line["step"]:
        yield "I4", f"step {line['step'] + 1} trained the weights of version {version}"
    lengths = {len(line[name]) for name in ("groups", "samples", "oldest", "newest")}
    if len(lengths) > 1:
        yield RECORD, f"trained has {sorted(lengths)} entries for its groups"
    for number, oldest, newest in zip(line["groups"], line["oldest"], line["newest"]):
        told = f"group {number} has tokens of versions {oldest} to {newest}"
        if version - oldest > planned.max_staleness:
            yield "I1", f"{told}; version {version} trains none below {version - planned.max_staleness}"
        if newest > version:
            yield "I1", f"{told}, which are newer than the weights of version {version}"
        put = ledger.groups[number].versions if number in ledger.groups else None
        if put and not put[0] <= oldest <= newest <= put[1]:
            yield "I1", f"{told}; versions {put[0]} to {put[1]} were put"


@rule("acknowledged")
def all_ages_seen(ledger: Ledger, line: Line) -> Found:
    """The ranks together have trained the oldest and the newest token of each group."""
    task = ledger.task_of(line)
    if line["stage"] not in ledger.planned.trainers or task is None:
        return
    for number in line["groups"]:
        group = ledger.groups.get(number)
        seen = list(group.trained.get(line["stage"], {}).values()) if group else []
        if group and group.versions and seen and number in task.left:
            span = (min(oldest for _, oldest, _ in seen), max(newest for *_, newest in seen))
            if span != group.versions:
                yield "I1", f"group {number} was put with versions {group.versions} and trained with {span}"


@rule("trained")
def as_many_of_each(ledger: Ledger, line: Line) -> Found:
    """As many logprobs as tokens as versions."""
    if len(set(line["entries"].values())) != 1 or not ledger.planned.stamps & line["entries"].keys():
        yield "I9", f"task {line['task']} trained columns of different lengths: {line['entries']}"
