"""Lets a process outside the graph read a run's columns and write the fields of its `External` stages.

    with OutsideProcess("runs/labels-...") as process:
        texts = process.read(3, "response")["response"]               # the samples of group 3
        process.write(3, TensorDict({"score": torch.tensor([1.0, 0.5])}, batch_size=[2]))

The run must be on Ray and still running; its directory says where the data plane is. A group is named by its admission
number, as in events.jsonl; its fields can be read from the `put` event of the last of them until the group is cleared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pipeline.data_plane.checks import broken
from pipeline.data_plane.tensordicts import as_tensordict, from_tensordict, is_tensordict
from pipeline.data_plane.transfer_queue import Settings, TransferQueuePlane
from pipeline.declare.columns import Columns
from pipeline.declare.fields import Field
from pipeline.declare.handle import keys_of
from pipeline.declare.stage import Stage
from pipeline.rundir import RunDir

if TYPE_CHECKING:
    from tensordict import TensorDict, TensorDictBase

READER = "outside process"


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where the data plane of a run is, and what it holds: the content of data_plane.json. `outside` has the fields of
    each `External` stage, by its name."""

    partition: str
    group_size: int
    fields: tuple[Field, ...]
    readers: tuple[str, ...]
    parts: dict[str, tuple[str, ...]]
    outside: dict[str, tuple[str, ...]]
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
        self._address = msgspec.json.decode(file.read_bytes(), type=Address)
        address = self._address
        self._plane = TransferQueuePlane.attach(address.settings)
        self._plane.register(address.partition, address.fields, (*address.readers, READER), address.parts)

    def read(self, group: int, *fields: str) -> TensorDict:
        """Return fields of a group's samples: texts, and numbers of fixed size. Raises DataPlaneError if one of them is
        not present."""
        keys = keys_of((group,), self._address.group_size)
        handle = self._plane.adopt(self._address.partition, keys, fields, {})
        return as_tensordict(self._plane.get(handle, fields, reader=READER), len(keys))

    def write(self, group: int, columns: TensorDictBase | Columns) -> None:
        """Write all fields of an `External` stage for a group's samples, in order. Raises DataPlaneError if they do not
        match their declaration, or were written before with other values."""
        made: Mapping[str, Any] = from_tensordict(columns) if is_tensordict(columns) else columns
        keys = keys_of((group,), self._address.group_size)
        stage = next((name for name, own in self._address.outside.items() if set(own) & set(made)), "")
        self._check(stage, made)
        self._plane.put(keys, made, partition=self._address.partition, stage=stage)

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._plane.close()

    def __enter__(self) -> OutsideProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, stage: str, made: Mapping[str, Any]) -> None:
        own = self._address.outside.get(stage, ())
        if set(own) != set(made):
            every = "; ".join(f"{name}: {', '.join(fields)}" for name, fields in self._address.outside.items())
            raise broken(
                READER, f"it writes {', '.join(made) or 'nothing'}",
                "an outside process writes all fields of one External stage", f"write the fields of one of {every}",
            )  # fmt: skip


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
        settings=plane.settings,
    )
    run_dir.data_plane.write_bytes(msgspec.json.encode(address))
