"""TensorBoard: event files in FOLDER/RUN. A run that is there already continues after its last step; another run of
that name is replaced."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from pipeline.forwarders import Described

KEY = "sluice.run"  # a file with the key of the run


def _last_step(folder: Path) -> int:
    """Return the last step that the event files in a folder have, or -1."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    files = [EventFileLoader(str(path)) for path in sorted(folder.glob("events.out.tfevents.*"))]
    return max((event.step for file in files for event in file.Load() if event.HasField("summary")), default=-1)


def errors() -> tuple[type[Exception], ...]:
    return (OSError,)


def open_sink(where: str, run: Described) -> TensorBoard:
    return TensorBoard(Path(where) / run.name, run.key)


class TensorBoard:
    """One folder of event files."""

    def __init__(self, folder: Path, key: str) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        whose = folder / KEY
        self.done = _last_step(folder) if whose.is_file() and whose.read_text() == key else -1
        whose.write_text(key)
        self._writer = EventFileWriter(str(folder))
        if self.done >= 0:
            return
        # makes TensorBoard discard the entries of earlier files in the folder for this step and later ones
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=0, session_log=start))

    def put(self, step: int, at_s: float, values: Mapping[str, float]) -> None:
        shown = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(wall_time=at_s, step=step, summary=self._summary(value=shown)))
        self._writer.flush()

    def close(self, state: str) -> None:
        self._writer.close()
