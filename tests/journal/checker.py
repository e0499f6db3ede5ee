"""The checker: replays the journal of a run against the invariants I1 to I10 and reports violations.

    violations = check(Path("runs/quickstart-20260101-120000"))
    report = audit(run_dir, stall_s=60.0)         # also counts of what was checked

Reads events.jsonl, plan.json, metrics.jsonl and checkpoints/*/manifest.json, with the standard library only. It knows
nothing of the code that wrote them. The invariants:

    I1   every trained token: 0 <= version of the weights - version of the token <= max_staleness
    I2   admitted = trained + dropped + in flight, 0 at a clean end; each group is claimed and trained once, whole
    I3   groups held <= capacity; with on_stale="drop", asked <= (ahead + version + 1) * batch
    I4   published versions rise by one, each with a hash; no token of a version that its worker did not serve
    I5   a step ends when all of it is done; a clean end leaves no step and no task; no gap above `stall_s`
    I6   tasks have whole groups, and fetch and put all samples of them; a stage per batch has the batch
    I7   put once per attempt, read only after it was put, never after it was cleared; fences hold
    I8   a resume continues from its checkpoint: nothing before it is trained again, nothing else is lost
    I9   as many logprobs as tokens as versions
    I10  nothing from a lost attempt counts
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.journal import rules_ends, rules_groups, rules_tasks, rules_versions  # noqa: F401 - they register themselves
from tests.journal.ledger import History, Ledger
from tests.journal.planned import Planned
from tests.journal.record import RECORD, Line, Violation, read_events, read_metrics, read_object
from tests.journal.rules import RULES, named, stranger


@dataclass
class Report:
    """The violations found, and counts of what was checked."""

    violations: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)  # versions -> trained groups, by their oldest token
    clean: bool = False  # the record says that the run ended


def check(run_dir: Path, *, stall_s: float | None = None) -> list[Violation]:
    """Return every violation in the record of a run, in order. `stall_s` bounds the time between two driver events."""
    return audit(run_dir, stall_s=stall_s).violations


def audit(run_dir: Path, *, stall_s: float | None = None) -> Report:
    """Do as `check`, with counts. A run that is still going on or was killed is checked as far as it is written."""
    report = Report()
    plan = read_object(run_dir / "plan.json")
    if plan is None:
        report.violations.append(Violation(RECORD, "plan.json", "it is not there, or is no JSON object"))
        return report
    lines, report.violations = read_events(run_dir / "events.jsonl")
    history, ledger, manifests = History(), None, _Manifests(run_dir, lines)
    for line in lines:
        report.counts[line.type] += 1
        if line.type == "started":
            report.violations += _starts(line, ledger, history)
            manifest = manifests.of_resume(line)
            report.violations += _resumes(line, plan, ledger, history, manifest)
            ledger = Ledger(Planned(plan, line["steps"]), line["start"], history, manifest)
        elif ledger is None or (ledger.clean and line.type != "started"):
            report.violations.append(Violation(RECORD, line.where, f"{line.type} outside of a run"))
        elif problem := stranger(ledger, line):
            report.violations.append(Violation(RECORD, line.where, problem))
        else:
            for rule in RULES[line.type]:
                report.violations += (Violation(name, line.where, text) for name, text in rule(ledger, line))
            ledger.apply(line)
            if line.type == "checkpointed":
                report.violations += manifests.check(line, ledger)
            if line.type == "trained":
                report.staleness.update(line["version"] - oldest for oldest in line["oldest"])
    report.clean = ledger is not None and ledger.clean
    report.violations += _stalls(lines, stall_s) if stall_s is not None else ()
    report.violations += _metrics(
        run_dir, history, clean=report.clean, transfers=bool(ledger and ledger.planned.transfers)
    )
    return report


def _starts(line: Line, before: Ledger | None, history: History) -> Iterator[Violation]:
    if before is None and line["start"]:
        yield Violation("I8", line.where, f"the record begins with a resume at {line['start']}")
    if before is not None and not line["start"]:
        yield Violation("I8", line.where, "the run began anew in the directory of another")
    if line["start"] >= line["steps"]:
        yield Violation(RECORD, line.where, f"a run of {line['steps']} steps was started at {line['start']}")


def _resumes(
    line: Line, plan: dict[str, Any], before: Ledger | None, history: History, manifest: dict[str, Any] | None
) -> Iterator[Violation]:
    """Cut the history at a resume, and check that no more is cut than a resume may forget."""
    start = line["start"]
    if not start or before is None:
        return
    history.cut(start, manifest["next_group"] if manifest else None)
    if start - 1 not in history.saved:
        yield Violation("I8", line.where, f"it goes on after step {start}, of which no checkpoint was recorded")
    for step in range(start) if before.planned.trainers else ():
        count = sum(of == step for of in history.trained.values())
        if count != plan["batch"]:
            yield Violation("I8", line.where, f"it has step {step + 1} behind it, at which {count} groups were trained")
    if manifest is None:
        return
    pending = set(manifest.get("pending", ()))
    behind = history.trained.keys() | history.dropped | pending
    lost = [group for group in range(manifest["next_group"]) if group not in behind]
    if lost:
        yield Violation("I8", line.where, f"{named(lost)} were admitted before the checkpoint and do not come again")
    again = sorted(pending & history.trained.keys())
    if again:
        yield Violation("I8", line.where, f"{named(again)} were trained before the checkpoint and come again")


class _Manifests:
    """The checkpoint manifests. One that was written again, or removed since, cannot be checked."""

    def __init__(self, run_dir: Path, lines: list[Line]) -> None:
        self._folder = run_dir / "checkpoints"
        fetched = run_dir / "fetched.json"  # of a run whose other checkpoints are in its mirror
        self._left = json.loads(fetched.read_bytes())["left"] if fetched.exists() else []
        self._last = {line["step"]: line.number for line in lines if line.type in ("checkpointed", "removed")}

    def of_resume(self, line: Line) -> dict[str, Any] | None:
        """Return the manifest that the run resumes from."""
        start = line["start"]
        if not start or self._last.get(start - 1, 0) > line.number:
            return None
        manifest = self._read(start)
        return manifest if manifest and isinstance(manifest.get("next_group"), int) else None

    def check(self, line: Line, ledger: Ledger) -> Iterator[Violation]:
        """Check that a checkpoint holds the state of the run at the time it was written."""
        step = line["step"]
        if self._last[step] != line.number:
            return
        where = f"checkpoints/step_{step + 1:06d}/manifest.json"
        manifest = self._read(step + 1)
        if step + 1 in self._left and not (self._folder / f"step_{step + 1:06d}").exists():
            return
        if manifest is None or not isinstance(manifest.get("next_group"), int):
            yield Violation("I8", where, f"{line.where} says that it was written, and it cannot be read")
            return
        if manifest.get("steps") != step + 1 or manifest.get("version") != step + 1:
            told = f"{manifest.get('steps')} steps and version {manifest.get('version')}"
            yield Violation("I8", where, f"it says {told} after step {step + 1}")
        following, pending = manifest["next_group"], set(manifest.get("pending", ()))
        trained = {group for group, of in ledger.history.trained.items() if of <= step}
        behind = trained | ledger.history.dropped | pending
        if trained & pending:
            yield Violation("I8", where, f"{named(sorted(trained & pending))} were trained and come again")
        beyond = sorted(group for group in trained | pending if group >= following)
        if beyond:
            yield Violation("I8", where, f"{named(beyond)} would be admitted again: {following} is next")
        lost = [group for group in range(following) if group not in behind]
        if lost:
            yield Violation("I8", where, f"{named(lost)} are neither trained nor dropped nor pending")

    def _read(self, steps: int) -> dict[str, Any] | None:
        return read_object(self._folder / f"step_{steps:06d}" / "manifest.json")


def _stalls(lines: list[Line], stall_s: float) -> Iterator[Violation]:
    """Yield gaps between driver events; loading time before the first decision does not count."""
    before: float | None = None
    for line in lines:
        if line.type == "started":
            before = None
        at_s = line.event.get("at_s") if line.type != "trained" else None  # on a worker's clock
        if at_s is None:
            continue
        if before is not None and at_s - before > stall_s:
            yield Violation("I5", line.where, f"nothing happened for {at_s - before:.1f} s before this")
        before = at_s


def _metrics(run_dir: Path, history: History, *, clean: bool, transfers: bool) -> Iterator[Violation]:
    """Check that metrics.jsonl has one line per step that counts, with the metrics of its StepEnded."""
    lines, violations = read_metrics(run_dir / "metrics.jsonl")
    yield from violations
    seen: set[int] = set()
    for number, value in lines:
        step = value["step"] - 1
        where = f"metrics.jsonl:{number}"
        if step in seen:
            yield Violation(RECORD, where, f"a second line for step {step + 1}")
        seen.add(step)
        ended = history.ended.get(step)
        if ended is None:
            if clean:
                yield Violation(RECORD, where, f"the record does not say that step {step + 1} ended")
            continue
        line, version = ended
        if {name: of for name, of in value.items() if name not in ("step", "version")} != line["metrics"]:
            yield Violation(RECORD, where, f"it differs from {line.where}")
        if transfers and value["version"] != version:
            yield Violation(RECORD, where, f"version {value['version']}; {version} was published at {line.where}")
    for step, (line, _) in sorted(history.ended.items()):
        if step not in seen and not violations:
            yield Violation(RECORD, line.where, f"metrics.jsonl has no line for step {step + 1}")
