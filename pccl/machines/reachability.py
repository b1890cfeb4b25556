"""Which peers can be dialled, as far as the master knows, and the tests of their addresses.

The master and one member test a newcomer's addresses once, after it has proven the token. A
success of the master alone proves little: it may share a network with the newcomer. A failed test
does not prevent admission: it shows the newcomer what to fix, and the master which side must dial.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address

from pccl.protocol.guards.source_shares import source_of
from pccl.protocol.limits import (
    QUERIES_AT_ONCE_MAX,
    QUERIES_PER_S,
    TESTS_AT_ONCE_MAX,
    TESTS_PER_S,
)
from pccl.protocol.link_messages import AddressQuery, LinkPath, MeasuredLink
from pccl.protocol.types import ADDRESS_CHARACTERS_MAX, NS_PER_S, Member, PeerId


@lru_cache(maxsize=1024)
def _address(host: str) -> IPv4Address | IPv6Address | None:
    """Return ``host`` as an IP address; None if it is a name."""
    try:
        address = ip_address("127.0.0.1" if host == "localhost" else host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return address is not None and (address.is_loopback or address.is_unspecified)


def _is_link_local(host: str) -> bool:
    address = _address(host)
    return address is not None and address.is_link_local


def _is_multicast(host: str) -> bool:
    address = _address(host)
    return address is not None and address.is_multicast


def may_be_dialled(host: str, *, seen: str, by: str) -> bool:
    """Whether a process may dial ``host`` because a peer declares that address as its own.

    Loopback and link-local addresses mean another host on each machine. So they are dialled only
    for a peer on the same machine or the same local network.

    Args:
        host: an address, or a name that is not resolved yet.
        seen: the host from which the peer connects to the master.
        by: the master's host as the dialling process sees it; if the master dials, ``seen``.
    """
    if _is_multicast(host):
        return False
    if _is_loopback(host):
        return _is_loopback(seen) and _is_loopback(by)
    near = all(_is_loopback(one) or _is_link_local(one) for one in (seen, by))
    return near or not _is_link_local(host)


def dialled_at(declared: str, hosts: Iterable[str], seen: str) -> tuple[str, tuple[str, ...]]:
    """Return the host at which peers dial a peer, and further hosts, if the first does not answer.

    The first is the declared host if peers may dial it, else ``seen``.

    Args:
        declared: the host that the peer declares; empty if it declares none.
        hosts: the addresses of its machine.
        seen: the host from which the peer connects to the master.
    """
    first = declared if declared and may_be_dialled(declared, seen=seen, by=seen) else seen
    if len(first) > ADDRESS_CHARACTERS_MAX:  # so that a roster of all peers fits a message
        return first, ()
    more = (one for one in hosts if one and may_be_dialled(one, seen=seen, by=seen))
    return first, tuple(dict.fromkeys(one for one in more if one != first))


@dataclass(frozen=True, slots=True)
class TryAddress:
    """An effect: dial this peer's port on each host in turn, and greet it, until it answers."""

    member: Member
    hosts: tuple[str, ...]
    """Hosts to dial, in this order; empty if no host may be dialled."""
    seen: str
    """The host from which the peer connects to its master."""


@dataclass(frozen=True, slots=True)
class MeetPeer:
    """An effect: make the link to a peer through a relay; see ``messages.Meet``."""

    member: Member
    relay: Member


@dataclass(frozen=True, slots=True)
class ReportUndialable:
    """An effect: report that no peer can dial this peer, and what to do."""

    text: str


@dataclass(frozen=True, slots=True)
class AddressTried:
    """The result of a ``TryAddress``."""

    peer: PeerId
    host: str
    """The host at which the peer answered; empty if it answered at none."""
    reason: str
    """Why the peer did not answer at the first host; empty if it did."""
    key: bytes
    """Public key of the peer: another run may have given the id to another one meanwhile."""


class DialQuota:
    """Limits how often a process dials unproven addresses.

    Args:
        at_once: number of dials after a pause.
        per_s: rate of further dials.
        now_ns: current time.
    """

    def __init__(self, at_once: int, per_s: int, now_ns: int) -> None:
        self._price_ns = NS_PER_S // per_s
        self._credit_max_ns = self._credit_ns = at_once * self._price_ns
        """Time credit; each dial costs 1 s / ``per_s``."""
        self._now_ns = now_ns

    def take(self, now_ns: int) -> bool:
        """Whether a dial is allowed now; True uses it up."""
        gained_ns = max(0, now_ns - self._now_ns)
        self._now_ns = now_ns
        self._credit_ns = min(self._credit_ns + gained_ns, self._credit_max_ns)
        may = self._credit_ns >= self._price_ns
        self._credit_ns -= may * self._price_ns
        return may


@dataclass(slots=True)
class _Tested:
    """The tests of one peer's addresses."""

    member: Member
    awaited: set[PeerId | None]
    """Testers that have not reported yet; None stands for the master."""
    answers: dict[PeerId | None, str] = field(default_factory=dict[PeerId | None, str])
    """Tester -> why the peer did not answer at its declared host; empty if it did."""
    reached_at: str = ""
    """The host at which the master reached the peer, if it is not the declared one."""
    told: bool = False


class Reachability:
    """The master's results of all address tests of a run.

    Args:
        now_ns: current time.
    """

    def __init__(self, now_ns: int) -> None:
        self._tested: dict[PeerId, _Tested] = {}
        self._tests_by: dict[PeerId, set[PeerId]] = {}
        """Member -> the peers that the master asked it to test."""
        self._quota = DialQuota(TESTS_AT_ONCE_MAX, TESTS_PER_S, now_ns)

    def begin(
        self, member: Member, seen: str, tester: PeerId | None, now_ns: int
    ) -> TryAddress | None:
        """Begin the test of a newcomer; return what to dial, or None if tests are too frequent.

        Args:
            member: the newcomer, as it declares itself.
            seen: the host from which it connects to the master.
            tester: a member that can test the newcomer as well; None if there is none.
            now_ns: current time.
        """
        if not self.may_dial(now_ns):
            return None
        hosts = tuple(
            host
            for host in dict.fromkeys((member.host, seen))
            if may_be_dialled(host, seen=seen, by=seen)
        )
        known = self._tested[member.peer] = _Tested(member, {None})
        if tester is not None:
            known.awaited.add(tester)
            self._tests_by.setdefault(tester, set()).add(member.peer)
        return TryAddress(member, hosts, seen)

    def may_dial(self, now_ns: int) -> bool:
        """Whether the rate limit allows a dial to a peer not reached yet; True uses up one dial."""
        return self._quota.take(now_ns)

    def tested(self, peer: PeerId, by: PeerId | None, host: str, reason: str) -> bool:
        """Record the result of a test; return whether this result was pending.

        Args:
            peer: the tested peer.
            by: the tester; None: the master.
            host: the host at which the peer answered; empty if it answered at none.
            reason: why the peer did not answer at its declared host.
        """
        known = self._tested.get(peer)
        if known is None or by not in known.awaited:
            return False
        known.awaited.remove(by)
        if by is not None:
            self._tests_by[by].discard(peer)
        answered = host == known.member.host
        known.answers[by] = "" if answered else reason or "no answer"
        if not answered and by is None:
            known.reached_at = host
        return True

    def was_reached(self, peer: PeerId) -> bool:
        """Whether ``peer`` has answered a test at its declared host."""
        return peer in self._tested and "" in self._tested[peer].answers.values()

    def awaits(self, peer: PeerId) -> bool:
        """Whether a test of ``peer`` is still pending."""
        return peer in self._tested and bool(self._tested[peer].awaited)

    def why_undialable(self, peer: PeerId) -> str | None:
        """Return why peers cannot dial ``peer``; None if they can, or no test has ended.

        The result of a member overrides that of the master.
        """
        answers = self._tested[peer].answers if peer in self._tested else {}
        if not answers:
            return None
        by = next((by for by in answers if by is not None), None)
        who = "the master" if by is None else f"peer {by}"
        return f"{who}: {answers[by]}" if answers[by] else None

    def news_of(self, peer: PeerId) -> str:
        """Return the report for an undialable peer, once, after all its tests; otherwise empty."""
        known, why = self._tested[peer], self.why_undialable(peer)
        if why is None or known.awaited or known.told:
            return ""
        known.told = True
        return why + (f"; it answers at {known.reached_at}" if known.reached_at else "")

    def forget(self, gone: Iterable[PeerId]) -> None:
        """Forget these peers, their tests, and the tests that they were asked to make."""
        for peer in gone:
            known = self._tested.pop(peer, None)
            for tester in known.awaited if known is not None else ():
                if tester is not None:
                    self._tests_by[tester].discard(peer)
            for tested in self._tests_by.pop(peer, ()):
                if tested in self._tested:
                    self._tested[tested].awaited.discard(peer)


@dataclass(frozen=True, slots=True)
class TryCaller:
    """An effect: dial and greet this address for the process that asked on a connection."""

    connection: int
    host: str
    port: int
    seen: str
    """The host from which that process is connected."""


@dataclass(frozen=True, slots=True)
class CallerTried:
    """The result of a ``TryCaller``."""

    connection: int
    reason: str
    """Why no peer answered; empty if one did."""


class CallerTests:
    """The tests of addresses for processes outside the run, which ask with ``AddressQuery``.

    They have a small quota of their own, so that they cannot keep newcomers from being tested.

    Args:
        now_ns: current time.
    """

    def __init__(self, now_ns: int) -> None:
        self._quota = DialQuota(QUERIES_AT_ONCE_MAX, QUERIES_PER_S, now_ns)
        self._sources: dict[int, str] = {}
        """Connection whose test is pending -> its source address."""

    def begin(
        self, connection: int, query: AddressQuery, seen: str, now_ns: int
    ) -> TryCaller | str:
        """Begin a test; return what to dial, or why the master does not dial.

        Args:
            connection: the connection of the query.
            query: the address to dial; without a port, there is nothing to dial and no reason.
            seen: the host from which the process is connected.
            now_ns: current time.
        """
        host, source = query.host or seen, source_of(seen)
        if not query.port:
            return ""
        if not may_be_dialled(host, seen=seen, by=seen):
            return f"{host} is an address for its own machine or network only"
        if source in self._sources.values():
            return "the master is testing another address for this host; ask again later"
        if not self._quota.take(now_ns):
            return f"the master tests {QUERIES_PER_S} address a second; ask again later"
        self._sources[connection] = source
        return TryCaller(connection, host, query.port, seen)

    def ended(self, connection: int) -> None:
        """Note the end of a test."""
        self._sources.pop(connection, None)


@dataclass(frozen=True, slots=True)
class LinkChanged:
    """The link to ``peer`` is up (``reason`` is None) or down; see ``messages.LinkReport``."""

    peer: PeerId
    reason: str | None
    relay: PeerId | None = None
    path: LinkPath = LinkPath.DIRECT


@dataclass(frozen=True, slots=True)
class LinkMeasurements:
    """All current measurements of links, unchanged ones included."""

    links: tuple[MeasuredLink, ...]
