"""Watches the metrics of a run for divergence: records and says each notice, and by choice ends the run.

watch = Watch(journal, run_dir, stop=graph.schedule.on_divergence == "stop", says=print)
watch.take(step, metrics)
"""

from __future__ import annotations

from collections.abc import Callable

from pipeline.engine.divergence import Divergence
from pipeline.engine.journal import Journal
from pipeline.errors import Problem, StageError
from pipeline.rundir import RunDir

Says = Callable[[Problem], None]


class Watch:
    """Watches one run. `says` is called with each notice, unless `stop`: the first one then ends the run."""

    def __init__(self, journal: Journal, run_dir: RunDir | None, *, stop: bool, says: Says | None) -> None:
        self._journal, self._run_dir, self._stop, self._says = journal, run_dir, stop, says
        self._divergence = Divergence()

    def take(self, step: int, metrics: dict[str, float]) -> None:
        """Take the metrics of a step. Raises StageError if they show a divergence and the run is to stop."""
        notices = self._divergence.take(step, metrics)
        if not notices:
            return
        saved = max(self._run_dir.checkpoint_steps(), default=0) if self._run_dir else None
        problems = [notice.problem(warning=not self._stop, saved=saved) for notice in notices]
        for notice, problem in zip(notices, problems):
            self._journal.diverged(notice, str(problem))
        if self._stop:
            raise StageError(*problems)
        if self._says:
            for problem in problems:
                self._says(problem)
