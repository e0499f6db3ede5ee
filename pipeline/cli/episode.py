"""Plays one kept episode of a run again: python -m pipeline.run GRAPH --replay RUN --episode STEP/GROUP/SAMPLE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pipeline.declare.abilities import Replays, shown_by
from pipeline.declare.graph import Graph
from pipeline.declare.handle import group_of, index_of, sample_key
from pipeline.declare.held import Closes
from pipeline.errors import GraphError, Problem
from pipeline.executors.replay import context_of
from pipeline.reading import readable
from pipeline.rundir import RunDir


def replay_episode(graph: Graph, folder: Path, name: str, *, live: bool) -> tuple[list[str], bool]:
    """Play an episode against its environment, with the recorded replies, and score it again; with `live`, also sample
    it again, with the model as it is before training. Returns lines that say how it went, and whether all went as
    before. Raises GraphError if the run has not kept it."""
    sample = _kept(folder, name)
    lines, same = [], True
    for stage in graph.all_stages():
        if isinstance(stage, Replays):
            needs = (*stage.reads, *shown_by(stage), *(field for field in stage.writes if not field.ragged))
            if missing := [field.name for field in needs if field.name not in sample]:
                lines.append(f"stage {stage.name!r} is left out: the run has not kept {', '.join(missing)}")
                continue
            context = context_of(graph, stage.groups()[0] if stage.groups() else graph.host)
            try:
                more, as_before = stage.replayed(sample, context, live=live)
            finally:
                for held in context.shared.values():
                    if isinstance(held, Closes):
                        held.close()
            lines, same = lines + more, same and as_before
    return lines, same


def _kept(folder: Path, name: str) -> dict[str, Any]:
    """The fields of a kept sample. Raises GraphError."""
    flag, fix = f"--episode {name}", "the number of a step, and of a group and a sample from its file in samples/"
    parts = name.split("/")
    if len(parts) != 3 or not all(part.isdigit() for part in parts) or int(parts[0]) < 1:
        raise GraphError(Problem(where=flag, what="it is no step, group and sample", why="such as 30/232/0", fix=fix))
    step, group, member = map(int, parts)
    path = RunDir(folder).samples(step - 1)
    key = sample_key(group, member)
    with readable(f"--replay {folder}", GraphError, why=f"a run keeps samples of step {step} in {path.name}", fix=fix):
        rows = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    found = next((row for row in rows if isinstance(row, dict) and row.get("key") == key), None)
    if found is None:
        kept = ", ".join(f"{step}/{group_of(row['key'])}/{index_of(row['key'])}" for row in rows[:4])
        raise GraphError(
            Problem(where=flag, what=f"step {step} has not kept it", why=f"it has {kept} and others", fix=fix)
        )
    return found
