"""Sorts sample fields into partitions by their lifetime: the fields of a partition are cleared at the same time. Pure.

A field's last readers are the readers from which no other reader of it follows. Fields with the same last readers form
a partition, which is named by them; a field without readers lives until its writer has acknowledged. The partition of a
field that an outside process writes is cleared last of all, so that nothing it writes late is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import networkx as nx

from pipeline.declare.abilities import bounds_of
from pipeline.declare.fields import ITEM_BYTES, Field
from pipeline.declare.stage import Stage
from pipeline.plan.plan import Partition

Readers = dict[str, set[str]]  # field -> stages


def partitions(name: str, stages: Sequence[Stage], dag: nx.DiGraph, group_size: int) -> tuple[Partition, ...]:
    """Return the partitions of a graph, in the order in which their first fields are written. `dag` has an edge for
    each stage that depends on another."""
    fields = {field.name: field for stage in stages for field in stage.writes if not field.per_step}
    writer = {field.name: stage for stage in stages for field in stage.writes}
    readers = _readers(stages, fields)
    order = [stage.name for stage in stages]
    members: dict[tuple[str, ...], list[str]] = {}
    for field in fields:
        ends = _last(readers[field], dag) or {writer[field].name}
        members.setdefault(tuple(name for name in order if name in ends), []).append(field)
    limits = {dim: most for stage in stages for dim, most in bounds_of(stage).items()}
    made = []
    for last, names in members.items():
        outside = any(writer[field].shape == "external" for field in names)
        holders = {stage for field in names for stage in (*readers[field], writer[field].name)}
        most = {field: _most_bytes(fields[field], limits, group_size) for field in names}
        made.append(
            Partition(
                name=f"{name}.{'+'.join(last)}",
                fields=tuple(names),
                last_readers=last,
                holders=() if outside else tuple(name for name in order if name in holders),
                group_bytes=tuple(most[field] for field in names),
            )
        )
    return tuple(made)


def _readers(stages: Sequence[Stage], fields: Iterable[str]) -> Readers:
    """Return who needs each field. An outside process is done with a field when its own fields have been read, so
    their readers stand in for it."""
    direct: Readers = {field: set() for field in fields}
    for stage in stages:
        for read in stage.reads:
            direct.setdefault(read.name, set()).add(stage.name)
    outside = {stage.name: stage for stage in stages if stage.shape == "external"}
    return {field: _inside(direct[field], direct, outside) for field in fields}


def _inside(names: set[str], direct: Readers, outside: Mapping[str, Stage]) -> set[str]:
    """Return these stages, with the readers of its fields in place of each outside process."""
    behind = (direct.get(field.name, set()) for name in names & outside.keys() for field in outside[name].writes)
    return (names - outside.keys()).union(*(_inside(more, direct, outside) for more in behind))


def _last(names: set[str], dag: nx.DiGraph) -> set[str]:
    """Return the stages from which no other of `names` follows."""
    return {name for name in names if names.isdisjoint(nx.descendants(dag, name))}


def _most_bytes(field: Field, limits: Mapping[str, int], group_size: int) -> int | None:
    """Return the most bytes that a field takes per group; None for texts and dimensions without a limit."""
    if field.dtype == "str" or (field.ragged and field.ragged not in limits):
        return None
    return group_size * (limits[field.ragged] if field.ragged else 1) * entry_bytes(field)


def entry_bytes(field: Field) -> int:
    """Return the bytes of one entry of a field; texts are estimated."""
    size = ITEM_BYTES[field.dtype]
    for extent in field.inner:
        size *= extent
    return size
