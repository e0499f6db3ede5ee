"""Reports exceptions of user code in a worker, with its traceback in the log and its inputs saved for `--replay`."""

from __future__ import annotations

import traceback
from pathlib import Path

from pipeline.declare.stage import Stage
from pipeline.errors import SluiceError, is_users, user_error
from pipeline.executors import replay
from pipeline.executors.inputs import TaskInputs
from pipeline.plan.samples import KeepSamples
from pipeline.rundir import RunDir


class Failures:
    """The failures of worker `rank` of `group`; nothing is logged or saved without a run directory."""

    def __init__(self, run_dir: Path | None, group: str, rank: int) -> None:
        self._run_dir, self._group, self._rank = RunDir(run_dir) if run_dir else None, group, rank

    def of_task(self, inputs: TaskInputs, error: BaseException) -> SluiceError:
        """Save the inputs of a failed task of the graph. Returns its error, as `of` does."""
        stage, task = inputs.stage, inputs.task
        reported = self.of(stage, error, f"failed at step {task.step + 1}")
        if self._run_dir and not isinstance(stage, KeepSamples):
            replay.save_inputs(self._run_dir.failure(task.step, stage.name, self._rank), task, inputs.columns)
        return reported

    def of(self, stage: Stage, error: BaseException, when: str) -> SluiceError:
        """Return the error to report for an exception of user code, which is logged. Raises any other exception."""
        if not is_users(error):
            raise error
        log = self._run_dir.log(self._group, self._rank) if self._run_dir else None
        if log:
            try:
                with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
                    traceback.print_exception(error, file=file)
            except OSError:
                log = None
        return user_error(error, stage=stage.name, where=str(stage.location), when=when, log=log)
