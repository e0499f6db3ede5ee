"""Random changes to valid journals: how many does the checker notice?

python -m tests.journal.mutations [--each 200]      # a table: kind of change, type of event, share noticed

A line is deleted, repeated, or edited in a value that an invariant covers. Times and sizes are left alone, and so is
what no invariant can detect: a lower policy version in an Admitted or Submitted was published too.
"""

from __future__ import annotations

import argparse
import copy
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.journal.checker import check
from tests.journal.faults import AHEAD, DIES, DROP, GATE, PARTLY, RANKS, SYNC
from tests.journal.world import Event, MadeUp

SETUPS = (SYNC, AHEAD, DROP, GATE, RANKS, DIES, PARTLY)
_TASK = ("task", "stage", "step", "attempt", "groups")
EDITED = {  # the edited values, by type of event
    "started": ("start", "steps"),
    "admitted": ("groups", "step"),
    "claimed": ("groups", "step"),
    "dropped": ("groups", "stage", "reason"),
    "submitted": (*_TASK, "group", "replica", "samples"),
    "got": ("stage", "step", "fields", "samples"),
    "put": ("stage", "attempt", "fields", "groups", "samples", "versions"),
    "ran": (*_TASK, "group", "worker"),
    "acknowledged": _TASK,
    "trained": (*_TASK, "worker", "version", "samples", "oldest", "newest", "entries"),
    "retried": _TASK,
    "fenced": _TASK,
    "served": ("task", "stage", "step", "replica", "version"),
    "published": ("stage", "step", "version", "sha256"),
    "cleared": ("groups", "partitions", "last"),
    "held": ("step",),
    "checkpointed": ("step", "folder"),
    "removed": ("step",),
    "step_ended": ("step", "metrics"),
    "ended": ("steps", "rows_left"),
}
KINDS = ("delete", "repeat", "edit")


def changed(events: list[Event], kind: str, draw: random.Random) -> tuple[list[Event], str]:
    """Return the events with one change, and the type of the changed event."""
    events = list(events)
    name = draw.choice(sorted({one["type"] for one in events}))  # rare types as often as frequent ones
    place = draw.choice([i for i, one in enumerate(events) if one["type"] == name])
    if kind == "delete":
        del events[place]
    elif kind == "repeat":
        events.insert(place + 1, copy.deepcopy(events[place]))
    else:
        events[place] = copy.deepcopy(events[place])
        fields = [key for key in EDITED[name] if events[place].get(key) not in ([], {})]
        key = draw.choice(fields)
        events[place][key] = _other(events[place][key], draw)
    return events, name


def _other(value: Any, draw: random.Random) -> Any:
    """Return another value of the same kind."""
    if value is None:
        return 0
    if isinstance(value, int):
        return value + draw.choice((-1, 1))
    if isinstance(value, str):
        return value[:-1] + "~"
    if isinstance(value, dict):
        key = draw.choice(sorted(value))
        return {**value, key: value[key] + 1}
    place = draw.randrange(len(value))
    if draw.random() < 0.5:
        return value[:place] + value[place + 1 :]
    return value[:place] + [_other(value[place], draw)] + value[place + 1 :]


def survey(each: int, seed: int = 0) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """Make `each` changes of each kind and count (noticed, all) by kind and type of event."""
    draw = random.Random(seed)
    noticed: Counter[tuple[str, str]] = Counter()
    tried: Counter[tuple[str, str]] = Counter()
    runs = []
    for setup in SETUPS:
        run = MadeUp(setup, seed)
        run.segment()
        runs.append(run)
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            for _ in range(each):
                run = draw.choice(runs)
                sound = run.events
                run.events, name = changed(sound, kind, draw)
                tried[kind, name] += 1
                noticed[kind, name] += bool(check(run.write(Path(folder) / str(run.setup))))
                run.events = sound
    return noticed, tried


def shares(noticed: Counter[tuple[str, str]], tried: Counter[tuple[str, str]]) -> dict[str, float]:
    """Return the noticed share, by kind of change."""
    return {
        kind: sum(noticed[key] for key in tried if key[0] == kind) / sum(tried[key] for key in tried if key[0] == kind)
        for kind in KINDS
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.journal.mutations")
    parser.add_argument("--each", type=int, default=200, help="changes of each kind")
    noticed, tried = survey(parser.parse_args().each)
    print(f"{'':14}" + "".join(f"{kind:>14}" for kind in KINDS))
    for name in sorted({name for _, name in tried}):
        cells = [f"{noticed[kind, name]} of {tried[kind, name]}" if tried[kind, name] else "-" for kind in KINDS]
        print(f"{name:14}" + "".join(f"{cell:>14}" for cell in cells))
    print(f"{'share':14}" + "".join(f"{share:>14.3f}" for share in shares(noticed, tried).values()))


if __name__ == "__main__":
    main()
