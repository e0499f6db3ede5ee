"""What becomes of a task whose worker was lost: the worker is replaced and the task is submitted again, if possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from pipeline.data_plane.patience import in_thread
from pipeline.data_plane.transfer_queue import Settings
from pipeline.declare.task import Task
from pipeline.errors import SluiceError, Unfit
from pipeline.executors.actor_groups import ActorGroups
from pipeline.executors.answers import SETUP_DEADLINE_S, get_all, lost
from pipeline.executors.heartbeat import Heartbeat, dead
from pipeline.executors.outputs import TaskResult
from pipeline.executors.transfers import Transfers
from pipeline.record.trace import Placed

RESTARTS = 8  # worker restarts per group and run
REPLACE_S = 3600.0  # for a replacement; each wait in it has a shorter deadline


class Losses:
    """The lost workers of a run. `look` is called every second of a replacement, and ends it if it raises; `joined` is
    called with the place of a replacement. `settings` are those of the data plane."""

    def __init__(
        self, groups: ActorGroups, transfers: Transfers, heartbeat: Heartbeat, settings: Settings, *,
        look: Callable[[], None], joined: Callable[[Placed], None],
    ) -> None:  # fmt: skip
        self._groups, self._transfers, self._heartbeat, self._settings = groups, transfers, heartbeat, settings
        self._look, self._joined = look, joined
        self._restarts: Counter[str] = Counter()

    def among(self, actors: Collection[Any], task: Task) -> TaskResult | None:
        """Return the report of a lost worker if the death of one of these explains another one's error, or None."""
        gone = dead(actors) if len(actors) > 1 else None
        return self.without(task, *gone) if gone else None

    def without(self, task: Task, actor: Any, error: RayError) -> TaskResult:
        """Return the report of a task whose worker did not respond. A dead worker is replaced if possible."""
        name, rank = self._groups.find(actor)
        fate = self._heartbeat.fate(actor)
        doing = f"finish {task.stage!r} at step {task.step + 1} on {name!r}"
        if not isinstance(error, RayActorError) or not self._groups.replaceable[name]:
            return TaskResult(task=task, error=lost(doing, error, fate=fate))
        if self._groups.actors[name][rank] is actor and self._restarts[name] == RESTARTS:
            return TaskResult(task=task, error=lost(doing, error, f"; {RESTARTS} others died before it", fate=fate))
        return self._another(task, actor, fate)

    def instead(self, task: Task, actor: Any, error: Unfit) -> TaskResult:
        """Return the report of a task whose worker cannot continue. It is replaced if possible."""
        name, rank = self._groups.find(actor)
        if not self._groups.replaceable[name] or (
            self._groups.actors[name][rank] is actor and self._restarts[name] == RESTARTS
        ):
            return TaskResult(task=task, error=error)
        return self._another(task, actor, f"gave up: {error.problems[0].what}")

    def server(self, actor: Any, error: RayError) -> Placed:
        """Replace a worker that serves others, after this error. Raises SluiceError if that is impossible."""
        name, rank = self._groups.find(actor)
        fate = self._heartbeat.fate(actor)
        if self._restarts[name] == RESTARTS:
            raise lost("serve others", error, f"; {RESTARTS} others died before it", fate=fate)
        self._restarts[name] += 1
        return in_thread(partial(self.replace, name, rank), REPLACE_S, f"replaces {name}.{rank}", self._look)

    def _another(self, task: Task, actor: Any, fate: str) -> TaskResult:
        """Return the report of a task whose worker was lost. Replaces the worker."""
        name, rank = self._groups.find(actor)
        result = TaskResult(task=task, lost=f"worker {name}.{rank} {fate}")
        if self._groups.actors[name][rank] is actor:  # otherwise another of its tasks has handled that
            self._restarts[name] += 1
            self._transfers.meetings.lose(f"{name}.{rank}", result.lost or "")
            replaces = partial(self.replace, name, rank)
            try:
                result.events.append(in_thread(replaces, REPLACE_S, f"replaces {name}.{rank}", self._look))
            except SluiceError as failure:
                return TaskResult(task=task, error=failure)
        return result

    def replace(self, name: str, rank: int) -> Placed:
        """Start a replacement worker with the weights that the old one served, and kill the old one in case it is only
        unreachable."""
        old = self._groups.actors[name][rank]
        self._heartbeat.forget(old)
        ray.kill(old)
        actor = self._groups.born(name, rank)
        what = f"take the place of {name}.{rank}"
        get_all([actor.setup.remote()], what, SETUP_DEADLINE_S)
        ((placed, _),) = get_all([actor.connect.remote(self._settings)], what)
        self._groups.placed(placed)
        self._transfers.again(name, rank, actor, what)
        self._groups.replace(name, rank, actor)
        self._heartbeat.watch([actor])
        self._joined(placed)
        return placed
