"""Lets a process outside the graph read a run's columns and write the fields of its `External` stages.

    with OutsideProcess("runs/labels-...") as process:
        texts = process.read(3, "response")["response"]               # the samples of group 3
        process.write(3, TensorDict({"score": torch.tensor([1.0, 0.5])}, batch_size=[2]))

The run must be on Ray and still running; its directory says where the data plane is. A group is named by its admission
number, as in events.jsonl. Up to a second after the last `put` event of the fields that the `External` stage reads, the
driver puts the group's handle, with the lengths of ragged fields, into a partition of its own. From then on the process
can read these fields, until the group is cleared.
"""

from __future__ import annotations

from collections.abc import Collection, KeysView, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pipeline.data_plane import DataPlane
from pipeline.data_plane.checks import broken
from pipeline.data_plane.plain import plain
from pipeline.data_plane.signed import KEY_BYTES
from pipeline.data_plane.tensordicts import as_tensordict, from_tensordict, is_tensordict
from pipeline.data_plane.transfer_queue import Settings, TransferQueuePlane
from pipeline.declare.columns import Columns, Ragged
from pipeline.declare.fields import Field
from pipeline.declare.handle import KVBatchMeta, group_of, keys_of
from pipeline.declare.parameters import is_whole
from pipeline.declare.stage import Stage
from pipeline.errors import DataPlaneError, DataPlaneLost, Problem, shown
from pipeline.reading import decode, readable
from pipeline.rundir import RunDir
from pipeline.writing import replace

if TYPE_CHECKING:
    from tensordict import TensorDict, TensorDictBase

READER = "outside process"
LONGEST_S = 86_400.0  # of a deadline
HANDLE = Field("handle", dtype="str")  # of a group, as JSON: in the text of its first sample


class SharedHandles:
    """The handles that the driver shares with the outside process of one `External` stage."""

    def __init__(self, plane: DataPlane, partition: str, stage: str) -> None:
        self._plane, self._stage = plane, stage
        self._partition = _register_handles(plane, partition, stage)
        self._puts: dict[int, KVBatchMeta] = {}  # group -> where its handle is

    @property
    def groups(self) -> KeysView[int]:
        """The groups whose handles are shared."""
        return self._puts.keys()

    def share(self, handles: Sequence[KVBatchMeta]) -> None:
        """Put the handles of groups, each with all samples of its group."""
        if not handles:
            return
        texts = [text for each in handles for text in (_encode(each), *[""] * (len(each) - 1))]
        keys = tuple(key for each in handles for key in each.keys)
        put = self._plane.put(keys, {HANDLE.name: texts}, partition=self._partition, stage=self._stage)
        for i, key in enumerate(keys):
            if texts[i]:
                self._puts[group_of(key)] = put.slice(i, i + 1)

    def keep(self, groups: Collection[int]) -> None:
        """Remove the handles of all groups but these."""
        if gone := [group for group in self._puts if group not in groups]:
            self._plane.clear(KVBatchMeta.concat([self._puts.pop(group) for group in gone]))


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where the data plane of a run is, and what it holds: the content of data_plane.json. `outside` and `reads` have
    the fields that each `External` stage writes and reads, by its name."""

    partition: str
    group_size: int
    fields: tuple[Field, ...]
    readers: tuple[str, ...]
    parts: dict[str, tuple[str, ...]]
    outside: dict[str, tuple[str, ...]]
    reads: dict[str, tuple[str, ...]]
    settings: Settings


class OutsideProcess:
    """A connection to the data plane of a running run. Raises DataPlaneError if the run has no `External` stage, and
    DataPlaneLost if it does not answer."""

    def __init__(self, run_dir: str | Path) -> None:
        file = RunDir(Path(run_dir)).data_plane
        if not file.is_file():
            raise broken(
                str(file), "the file does not exist",
                "a run on Ray with an External stage writes it once its workers are up",
                "name the directory of such a run, or wait for its first step",
            )  # fmt: skip
        why = "a run on Ray writes it completely"
        with readable(file, DataPlaneError, why=why, fix="wait for its first step, or start the run again"):
            self._address = decode(file.read_bytes(), Address)
            _check(self._address)
        address = self._address
        try:
            self._plane = TransferQueuePlane.attach(address.settings)
        except DataPlaneLost as lost:
            raise DataPlaneLost(
                Problem(
                    where=str(run_dir),
                    what=f"its data plane does not answer: {lost.problems[0].what}",
                    why="the data plane ends with its run",
                    fix="open the process while the run is on; a resumed run has a data plane once its workers are up",
                )
            ) from lost
        self._plane.register(address.partition, address.fields, (*address.readers, READER), address.parts)
        self._handles = {stage: _register_handles(self._plane, address.partition, stage) for stage in address.reads}

    def read(self, group: int, *fields: str) -> TensorDict:
        """Return fields that one `External` stage reads, of a group's samples; ragged ones as nested tensors. Raises
        DataPlaneError if they are not present."""
        stage = next((name for name, own in self._address.reads.items() if set(own) >= set(fields)), "")
        if not stage:
            raise self._no_stage(f"it reads {', '.join(fields)}", "reads", self._address.reads)
        handle = self._handle(group, stage)
        return as_tensordict(self._plane.get(handle, fields, reader=READER), len(handle))

    def write(self, group: int, columns: TensorDictBase | Columns) -> None:
        """Write all fields of an `External` stage for a group's samples, in order, once what the stage reads is there.
        Raises DataPlaneError if they do not match their declaration or the lengths of the group's samples, or were
        written before with other values."""
        ragged = {field.name for field in self._address.fields if field.ragged}
        given: Mapping[str, Any] = from_tensordict(columns, ragged) if is_tensordict(columns) else columns
        made = {name: plain(column) for name, column in given.items()}
        stage = next((name for name, own in self._address.outside.items() if set(own) == set(made)), "")
        if not stage:
            raise self._no_stage(f"it writes {', '.join(made) or 'nothing'}", "writes", self._address.outside)
        keys = self._keys(group)
        written = [field for field in self._address.fields if field.name in made and field.ragged]
        # there is no handle of a group that was cleared, where what is written would be left over
        self._check_lengths(self._handle(group, stage), made, written)
        self._plane.put(keys, made, partition=self._address.partition, stage=stage)

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._plane.close()

    def __enter__(self) -> OutsideProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _handle(self, group: int, stage: str) -> KVBatchMeta:
        """Return the handle that the driver shares with the stage's process, from the store: groups are cleared."""
        partition, keys, field = self._handles[stage], self._keys(group), HANDLE.name
        if not all(self._plane.presence(partition, keys, [field])[field]):
            reads = ", ".join(self._address.reads[stage])
            raise broken(
                READER, f"group {group} has no {reads}" if reads else f"group {group} has no samples yet, or none now",
                "they are there up to a second after the last of them was put, and until the group is cleared",
                "wait for the group's `put` events in events.jsonl",
            )  # fmt: skip
        at = self._plane.adopt(partition, keys, [field], {})
        self._plane.evict(at.placements[0].rows)
        texts: Any = self._plane.get(at, [field], reader=READER)[field]
        handle = msgspec.json.decode(texts[0], type=KVBatchMeta)
        self._plane.evict([row for placement in handle.placements for row in placement.rows])
        return handle

    def _keys(self, group: int) -> tuple[str, ...]:
        if not is_whole(group, 0):
            raise broken(
                READER, f"group {shown(group)}", "a group is named by its number, as in events.jsonl", "use an int"
            )
        return keys_of((group,), self._address.group_size)

    def _check_lengths(self, handle: KVBatchMeta, made: Mapping[str, Any], ragged: Sequence[Field]) -> None:
        for field in ragged:
            column = made[field.name]
            given = tuple(column.lengths) if isinstance(column, Ragged) else ()
            if given and field.ragged and given != (wanted := handle.lengths[field.ragged]):
                raise broken(
                    READER, f"field {field.name!r} has samples of lengths {_listed(given)}",
                    f"those of the group have {field.ragged} = {_listed(wanted)}",
                    "give each sample as many values as the fields with the same dimension have",
                )  # fmt: skip

    def _no_stage(self, what: str, verb: str, fields: Mapping[str, tuple[str, ...]]) -> DataPlaneError:
        every = "; ".join(f"{name}: {', '.join(own) or 'none'}" for name, own in fields.items())
        count = "all fields" if verb == "writes" else "fields"
        return broken(READER, what, f"an outside process {verb} {count} of one External stage", f"choose from {every}")


def _check(address: Address) -> None:
    """Raise ValueError if no run has such an address."""
    settings = address.settings
    if not 0 < settings.deadline_s <= LONGEST_S or settings.cache_bytes < 0 or address.group_size < 1:
        raise ValueError(f"it has deadline_s={settings.deadline_s:g} and group_size={address.group_size}")
    if len(settings.key) != KEY_BYTES or address.reads.keys() != address.outside.keys():
        raise ValueError("its key is of another length, or its stages differ")
    for name, host, ports in (settings.controller, *settings.storage):
        if not (name and host) or not all(0 < port < 1 << 16 for port in ports.values()):
            raise ValueError(f"it has no address of {name!r}")
    needed = {"request_handle_socket"}, *({"put_get_socket"} for _ in settings.storage)
    if not all(names <= ports.keys() for names, (*_, ports) in zip(needed, (settings.controller, *settings.storage))):
        raise ValueError("a port is missing")
    names = {field.name for field in address.fields}
    for fields in (*address.parts.values(), *address.outside.values(), *address.reads.values()):
        if not names.issuperset(fields):
            raise ValueError(f"it names fields that it does not describe: {', '.join(fields)}")


def _register_handles(plane: DataPlane, partition: str, stage: str) -> str:
    """Declare the partition with the handles for one `External` stage's process; returns its name."""
    name = f"{partition}.{stage}.handles"
    plane.register(name, (HANDLE,), (READER,))
    return name


def _encode(handle: KVBatchMeta) -> str:
    return msgspec.json.encode(handle).decode()


def _listed(lengths: Sequence[int]) -> str:
    return ", ".join(map(str, lengths))


def publish(
    run_dir: RunDir, plane: object, stages: Sequence[Stage], *, partition: str, group_size: int,
    parts: Mapping[str, tuple[str, ...]],
) -> None:  # fmt: skip
    """Write data_plane.json, if processes outside the graph write fields and can reach the data plane."""
    outside = {stage.name: tuple(f.name for f in stage.writes) for stage in stages if stage.shape == "external"}
    if not outside or not isinstance(plane, TransferQueuePlane):
        return
    address = Address(
        partition=partition,
        group_size=group_size,
        fields=tuple(field for stage in stages for field in stage.writes if not field.per_step),
        readers=tuple(stage.name for stage in stages),
        parts=dict(parts),
        outside=outside,
        reads={s.name: tuple(f.name for f in s.reads if not f.per_step) for s in stages if s.shape == "external"},
        settings=plane.settings,
    )
    replace(run_dir.data_plane, msgspec.json.encode(address))  # it has the key of the run
