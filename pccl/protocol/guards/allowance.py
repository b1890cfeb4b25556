"""Limits how much data a process accepts from a sender, by how far it trusts that sender.

The caller asks for the size limit before it reads a message in full, and charges an allowance for
each message that it has read. All functions are pure: they take kinds, sizes and times.
"""

from __future__ import annotations

import enum
import heapq

from pccl.protocol import messages as msg
from pccl.protocol.codec import BYTES_MAX
from pccl.protocol.limits import NEWCOMER_BYTES_MAX, NEWCOMERS_SOURCES_MAX
from pccl.protocol.types import NS_PER_S


class Trust(enum.IntEnum):
    """How far a master trusts a connection."""

    STRANGER = 0
    """The connection has not identified itself."""
    NEWCOMER = 1
    """The peer is registered, but not admitted."""
    LATE = 2
    """The peer returned after the recovery. The master reads its report, and ignores it."""
    RETURNING = 3
    """The peer reports its knowledge of a run that this master may continue."""
    MEMBER = 4
    READER = 5
    """The process is outside the run, and reads what members publish."""


_OPENERS = (
    msg.Register,
    msg.Resume,
    msg.Return,
    msg.StatusRequest,
    msg.RunQuery,
    msg.EvidenceRequest,
    msg.AddressQuery,
    msg.Subscribe,
    msg.Goodbye,
    msg.Damaged,
)
REPORTS = (msg.KnownRoster, msg.KnownOutcome, msg.KnownAnswer, msg.KnownEntry, msg.Reported)
"""What only a returning peer sends, before its requests."""
_READERS_SAY = (msg.Subscribe, msg.ReaderLives)
"""Messages that no peer of the run sends."""
_MEMBERS_SAY = (
    *(*REPORTS, msg.AddressProbed, msg.EvidenceReply),
    *(msg.StoreRequest, msg.AnnounceVersions),
)
"""Messages that a newcomer may not send."""
_MASTERS_SAY = frozenset(msg.MasterMessage.__args__)


def _peers_bytes_max(trust: Trust, kind: type[msg.Message]) -> int:
    match trust:
        case Trust.STRANGER:
            allowed = kind in _OPENERS
        case Trust.LATE | Trust.RETURNING:
            allowed = kind not in _READERS_SAY
        case Trust.NEWCOMER:
            allowed = kind not in (*_MEMBERS_SAY, *_READERS_SAY)
        case Trust.MEMBER:
            allowed = kind not in (*REPORTS, *_READERS_SAY)
        case Trust.READER:
            allowed = kind in (msg.ReaderLives, msg.Damaged)
    narrow = trust in (Trust.STRANGER, Trust.NEWCOMER, Trust.READER)
    return allowed * (min(BYTES_MAX[kind], NEWCOMER_BYTES_MAX) if narrow else BYTES_MAX[kind])


PEERS_BYTES_MAX = {
    trust: {kind: _peers_bytes_max(trust, kind) for kind in msg.PeerMessage.__args__}
    for trust in Trust
}
"""The largest size of each message type that a master accepts from a peer; 0 or missing: none."""

CHARGED = frozenset({Trust.STRANGER, Trust.NEWCOMER, Trust.LATE, Trust.READER})
"""Levels of trust at which the allowance of newcomers is charged for a connection's bytes."""


def masters_bytes_max(kind: type[msg.Message]) -> int:
    """Return the largest size of a message type that a peer accepts from its master; 0: none."""
    return BYTES_MAX[kind] if kind in _MASTERS_SAY else 0


class Allowance:
    """The bytes that some connections together may cost: a rate, and a burst after a pause.

    Args:
        bytes_per_s: the rate at which it grows.
        burst_bytes: the size at which it stops growing.
        now_ns: the current time in nanoseconds.
    """

    def __init__(self, bytes_per_s: int, burst_bytes: int, now_ns: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst_ns = burst_bytes * NS_PER_S // bytes_per_s
        self._spent_until_ns = now_ns - self._burst_ns

    def spend(self, cost_bytes: int, now_ns: int) -> int:
        """Charge the cost of a message; return for how many ns to pause reading."""
        begins_ns = max(self._spent_until_ns, now_ns - self._burst_ns)
        self._spent_until_ns = begins_ns + cost_bytes * NS_PER_S // self._bytes_per_s
        return max(0, self._spent_until_ns - now_ns)


class SharedAllowance:
    """An allowance that is shared equally among the sources that need it.

    It delays no source while the total is within the allowance. Beyond that, it delays the sources
    that have used more than their share, so the load of one source does not delay another.

    Each source has an account of its cost. All accounts are paid off at the same time, each
    with an equal share of the rate. A source whose account is paid off is forgotten.

    Args:
        bytes_per_s: the rate at which it grows, for all sources together.
        burst_bytes: the size at which it stops growing.
        now_ns: the current time in nanoseconds.
        sources_max: number of sources with their own account; further sources share one.
    """

    def __init__(
        self,
        bytes_per_s: int,
        burst_bytes: int,
        now_ns: int,
        sources_max: int = NEWCOMERS_SOURCES_MAX,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst_ns = burst_bytes * NS_PER_S // bytes_per_s
        self._total = Allowance(bytes_per_s, burst_bytes, now_ns)
        self._sources_max = sources_max
        self._accounts: dict[str, int] = {}
        """Source -> the value of ``_settled_ns`` at which its account is paid off."""
        self._next: list[tuple[int, str]] = []
        """A heap with one entry for each account; an account may have grown since."""
        self._settled_ns = 0
        """Amount that each account could pay so far, as time at the full rate."""
        self._now_ns = now_ns

    def __len__(self) -> int:
        return len(self._accounts)

    def spend(self, source: str, cost_bytes: int, now_ns: int) -> int:
        """Charge a source; return for how many ns to pause reading from this connection."""
        self._settle(now_ns)
        if source not in self._accounts and len(self._accounts) >= self._sources_max:
            source = ""
        begins_ns = self._accounts.get(source, self._settled_ns)
        if source not in self._accounts:
            heapq.heappush(self._next, (begins_ns, source))
        ends_ns = begins_ns + cost_bytes * NS_PER_S // self._bytes_per_s
        self._accounts[source] = ends_ns
        own_ns = (ends_ns - self._settled_ns) * len(self._accounts) - self._burst_ns
        return max(0, min(own_ns, self._total.spend(cost_bytes, now_ns)))

    def _settle(self, now_ns: int) -> None:
        """Pay off the accounts with the allowance of the time since the last call."""
        while self._accounts:
            step_ns = (now_ns - self._now_ns) // len(self._accounts)
            first_ns, source = self._next[0]
            if first_ns > self._settled_ns + step_ns:
                self._settled_ns += step_ns
                self._now_ns += step_ns * len(self._accounts)
                return
            if self._accounts[source] > first_ns:  # its source was charged again
                heapq.heapreplace(self._next, (self._accounts[source], source))
                continue
            self._now_ns += max(0, first_ns - self._settled_ns) * len(self._accounts)
            self._settled_ns = max(self._settled_ns, first_ns)
            heapq.heappop(self._next)
            del self._accounts[source]
        self._now_ns = now_ns
