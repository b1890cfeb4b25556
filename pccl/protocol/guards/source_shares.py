"""Which connection has to go when strangers want more of a port than it has: one pure decision.

Before a connection has proven itself, anybody may have opened it. So a port keeps a bounded number
of such connections, and shares them fairly among the addresses that they come from: when one more
comes than there is room for, the address that has the most loses one. One address can therefore
never push out the connection of another address that has fewer.

Many honest peers may share an address (behind one NAT), also with somebody who floods the port. So
within an address the connections that have said nothing yet go first. An honest peer says its
opening as soon as it is connected; then it can only be pushed out by others that have done so too.

Connections that have proven themselves are not in here: they never count, and nobody here can take
their place. What they need is the rest of the descriptors, see :func:`port_limits`.

Pure: whoever comes and goes is passed in, who has to go is returned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address
from typing import Generic, TypeVar

from pccl.protocol.limits import (
    LINGERING_MAX,
    NEWCOMERS_MAX,
    UNPROVEN_MAX,
)

_Key = TypeVar("_Key")

_IPV6_SITE_BITS = 64
"""One site has at least so many addresses to itself."""


@dataclass(frozen=True, slots=True)
class PortLimits:
    """How many connections of each kind a port may hold.

    Attributes:
        unproven: that have not proven themselves yet.
        newcomers: that have, but belong to nobody whom the run knows yet.
        lingering: that are closed here; the other side may still read what was said last.
    """

    unproven: int = UNPROVEN_MAX
    newcomers: int = NEWCOMERS_MAX
    lingering: int = LINGERING_MAX


def port_limits(descriptors: int) -> PortLimits:
    """Derive the limits of a port from how many descriptors the process may have.

    Strangers get a quarter at most, and what lingers after them a sixteenth. Newcomers get another
    quarter. The rest is a reserve for members, for our own dials, and for the application.
    """
    quarter = max(descriptors // 4, 1)
    return PortLimits(
        unproven=min(UNPROVEN_MAX, quarter),
        newcomers=min(NEWCOMERS_MAX, quarter),
        lingering=min(LINGERING_MAX, max(quarter // 4, 1)),
    )


def source_of(host: str) -> str:
    """Return what counts as one source: an IPv4 address, a host name, or an IPv6 network (/64)."""
    if ":" not in host:
        return host
    try:
        address = IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{int(address) >> _IPV6_SITE_BITS:x}::/64"


def of_the_largest(hosts: Mapping[_Key, str], coming: str) -> _Key:
    """Of many who wait, who has to go if one more comes from ``coming``.

    It is the first from the source with the most, with the one that comes.
    """
    sources = {key: source_of(host) for key, host in hosts.items()}
    counts = Counter([source_of(coming), *sources.values()])
    return max(sources, key=lambda key: counts[sources[key]])


class _Source(Generic[_Key]):
    """The connections of one source, each kind with the oldest first."""

    __slots__ = ("silent", "spoken")

    def __init__(self) -> None:
        self.silent: dict[_Key, None] = {}
        self.spoken: dict[_Key, None] = {}

    def __len__(self) -> int:
        return len(self.silent) + len(self.spoken)


class SourceShares(Generic[_Key]):
    """A bounded number of connections, shared among their sources.

    Args:
        room: how many there may be, at least 1.
    """

    def __init__(self, room: int) -> None:
        assert room >= 1
        self._room = room
        self._sources: dict[str, _Source[_Key]] = {}
        """Those that have a connection; the one that has had some for longest is the first."""
        self._source_of: dict[_Key, str] = {}

    def __len__(self) -> int:
        return len(self._source_of)

    def __contains__(self, key: _Key) -> bool:
        return key in self._source_of

    def add(self, key: _Key, host: str) -> _Key | None:
        """A connection has come from ``host``.

        Returns:
            The one that has to go for it, which is no longer in here; None: there was room.
        """
        assert key not in self._source_of
        name = source_of(host)
        goes = self._first_to_go(name) if len(self._source_of) >= self._room else None
        if goes is not None:
            self.remove(goes)
        self._source_of[key] = name
        self._sources.setdefault(name, _Source()).silent[key] = None
        return goes

    def spoke(self, key: _Key) -> None:
        """The connection has begun as ours do."""
        source = self._sources[self._source_of[key]]
        if key in source.silent:
            del source.silent[key]
            source.spoken[key] = None

    def remove(self, key: _Key) -> None:
        """The connection has proven itself, or is gone; a second time changes nothing."""
        name = self._source_of.pop(key, None)
        if name is None:
            return
        source = self._sources[name]
        source.silent.pop(key, None)
        source.spoken.pop(key, None)
        if not len(source):
            del self._sources[name]

    def _first_to_go(self, coming: str) -> _Key:
        """The oldest of the source with the most; the silent before those that have spoken.

        The one that comes counts for its source, but never goes itself.
        """

        def weight(name: str) -> tuple[int, bool]:
            source = self._sources[name]
            return len(source) + (name == coming), bool(source.silent)

        largest = self._sources[max(self._sources, key=weight)]
        return next(iter(largest.silent or largest.spoken))
