"""Transfers between the actors of two worker groups. Remembers what each group was last offered, for replacements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from pipeline.declare.stage import Stage
from pipeline.declare.task import MeetingPlace, Task
from pipeline.executors.actor_groups import ActorGroups
from pipeline.executors.answers import EXCHANGE_DEADLINE_S, get_all
from pipeline.executors.meetings import Meetings
from pipeline.executors.task_calls import Offer, TaskCalls
from pipeline.plan.plan import PlannedStage

MEETING_DEADLINE_S = 900.0  # between the two sides of a transfer; a dead worker ends the wait at once


class Transfers:
    """The transfers of a run. Their meetings are on the driver's machine."""

    def __init__(self, groups: ActorGroups) -> None:
        self._groups = groups
        self.meetings = Meetings(ray.util.get_node_ip_address, deadline_s=MEETING_DEADLINE_S)
        self.served: dict[str, Offer] = {}  # the last offer of each stage that all of its targets took

    def start(self, task: Task, planned: PlannedStage, stage: Stage) -> TaskCalls:
        """Start offer and take, and, in a two-sided transfer, the source's carry."""
        source, target = (self._groups.actors[name] for name in planned.groups)
        near = self._groups.are_near(planned.groups)
        meeting = self.meeting(planned, range(len(target))) if stage.meets(near) else None
        sends = [actor.send.options(num_returns=2).remote(task, near, meeting) for actor in source]
        offer = Offer(planned, task, near, meeting is not None, [payload for payload, _ in sends])
        sent = [(ref, actor) for (_, ref), actor in zip(sends, source)]
        carried = self._carried(offer, meeting)
        received = [(actor.receive.remote(task, near, meeting, offer.payloads), actor) for actor in target]
        others = dict([*sent, *carried])
        return TaskCalls(task, leading=dict(received), others=others, offer=offer, meeting=meeting)

    def again(self, group: str, rank: int, actor: Any, what: str) -> None:
        """Have the new worker of a rank take what its group was last offered. Raises SluiceError if it does not."""
        for offer in self.served.values():
            if offer.stage.groups[-1] == group:
                meeting = self.meeting(offer.stage, [rank]) if offer.carried else None
                calls = [actor.receive.remote(offer.task, offer.near, meeting, offer.payloads)]
                calls += [call for call, _ in self._carried(offer, meeting)]  # after the sources' current work
                for result in get_all(calls, what, EXCHANGE_DEADLINE_S):
                    if result.error:
                        raise result.error

    def _carried(self, offer: Offer, meeting: MeetingPlace | None) -> list[tuple[ray.ObjectRef, Any]]:
        """Start the carry calls to all sources of a two-sided transfer; none for a one-sided one."""
        if meeting is None:
            return []
        sources = self._groups.actors[offer.stage.groups[0]]
        return [(actor.carry.remote(offer.task, offer.near, meeting, offer.payloads), actor) for actor in sources]

    def meeting(self, stage: PlannedStage, ranks: Sequence[int]) -> MeetingPlace:
        """Return the meeting of a transfer's sources with these target ranks."""
        source, target = stage.groups
        sources = [f"{source}.{rank}" for rank in range(len(self._groups.actors[source]))]
        return self.meetings.of(stage.name, sources, target, ranks)
