"""The actors of a run: by worker group and rank, with the place of each, and those that were replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline.declare.ranks import RankLayout
from pipeline.record.trace import Placed


class ActorGroups:
    """The actors of all worker groups of a run. Each dictionary is by the name of a worker group."""

    def __init__(self) -> None:
        self.actors: dict[str, list[Any]] = {}
        self.layouts: dict[str, RankLayout] = {}
        self.replaceable: dict[str, bool] = {}
        self.retired: dict[Any, tuple[str, int]] = {}  # dead actors that were replaced
        self._births: dict[str, Callable[[int], Any]] = {}  # starts the actor of a rank
        self._nodes: dict[str, set[str]] = {}  # where it runs

    def add(self, name: str, workers: int, layout: RankLayout, birth: Callable[[int], Any]) -> list[Any]:
        """Start the actors of a group; `birth` starts the one of a rank."""
        self._births[name], self.layouts[name] = birth, layout
        actors = self.actors[name] = [birth(rank) for rank in range(workers)]
        return actors

    def born(self, name: str, rank: int) -> Any:
        """Start another actor for a rank; it takes the place of the first one with `replace`."""
        return self._births[name](rank)

    def replace(self, name: str, rank: int, actor: Any) -> None:
        """Let this actor be the one of a rank, and remember the one before it."""
        self.retired[self.actors[name][rank]] = name, rank
        self.actors[name][rank] = actor

    def placed(self, at: Placed) -> None:
        """Note where a worker runs."""
        self._nodes.setdefault(at.group, set()).add(at.node)

    def are_near(self, names: tuple[str, ...]) -> bool:
        """Return whether all workers of these groups are on one machine."""
        return len(set().union(*(self._nodes[name] for name in names))) == 1

    def all(self) -> list[Any]:
        return [actor for group in self.actors.values() for actor in group]

    def stateful(self) -> dict[str, Any]:
        """Return the actors that cannot be replaced, by the name of the worker."""
        return {
            f"{name}.{rank}": actor
            for name, group in self.actors.items()
            for rank, actor in enumerate(group)
            if not self.replaceable[name]
        }

    def find(self, actor: Any) -> tuple[str, int]:
        """Return worker group and rank of an actor, current or replaced."""
        for name, actors in self.actors.items():
            if actor in actors:
                return name, actors.index(actor)
        return self.retired[actor]

    def replica(self, name: str, replica: int) -> list[tuple[int, Any]]:
        """Return the ranks of a replica with their actors, the leader first."""
        return [(rank, self.actors[name][rank]) for rank in self.layouts[name].siblings(replica)]

    def siblings(self, actor: Any) -> list[Any]:
        """Return the workers of the replica that the worker is part of."""
        name, rank = self.find(actor)
        return [one for _, one in self.replica(name, self.layouts[name].replica(rank))]
