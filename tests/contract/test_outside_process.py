"""A process outside the graph, against the real store: what it may read and write, and until when."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pipeline import Field
from pipeline.data_plane.outside import READER, Address, OutsideProcess, SharedHandles
from pipeline.data_plane.signed import KEY_BYTES
from pipeline.data_plane.transfer_queue import Settings, TransferQueuePlane
from pipeline.declare.columns import Ragged
from pipeline.declare.handle import KVBatchMeta, keys_of
from pipeline.errors import DataPlaneError, DataPlaneLost
from pipeline.rundir import RunDir

TEXT, MARKS = Field("text", dtype="str"), Field("marks", dtype="int64", dims="N M")
SCORE, GRADES = Field("score", dtype="float32"), Field("grades", dtype="float32", dims="N M")
FIELDS = (TEXT, MARKS, SCORE, GRADES)
PARTITION = "outside_process"


@pytest.fixture
def plane(session_store: Any) -> Iterator[TransferQueuePlane]:
    """The driver's plane, with a partition of the test."""
    found = session_store.plane
    found.register(PARTITION, FIELDS, ("reader", READER))
    yield found
    found.drain()


@pytest.fixture
def process(plane: TransferQueuePlane, tmp_path: Path) -> Iterator[OutsideProcess]:
    run_dir = RunDir(tmp_path / "run").create()
    address = Address(
        partition=PARTITION,
        group_size=2,
        fields=FIELDS,
        readers=("reader",),
        parts={PARTITION: tuple(field.name for field in FIELDS)},
        outside={"judge": ("score", "grades"), "scout": ("score",)},
        reads={"judge": ("text", "marks"), "scout": ()},
        settings=plane.settings,
    )
    run_dir.data_plane.write_bytes(msgspec.json.encode(address))
    with OutsideProcess(run_dir.path) as connected:
        yield connected


def put(plane: TransferQueuePlane, group: int) -> KVBatchMeta:
    marks = Ragged(torch.tensor([group, group + 1, group + 2]), (1, 2))
    return plane.put(keys_of((group,), 2), {"text": ["a", "b"], "marks": marks}, partition=PARTITION, stage="stage")


def test_a_group_can_be_read_and_written_until_it_is_cleared(
    plane: TransferQueuePlane, process: OutsideProcess
) -> None:
    shared = SharedHandles(plane, PARTITION, "judge")
    made = put(plane, 7)
    grades = Ragged(torch.tensor([0.5, 0.25, 0.75]), (1, 2))
    columns = {"score": torch.ones(2), "grades": grades}
    with pytest.raises(DataPlaneError, match="group 7 has no text, marks"):
        process.write(7, columns)
    shared.share([made])
    read = process.read(7, "marks", "text")
    assert read["marks"].values().tolist() == [7, 8, 9] and list(read["text"]) == ["a", "b"]
    with pytest.raises(DataPlaneError, match=r"'grades' has samples of lengths 2, 1; .* have M = 1, 2"):
        process.write(7, {**columns, "grades": Ragged(grades.values, (2, 1))})
    process.write(7, {**columns, "grades": Ragged(grades.values, tuple(np.array([1, 2])))})  # as numpy counts
    adopted = plane.adopt(PARTITION, made.keys, ["grades"], made.lengths)
    assert plane.get(adopted, ["grades"], reader="reader")["grades"].values.tolist() == [0.5, 0.25, 0.75]
    shared.keep([])
    plane.clear(KVBatchMeta.concat([made.select("text"), adopted.select("grades")][:1]))
    for again in (lambda: process.read(7, "marks"), lambda: process.write(7, columns)):
        with pytest.raises(DataPlaneError, match="until the group is cleared"):
            again()
    assert plane.row_count(PARTITION) == 0


def test_a_process_that_reads_nothing_writes_only_to_groups_that_are_there(
    plane: TransferQueuePlane, process: OutsideProcess
) -> None:
    shared = SharedHandles(plane, PARTITION, "scout")
    columns = {"score": torch.ones(2)}
    handle = KVBatchMeta(keys=keys_of((7,), 2), partition_id=PARTITION, fields=())
    with pytest.raises(DataPlaneError, match="group 7 has no samples yet, or none now"):
        process.write(7, columns)
    shared.share([handle])
    process.write(7, columns)
    plane.clear(plane.adopt(PARTITION, handle.keys, ["score"], {}))
    shared.keep([])
    with pytest.raises(DataPlaneError, match="group 7 has no samples yet, or none now"):
        process.write(7, columns)
    assert plane.row_count(PARTITION) == 0


def test_a_run_that_has_ended_is_said_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ports = {"request_handle_socket": port, "handshake_socket": port, "put_get_socket": port}
    settings = Settings(("controller", "127.0.0.1", ports), (("unit", "127.0.0.1", ports),), 90.0, 0, bytes(KEY_BYTES))
    run_dir = RunDir(tmp_path / "run").create()
    address = Address(
        partition=PARTITION, group_size=2, fields=(), readers=(), parts={}, outside={}, reads={}, settings=settings
    )
    run_dir.data_plane.write_bytes(msgspec.json.encode(address))
    began_s = time.monotonic()
    with pytest.raises(DataPlaneLost, match=r"TransferQueue's controller is lost.*\n?.*ends with its run"):
        OutsideProcess(run_dir.path)
    assert time.monotonic() - began_s < 5


def test_what_it_asks_for_wrongly_is_named(process: OutsideProcess) -> None:
    for group in ("7", 7.0, -1, None):
        with pytest.raises(DataPlaneError, match="a group is named by its number"):
            process.read(group, "text")  # type: ignore[arg-type]
    with pytest.raises(DataPlaneError, match=r"it reads score; .* choose from judge: text, marks; scout: none"):
        process.read(7, "score")
    with pytest.raises(DataPlaneError, match="it writes score, text; an outside process writes all fields of one"):
        process.write(7, {"score": torch.ones(2), "text": ["a", "b"]})
    process.close()
    with pytest.raises(DataPlaneError, match="closed"):
        process.read(7, "text")
