"""The dials of one peer: links that it wants, the lanes of each, and how many those should be."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pccl.protocol.limits import LANES_BETWEEN_MACHINES, SHARED_CONNECTIONS_MAX
from pccl.protocol.types import Member
from pccl.runtime.clock import Timer


@dataclass(slots=True)
class Redial:
    """A lane that we keep by dialling."""

    backoff_ns: int
    up_since_ns: int = 0
    """When the lane last came up."""
    task: asyncio.Task[None] | None = None
    timer: Timer | None = None

    @property
    def under_way(self) -> bool:
        """Whether the lane is being dialled, or will be."""
        return self.task is not None or self.timer is not None


@dataclass(slots=True)
class WantedLink:
    """A peer that we want a link to."""

    member: Member
    keeps: bool = False
    """Whether this side keeps the link: dials its lanes, and dials them again."""
    lanes: dict[int, Redial] = field(default_factory=dict[int, "Redial"])
    """By number: those that we keep; of a link that the other side keeps, the dial in reserve."""
    was_up: bool = False
    """Whether there ever was a link to it."""
    used: bool = False
    """Whether it has carried a collective, or is about to."""

    def cancel(self) -> None:
        """Keep none of its lanes any longer."""
        for number in list(self.lanes):
            self.give_up(number)

    def give_up(self, number: int) -> None:
        """Keep this lane no longer."""
        redial = self.lanes.pop(number)
        if redial.task is not None:
            redial.task.cancel()
        if redial.timer is not None:
            redial.timer.cancel()


def lanes_of(told: int, *, near: bool, sharers: int) -> int:
    """How many lanes a link has once it is used.

    Args:
        told: what one of its sides was told; 0: neither was.
        near: whether both ends are on one machine, where more lanes only cost time.
        sharers: how many links share the connections, this one included.
    """
    if told:
        return told
    return 1 if near else max(1, min(LANES_BETWEEN_MACHINES, SHARED_CONNECTIONS_MAX // sharers))
