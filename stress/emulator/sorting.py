"""Which link a connection belongs to, by the first bytes that its dialler sends."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.handshake import OPENING_BYTES, Channel, Opening

LinkOf = Callable[[bytes], Hashable]
"""First bytes in, key of the link out; does not raise."""

SHARED = "shared"
"""Key of the one link of connections that are not told apart."""


def peer_of(first_bytes: bytes) -> Hashable:
    """Sort connections of this library: a link for each peer that dials, one for all others.

    A lane's opening names the peer. What goes to a master (newcomers have no id yet), or is none
    of ours, shares a link.
    """
    if len(first_bytes) < OPENING_BYTES:
        return SHARED
    try:
        opening = Opening.decode(first_bytes[:OPENING_BYTES])
    except RemoteProtocolError:
        return SHARED
    return int(opening.source) if opening.channel is Channel.LANE else SHARED
