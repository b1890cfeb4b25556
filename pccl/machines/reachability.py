"""Which peers can be dialled, as far as the master knows, and whose addresses are tested.

A newcomer's addresses are tested once, after it has proven the token: by the master, and by a
member, since a master in the newcomer's own network proves nothing. A test that fails refuses
nobody. It tells the newcomer what to mend, and the master which side of a link has to dial.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address

from pccl.protocol.limits import TESTS_AT_ONCE_MAX, TESTS_PER_S
from pccl.protocol.types import NS_PER_S, Member, PeerId


def _address(host: str) -> IPv4Address | IPv6Address | None:
    """The address that ``host`` is; None: it is a name."""
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
    """Whether a peer may be dialled at ``host`` on its behalf.

    Loopback and link-local addresses mean something else on each machine: they are dialled only for
    a peer on the own machine, or on the same wire.

    Args:
        host: an address, or a name that was not looked up yet.
        seen: the host that the master sees the peer at.
        by: the host between the dialling process and the master, as one of them sees it.
    """
    if _is_multicast(host):
        return False
    if _is_loopback(host):
        return _is_loopback(seen) and _is_loopback(by)
    near = all(_is_loopback(one) or _is_link_local(one) for one in (seen, by))
    return near or not _is_link_local(host)


def dialled_at(declared: str, seen: str) -> str:
    """The host at which others dial a peer: the declared one, or ``seen`` if nobody may dial that.

    Args:
        declared: the host that it declares; empty if it declares none.
        seen: the host that the master sees it at.
    """
    return declared if declared and may_be_dialled(declared, seen=seen, by=seen) else seen


@dataclass(frozen=True, slots=True)
class TryAddress:
    """An effect: greet this peer at its port, on one host after the other until it answers."""

    member: Member
    hosts: tuple[str, ...]
    """In this order; empty: there is none that may be dialled."""
    seen: str
    """The host that its master sees it at."""


@dataclass(frozen=True, slots=True)
class AddressTried:
    """What became of a ``TryAddress``."""

    peer: PeerId
    host: str
    """Where it has answered; empty: nowhere."""
    reason: str
    """Why not at the first host; empty: it has."""


@dataclass(slots=True)
class _Tested:
    """What is known of one peer."""

    member: Member
    awaited: set[PeerId | None]
    """Who has not answered yet; None: the master."""
    answers: dict[PeerId | None, str] = field(default_factory=dict[PeerId | None, str])
    """Who has tested it -> why it did not answer where it says; empty: it did."""
    reached_at: str = ""
    """Another host than the declared one, where the master has reached it."""
    told: bool = False


class Reachability:
    """What the tests of one run have shown; the master's.

    Args:
        now_ns: the present.
    """

    def __init__(self, now_ns: int) -> None:
        self._tested: dict[PeerId, _Tested] = {}
        self._tests_by: dict[PeerId, set[PeerId]] = {}
        """Member -> the peers that it was asked to test."""
        self._allowance_ns = TESTS_AT_ONCE_MAX * NS_PER_S // TESTS_PER_S
        """Time that tests may still take, at a second for so many a second."""
        self._allowed_ns = now_ns

    def begin(
        self, member: Member, seen: str, tester: PeerId | None, now_ns: int
    ) -> TryAddress | None:
        """A newcomer has come; return what to try, None if too many came before it.

        Args:
            member: the newcomer, as it declares itself.
            seen: the host that its connection comes from.
            tester: a member that can test it; None: there is none.
            now_ns: the present.
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
        """Whether a peer that nobody has reached may be dialled; True uses up one dial."""
        price_ns = NS_PER_S // TESTS_PER_S
        gained_ns = max(0, now_ns - self._allowed_ns)
        self._allowed_ns = now_ns
        self._allowance_ns = min(self._allowance_ns + gained_ns, TESTS_AT_ONCE_MAX * price_ns)
        may = self._allowance_ns >= price_ns
        self._allowance_ns -= may * price_ns
        return may

    def tested(self, peer: PeerId, by: PeerId | None, host: str, reason: str) -> bool:
        """A test has ended; return whether it was awaited.

        Args:
            peer: whose address it was.
            by: who has tested it; None: the master.
            host: where it answered; empty: nowhere.
            reason: why not at the declared host.
        """
        known = self._tested.get(peer)
        if known is None or by not in known.awaited:
            return False
        known.awaited.remove(by)
        if by is not None:
            self._tests_by[by].discard(peer)
        answered = host == known.member.host
        known.answers[by] = "" if answered else reason or "it did not answer there"
        if not answered and by is None:
            known.reached_at = host
        return True

    def was_reached(self, peer: PeerId) -> bool:
        """Whether it has answered a test at the host that it declares."""
        return peer in self._tested and "" in self._tested[peer].answers.values()

    def awaits(self, peer: PeerId) -> bool:
        """Whether a test of its addresses goes on."""
        return peer in self._tested and bool(self._tested[peer].awaited)

    def why_undialable(self, peer: PeerId) -> str | None:
        """Why others cannot dial a peer; None if they can, or nobody knows.

        What a member has found counts for more than what the master has.
        """
        answers = self._tested[peer].answers if peer in self._tested else {}
        if not answers:
            return None
        by = next((by for by in answers if by is not None), None)
        who = "the master" if by is None else f"peer {by}"
        return f"{who}: {answers[by]}" if answers[by] else None

    def news_of(self, peer: PeerId) -> str:
        """What to tell a peer that nobody can dial; empty: nothing new, or it can be dialled."""
        known, why = self._tested[peer], self.why_undialable(peer)
        if why is None or known.awaited or known.told:
            return ""
        known.told = True
        return why + (f"; it answers at {known.reached_at}" if known.reached_at else "")

    def forget(self, gone: Iterable[PeerId]) -> None:
        """These peers are gone, and test nothing any more."""
        for peer in gone:
            known = self._tested.pop(peer, None)
            for tester in known.awaited if known is not None else ():
                if tester is not None:
                    self._tests_by[tester].discard(peer)
            for tested in self._tests_by.pop(peer, ()):
                if tested in self._tested:
                    self._tested[tested].awaited.discard(peer)
