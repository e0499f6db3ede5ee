"""The row cache of a process is bounded by its setting, whatever the size of the run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pipeline.data_plane.cache import OVERHEAD_BYTES
from pipeline.data_plane.transfer_queue import TransferQueuePlane
from pipeline.declare.handle import KVBatchMeta
from pipeline.errors import DataPlaneError

from .conftest import FIELDS
from .test_plane_contract import keys_of

ROW_BYTES = 4 + OVERHEAD_BYTES  # for a float32 of one sample


def test_a_process_forgets_the_rows_that_it_used_longest_ago(transfer_queue: TransferQueuePlane):
    """One process writes twelve rows and another fetches them; each caches the last four.

    A third process then clears rows. The other two are not notified, so their reads show what they have cached."""
    settings = replace(transfer_queue.settings, cache_bytes=4 * ROW_BYTES)
    writer, reader, eraser = planes = [TransferQueuePlane.attach(settings) for _ in range(3)]
    for plane in planes:
        plane.register("bounds", FIELDS, ["train"])

    def score(plane: TransferQueuePlane, meta: KVBatchMeta) -> list[float]:
        return plane.get(meta, ["reward"], reader="train")["reward"].tolist()

    metas = [
        writer.put((key,), {"reward": torch.tensor([float(i)])}, partition="bounds", stage="work")
        for i, key in enumerate(keys_of(12, 1))
    ]
    assert [score(reader, meta) for meta in metas] == [[float(i)] for i in range(12)]
    for meta in metas:
        eraser.clear(meta)
    for plane in (writer, reader):
        assert [score(plane, meta) for meta in metas[8:]] == [[8.0], [9.0], [10.0], [11.0]]
        for meta in metas[:8]:
            with pytest.raises(DataPlaneError, match="is not present"):
                score(plane, meta)
    for plane in planes:
        plane.close()
