"""Workers that serve those of other groups: who needs to know where they listen, and which of them has died.

servers = Servers(plan, groups)
servers.announce()             # all listen, and everyone knows where
ray.wait(servers.lives)        # what becomes ready is of a worker that has died
servers.moved(placed)          # a worker has taken the place of another one
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Any

import ray

from pipeline.declare.task import ServerAddress
from pipeline.errors import WorkerLost
from pipeline.executors import by_stage
from pipeline.executors.actor_groups import ActorGroups
from pipeline.executors.answers import get_all
from pipeline.plan.plan import Plan
from pipeline.record.trace import Placed

ANSWER_S = 30.0  # for workers that live; heartbeats end one that hangs, and then its replacement has its turn


class Servers:
    """The workers of a run that serve others, once all workers are placed."""

    def __init__(self, plan: Plan, groups: ActorGroups) -> None:
        self._groups = groups
        homes = {stage.name: stage.groups for stage in plan.stages}
        self._clients = {  # by group that serves: the groups of the stages that it serves
            placed.name: tuple(dict.fromkeys(name for stage in placed.serves for name in homes[stage]))
            for placed in plan.servers
        }
        self._where: dict[str, dict[int, dict[str, ServerAddress]]] = {name: {} for name in self._clients}  # by rank
        self._lives: dict[Any, Any] = {}  # calls that end with their worker

    @property
    def lives(self) -> Collection[Any]:
        """A call on each worker, which ends with it."""
        return self._lives.keys()

    def died(self, life: Any) -> Any:
        """Return the worker whose call has ended, and forget the call."""
        return self._lives.pop(life)

    def announce(self) -> None:
        """Have all of them listen, and tell everyone who needs to know. One that does not answer keeps its address: it
        has its turn again once it is replaced. Raises SluiceError if one cannot listen."""
        watched = set(self._lives.values())
        for name, clients in self._clients.items():
            actors, near = self._groups.actors[name], self._groups.are_near((name, *clients))
            self._lives |= {actor.live.remote(): actor for actor in actors if actor not in watched}
            self._where[name] |= _answers([actor.serve.remote(near) for actor in actors])
            servers = by_stage(addresses for _, addresses in sorted(self._where[name].items()))
            _answers([actor.found.remote(servers) for client in clients for actor in self._groups.actors[client]])

    def moved(self, placed: Placed) -> None:
        """Tell everyone again, if this worker serves or is served: it has taken the place of another one."""
        if any(placed.group in (name, *clients) for name, clients in self._clients.items()):
            self.announce()


def _answers(calls: list[Any]) -> dict[int, Any]:
    """Return the answers to calls by their place in the list, of the workers that live."""
    answers = {}
    ready, _ = ray.wait(calls, num_returns=len(calls), timeout=ANSWER_S)
    for call in ready:
        with suppress(WorkerLost):
            answers[calls.index(call)] = get_all([call], "serve others")[0]
    return answers
