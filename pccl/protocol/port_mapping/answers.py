"""What a router may answer to a request for a port, in whichever protocol.

A router answers at one port (``ROUTER_PORT``). An answer is at most ``DATAGRAM_BYTES_MAX`` long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

ROUTER_PORT = 5351
"""UDP port of routers, for both protocols."""

DATAGRAM_BYTES_MAX = 1100
"""Longest packet of PCP (RFC 6887, section 7). Packets of NAT-PMP are far shorter."""


@dataclass(frozen=True, slots=True)
class PortGranted:
    """The router forwards a port, or has stopped doing so.

    Attributes:
        host: the router's own address on the other side; empty: not in this answer.
        port: its port there.
        lifetime_s: for how long it forwards; 0: it has deleted the mapping.
        epoch_s: seconds since the router has had its mappings.
    """

    host: str
    port: int
    lifetime_s: int
    epoch_s: int


@dataclass(frozen=True, slots=True)
class PortDenied:
    """The router does not forward.

    Attributes:
        reason: why, in words.
        epoch_s: as in ``PortGranted``.
    """

    reason: str
    epoch_s: int


@dataclass(frozen=True, slots=True)
class RouterAddress:
    """The router's own address on the other side, in NAT-PMP.

    Attributes:
        host: the address.
        epoch_s: as in ``PortGranted``.
    """

    host: str
    epoch_s: int


@dataclass(frozen=True, slots=True)
class OtherVersion:
    """The router does not know the version of the request."""


RouterAnswer: TypeAlias = PortGranted | PortDenied | RouterAddress | OtherVersion
