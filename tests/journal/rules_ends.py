"""Rules for the end of a step (I5, I6), of a checkpoint (I8), and of a run, with nothing in flight (I2, I5, I6)."""

from __future__ import annotations

from tests.journal.ledger import Ledger
from tests.journal.record import RECORD, Line
from tests.journal.rules import Found, named, rule


@rule("step_ended")
def all_stages_behind(ledger: Ledger, line: Line) -> Found:
    """A step ends once, after every stage has acknowledged all groups that it has there."""
    planned, step = ledger.planned, line["step"]
    if step in ledger.history.ended:
        yield "I5", f"step {step + 1} ended twice"
    opening = step < ledger.start
    if opening and not (step == -1 and planned.transfers):
        yield "I5", f"step {step + 1} ended in a run from {ledger.start}"
        return
    for stage in sorted(planned.internal - planned.pool):
        due = planned.opens(stage, ledger.start) if opening else planned.runs_at(stage, step)
        if due and not ledger.finished(stage, step):
            yield "I5", f"step {step + 1} ended before {stage} had acknowledged all of it"


@rule("step_ended")
def runs_of_groups(ledger: Ledger, line: Line) -> Found:
    """A stage per batch got the whole batch at once, or runs of it, in order."""
    planned, step = ledger.planned, line["step"]
    batch = sorted(ledger.claims.get(step, ()))
    for stage in sorted(planned.holding):
        plan = planned.stages[stage]
        if not batch or plan["per"] != "batch" or plan["shape"] == "stream":
            continue
        size = plan["run_groups"] or len(batch)
        runs = [batch[first : first + size] for first in range(0, len(batch), size)]
        tasks = [ledger.tasks[number] for number in ledger.submitted[stage, step]]
        had = [task.groups for task in tasks if not task.lost]
        if had and sorted(had) != sorted(runs):
            yield "I6", f"{stage} of step {step + 1} was handed {had}, the batch is {runs}"


@rule("checkpointed")
def what_is_written_was_held(ledger: Ledger, line: Line) -> Found:
    """A checkpoint is written once, from the state that was copied for it, when every step before it has ended."""
    step = line["step"]
    if early := [number for number in range(ledger.start, step + 1) if number not in ledger.history.ended]:
        yield "I5", f"the checkpoint of step {step + 1} was written before step {early[0] + 1} ended"
    if step not in ledger.history.held:
        yield "I8", f"no state was held for the checkpoint of step {step + 1}"
    if step in ledger.history.saved:
        yield "I8", f"the checkpoint of step {step + 1} was written twice"
    if line["folder"] != f"step_{step + 1:06d}":
        yield RECORD, f"the checkpoint of step {step + 1} is in {line['folder']}"


@rule("held")
def weights_are_settled(ledger: Ledger, line: Line) -> Found:
    """A checkpoint holds the weights after its step: trained and served."""
    planned, step = ledger.planned, line["step"]
    last = step == planned.steps - 1 or ledger.stopping
    if step < ledger.start or not (last or step in planned.checkpoints_before(step + 1, ledger.start)):
        yield "I8", f"a checkpoint of step {step + 1} was not due"
    if step in ledger.history.held:
        yield "I8", f"the state after step {step + 1} was held twice"
    for stage in (*planned.trainers, *planned.transfers):
        if step >= ledger.start and planned.runs_at(stage, step) and not ledger.finished(stage, step):
            yield "I8", f"the checkpoint of step {step + 1} was begun before {stage} was done"


@rule("removed")
def a_newer_checkpoint_stays(ledger: Ledger, line: Line) -> Found:
    """A checkpoint is removed only after two newer ones were written."""
    step, saved = line["step"], ledger.history.saved
    if step not in saved or sum(other > step for other in saved) < 2:
        yield "I8", f"the checkpoint of step {step + 1} was removed, and two newer ones were not recorded"


@rule("admitted", "claimed")
def nothing_enters_a_run_that_stops(ledger: Ledger, line: Line) -> Found:
    """A run that was asked to stop admits nothing."""
    if ledger.stopping:
        yield "I5", f"{named(line['groups'])} were {line.type} after the run was asked to stop"


@rule("submitted")
def no_training_begins_in_a_run_that_stops(ledger: Ledger, line: Line) -> Found:
    """A run that was asked to stop finishes the step in training and starts no other."""
    stage, step = line["stage"], line["step"]
    if ledger.stopping and stage in ledger.planned.trainers and not ledger.submitted[stage, step]:
        yield "I5", f"{stage} of step {step + 1} began after the run was asked to stop"


@rule("ended")
def nothing_in_flight(ledger: Ledger, line: Line) -> Found:
    """At a clean end every group is trained or dropped, and its rows are cleared."""
    planned = ledger.planned
    if line["rows_left"]:
        yield "I2", f"{line['rows_left']} rows were left in the data plane"
    if line["steps"] != planned.steps:
        yield RECORD, f"the run ended after {line['steps']} steps, it was started for {planned.steps}"
    lost = [n for n, group in ledger.groups.items() if group.claimed is None and group.dropped is None]
    if lost:
        yield "I2", f"{named(lost)} were admitted and neither claimed nor dropped"
    held = sorted(ledger.held - set(lost))
    if held:
        yield "I2", f"{named(held)} were claimed or dropped and are not behind every stage that has them"
    stored = [n for n, g in ledger.groups.items() if g.stored and not g.cleared and n not in ledger.held]
    if stored:
        yield "I2", f"{named(stored)} were put and not cleared"


@rule("ended")
def no_step_left(ledger: Ledger, line: Line) -> Found:
    """At a clean end every step has ended, every due checkpoint is written, and no task is running."""
    planned = ledger.planned
    for step in range(ledger.start, planned.steps):
        if step not in ledger.history.ended:
            yield "I5", f"step {step + 1} never ended"
    if ledger.start == 0 and planned.transfers and -1 not in ledger.history.ended:
        yield "I5", "what runs before the first step never ended"
    due = {*planned.checkpoints_before(planned.steps, ledger.start), *([planned.steps - 1] if planned.trainers else [])}
    for step in sorted(due - ledger.history.saved):
        yield "I8", f"the checkpoint of step {step + 1} was never written"
    for number, task in ledger.tasks.items():
        told = f"task {number} ({task.line['stage']} of step {task.line['step'] + 1}, line {task.line.number})"
        if task.left:
            yield "I5", f"{told} was handed out and never acknowledged"
        elif not (task.ran or task.lost) and ledger.planned.stages[task.line["stage"]]["shape"] != "stream":
            yield RECORD, f"{told} was acknowledged and no worker says that it ran"


@rule("ended")
def all_were_fetched(ledger: Ledger, line: Line) -> Found:
    """The tasks of a stage have fetched all samples of their groups. Siblings may fetch the same ones."""
    planned = ledger.planned
    for (stage, step), numbers in ledger.submitted.items():
        tasks = [ledger.tasks[number] for number in numbers]
        if any(task.lost or task.left for task in tasks):
            continue
        wanted = sum(planned.fetched(stage, len(task.groups)) for task in tasks)
        got = ledger.fetched[stage, step]
        if got not in (wanted, wanted * planned.siblings(stage)):
            yield "I6", f"{stage} of step {step + 1} fetched {got} samples, its groups have {wanted}"
