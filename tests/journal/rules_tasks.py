"""Rules for tasks: when they may start (I6, I7, I8), what they put and acknowledge (I6, I7), lost attempts (I10)."""

from __future__ import annotations

from tests.journal.ledger import WHOLE, Group, Ledger, units
from tests.journal.planned import Planned
from tests.journal.record import RECORD, Line
from tests.journal.rules import Found, rule


@rule("submitted")
def well_formed(ledger: Ledger, line: Line) -> Found:
    """A task has its own number, whole groups, and the replica that its stage requires."""
    planned, stage, number = ledger.planned, line["stage"], line["task"]
    if number in ledger.tasks:
        yield "I10", f"task {number} was handed out twice"
    if line["group"] != planned.stages[stage]["groups"][0]:
        yield RECORD, f"{stage} was handed to {line['group']}"
    samples = len(line["groups"]) * planned.group_size
    if line["samples"] != samples:
        yield (
            "I6",
            f"{stage} was handed {line['samples']} samples of {len(line['groups'])} groups, which have {samples}",
        )
    together = stage in planned.transfers or planned.stages[stage]["sharding"] is not None
    replica = line["replica"]
    if together != (replica is None) or (not together and not 0 <= replica < planned.replicas(stage)):
        yield RECORD, f"{stage} was handed to replica {replica}; its group has {planned.replicas(stage)}"
    opening = line["step"] < ledger.start
    if opening and not (line["step"] == ledger.start - 1 and planned.opens(stage, ledger.start)):
        yield "I8", f"{stage} ran at step {line['step'] + 1}, which a run from {ledger.start} has behind it"
    if bool(line["groups"]) != (stage in planned.holding and not opening):
        yield "I6", f"{stage} was handed {len(line['groups'])} groups"


@rule("submitted")
def weights_are_there(ledger: Ledger, line: Line) -> Found:
    """A stage that reads weights of its step starts after they were written."""
    planned, stage, step = ledger.planned, line["stage"], line["step"]
    for field in planned.weights_reads(stage):
        writer = planned.writer[field]
        if writer in planned.transfers:
            landed = (writer, step) in ledger.published
        else:
            landed = step < ledger.start or ledger.finished(writer, step)
        if not landed:
            yield "I7", f"{stage} of step {step + 1} started before {field} of {writer} had landed"


@rule("submitted")
def groups_are_there(ledger: Ledger, line: Line) -> Found:
    """A stage starts on a group once per attempt, after all it reads is present, and never after it was cleared."""
    planned, stage, step = ledger.planned, line["stage"], line["step"]
    if not line["groups"]:
        yield from _single(ledger, line)
    for number in line["groups"]:
        group = ledger.groups.get(number)
        if group is None:
            yield "I2", f"{stage} was handed group {number}, which was never admitted"
            continue
        yield from _handed_once(line, number, group)
        yield from _is_kept(planned, number, group, planned.sample_reads(stage), f"{stage} was handed")
        missing = planned.waits(stage) - group.present.keys()
        if missing and not group.cleared:
            yield "I7", f"{stage} was handed group {number} before {', '.join(sorted(missing))} had landed"
        home = group.step if not planned.pooled else group.claimed
        if stage not in planned.pool and home != step:
            yield "I2", f"{stage} at step {step + 1} was handed group {number}, which is not of that step"
        if stage in planned.trainers and group.claimed is None and home == step:
            yield "I2", f"{stage} was handed group {number}, which was not claimed"


def _single(ledger: Ledger, line: Line) -> Found:
    stage, step = line["stage"], line["step"]
    state = ledger.single.get((stage, step))
    if state in ("out", "done"):
        yield "I7", f"{stage} of step {step + 1} was handed out twice"
    elif line["attempt"] != ledger.lost[stage, step]:
        yield "I10", f"{stage} of step {step + 1} is attempt {line['attempt']}; {ledger.lost[stage, step]} were lost"


def _is_kept(planned: Planned, number: int, group: Group, fields: set[str], what: str) -> Found:
    for name in group.freed if not group.cleared else ():
        if fields & planned.partitions.get(name, set()):
            yield "I7", f"{what} group {number} after its partition {name} was cleared"


def _handed_once(line: Line, number: int, group: Group) -> Found:
    stage = line["stage"]
    if group.cleared:
        yield "I7", f"{stage} was handed group {number} after it was cleared"
    elif group.dropped is not None:
        yield "I2", f"{stage} was handed group {number}, which was dropped ({group.dropped})"
    elif stage in group.working or stage in group.acknowledged:
        yield "I7", f"{stage} was handed group {number} twice"
    elif line["attempt"] != group.attempts[stage]:
        lost = group.attempts[stage]
        yield "I10", f"{stage} was handed group {number} as attempt {line['attempt']}; {lost} were lost"


@rule("submitted")
def fences(ledger: Ledger, line: Line) -> Found:
    """Fenced stages do not overlap: `after` starts once `before` is done at the step that the fence refers to."""
    planned, step = ledger.planned, line["step"]
    for fence in planned.fences:
        if fence["after"] != line["stage"]:
            continue
        before, at = fence["before"], step - fence["lag"]
        if at >= ledger.start:
            due = planned.runs_at(before, at)
        else:
            due = at == ledger.start - 1 and planned.opens(before, ledger.start)
        if due and step >= ledger.start and not ledger.finished(before, at):
            yield "I7", f"{fence['after']} of step {step + 1} started before {before} of step {at + 1} was done"


@rule("submitted")
def after_the_checkpoint(ledger: Ledger, line: Line) -> Found:
    """The weights do not change before they are copied for a due checkpoint, or written to it."""
    planned = ledger.planned
    if line["stage"] in planned.trainers:
        for done in planned.checkpoints_before(line["step"], ledger.start):
            if done not in ledger.history.held:
                yield "I8", f"step {line['step'] + 1} was trained before the state after step {done + 1} was held"


@rule("got")
def fetched(ledger: Ledger, line: Line) -> Found:
    """Fetched columns belong to a task and are those that its stage reads."""
    planned, stage = ledger.planned, line["stage"]
    if set(line["fields"]) not in (planned.sample_reads(stage), set(planned.stages[stage]["chooses"])):
        yield RECORD, f"{stage} fetched {', '.join(line['fields'])}"
    elif not ledger.submitted[stage, line["step"]]:
        yield "I7", f"{stage} fetched columns at step {line['step'] + 1} and was handed nothing there"


@rule("put")
def put_once(ledger: Ledger, line: Line) -> Found:
    """The task that has a group puts its columns once per attempt; puts of a lost attempt are void."""
    planned, stage, size = ledger.planned, line["stage"], ledger.planned.group_size
    external = stage not in planned.internal
    written, declared = set(line["fields"]), planned.sample_writes(stage)
    if written != declared and not (external and written <= declared):
        yield RECORD, f"{stage} put {', '.join(line['fields'])}"
    whole, samples = len(line["groups"]) * size, line["samples"]
    divided = not external and planned.stages[stage]["sharding"] is not None
    if not external and (samples > whole or (samples != whole and not divided)):
        yield "I6", f"{stage} put {samples} samples of {len(line['groups'])} groups, which have {whole}"
    for number in line["groups"]:
        group = ledger.groups.get(number)
        if group is None:
            yield "I7", f"{stage} put group {number}, which was never admitted"
        elif not external and line["attempt"] < group.attempts[stage]:
            continue  # put by a lost attempt
        elif line["attempt"] > group.attempts[stage]:
            yield "I10", f"{stage} put group {number} as attempt {line['attempt']}; {group.attempts[stage]} were lost"
        elif group.cleared:
            yield "I7", f"{stage} put group {number} after it was cleared"
        elif not external and stage not in group.working:
            yield "I7", f"{stage} put group {number} and has no task with it"
        elif gone := list(_is_kept(planned, number, group, written, f"{stage} put")):
            yield from gone
        elif written & group.present.keys():
            yield "I7", f"{stage} put {', '.join(sorted(written & group.present.keys()))} of group {number} twice"


@rule("put")
def shares_fit(ledger: Ledger, line: Line) -> Found:
    """The shares of all ranks together are the samples of the task."""
    group = next((ledger.groups[n] for n in line["groups"] if n in ledger.groups), None)
    task = ledger.tasks.get(group.working.get(line["stage"], -1)) if group else None
    if task is None or task.line["attempt"] != line["attempt"] or not ledger.is_divided(line, task):
        return
    whole = len(task.groups) * ledger.planned.group_size
    before = max((task.put[name] for name in line["fields"]), default=0)
    if before < whole < before + line["samples"]:
        yield "I7", f"the ranks of {line['stage']} put more than the {whole} samples of task {task.line['task']}"


@rule("acknowledged", "ran", "spent", "trained", "retried", "fenced")
def of_a_task(ledger: Ledger, line: Line) -> Found:
    """Every report belongs to a task that was handed out and agrees with it."""
    task = ledger.task_of(line)
    if task is None:
        yield "I10", f"{line.type} of task {line['task']}, which was never handed out"
        return
    for name in ("stage", "step", "attempt"):
        if line[name] != task.line[name]:
            yield RECORD, f"{line.type} of task {line['task']} says {name} {line[name]}, it has {task.line[name]}"
    extra = set(line["groups"]) - set(task.groups)
    if extra:
        yield RECORD, f"{line.type} of task {line['task']} names groups {sorted(extra)}, which it does not have"
    if line.type == "trained" and not task.lost.isdisjoint(units(line["groups"])):
        yield "I10", f"task {line['task']} trained groups after its attempt was lost"


@rule("ran")
def on_its_workers(ledger: Ledger, line: Line) -> Found:
    """A task runs on workers of its worker group; a transfer runs on workers of both."""
    task = ledger.task_of(line)
    if task:
        groups = ledger.planned.stages[line["stage"]]["groups"]
        workers = ledger.planned.worker_groups[line["group"]]["workers"]
        if line["group"] not in groups or not 0 <= line["worker"] < workers:
            yield RECORD, f"{line['stage']} ran on worker {line['worker']} of {line['group']}"
        if line["groups"] != task.groups:
            yield RECORD, f"task {line['task']} ran on groups {line['groups']}, it has {task.groups}"
        if (line["group"], line["worker"]) in task.ran:
            yield RECORD, f"task {line['task']} ran twice on worker {line['worker']} of {line['group']}"


@rule("acknowledged")
def all_is_present(ledger: Ledger, line: Line) -> Found:
    """Acknowledged groups were not acknowledged or lost before, and all fields that the stage writes are present."""
    planned, stage, task = ledger.planned, line["stage"], ledger.task_of(line)
    if task is None:
        return
    for unit in units(line["groups"]):
        if unit in task.lost:
            yield "I10", f"task {line['task']} acknowledged {_unit(unit)} after its attempt was lost"
        elif unit not in task.left:
            yield "I7", f"task {line['task']} acknowledged {_unit(unit)} twice"
        elif unit in ledger.groups and ledger.groups[unit].dropped is None:
            missing = planned.sample_writes(stage) - ledger.groups[unit].present.keys()
            if missing:
                yield "I7", f"{stage} acknowledged group {unit} and {', '.join(sorted(missing))} was not put"
    if stage in planned.transfers and (stage, line["step"]) not in ledger.published:
        yield "I4", f"{stage} of step {line['step'] + 1} was acknowledged and nothing was published"


@rule("retried")
def was_running(ledger: Ledger, line: Line) -> Found:
    """Only what a task still has can be lost with it."""
    task = ledger.task_of(line)
    for unit in units(line["groups"]) if task else ():
        if task and unit not in task.left:
            yield "I10", f"task {line['task']} lost {_unit(unit)}, which it no longer had"


@rule("fenced")
def was_lost(ledger: Ledger, line: Line) -> Found:
    """Only reports of lost attempts are ignored."""
    task = ledger.task_of(line)
    if task and not task.lost:
        yield "I10", f"a report of task {line['task']} was ignored and its attempt was not lost"


def _unit(unit: int) -> str:
    return "itself" if unit == WHOLE else f"group {unit}"
