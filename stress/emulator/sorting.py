"""Finds the link of a connection by the first bytes that its dialler sends."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.handshake.opening import OPENING_BYTES, Channel, Opening

LinkOf = Callable[[bytes], Hashable]
"""A function from the first bytes to the key of the link; it must not raise."""

SHARED = "shared"
"""Key of the link of all connections without a link of their own."""


def peer_of(first_bytes: bytes) -> Hashable:
    """Return the key of a connection's link: the id of the peer that dials a lane, or ``SHARED``.

    The opening of a lane names the peer. Connections to a master, where newcomers have no id yet,
    and connections of other programs share a link.
    """
    if len(first_bytes) < OPENING_BYTES:
        return SHARED
    try:
        opening = Opening.decode(first_bytes[:OPENING_BYTES])
    except RemoteProtocolError:
        return SHARED
    return int(opening.source) if opening.channel is Channel.LANE else SHARED
