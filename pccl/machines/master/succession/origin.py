"""What a master knows when it is started, and as whom it coordinates a run."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pccl.protocol.messages import MasterAddress


class Origin(enum.Enum):
    """What a master knows when it is started."""

    BLANK = "blank"
    """Nothing: it begins a run, unless members of another one return."""
    RESTARTED = "restarted"
    """Which run it had: the members return."""
    STANDBY = "standby"
    """That it coordinates none: it waits for the members of its master's run."""


@dataclass(slots=True)
class Incarnation:
    """As whom a master coordinates a run; another one is taken up under the same object.

    Attributes:
        run: the run's id.
        term: number of this incarnation.
        incumbent: id of the master.
        standbys: where other masters of the run listen.
    """

    run: bytes
    term: int
    incumbent: bytes
    standbys: tuple[MasterAddress, ...]
