"""MLflow: a run in an experiment named after the graph, on the tracking server or store at an address.

Credentials come from MLFLOW_TRACKING_USERNAME and similar variables. A run that MLflow already has continues after its
last step, which is stored in a tag.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pipeline.forwarders import Described

KEY, DONE = "sluice.run", "sluice.step"  # tags
NOT_IN_NAMES = re.compile(r"[^\w./ :-]")
STATES = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
AT_ONCE = 100  # maximum parameters per call of MLflow


def errors() -> tuple[type[Exception], ...]:
    from mlflow.exceptions import MlflowException

    return (MlflowException, OSError)


def open_sink(where: str, run: Described) -> MLflow:
    return MLflow(where, run)


class MLflow:
    """One run of MLflow."""

    def __init__(self, where: str, run: Described) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

        self._metric, self._tag = Metric, RunTag
        self._client = MlflowClient(tracking_uri=where)
        experiment = self._client.get_experiment_by_name(run.graph)
        identity = experiment.experiment_id if experiment else self._client.create_experiment(run.graph)
        known = self._client.search_runs([identity], filter_string=f"tags.`{KEY}` = '{run.key}'", max_results=1)
        if known:
            self._run, self.done = known[0].info.run_id, int(known[0].data.tags.get(DONE, -1))
            return
        self._run, self.done = self._client.create_run(identity, run_name=run.name, tags={KEY: run.key}).info.run_id, -1
        flags = [Param(name, str(value)) for name, value in run.flags.items()]
        for first in range(0, len(flags), AT_ONCE):
            self._client.log_batch(self._run, params=flags[first : first + AT_ONCE])

    def put(self, step: int, at_s: float, values: Mapping[str, float]) -> None:
        at_ms = int(at_s * 1000)
        made = [self._metric(NOT_IN_NAMES.sub("_", name), value, at_ms, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=made, tags=[self._tag(DONE, str(step))])

    def close(self, state: str) -> None:
        if state in STATES:
            self._client.set_terminated(self._run, status=STATES[state])
