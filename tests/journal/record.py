"""Read the files of a run directory as plain values, with the standard library. Knows the format, not its meaning.

lines, violations = read_events(run_dir / "events.jsonl")
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORD = "record"  # a violation of the file format, not of an invariant


@dataclass(frozen=True)
class Violation:
    """`invariant` is "I1" to "I10", or "record"; `where` is a file, with a line number if it has lines."""

    invariant: str
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.invariant}: {self.text}"


@dataclass(frozen=True)
class Line:
    """One event of type `type`."""

    number: int
    type: str
    event: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.event[name]

    @property
    def where(self) -> str:
        return f"events.jsonl:{self.number}"


# Fields of each event type, with the kind of their values. "?" marks an optional field.
_TASK = {"task": "i", "stage": "s", "step": "i", "attempt": "i"}
_SPAN = {"start_s": "f", "end_s": "f"}
_KINDS: dict[str, dict[str, str]] = {
    "started": {"graph": "s", "start": "i", "steps": "i", "executor": "s", "monotonic_s": "f", "wall_s": "f"},
    "placed": {"group": "s", "worker": "i", "node": "s", "pid": "i"},
    "turned": {"group": "s", "worker": "i", "awake": "b", "before_bytes": "i", "memory_bytes": "i", **_SPAN},
    "admitted": {"step": "i", "groups": "I", "version": "i", "at_s": "f"},
    "claimed": {"step": "i", "groups": "I", "at_s": "f"},
    "dropped": {"stage": "s", "step": "i", "groups": "I", "reason": "s", "tokens": "I?", "at_s": "f"},
    "submitted": {**_TASK, "group": "s", "replica": "n", "groups": "I", "samples": "i", "version": "i", "at_s": "f"},
    "got": {"stage": "s", "step": "i", "fields": "S", "samples": "i", "size_bytes": "i", "field_bytes": "I", **_SPAN},
    "put": {
        "stage": "s", "step": "i", "attempt": "i", "fields": "S", "groups": "I", "samples": "i", "size_bytes": "i",
        "versions": "P?", **_SPAN,
    },
    "ran": {**_TASK, "group": "s", "worker": "i", "groups": "I", "cpu_s": "f", "metrics": "d", **_SPAN},
    "spent": {
        **_TASK, "group": "s", "worker": "i", "groups": "I", "names": "S", "samples": "S", "at_once": "d", **_SPAN,
    },
    "open": {"stage": "s", "parts": "d", "at_s": "f"},
    "acknowledged": {**_TASK, "groups": "I", "at_s": "f"},
    "trained": {
        **_TASK, "worker": "i", "version": "i", "groups": "I", "samples": "I", "oldest": "I", "newest": "I",
        "entries": "d", "at_s": "f",
    },
    "retried": {**_TASK, "groups": "I", "reason": "s", "at_s": "f"},
    "fenced": {**_TASK, "groups": "I", "at_s": "f"},
    "published": {"stage": "s", "step": "i", "version": "i", "sha256": "s", "at_s": "f"},
    "served": {**_TASK, "replica": "i", "version": "i", "at_s": "f"},
    "cleared": {"step": "i", "groups": "I", "partitions": "S", "last": "b", **_SPAN},
    "held": {"step": "i", **_SPAN},
    "checkpointed": {"step": "i", "folder": "s", "size_bytes": "i", **_SPAN},
    "removed": {"step": "i", "folder": "s", "at_s": "f"},
    "step_ended": {"step": "i", "metrics": "d", "at_s": "f"},
    "diverged": {
        "step": "i", "kind": "s", "metric": "s", "value": "F", "before": "F", "problem": "s", "at_s": "f",
    },
    "stopping": {"at_s": "f"},
    "failed": {"stage": "n", "step": "n", "error": "s", "problems": "S", "at_s": "f"},
    "ended": {"steps": "i", "rows_left": "i", "at_s": "f"},
}  # fmt: skip


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_int, value))


_IS = {
    "i": _is_int,
    "f": lambda value: _is_int(value) or isinstance(value, float),
    "s": lambda value: isinstance(value, str),
    "n": lambda value: value is None or _is_int(value) or isinstance(value, str),
    "b": lambda value: isinstance(value, bool),
    "F": lambda value: value is None or (isinstance(value, int | float) and not isinstance(value, bool)),
    "d": lambda value: isinstance(value, dict),
    "I": lambda value: isinstance(value, list) and all(map(_is_int, value)),
    "S": lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
    "P": lambda value: isinstance(value, list) and all(map(_is_pair, value)),
}


def read_events(path: Path) -> tuple[list[Line], list[Violation]]:
    """Return the events of a run in order. A last line without newline is still being written and left out."""
    lines, violations = [], []
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        event = _decoded(text)
        wrong = list(_wrong(event))
        violations += [Violation(RECORD, f"events.jsonl:{number}", problem) for problem in wrong]
        if not wrong:
            lines.append(Line(number, event["type"], {"tokens": [], "versions": [], **event}))
    return lines, violations


def read_metrics(path: Path) -> tuple[list[tuple[int, dict[str, Any]]], list[Violation]]:
    """Return the numbered lines of metrics.jsonl; none if the file does not exist."""
    lines, violations = [], []
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1] if path.is_file() else (), start=1):
        value = _decoded(text)
        if isinstance(value, dict) and _is_int(value.get("step")) and _is_int(value.get("version")):
            lines.append((number, value))
        else:
            violations.append(Violation(RECORD, f"metrics.jsonl:{number}", "the line has no step and version"))
    return lines, violations


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file does not exist or holds something else."""
    value = _decoded(path.read_bytes()) if path.is_file() else None
    return value if isinstance(value, dict) else None


def _decoded(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _wrong(event: Any) -> Iterator[str]:
    if not isinstance(event, dict) or event.get("type") not in _KINDS:
        yield "the line is no event"
        return
    for name, kind in _KINDS[event["type"]].items():
        if name not in event:
            if not kind.endswith("?"):
                yield f"{event['type']} has no {name}"
        elif not _IS[kind[0]](event[name]):
            yield f"{event['type']} has {name}={event[name]!r}"
        elif name == "end_s" and _IS["f"](event.get("start_s")) and event["end_s"] < event["start_s"]:
            yield f"{event['type']} ends before it starts"
