"""TensorBoard: event files in FOLDER/RUN. Metrics forwarded there earlier are replaced, not duplicated."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from pipeline.forwarders import Described


def errors() -> tuple[type[Exception], ...]:
    return (OSError,)


def open_sink(where: str, run: Described) -> TensorBoard:
    return TensorBoard(Path(where) / run.name)


class TensorBoard:
    """One folder of event files."""

    done = -1

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))
        # makes TensorBoard discard the entries of earlier files in the folder for this step and later ones
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=0, session_log=start))

    def put(self, step: int, values: Mapping[str, float]) -> None:
        shown = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=shown)))
        self._writer.flush()

    def close(self, state: str) -> None:
        self._writer.close()
