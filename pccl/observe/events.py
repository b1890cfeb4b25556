"""The events of a peer, for programs and tools that consume them.

``Communicator.on_event`` passes each event to a function. ``to_json`` and ``from_json`` convert
events for files; ``SCHEMA`` is the version of that form.
"""

from __future__ import annotations

from pccl.telemetry.events import (
    SCHEMA,
    AddressUnreachable,
    CallEnded,
    ContributionFlagged,
    Joined,
    LargePacketsLost,
    LinkLost,
    LinkRestored,
    MasterDisconnected,
    MasterReconnected,
    MemberJoined,
    MemberLost,
    MembershipLost,
    NoRoom,
    PeerReport,
    PortForwarded,
    PortNotForwarded,
    RunChanged,
    Waiting,
    WaitingEnded,
    from_json,
    to_json,
)
from pccl.telemetry.stream import Stamped

__all__ = [
    "SCHEMA",
    "AddressUnreachable",
    "CallEnded",
    "ContributionFlagged",
    "Joined",
    "LargePacketsLost",
    "LinkLost",
    "LinkRestored",
    "MasterDisconnected",
    "MasterReconnected",
    "MemberJoined",
    "MemberLost",
    "MembershipLost",
    "NoRoom",
    "PeerReport",
    "PortForwarded",
    "PortNotForwarded",
    "RunChanged",
    "Stamped",
    "Waiting",
    "WaitingEnded",
    "from_json",
    "to_json",
]
