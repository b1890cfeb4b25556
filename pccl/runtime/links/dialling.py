"""The state of the dials of one peer: links that it wants, and the lanes of each."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

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
    asked: int = 0
    """How many lanes the other side would like to send on, if neither was told a number."""
    spare_since_ns: int | None = None
    """Since when there are more lanes than wanted."""

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
