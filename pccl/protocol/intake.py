"""How much of what others send a process takes, by what it knows of the sender.

The shell asks before it reads a message in full, and spends an allowance for what it has read. All
of it is pure: kinds, sizes and the time go in, a number comes out.
"""

from __future__ import annotations

import enum

from pccl.protocol import messages as msg
from pccl.protocol.codec import BYTES_MAX
from pccl.protocol.limits import NEWCOMER_BYTES_MAX
from pccl.protocol.types import NS_PER_S


class Trust(enum.IntEnum):
    """What a master knows of a connection."""

    STRANGER = 0
    """It has not said who it is."""
    NEWCOMER = 1
    """A peer that is registered and not admitted."""
    RETURNING = 2
    """It says what it knows of a run that this master takes up, or has taken up."""
    MEMBER = 3


_OPENERS = (
    msg.Register,
    msg.Resume,
    msg.Return,
    msg.StatusRequest,
    msg.RunQuery,
    msg.Goodbye,
    msg.Damaged,
)
_REPORT = (msg.KnownRoster, msg.KnownOutcome, msg.KnownAnswer, msg.Reported)
_MEMBERS_SAY = (*_REPORT, msg.AddressProbed)
"""What a newcomer has no part in."""
_PEERS_SAY = frozenset(msg.PeerMessage.__args__)
_MASTERS_SAY = frozenset(msg.MasterMessage.__args__)


def peers_bytes_max(trust: Trust, kind: type[msg.Message]) -> int:
    """How large a message of a type a master takes from a peer; 0: it takes none."""
    if kind not in _PEERS_SAY:
        return 0
    match trust:
        case Trust.STRANGER:
            allowed = kind in _OPENERS
        case Trust.RETURNING:
            allowed = True
        case Trust.NEWCOMER:
            allowed = kind not in _MEMBERS_SAY
        case Trust.MEMBER:
            allowed = kind not in _REPORT
    narrow = trust in (Trust.STRANGER, Trust.NEWCOMER)
    return allowed * (min(BYTES_MAX[kind], NEWCOMER_BYTES_MAX) if narrow else BYTES_MAX[kind])


def masters_bytes_max(kind: type[msg.Message]) -> int:
    """How large a message of a type a peer takes from its master; 0: it takes none."""
    return BYTES_MAX[kind] if kind in _MASTERS_SAY else 0


class Allowance:
    """What some connections together may cost: so much a second, and a burst after a pause.

    Args:
        bytes_per_s: at which it grows.
        burst_bytes: beyond which it does not.
        now_ns: the present.
    """

    def __init__(self, bytes_per_s: int, burst_bytes: int, now_ns: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst_ns = burst_bytes * NS_PER_S // bytes_per_s
        self._spent_until_ns = now_ns - self._burst_ns

    def spend(self, cost_bytes: int, now_ns: int) -> int:
        """Something was read; return for how long nothing more should be."""
        begins_ns = max(self._spent_until_ns, now_ns - self._burst_ns)
        self._spent_until_ns = begins_ns + cost_bytes * NS_PER_S // self._bytes_per_s
        return max(0, self._spent_until_ns - now_ns)
