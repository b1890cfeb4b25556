"""Decides which unproven connection a port closes when it has too many of them.

Anyone may have opened a connection that has not proven itself. So a port keeps a bounded number of
such connections, and shares them fairly among the addresses that they come from. When one
more comes to a full port, the address with the most connections loses one. So an address
never loses a connection to an address that has more.

Many honest peers may share an address (behind one NAT), also with an attacker who floods the port.
So within an address the port first closes connections that have sent nothing yet. An honest peer
sends its opening at once. After that, only connections that have sent an opening can replace it.

Proven connections do not count here, and no unproven one can replace them. The rest of the
descriptors is reserved for them; see :func:`port_limits`.

The module is pure: callers report new and closed connections, and close the returned one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
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
"""Bits of an IPv6 address that one site has for its own addresses."""


@dataclass(frozen=True, slots=True)
class PortLimits:
    """The largest number of connections of each kind at one port.

    Attributes:
        unproven: connections that have not proven themselves yet.
        newcomers: proven connections of processes that the run does not know yet.
        lingering: connections that this side closed; the other side may still read the last bytes.
    """

    unproven: int = UNPROVEN_MAX
    newcomers: int = NEWCOMERS_MAX
    lingering: int = LINGERING_MAX


def port_limits(descriptors: int) -> PortLimits:
    """Derive the limits of a port from the number of descriptors that the process may have.

    Unproven connections get a quarter at most, and lingering ones a sixteenth. Newcomers get
    another quarter. The rest is reserved for members, for own dials, and for the application.
    """
    quarter = max(descriptors // 4, 1)
    return PortLimits(
        unproven=min(UNPROVEN_MAX, quarter),
        newcomers=min(NEWCOMERS_MAX, quarter),
        lingering=min(LINGERING_MAX, max(quarter // 4, 1)),
    )


def source_of(host: str) -> str:
    """Return the source of ``host``: its IPv4 address, its host name, or its IPv6 network (/64)."""
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
    """Return the entry to remove if one more comes from ``coming``.

    It is the first entry of the source with the most entries; the new entry counts too.
    """
    sources = {key: source_of(host) for key, host in hosts.items()}
    counts = Counter([source_of(coming), *sources.values()])
    return max(sources, key=lambda key: counts[sources[key]])


class _Source(Generic[_Key]):
    """The connections of one source, the oldest of each kind first."""

    __slots__ = ("silent", "spoken")

    def __init__(self) -> None:
        self.silent: dict[_Key, None] = {}
        self.spoken: dict[_Key, None] = {}

    def __len__(self) -> int:
        return len(self.silent) + len(self.spoken)


class SourceShares(Generic[_Key]):
    """A bounded number of connections, shared among their sources.

    Args:
        room: largest number of connections, at least 1.
    """

    def __init__(self, room: int) -> None:
        assert room >= 1
        self._room = room
        self._sources: dict[str, _Source[_Key]] = {}
        """Sources with connections, in the order in which they got their first one."""
        self._source_of: dict[_Key, str] = {}

    def __len__(self) -> int:
        return len(self._source_of)

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._source_of)

    def __contains__(self, key: _Key) -> bool:
        return key in self._source_of

    def add(self, key: _Key, host: str) -> _Key | None:
        """Add a connection from ``host``.

        Returns:
            The connection to close for it, already removed; None: there was room.
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
        """Record that the connection has sent an opening."""
        source = self._sources[self._source_of[key]]
        if key in source.silent:
            del source.silent[key]
            source.spoken[key] = None

    def remove(self, key: _Key) -> None:
        """Remove a connection that has proven itself or is closed, if it is still there."""
        name = self._source_of.pop(key, None)
        if name is None:
            return
        source = self._sources[name]
        source.silent.pop(key, None)
        source.spoken.pop(key, None)
        if not len(source):
            del self._sources[name]

    def _first_to_go(self, coming: str) -> _Key:
        """Return the oldest connection of the source with the most; silent ones go first.

        The new connection counts for its source, but is never the one to close.
        """

        def weight(name: str) -> tuple[int, bool]:
            source = self._sources[name]
            return len(source) + (name == coming), bool(source.silent)

        largest = self._sources[max(self._sources, key=weight)]
        return next(iter(largest.silent or largest.spoken))
