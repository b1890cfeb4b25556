"""What a master knows when it is started."""

from __future__ import annotations

import enum


class Origin(enum.Enum):
    """What a master knows when it is started."""

    BLANK = "blank"
    """Nothing: it begins a run, unless members of another one return."""
    RESTARTED = "restarted"
    """Which run it had: the members return."""
    STANDBY = "standby"
    """That it coordinates none: it waits for the members of its master's run."""
